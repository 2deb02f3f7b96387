"""Learning rates that grow, stay and fall."""

from __future__ import annotations

import pytest
import torch

from hotrow.run.config import ScheduleSection


def reference(step: int, warmup: int, start: int, steps: int) -> float:
    """The rule of facebookresearch/dlrm, in its words: warm-up, decay, else frozen."""
    if step < warmup:
        return 1.0 - (warmup - step) / warmup
    if start <= step < start + steps:
        return ((steps - (step - start)) / steps) ** 2
    return 1.0 if step < start else (1 / steps) ** 2


def test_rates_follow_the_reference() -> None:
    section = ScheduleSection(warmup_steps=5, decay_start=12, decay_steps=8)
    for step in range(1, 40):
        assert section.scale(step) == pytest.approx(reference(step, 5, 12, 8))


def test_both_optimizers_are_driven_tensors_too() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    number = torch.optim.SGD([weight], lr=0.4)
    tensor = torch.optim.Adam([weight], lr=torch.tensor(0.2), capturable=False, foreach=False)
    schedules = ScheduleSection(warmup_steps=4).drive([number, tensor])
    seen = []
    for _ in range(6):
        seen.append((number.param_groups[0]["lr"], float(tensor.param_groups[0]["lr"])))
        for optimizer, schedule in zip((number, tensor), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert [each for each, _ in seen] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert [each for _, each in seen] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


def test_a_constant_rate_needs_no_schedule() -> None:
    assert ScheduleSection().drive([]) == []
    assert ScheduleSection().is_constant


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be a number of at least 0, got -1"),
        ({"decay_start": 5}, "decay_start and decay_steps belong together"),
        ({"decay_start": 5, "decay_steps": 0}, "decay_steps must be a number of at least 1, got 0"),
        (
            {"warmup_steps": 9, "decay_start": 5, "decay_steps": 3},
            "decay_start is step 5, before the end of warm-up, step 9",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSection(**settings)
