"""Torch's own number of threads is left alone, with a warning if other programs use the cores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrow.cli._process import busy_cores, use_threads
from hotrow.run.config import RunSection


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("busy", "cores", "settings", "warning"),
    [
        (3.24, 4, {}, "keep 3.2 of 4 cores busy, and 2 threads that share the rest can"),
        (1.44, 2, {}, "keep 1.4 of 2 cores busy, and 2 threads that share the rest can"),
        (2.9, 2, {}, "keep both cores busy, and 2 threads that share them can"),
        (9.0, 4, {}, "keep all 4 cores busy, and 2 threads that share them can"),
        (0.4, 4, {}, ""),
        (2.4, 4, {}, ""),  # which leaves two cores, about
        (9.0, 4, {"threads": 2}, ""),
        (9.0, 4, {"device": "cuda"}, ""),
    ],
)
def test_a_busy_machine_is_warned_of(
    busy: float, cores: int, settings: dict[str, Any], warning: str
) -> None:
    warnings: list[str] = []
    use_threads(RunSection(**settings), warnings.append, cores=cores, busy=busy)
    assert len(warnings) == bool(warning)
    assert all(warning in text and "--set run.threads=1" in text for text in warnings)
    assert torch.get_num_threads() == 2


def test_a_run_sets_its_threads() -> None:
    use_threads(RunSection(threads=1), pytest.fail)
    assert torch.get_num_threads() == 1


def test_programs_that_have_ended_are_not_busy(tmp_path: Path) -> None:
    """The load is 0 in these tests; fewer threads run than a load of the last minute says."""
    assert busy_cores(tmp_path / "none") == 0.0
    (tmp_path / "loadavg").write_text("9.0 0.00 0.00 2/300 4711")
    assert busy_cores(tmp_path / "loadavg", load=9.0) == 1
    assert busy_cores(tmp_path / "none", load=9.0) == 9.0
