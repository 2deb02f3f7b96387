"""The examples run as written, and show how little changes."""

import difflib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def changed_lines(before: list[str], after: list[str]) -> int:
    """Lines a user has to touch: a replaced line counts once, empty lines not at all."""
    before, after = [[line for line in lines if line.strip()] for lines in (before, after)]
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


def run(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    threads, words = torch.get_num_threads(), sys.argv
    torch.set_num_threads(1)  # more are slower where other programs use the cores
    sys.argv = [name]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        sys.argv = words
    return {
        key: float(value) for key, value in re.findall(r"(\w+) ([\d.]+)", capsys.readouterr().out)
    }


def test_a_replaced_line_counts_once():
    assert changed_lines(["a", "b", "c"], ["a", "x", "c", "", "d"]) == 2


def test_six_lines_bring_a_plain_model_to_hotrow():
    plain, hotrow = [
        (EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "with_hotrow.py")
    ]
    assert 0 < changed_lines(plain, hotrow) <= 6


def test_both_versions_learn_the_same(capsys: pytest.CaptureFixture[str]):
    plain, hotrow = run("plain.py", capsys), run("with_hotrow.py", capsys)
    assert plain["AUC"] > 0.75
    # Rows sum their gradients in another order than torch does: equal but for rounding.
    assert hotrow["loss"] == pytest.approx(plain["loss"], abs=1e-4)
    assert hotrow["AUC"] == pytest.approx(plain["AUC"], abs=1e-4)


@pytest.mark.parametrize("name", ["ctr", "two_towers", "sequence"])
def test_a_converted_model_learns_what_the_plain_one_learns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(f"switch_{name}.py", capsys)
    assert found["loss"] == pytest.approx(found["plain_loss"], abs=1e-4)
    assert found["difference"] < 2e-3
    assert 0.5 < found["hit_rate"] < 1.0
    assert found["fetched_rows"] > 1_000


def test_one_process_and_two_ranks_learn_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    alone = run("several_ranks.py", capsys)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [sys.executable, *launcher, str(EXAMPLES / "several_ranks.py")]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    both = {key: float(value) for key, value in re.findall(r"(\w+) ([\d.]+)", ended.stdout)}
    assert (alone["ranks"], both["ranks"]) == (1, 2)
    assert both["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert alone["loss"] < 0.52
