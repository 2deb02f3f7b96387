"""Commands as tests call them, small runs for them to train, and faults of these runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Never

import pytest
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from hotrow.cli import make_app
from hotrow.run.job import Job
from hotrow.run.saving import Saving
from hotrow.support.files import Disk

SMALL = """
[run]
name = "small"
[data]
rows = [400, 60, 5]
batch_size = 16
samples = 160
eval_batches = 4
[model]
embedding_dim = 4
bottom = [8]
top = [8]
[embedding]
budget = "60%"
"""
# The same run by settings, without a file.
SMALL_SETTINGS = (
    "data.rows=[400, 60, 5]", "data.batch_size=16", "data.samples=160", "data.eval_batches=4",
    "model.embedding_dim=4", "embedding.budget=60%", "run.threads=1",
    "training.check_equality=false", "training.eval_every=4",
)  # fmt: skip

# Typer builds all commands anew for every call, which takes longer than most of them.
app = cache(make_app)
typer.testing._get_command = cache(get_command)


def hotrow(*words: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app(), [str(word) for word in words], env=environment)


def succeeds(*words: str | Path) -> Result:
    """Call a command that must succeed."""
    result = hotrow(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words: str | Path) -> str:
    """Return the error of a command that must end with one."""
    result = hotrow(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr


def settings(*given: str) -> list[str]:
    """As options of a command."""
    return [word for setting in given for word in ("--set", setting)]


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def spoil(path: Path) -> None:
    """Change a bit near the end of a file."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


class Killed(BaseException):
    """The process is dead: nothing cleans up."""


class Faults:
    """What happens to a run after a step, before it is saved, and when a file is opened."""

    def __init__(self) -> None:
        self.at_step: dict[int, Callable[[Job], object]] = {}
        self.at_open: Callable[[Path], Any] = lambda path: None  # returns a file, or raises
        self._is_dead = False

    def after_step(self, job: Job, step: int) -> None:
        if step in self.at_step:
            self.at_step.pop(step)(job)

    def open(self, path: Path) -> Any:
        if self._is_dead and path.name.startswith("run.json"):
            raise Killed
        return self.at_open(path)

    def kill(self, *_: object) -> Never:
        """Kill the process: its run has no record of its end."""
        self._is_dead = True
        raise Killed

    def revive(self) -> None:
        """Begin another process, without faults."""
        self.__init__()  # type: ignore[misc]


def inject_faults(patch: pytest.MonkeyPatch) -> Faults:
    faults, after_step, opened = Faults(), Saving.after_step, Disk.open

    def hooked(self: Saving, step: int) -> None:
        faults.after_step(self._job, step)
        after_step(self, step)

    def hooked_open(self: Disk, path: Path) -> Any:
        file = faults.open(path)
        return opened(self, path) if file is None else file

    patch.setattr(Saving, "after_step", hooked)
    patch.setattr(Disk, "open", hooked_open)
    return faults


def fail(error: type[BaseException], text: str = "now") -> Callable[[object], Never]:
    def failing(_: object) -> Never:
        raise error(text)

    return failing


def full_disk(*parts: str) -> Callable[[Path], Any]:
    """Return a disk that has no space for files whose path matches all patterns."""

    def opened(path: Path) -> Any:
        is_full = all(re.search(part, str(path)) for part in parts)
        return open("/dev/full", "wb", buffering=0) if is_full else None

    return opened
