"""One training step of several ranks, each of which trains a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hotrow.distributed.exchange import is_told
from hotrow.distributed.ranks import RankError
from hotrow.support.messages import warn
from hotrow.training.graphed import GraphedStep
from hotrow.training.shared_dense import SharedDense


class RankedStep(GraphedStep):
    """A training step that all ranks make together. It runs eagerly.

    The loss of a part is its share of the mean over the whole batch. Rows and dense weights get the
    gradients of that mean, and the loss that is returned is that mean.
    """

    def __init__(self, *args: Any, dense: SharedDense, **options: Any) -> None:
        super().__init__(*args, **options, lanes=None)
        self._dense, self._steps = dense, 0
        self._samples = 0  # of the newest batch, on all ranks
        self._runs_empty = True  # the model can be called with a batch of 0 samples
        # Takes part in the lookup of the newest batch; False: its ids were not known.
        self._fetch: Callable[[], bool] = lambda: False
        dense.start_alike(self._weights())

    def samples_of(self, batch: Any) -> int:
        return self._samples

    @contextmanager
    def reading(self, fetch: Callable[[], bool]) -> Iterator[None]:
        """Inside, batches are those of a pass whose vectors `fetch` gets."""
        before, self._fetch = self._fetch, fetch
        try:
            yield
        finally:
            self._fetch = before

    def _once(self, batch: Any) -> Tensor:
        dense, samples = self._dense, len(self.labels(batch))
        self._steps += 1
        part = dense.part(samples, self._steps)
        self._samples = part.samples
        with self._around(), self._fused():
            loss = self._loss_of(batch) if samples else self._loss_without_samples(batch)
            self._zero_grad()
            if loss is not None:
                # Not even by 1, so that equal parts have the bits of a loop written by hand.
                loss = loss if part.scale == 1 else loss * part.scale
                loss.backward()
            dense.settle()
            own = loss.detach() if samples and loss is not None else dense.zero()
            mean = dense.average(self._weights(), own, is_empty=not samples)
            self._update()
        dense.follow_buffers(part.first)
        return mean if part.samples else mean * float("nan")  # as the mean of nothing is

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
        if not self._dense.looks_up() and not self._fetch():
            raise RuntimeError(
                "this rank has no samples of a batch, and what the model looks up is not known "
                "yet: let the first batches have at least as many samples as there are ranks"
            )
