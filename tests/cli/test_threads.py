"""Torch's own number of threads is left alone, and where others need the cores that is told."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotrow.cli import _process
from hotrow.cli._process import use_threads
from hotrow.run.config import RunSection


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def told(
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    *,
    cores: int = 4,
    running: int | None = None,
    **settings: object,
) -> list[str]:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    now = "" if running is None else f"{load} 0.00 0.00 {running}/300 4711"
    monkeypatch.setattr(_process, "_RUNNING", SimpleNamespace(read_text=lambda: now))
    said: list[str] = []
    use_threads(RunSection(**settings), said.append)  # type: ignore[arg-type]
    return said


def test_a_busy_machine_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = told(monkeypatch, 3.24)
    assert "3.2 of 4 cores busy" in said
    assert "run.threads=1" in said
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("load", "cores", "words"),
    [
        (1.44, 2, "keep 1.4 of 2 cores busy, and 2 threads that share the rest can"),
        (2.9, 2, "keep both cores busy, and 2 threads that share them can"),
        (9.0, 4, "keep all 4 cores busy, and 2 threads that share them can"),
    ],
)
def test_no_more_cores_are_busy_than_there_are(
    monkeypatch: pytest.MonkeyPatch, load: float, cores: int, words: str
) -> None:
    (said,) = told(monkeypatch, load, cores=cores)
    assert words in said


@pytest.mark.parametrize(
    ("load", "settings"),
    [
        (0.4, {}),
        (9.0, {"threads": 2}),
        (9.0, {"device": "cuda"}),
        (2.4, {}),  # which leaves two cores, about
        (9.0, {"running": 2}),  # others have ended since
    ],
)
def test_nothing_is_said_where_it_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, load: float, settings: dict[str, Any]
) -> None:
    assert told(monkeypatch, load, **settings) == []


def test_a_run_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, 9.0, threads=1) == []
    assert torch.get_num_threads() == 1
