"""Learning rates over a run: warm-up, then constant, then decay. Knows steps and optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from hotrow.support.numbers import plain_fields


@dataclass(frozen=True)
class ScheduleSection:
    """`[training.schedule]`: as in the DLRM reference code, which MLPerf trains with.

    The rate grows evenly over the first `warmup_steps`. From step `decay_start` on it falls with
    the square of the steps that are left of `decay_steps`, and stays where it is after them. It is
    for rows and dense layers alike.
    """

    warmup_steps: int = 0
    decay_start: int | None = None
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("warmup_steps", "decay_start", "decay_steps"):
            value, least = getattr(self, name), 1 if name == "decay_steps" else 0
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if (self.decay_start is None) != (self.decay_steps is None):
            raise ValueError("decay_start and decay_steps belong together: give both or neither")
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start is step {self.decay_start}, before the end of warm-up, step "
                f"{self.warmup_steps}"
            )

    @property
    def is_constant(self) -> bool:
        return not self.warmup_steps and self.decay_steps is None

    def scale(self, step: int) -> float:
        """What the rate is multiplied by at a step, the first being 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_steps is None or step < self.decay_start:
            return 1.0
        left = self.decay_steps - min(step - self.decay_start, self.decay_steps - 1)
        return (left / self.decay_steps) ** 2

    def drive(self, optimizers: Iterable[torch.optim.Optimizer], taken: int = 0) -> list[LambdaLR]:
        """Schedules to be stepped after each training step, of which some were taken before; none
        for a constant rate."""
        if self.is_constant:
            return []
        return [
            LambdaLR(each, lambda taken: self.scale(taken + 1), last_epoch=taken - 1)
            for each in optimizers
        ]
