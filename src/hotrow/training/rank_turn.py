"""One step of several ranks, in two phases with an exchange of gradients between them.

```
first phase    forward, backward: rows' gradients go to their owners when it ends
between        gradients of weights are averaged
second phase   weights are updated
```
Captured, each phase is a graph, and what ranks exchange stands around and between them. A batch in
two parts is not captured: both are in the first phase, and the rows of the second arrive beside the
first one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.split_batch import Split
from hotrow.support.streams import capturing
from hotrow.training.shared_dense import Part, SharedDense


class StepMemory:
    """Numbers of a step at addresses that graphs read and write."""

    def __init__(self, device: torch.device) -> None:
        self.scale, self.own, self.mean = (torch.zeros((), device=device) for _ in range(3))


class RankTurn:
    """What a rank does with the others in one step."""

    first = 0  # samples that are trained before others: none

    def __init__(
        self,
        batch: Any,
        samples: int,
        part: Part,
        dense: SharedDense,
        memory: StepMemory,
        weights: Callable[[], list[Tensor]],
        update: Callable[[], None],
        around: Callable[[], AbstractContextManager[Any]],
        split: Split | None = None,
    ) -> None:
        """`update` makes the second phase; `around` is the context of both; `split`: the first
        phase trains the batch in two parts."""
        self.batch, self.samples, self.part, self.split = batch, samples, part, split
        self._dense, self._memory, self._weights = dense, memory, weights
        self.update, self._around = update, around
        self._mean = memory.mean  # over all samples of all ranks, once it is known
        self._own: Tensor = memory.own  # this rank's share of it
        self._grads: list[Tensor | None] = []  # of a captured turn: where its graph writes

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the share of a mean loss in the mean over all ranks."""
        if capturing():
            return loss * self._memory.scale
        # Not even by 1, so that equal parts have the bits of a loop written by hand.
        return loss if self.part.scale == 1 else loss * self.part.scale

    def end_first(self, own: Tensor) -> None:
        """Note the loss that the first phase has led to."""
        if capturing():
            self._memory.own.copy_(own)
            self._grads = [weight.grad for weight in self._weights()]
        else:
            self._own = own

    def wait(self) -> None:
        """Average gradients and losses over all ranks."""
        with self._around():
            self._dense.settle()
            mean = self._dense.average(self._weights(), self._own, is_empty=not self.samples)
        # As the mean of nothing is.
        self._mean = mean if self.part.samples else mean * float("nan")

    @property
    def mean(self) -> Tensor:
        """The loss over all samples of all ranks."""
        return self._memory.mean if capturing() else self._mean

    # -- replays -----------------------------------------------------------------------

    def begin_replay(self) -> None:
        """Bring what the first graph reads up to date."""
        self._memory.scale.fill_(self.part.scale)

    def end_replay(self, captured: RankTurn) -> bool:
        """Average what the first graph has written. Return whether the second one can follow:
        not if a weight has a gradient now that it had not when it was captured."""
        weights = self._weights()
        for weight, grad in zip(weights, captured._grads, strict=True):
            weight.grad = grad
        self.wait()
        self._memory.mean.copy_(self._mean)
        return all(x.grad is grad for x, grad in zip(weights, captured._grads, strict=True))
