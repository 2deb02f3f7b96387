"""Checkpoints side by side in one folder: their names, which is the latest, which are removed.

    00001-step-500/  00002-step-1000/  00003-step-1200.partial/  latest

A folder gets its name when it is complete; then `latest` is replaced, which names one of them. A
folder that ends in .partial is being written or removed, or was when its process died.
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
IN_RUN = "checkpoints"  # the folder inside of a run's folder


class Lock:
    """Locks a folder during a save: another process would remove what is not complete.

    The folder itself is locked, so no file is left behind, and the end of the process unlocks it.
    On a file system without locks, no process is refused.
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
    if os.getpid() == owner:  # not a forked child, which shares the lock
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def saved_in(root: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for path in named_in(root) if (path / CHECKPOINT_FILE).is_file()]


def named_in(root: Path) -> list[Path]:
    """Return paths with the name of a checkpoint, oldest first. They were complete once."""
    paths = root.iterdir() if root.is_dir() else ()
    named = [path for path in paths if NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: number_of(path.name))


def number_of(name: str) -> int:
    return int(name.partition("-")[0])


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def latest_in(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or else the newest."""
    saved, named = saved_in(root), named_latest(root)
    if named is not None and root / named in saved:
        return root / named
    return saved[-1] if saved else None


def why_not_latest(root: Path) -> str | None:
    """Return why the checkpoint that `latest` names is not used; None: it is."""
    named = named_latest(root)
    if named is None or (root / named / CHECKPOINT_FILE).is_file():
        return None
    what = f"has no {CHECKPOINT_FILE}" if (root / named).exists() else "is gone"
    return f"{root / named}, which {LATEST!r} names, {what}: the newest of the others is taken"


def named_latest(root: Path) -> str | None:
    """Return the name in `latest`; None: it has none."""
    with suppress(OSError, UnicodeDecodeError), (root / LATEST).open("rb") as file:
        named = file.read(200).decode().strip()
        return named if NAME.fullmatch(named) else None
    return None


def find_checkpoint(path: str | Path) -> Path:
    """Return a checkpoint's folder, given itself, the folder of several, or a run's."""
    path = Path(path)
    if (path / CHECKPOINT_FILE).is_file():
        return path
    for root in (path, path / IN_RUN):
        if (latest := latest_in(root)) is not None:
            if (why := why_not_latest(root)) is not None:
                warn(why)
            return latest
    raise ValueError(f"{path} holds no checkpoint")


def next_name(root: Path, step: int) -> str:
    numbers = [int(match[1]) for path in root.iterdir() if (match := NAME.match(path.name))]
    return f"{max(numbers, default=0) + 1:05}-step-{step}"


def put_in_place(disk: Disk, path: Path) -> None:
    """Give a complete folder its name, and let `latest` name it."""
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
    """Remove incomplete checkpoints, and all but the newest `keep`.

    The latest stays, and so do parents of checkpoints that stay. One without its manifest does
    not count, and is removed when a complete one of its age would be.
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
        with suppress(OSError):  # a folder that cannot be removed only costs disk space
            path.rename(beside)
            shutil.rmtree(beside)
