"""Files of a run: records are written to disk and read back.

runs/<name>/start.json    the StartRecord, for readers of a run that has not ended
runs/<name>/steps.jsonl   one StepRecord per line, written while the run trains; on a GPU a few
                          steps later, when the loss is known
runs/<name>/run.json      the RunRecord, written when the run has ended
runs/<name>/model/        the trained model: see hotrow.checkpoint
runs/<name>/checkpoints/  the states from which the run can be resumed

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
from types import UnionType
from typing import Any, Self, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import torch

from hotrow.run.tally import PendingRecords
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
    """Raise if another process trains the run; call this before memory is allocated."""
    with contextlib.suppress(FileNotFoundError), (folder / STEPS_FILE).open("rb") as steps:
        _lock(steps, folder)


def _lock(steps: Any, folder: Path) -> None:
    """Lock the file until it is closed."""
    try:
        fcntl.flock(steps, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is training the run in {folder}") from None
    except OSError:
        pass  # a file system without locks


class RunWriter:
    """Writes the records of one run to a new folder: `name`, else `name-2`, `name-3` ...

    with RunWriter("runs", name="first") as run:
        for record in trainer.run(batches):
            run.step(record)
        run.finish(RunRecord(...))
    """

    def __init__(self, root: str | Path, *, name: str) -> None:
        self._open(new_folder(Path(root), name), "wb")

    @classmethod
    def going_on(cls, folder: Path, *, after: int) -> Self:
        """Resume in the folder of a run after a step; records of later steps are removed."""
        run = cls.__new__(cls)
        (folder / STEPS_FILE).touch()
        run._open(folder, "r+b")
        (folder / RUN_FILE).unlink(missing_ok=True)
        run._size = _end_of(run._steps, after)
        run._steps.truncate(run._size)
        run._steps.seek(run._size)
        return run

    def _open(self, folder: Path, mode: str) -> None:
        self.folder = folder
        # Unbuffered: bytes that a full disk refused must not be written when the file is closed.
        self._steps: Any = (folder / STEPS_FILE).open(mode, buffering=0)
        try:
            _lock(self._steps, folder)
        except ValueError:
            self._steps.close()
            raise
        self._size = self._missing = 0
        self._pending = PendingRecords(self._write)

    @property
    def name(self) -> str:
        return self.folder.name

    def start(self, record: StartRecord) -> None:
        """Write the start of a run, also when it is resumed, perhaps with other settings."""
        try:
            _write_record(self.folder, START_FILE, record)
        except OSError as error:  # training goes on, as with steps
            warn(f"{error}; until the run has ended, reports lack its settings")

    def step(self, record: StepRecord) -> None:
        self._pending.add(record)

    def _write(self, record: StepRecord) -> None:
        # One write, so that a killed run keeps every step it has reported.
        line = (to_json(record) + "\n").encode()
        try:
            if (written := self._steps.write(line)) == len(line):
                self._size += written
                return
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as failure:
            error = failure
        # A full disk loses records of steps, and not the training.
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
        """Put all steps so far on the disk; waits for the device."""
        self._pending.finish()
        with contextlib.suppress(OSError):  # a full disk, of which users were warned
            os.fsync(self._steps.fileno())

    def finish(self, record: RunRecord) -> Path:
        """Write the record; readers see all of it or none."""
        _write_record(self.folder, RUN_FILE, record)
        return self.folder / RUN_FILE

    def close(self) -> None:
        try:
            self._pending.finish()
        finally:
            self._steps.close()
        if self._missing:
            warn(f"{self.folder / STEPS_FILE} lacks {many(self._missing, 'step')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except RuntimeError:
            if error is None:  # else the failure of the device was reported
                raise


class FollowedRun:
    """The folder of a run whose records another rank writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return self.folder.name

    def start(self, record: StartRecord) -> None:
        """Write nothing, like all that follows."""

    def step(self, record: StepRecord) -> None: ...

    def sync(self) -> None: ...

    def finish(self, record: RunRecord) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def write_comparison(folder: Path, record: ComparisonRecord, page: str) -> None:
    """Write both files; readers see all of each or none."""
    _write_record(folder, COMPARISON_FILE, record)
    Disk(folder).write(COMPARISON_PAGE, [page.encode()])


def _write_record(folder: Path, name: str, record: Any) -> None:
    text = to_json({"format": FORMAT, **to_dict(record)}, indent=2) + "\n"
    Disk(folder).write(name, [text.encode()])


def read_run(folder: str | Path) -> RunRecord:
    """Return the record of the run in `folder`; a ValueError: this version can read none."""
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {RUN_FILE}: it is not a run, or the run has not ended")
    return _read_record(RunRecord, path, "a run record")


def read_start(folder: str | Path) -> StartRecord | None:
    """Return the start of the run in `folder`; None: an earlier version did not write it."""
    path = Path(folder) / START_FILE
    return _read_record(StartRecord, path, "the start of a run") if path.is_file() else None


def _read_record(kind: type[Record], path: Path, what: str) -> Record:
    """Read a record; keys that a newer version has added are ignored."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not {what} of format {FORMAT}")
    try:
        return msgspec.convert(_with_nan(kind, values), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged: {in_words(error)}") from None


def _end_of(file: Any, step: int) -> int:
    """Return where later steps begin, or half a line of a run that was killed."""
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
    """Yield the steps of the run in `folder`, also while it is trained."""
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
    """Return a record as plain values; NaN and infinity become None, which JSON can say."""
    values = asdict(record)
    if isinstance(record, StepRecord):
        values["hit_rate"] = record.hit_rate
    return {key: plain(value) for key, value in values.items()}


def to_json(record: Any, *, indent: int | None = None) -> str:
    values = plain(record) if isinstance(record, Mapping) else to_dict(record)
    return json.dumps(values, indent=indent, allow_nan=False)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(device: str) -> dict[str, Any]:
    """Return the facts of the machine and the software that a later reader needs."""
    packages = ("torch", "numpy", "triton")
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        **gpu,
        "versions": {"hotrow": __version__, **{name: package_version(name) for name in packages}},
    }


def package_version(name: str) -> str | None:
    if name == "torch":
        return torch.__version__  # with the CUDA version, which the package's version lacks
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def new_folder(root: Path, name: str, *, option: str = "--runs") -> Path:
    """Make `name` in `root`, or `name-2`, `name-3` ... if it exists."""
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
    """Return a value as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _with_nan(kind: Any, values: Any) -> Any:
    """Return what was read, with NaN in the place of numbers that were written as null."""
    if kind is float and values is None:
        return math.nan
    if is_dataclass(kind) and isinstance(values, dict):
        kinds: Any = _kinds_in(kind)  # type: ignore[arg-type]
        return {key: _with_nan(kinds.get(key), value) for key, value in values.items()}
    parts = get_args(kind)
    if isinstance(values, dict) and len(parts) == 2:
        return {key: _with_nan(parts[1], value) for key, value in values.items()}
    if isinstance(values, list) and parts:
        return [_with_nan(parts[0], value) for value in values]
    return values


@cache  # a run may have a million steps
def _kinds_in(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields, without `| None`."""
    hints = get_type_hints(kind)
    return {
        name: get_args(hint)[0] if isinstance(hint, UnionType) else hint
        for name, hint in hints.items()
    }
