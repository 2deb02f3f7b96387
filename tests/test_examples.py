"""The examples run as written, and show how little changes."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def changed_lines(before: list[str], after: list[str]) -> int:
    """Lines a user has to touch: a replaced line counts once, empty lines not at all."""
    before, after = [[line for line in lines if line.strip()] for lines in (before, after)]
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


def run(name: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {key: float(value) for key, value in re.findall(r"(\w+) ([\d.]+)", process.stdout)}


def test_a_replaced_line_counts_once():
    assert changed_lines(["a", "b", "c"], ["a", "x", "c", "", "d"]) == 2


def test_six_lines_bring_a_plain_model_to_hotrow():
    plain, hotrow = [
        (EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "with_hotrow.py")
    ]
    assert 0 < changed_lines(plain, hotrow) <= 6


def test_both_versions_learn_the_same():
    plain, hotrow = run("plain.py"), run("with_hotrow.py")
    assert plain["AUC"] > 0.75
    # Rows sum their gradients in another order than torch does: equal but for rounding.
    assert hotrow["loss"] == pytest.approx(plain["loss"], abs=1e-4)
    assert hotrow["AUC"] == pytest.approx(plain["AUC"], abs=1e-4)
