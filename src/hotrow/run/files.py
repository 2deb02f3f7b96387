"""How a run's records are written to disk, and read from there.

runs/<name>/start.json    the StartRecord, for readers of a run that has not ended
runs/<name>/steps.jsonl   one StepRecord per line, written while the run is under way; on a GPU a
                          few steps later, when the loss has arrived
runs/<name>/run.json      the RunRecord, put in place whole once the run has ended
runs/<name>/model/        the trained model: see hotrow.checkpoint
runs/<name>/checkpoints/  all that the run can go on with, at some of its steps

comparisons/<name>/compare.json, compare.html    a ComparisonRecord, and the same for people
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Self, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import torch

from hotrow.run.tally import Arriving
from hotrow.support.files import Disk, make_durable, make_folder
from hotrow.support.manifests import in_words, read_json
from hotrow.support.messages import many, warn
from hotrow.support.records import ComparisonRecord, RunRecord, StartRecord, StepRecord
from hotrow.support.version import __version__

FORMAT = 1
RUN_FILE = "run.json"
START_FILE = "start.json"
STEPS_FILE = "steps.jsonl"
MODEL_FOLDER = "model"
COMPARISON_FILE = "compare.json"
COMPARISON_PAGE = "compare.html"

Record = TypeVar("Record")


def refuse_busy(folder: Path) -> None:
    """Raises if another process is training the run; to be asked before its memory is needed."""
    with contextlib.suppress(FileNotFoundError), (folder / STEPS_FILE).open("rb") as steps:
        _lock(steps, folder)


def _lock(steps: Any, folder: Path) -> None:
    """Until the file is closed."""
    try:
        fcntl.flock(steps, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is training the run in {folder}") from None
    except OSError:
        pass  # a file system without locks


class RunWriter:
    """A new folder for one run. Where `name` exists already, it takes `name-2`, `name-3` ...

    with RunWriter("runs", name="first") as run:
        for record in trainer.run(batches):
            run.step(record)
        run.finish(RunRecord(...))
    """

    def __init__(self, root: str | Path, *, name: str) -> None:
        self._open(new_folder(Path(root), name), "wb")

    @classmethod
    def going_on(cls, folder: Path, *, after: int) -> Self:
        """The folder of a run that goes on after a step; what was recorded of later ones goes."""
        found = cls.__new__(cls)
        (folder / STEPS_FILE).touch()
        found._open(folder, "r+b")
        (folder / RUN_FILE).unlink(missing_ok=True)
        found._size = _end_of(found._steps, after)
        found._steps.truncate(found._size)
        found._steps.seek(found._size)
        return found

    def _open(self, folder: Path, mode: str) -> None:
        self.folder = folder
        # Unbuffered: what a full disk did not take must not come back when the file is closed.
        self._steps: Any = (folder / STEPS_FILE).open(mode, buffering=0)
        try:
            _lock(self._steps, folder)
        except ValueError:
            self._steps.close()
            raise
        self._size = self._missing = 0
        self._arriving = Arriving(self._write)

    @property
    def name(self) -> str:
        return self.folder.name

    def start(self, record: StartRecord) -> None:
        """Also of a run that goes on, maybe elsewhere and with other settings."""
        try:
            _write_record(self.folder, START_FILE, record)
        except OSError as error:  # costs no training, as with steps
            warn(f"{error}; until the run has ended, reports lack its settings")

    def step(self, record: StepRecord) -> None:
        self._arriving.add(record)

    def _write(self, record: StepRecord) -> None:
        # One write, so that a killed run keeps every step it has reported.
        line = (to_json(record) + "\n").encode()
        try:
            if (written := self._steps.write(line)) == len(line):
                self._size += written
                return
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as found:
            error = found
        # A disk that takes no more costs records of steps, and not the training they tell of.
        with contextlib.suppress(OSError):
            self._steps.truncate(self._size)  # half a line
            self._steps.seek(self._size)
        if not self._missing:
            warn(
                f"step {record.step:,} was not recorded in {self.folder / STEPS_FILE}: "
                f"{error.strerror}. Training goes on; make room for the model, which is saved at "
                "its end"
            )
        self._missing += 1

    def sync(self) -> None:
        """Steps so far are on the disk; waits for the device."""
        self._arriving.finish()
        with contextlib.suppress(OSError):  # a full one: its steps are missing, as was told
            os.fsync(self._steps.fileno())

    def finish(self, record: RunRecord) -> Path:
        """Puts the record in place whole: a reader sees all of it or none."""
        _write_record(self.folder, RUN_FILE, record)
        return self.folder / RUN_FILE

    def close(self) -> None:
        try:
            self._arriving.finish()
        finally:
            self._steps.close()
        if self._missing:
            warn(f"{self.folder / STEPS_FILE} lacks {many(self._missing, 'step')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuntimeError:
            if error is None:  # else the device failed, which was reported
                raise


def write_comparison(folder: Path, record: ComparisonRecord, page: str) -> None:
    """Puts both files in place whole, instead of those that are there."""
    _write_record(folder, COMPARISON_FILE, record)
    Disk(folder).write(COMPARISON_PAGE, [page.encode()])


def _write_record(folder: Path, name: str, record: Any) -> None:
    text = to_json({"format": FORMAT, **to_dict(record)}, indent=2) + "\n"
    Disk(folder).write(name, [text.encode()])


def read_run(folder: str | Path) -> RunRecord:
    """The record of the run in `folder`; a ValueError when it has none this version can read."""
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {RUN_FILE}: it is not a run, or the run has not ended")
    return _read_record(RunRecord, path, "a run record")


def read_start(folder: str | Path) -> StartRecord | None:
    """What the run in `folder` began with; None: an earlier version did not write it."""
    path = Path(folder) / START_FILE
    return _read_record(StartRecord, path, "the start of a run") if path.is_file() else None


def _read_record(kind: type[Record], path: Path, what: str) -> Record:
    """Read a record; keys that a newer version has added are ignored."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not {what} of format {FORMAT}")
    try:
        return msgspec.convert(_with_nan(kind, found), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged: {in_words(error)}") from None


def _end_of(file: Any, step: int) -> int:
    """Where the records of later steps begin, or half a line of a run that was killed."""
    end = 0
    for line in io.BufferedReader(io.FileIO(file.fileno(), closefd=False)):
        try:
            is_later = not line.endswith(b"\n") or json.loads(line)["step"] > step
        except (ValueError, KeyError, TypeError):
            is_later = True
        if is_later:
            break
        end += len(line)
    return end


def read_steps(folder: str | Path) -> Iterator[StepRecord]:
    """The steps of the run in `folder`, also while it is under way."""
    path = Path(folder) / STEPS_FILE
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):  # a killed run may leave half a line behind
                return
            try:
                step = msgspec.convert(_with_nan(StepRecord, json.loads(line)), StepRecord)
            except (ValueError, msgspec.ValidationError):
                raise ValueError(f"{path} is damaged: line {number:,} is no step") from None
            yield step


def to_dict(record: Any) -> dict[str, Any]:
    """A record as plain values; NaN and infinity become None, which JSON can say."""
    found = asdict(record)
    if isinstance(record, StepRecord):
        found["hit_rate"] = record.hit_rate
    return {key: plain(value) for key, value in found.items()}


def to_json(record: Any, *, indent: int | None = None) -> str:
    found = plain(record) if isinstance(record, Mapping) else to_dict(record)
    return json.dumps(found, indent=indent, allow_nan=False)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(*, device: str, threads: int) -> dict[str, Any]:
    """What a later reader needs to know about the machine and the software."""
    packages = ("torch", "numpy", "triton")
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        **gpu,
        "versions": {"hotrow": __version__, **{name: package_version(name) for name in packages}},
    }


def package_version(name: str) -> str | None:
    if name == "torch":
        return torch.__version__  # says which CUDA it was built for, where the package does not
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def new_folder(root: Path, name: str, *, option: str = "--runs") -> Path:
    """`name` in `root`, or `name-2`, `name-3` ... where that is taken."""
    try:
        make_folder(root)
        for number in count(1):
            folder = root / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()  # fails when it exists, so two runs started at once never share one
            except FileExistsError:
                continue
            make_durable(root)
            return folder
    except OSError as error:
        raise ValueError(
            f"cannot make a folder for the run in {root} ({error.strerror}); give another by "
            f"{option}"
        ) from error
    raise AssertionError("unreachable")


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _with_nan(kind: Any, found: Any) -> Any:
    """Return what was read with NaN where a number was written as null, which JSON can say."""
    if kind is float and found is None:
        return math.nan
    if is_dataclass(kind) and isinstance(found, dict):
        kinds: Any = _kinds_in(kind)  # type: ignore[arg-type]
        return {key: _with_nan(kinds.get(key), value) for key, value in found.items()}
    parts = get_args(kind)
    if isinstance(found, dict) and len(parts) == 2:
        return {key: _with_nan(parts[1], value) for key, value in found.items()}
    if isinstance(found, list) and parts:
        return [_with_nan(parts[0], value) for value in found]
    return found


@cache  # a run may have a million steps
def _kinds_in(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields, without None where that is allowed."""
    hints = get_type_hints(kind)
    return {
        name: get_args(hint)[0] if isinstance(hint, UnionType) else hint
        for name, hint in hints.items()
    }
