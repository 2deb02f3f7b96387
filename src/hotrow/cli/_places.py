"""Where commands write what they find."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_file(option: str, path: Path | None, *, such_as: str) -> None:
    """Before anything takes time: whether a file can be written there."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it: {path / such_as}")
    _check(option, path, path.parent)


def check_folder(option: str, path: Path | None) -> None:
    """Likewise, whether files can be written into a folder, which is made."""
    if path is not None:
        _check(option, path, path)


def _check(option: str, path: Path, folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is no folder; name another place")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}); name another place"
        ) from None
