"""Manifests: JSON that lies beside data and that anybody may have written.

Nothing in one is believed before it is checked: numbers size memory, and paths open files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

_MOST_BYTES = 1 << 30


def read_json(path: Path) -> Any:
    """What a manifest holds. One that is missing is a FileNotFoundError, anything else wrong a
    ValueError."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than any manifest: {size:,} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


class Reader:
    """Takes values out of a manifest; errors say `where` it is and what the `remedy` is."""

    def __init__(self, where: str, *, remedy: str) -> None:
        self._where, self._remedy = where, remedy

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self._where}: {what}; the file is damaged: {self._remedy}")

    def table(self, found: Any, name: str) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise self.wrong(f"{name} is missing or no table")
        return found

    def items(self, found: Mapping[str, Any], key: str) -> list[Any]:
        if not isinstance(found.get(key), list):
            raise self.wrong(f"{key} is missing or no list")
        return list(found[key])

    def text(self, found: Mapping[str, Any], key: str) -> str:
        if not isinstance(found.get(key), str):
            raise self.wrong(f"{key} is missing or no text")
        return str(found[key])

    def number(self, found: Mapping[str, Any], key: str) -> int:
        value = found.get(key)
        if type(value) is not int or not 0 <= value < 2**62:
            raise self.wrong(f"{key} must be a whole number of at least 0, not {value!r}")
        return value

    def path(self, found: Mapping[str, Any]) -> str:
        name = self.text(found, "file")
        parts = PurePosixPath(name).parts
        if not re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", name) or ".." in parts:
            raise self.wrong(f"file {name!r} is no file inside the folder")
        return name
