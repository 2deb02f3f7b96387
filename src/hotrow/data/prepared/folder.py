"""The folder of a run: whose it is, and what a stopped run has left in it."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotrow.data.prepared.disk import Disk
from hotrow.data.prepared.format import MANIFEST, read_manifest
from hotrow.data.prepared.spool import WORK

_SETTINGS = f"{WORK}/settings.json"
_LOCK = "lock"
_WORK_FORMAT = 2  # of what a stopped run leaves; raise it when keys, lines or splits change


@contextmanager
def alone(disk: Disk, described: Mapping[str, Any], *, restart: bool) -> Iterator[None]:
    """One process at a time works in a folder, and only goes on with what is `described` alike."""
    out, work = disk.folder, disk.folder / WORK
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out is the folder to make")
    is_new = not out.exists() or not any(out.iterdir())
    if not (is_new or (work / _LOCK).exists() or _is_ours(out / MANIFEST)):
        raise ValueError(f"{out} holds other files; choose a new folder for --out")
    try:
        work.mkdir(parents=True, exist_ok=True)
        opened = (work / _LOCK).open("w")
    except OSError as error:
        raise ValueError(f"{out} cannot be made: {error.strerror}; choose another --out") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is preparing {out}") from None
        if restart:
            _clear(out)
        try:
            _check(disk, json.loads(json.dumps(described)))
            yield
        finally:
            if (out / MANIFEST).exists():
                shutil.rmtree(work, ignore_errors=True)


def _is_ours(manifest: Path) -> bool:
    """Others have files of that name, too, and --restart throws away what lies beside it."""
    try:
        found = json.loads(manifest.read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(found, dict)
        and str(found.get("made_by")).startswith("hotrow ")
        and {"schema", "splits"} <= found.keys()  # or it is a model's
    )


def _check(disk: Disk, now: dict[str, Any]) -> None:
    out, noted = disk.folder, disk.folder / _SETTINGS
    if (out / MANIFEST).exists():
        before = read_manifest(out).settings
        if before != now:
            raise ValueError(
                f"{out} holds data prepared with other {_differs(before, now)}; choose "
                "another --out, or --restart to replace it"
            )
    elif noted.exists():
        before = json.loads(noted.read_text())
        if before.pop("work_format", 1) != _WORK_FORMAT:
            raise ValueError(
                f"{out} holds a stopped run of another version of hotrow, which cannot be resumed; "
                "--restart begins anew"
            )
        if before == now | {"bad_rows": "error"} and now["bad_rows"] == "skip":
            # As the message about a bad line suggests; none was met so far.
            _note(disk, now)
        elif before != now:
            raise ValueError(
                f"{out} holds a stopped run with other {_differs(before, now)}; resume "
                "with the same files and settings, or --restart"
            )
    else:
        _note(disk, now)


def _note(disk: Disk, now: dict[str, Any]) -> None:
    disk.write(_SETTINGS, [json.dumps({**now, "work_format": _WORK_FORMAT}).encode()])


def _clear(out: Path) -> None:
    (out / MANIFEST).unlink(missing_ok=True)
    for name in ("shards", "tables"):
        shutil.rmtree(out / name, ignore_errors=True)
    for path in (out / WORK).iterdir():
        if path.name != _LOCK:
            path.unlink()


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "settings"
