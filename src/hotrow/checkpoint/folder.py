"""Checkpoints side by side in one folder: their names, which is the latest, which are removed.

    00001-step-500/  00002-step-1000/  00003-step-1200.partial/  latest

A folder has its name when it is whole; `latest` names one, and is replaced after that. What ends in
.partial is being made or being removed, or was when its process died.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hotrow.checkpoint.manifest import CHECKPOINT_FILE, NAME, read_manifest
from hotrow.support.files import PARTIAL, Disk, make_durable
from hotrow.support.messages import warn

LATEST = "latest"
IN_RUN = "checkpoints"  # the folder of a run's


class Lock:
    """Locks a folder during a save: another process would remove what is not whole.

    It is the folder's own, so that no file is left; with the process it goes in any case. Where a
    file system has no such locks, no process is refused.
    """

    def __init__(self, root: Path, flock: Callable[[int, int], None] = fcntl.flock) -> None:
        handle = os.open(root, os.O_RDONLY)
        self.release = weakref.finalize(self, _unlock, handle, os.getpid())
        try:
            flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise OSError(
                f"another process is saving a checkpoint in {root}: let one of them save, or give "
                "each a folder of its own"
            ) from None
        except OSError:
            pass


def _unlock(handle: int, owner: int) -> None:
    if os.getpid() == owner:  # and no forked child, which has the same lock
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def saved_in(root: Path) -> list[Path]:
    """Whole checkpoints of a folder, oldest first."""
    return [path for path in named_in(root) if (path / CHECKPOINT_FILE).is_file()]


def named_in(root: Path) -> list[Path]:
    """Return what has the name of a checkpoint, oldest first. It was whole once."""
    there = root.iterdir() if root.is_dir() else ()
    found = [path for path in there if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: number_of(path.name))


def number_of(name: str) -> int:
    return _numbers_of(name)[0]


def step_of(name: str) -> int:
    return _numbers_of(name)[1]


def _numbers_of(name: str) -> tuple[int, int]:
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def latest_in(root: Path) -> Path | None:
    """The one that `latest` names; without it the newest."""
    found, named = saved_in(root), named_latest(root)
    if named is not None and root / named in found:
        return root / named
    return found[-1] if found else None


def why_not_latest(root: Path) -> str | None:
    """What became of the one that `latest` names, where another is taken in its place."""
    named = named_latest(root)
    if named is None or (root / named / CHECKPOINT_FILE).is_file():
        return None
    what = f"has no {CHECKPOINT_FILE}" if (root / named).exists() else "is gone"
    return f"{root / named}, which {LATEST!r} names, {what}: the newest of the others is taken"


def named_latest(root: Path) -> str | None:
    """What `latest` says; None: nothing that is a name."""
    with suppress(OSError, UnicodeDecodeError), (root / LATEST).open("rb") as file:
        named = file.read(200).decode().strip()
        return named if NAME.fullmatch(named) else None
    return None


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint's own folder, from that, from the folder of several, or from a run's."""
    path = Path(path)
    if (path / CHECKPOINT_FILE).is_file():
        return path
    for root in (path, path / IN_RUN):
        if (found := latest_in(root)) is not None:
            if (why := why_not_latest(root)) is not None:
                warn(why)
            return found
    raise ValueError(f"{path} holds no checkpoint")


def next_name(root: Path, step: int) -> str:
    numbers = [int(match[1]) for path in root.iterdir() if (match := NAME.match(path.name))]
    return f"{max(numbers, default=0) + 1:05}-step-{step}"


def put_in_place(disk: Disk, path: Path) -> None:
    """Give a folder that is whole its name, and let `latest` name it."""
    root = path.parent
    disk.folder.rename(path)
    make_durable(root)
    type(disk)(root).write(LATEST, [path.name.encode()])


def go_back(root: Path, step: int) -> Path | None:
    """Let `latest` name the newest of this step or before it; None: there is none."""
    for path in reversed(saved_in(root)):
        if step_of(path.name) <= step:
            Disk(root).write(LATEST, [path.name.encode()])
            return path
    return None


def clean(root: Path, keep: int | None) -> None:
    """Remove what died while it was made, and all but the newest `keep` checkpoints.

    The latest stays, and so do parents of those that stay. One whose manifest is gone counts
    as none, and goes when a whole one of its age would.
    """
    for path in root.glob(f"*{PARTIAL}"):
        if NAME.match(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    if keep is None:
        return
    newest, latest = saved_in(root)[-keep:], latest_in(root)
    staying = {path.name for path in newest} | ({latest.name} if latest else set())
    for path in reversed(named_in(root)):  # a parent is older
        if path.name in staying:
            with suppress(ValueError, OSError):
                parent = read_manifest(path).parent
                staying |= {parent.name} if parent is not None else set()
            continue
        is_old = len(newest) == keep and number_of(path.name) < number_of(newest[0].name)
        if not is_old or not path.is_dir() or path.is_symlink():
            continue
        beside = path.with_name(path.name + PARTIAL)
        with suppress(OSError):  # what cannot be removed costs room, and no more
            path.rename(beside)
            shutil.rmtree(beside)
