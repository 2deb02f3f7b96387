"""The command line teaches itself, and leaves torch's number of threads alone."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow as hotrow_package
from commands import hotrow, succeeds
from hotrow.cli._process import busy_cores, use_threads
from hotrow.run.config import RunSection
from hotrow.support.startup import is_the_command

COMMANDS = (
    "train", "compare", "prepare", "verify", "export", "doctor", "evaluate", "predict", "profile",
    "simulate", "size", "report",
)  # fmt: skip


def test_help_names_every_command() -> None:
    text = succeeds("--help").stdout
    assert "bool" not in text
    for command in COMMANDS:
        assert command in text
    assert "Usage" in hotrow().output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_and_flags_without_a_value(command: str) -> None:
    text = succeeds(command, "--help").stdout
    assert "Examples" in text
    assert f"hotrow {command}" in text
    assert "bool" not in text


def test_simulates_help_names_the_strategies_it_takes() -> None:
    shown = " ".join(hotrow("simulate", "--help").stdout.replace("│", " ").split())
    assert "of uncached, static, lru, scratchpipe, lookahead;" in shown
    assert "…" not in shown


def test_version_is_the_installed_one() -> None:
    assert hotrow("--version").stdout.strip() == f"hotrow {version('hotrow')}"


def test_an_unknown_command_is_an_error() -> None:
    assert hotrow("trian").exit_code == 2


def test_python_dash_m_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotrow", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hotrow", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hotrow {version('hotrow')}\n"


def test_ctrl_c_while_torch_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    places = [str(tmp_path), str(Path(hotrow_package.__file__).parents[1])]
    process = subprocess.Popen(
        [sys.executable, "-m", "hotrow", "train"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors == ""
    assert process.returncode == -signal.SIGINT  # which shells report as 130


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["/usr/bin/hotrow", "train"], ["python", "/usr/bin/hotrow", "train"], True),
        (["-m", "train"], ["python", "-m", "hotrow", "train"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["mine.py"], ["python", "mine.py", "hotrow"], False),
        ([], [], False),
    ],
)
def test_only_the_command_itself_is_quiet(
    argv: list[str], original: list[str], expected: bool
) -> None:
    assert is_the_command(argv, original) is expected


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
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
    use_threads(RunSection(threads=1), pytest.fail)
    assert torch.get_num_threads() == 1


def test_programs_that_have_ended_are_not_busy(tmp_path: Path) -> None:
    """The load is 0 in these tests; fewer threads run than a load of the last minute says."""
    assert busy_cores(tmp_path / "none") == 0.0
    (tmp_path / "loadavg").write_text("9.0 0.00 0.00 2/300 4711")
    assert busy_cores(tmp_path / "loadavg", load=9.0) == 1
    assert busy_cores(tmp_path / "none", load=9.0) == 9.0
