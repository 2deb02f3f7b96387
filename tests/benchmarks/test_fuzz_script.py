"""The script that fuzzes for long knows every test that does so for a moment."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


def test_every_reader_is_fuzzed(load: Callable[[str], ModuleType]) -> None:
    found = {
        f"{path.relative_to(TESTS.parent)}::{name}"
        for path in TESTS.rglob("test_*fuzz.py")
        for name in re.findall(r"@fuzzed\n(?:@.*\n)+def (\w+)", path.read_text())
    }
    assert set(load("fuzz").READERS.values()) == found


def test_a_failure_is_told_with_the_seed_that_repeats_it(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fuzz, codes = load("fuzz"), iter([0, 0, -11])
    monkeypatch.setattr(fuzz, "monotonic", iter(range(9)).__next__)
    monkeypatch.setattr(
        fuzz.subprocess, "run", lambda *_, **__: CompletedProcess([], next(codes), stdout="said")
    )
    assert fuzz.main(["--reader", "text", "--seed", "7"]) == 1
    told = capsys.readouterr().out
    assert "said\nexit -11" in told
    assert "benchmarks/fuzz.py --reader text --minutes 0 --examples 1000 --seed 9" in told
