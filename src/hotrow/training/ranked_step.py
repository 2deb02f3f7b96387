"""One training step of several ranks, each of which trains a part of the batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from hotrow.distributed.exchange import is_told
from hotrow.distributed.ranks import RankError
from hotrow.engine.split_batch import Split
from hotrow.support.messages import warn
from hotrow.training.graphed import GraphedStep
from hotrow.training.rank_turn import RankTurn, StepMemory
from hotrow.training.shared_dense import SharedDense


class RankedStep(GraphedStep):
    """A training step that all ranks make together.

    The loss of a part is its share of the mean over the whole batch. Rows and dense weights get the
    gradients of that mean, and the loss that is returned is that mean. Some ranks may run a step
    eagerly that others replay: they exchange the same messages.
    """

    def __init__(self, *args: Any, dense: SharedDense, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dense, self._steps = dense, 0
        self._memory = StepMemory(dense.device)
        self._samples = 0  # of the newest batch, on all ranks
        self.requests: Callable[[], int] = int  # bits that this rank sends with its next step
        self.requested = 0  # bits that ranks have sent with the newest step
        self._runs_empty = True  # the model can be called with a batch of 0 samples
        self._fetch: Callable[[], Callable[[], bool] | None] = lambda: None
        dense.start_alike(self._weights())

    def samples_of(self, batch: Any) -> int:
        return self._samples

    def fetch_by(self, fetch: Callable[[], bool]) -> None:
        self._fetch = weakref.WeakMethod(fetch)

    def run(self, batch: Any) -> Tensor:
        dense, samples = self._dense, len(self.labels(batch))
        split = self._take_split(batch)
        self._steps += 1
        part = dense.part(samples, self._steps, self.requests())
        self._samples, self.requested = part.samples, part.requests
        turn = RankTurn(
            batch, samples, part, dense, self._memory, self._weights, self._update, self._around,
            split,
        )  # fmt: skip
        self.split(turn)
        loss = super().run(batch)
        dense.follow_buffers(part.first)
        return loss

    def _take_split(self, batch: Any) -> Split | None:
        """Return how a batch is trained in two parts; None: as a whole."""
        split, self._split = self._split, None
        if not isinstance(split, Split):
            return None
        if split.batch is not batch:
            split.wait()  # another batch may need any row
            return None
        return split

    def _phases(self, batch: Any, split: Any) -> Generator[Tensor]:
        turn: RankTurn = split
        with self._around(), self._fused():
            if turn.split is None:
                own = self._train_whole(batch, turn)
            else:
                own = self._train_in_parts(batch, turn, turn.split)
            turn.end_first(own)
            yield own
            self._update()
            yield turn.mean

    def _train_whole(self, batch: Any, turn: RankTurn) -> Tensor:
        """Run forward and backward; return this rank's share of the loss."""
        loss = self._loss_of(batch) if turn.samples else self._loss_without_samples(batch)
        self._zero_grad()
        if loss is not None:
            loss = turn.scaled(loss)
            loss.backward()
        return loss.detach() if turn.samples and loss is not None else self._dense.zero()

    def _train_in_parts(self, batch: Any, turn: RankTurn, split: Split) -> Tensor:
        """Run forward and backward of samples whose rows are here, while those of the others come,
        then of the others; gradients go to owners at the end. Return this rank's share of the loss.

        Ranks send the same messages, whatever their parts are."""
        self._zero_grad()
        own = self._dense.zero()
        with ExitStack() as joined:
            # Gradients leave in the order in which a whole batch's do: that of this list reversed.
            for collection in sorted(split.collections, key=self._dense.place_of, reverse=True):
                joined.enter_context(collection.accumulate())
            split.begin()
            if split.first:
                own = own + self._train_part(batch, split, 0, split.first, turn.scaled)
            split.wait()
            if not turn.samples:
                loss = self._loss_without_samples(batch)
                if loss is not None:
                    loss.backward()
            elif split.first < split.size:
                own = own + self._train_part(batch, split, split.first, split.size, turn.scaled)
        return own

    def _loss_without_samples(self, batch: Any) -> Tensor | None:
        """Return the loss of no samples, whose gradients are zero or NaN and count as zero. None:
        the model cannot be called without samples, and this rank only serves the others.

        Models may have collectives of their own in forward and backward, so they are called.
        """
        if self._runs_empty:
            try:
                loss = self._loss_of(batch) * 0
            except Exception as error:
                if isinstance(error, RankError) or is_told(error):
                    raise
                self._runs_empty = False
                warn(
                    "the model cannot be called with a batch of 0 samples, which a rank gets where "
                    f"a batch has fewer samples than there are ranks ({type(error).__name__}: "
                    f"{error}). Such a rank takes part in the step without calling it"
                )
            else:
                self._take_part()
                return loss if loss.requires_grad else None
        self._take_part()
        return None

    def _take_part(self) -> None:
        """Take part where other ranks look up the batch, unless the model has done so."""
        fetch = self._fetch()
        if not self._dense.looks_up() and not (fetch is not None and fetch()):
            raise RuntimeError(
                "this rank has no samples of a batch, and what the model looks up is not known "
                "yet: let the first batches have at least as many samples as there are ranks"
            )
