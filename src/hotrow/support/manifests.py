"""Manifests: JSON files that lie beside data. Anyone may have written them.

Nothing in one is believed before it is checked: numbers size memory, and paths open files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import msgspec

_MOST_BYTES = 1 << 30
_INSIDE = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # of bytes, rows, numbers in a row
Schema = TypeVar("Schema")
_WORDS = {
    "object": "a table", "array": "a list", "str": "text", "int": "a whole number",
    "float": "a number", "bool": "true or false", "null": "nothing",
}  # fmt: skip


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


def converted(
    kind: type[Schema],
    found: Any,
    *,
    where: str,
    remedy: str,
    check: Callable[[Schema], None] = lambda _: None,
) -> Schema:
    """Return what was read as a dataclass; keys that it does not have are ignored.

    A ValueError says `where` it was read, which key is missing or of another type, or what the
    class itself or `check` has refused, and what the `remedy` is.
    """
    try:
        record = msgspec.convert(found, kind)
        check(record)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{where}: {in_words(error)}; the file is damaged: {remedy}") from None
    return record


def in_words(error: Exception) -> str:
    """Return what msgspec says in plain words: `tables[0].rows: expected text, got a list`."""
    what, _, place = str(error).partition(" - at `$")
    what = what.replace("Object missing required field", "it lacks").replace("Expected", "expected")
    what = re.sub(
        r"`([\w |]+)`",
        lambda types: " or ".join(_WORDS.get(name, name) for name in types[1].split(" | ")),
        what,
    )
    return f"{place.strip('.`')}: {what}" if place else what


def check_format(
    found: Any, newest: int, *, where: str, remedy: str, newer: type[ValueError] = ValueError
) -> None:
    """Refuse a manifest whose `format` this version cannot read; a later one raises `newer`."""
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is int and version > newest:
        raise newer(
            f"{where} was saved by a newer hotrow: its format is {version}, and this one reads "
            f"{newest}; update hotrow"
        )
    if type(version) is not int or version < 1:
        raise ValueError(
            f"{where}: format must be a whole number from 1 to {newest}, not {version!r}; the "
            f"file is damaged: {remedy}"
        )


def check_files(names: Iterable[str]) -> None:
    """Refuse names of files that lead out of the manifest's folder, or occur twice."""
    names = list(names)
    for name in names:
        if not _INSIDE.fullmatch(name) or ".." in PurePosixPath(name).parts:
            raise ValueError(f"file {name!r} is no file inside the folder")
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
