"""TOML tables into trees of frozen dataclasses, with errors in the user's words.

Knows types, and nothing of what the settings mean.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from hotrow.support.messages import nearest

Kind = TypeVar("Kind")


def read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def written(tables: Mapping[str, Any], *, head: str = "") -> str:
    """Tables as the text of a file that `read` gives back; `head` is a comment above them."""
    lines = [f"# {line}" for line in textwrap.wrap(head, 98)]
    return "\n".join([*lines, *_lines(tables, ())]) + "\n"


def _lines(tables: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    values = {key: each for key, each in tables.items() if not isinstance(each, Mapping)}
    if above and (values or not tables):
        yield f"\n[{'.'.join(above)}]"
    for key, value in values.items():
        # JSON writes texts, numbers, lists, true and false as TOML does.
        yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, each in tables.items():
        if isinstance(each, Mapping):
            yield from _lines(each, (*above, key))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values with their keys, such as `training.optimizer.lr`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def override(kind: type[Any], found: dict[str, Any], text: str) -> None:
    """Puts `a.b=c` into the tables read from the file of a `kind`."""
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not path:
        raise ValueError(f"--set {text}: write section.key=value, such as training.steps=200")
    keys = path.split(".")
    hint: Any = kind
    tables = [found]
    for depth, key in enumerate(keys):
        section = ".".join(keys[:depth])
        if not is_dataclass(hint):
            raise ValueError(f"--set {text}: {section} is a value, not a section")
        hint = _hint(hint, key, where=f"--set {text}", section=section)
        inner = tables[-1].setdefault(key, {}) if is_dataclass(hint) else {}
        # Where the file has a value in a section's place, building the tree says so.
        tables.append(inner if isinstance(inner, dict) else {})
    if is_dataclass(hint):
        raise ValueError(f"--set {text}: [{path}] is a section; name one of its keys")
    tables[-2][keys[-1]] = _parsed(value, hint, where=f"--set {text}")


def _parsed(text: str, hint: Any, *, where: str) -> Any:
    """A value as TOML would read it, or else the bare text: `lru` needs no quotes in a shell."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for candidate in (value, text):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(candidate, hint)
    raise ValueError(f"{where}: the value must be {_words(hint)}, not {text!r}")


def build(kind: type[Kind], found: Mapping[str, Any], *, where: str, section: str) -> Kind:
    values = {}
    for key, value in found.items():
        hint = _hint(kind, key, where=where, section=section)
        name = f"{section}.{key}" if section else key
        if is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: [{name}] is a section, not a value")
            values[key] = build(hint, value, where=where, section=name)
            continue
        try:
            values[key] = msgspec.convert(value, hint)
        except msgspec.ValidationError:
            raise ValueError(f"{where}: {name} must be {_words(hint)}, not {value!r}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: [{section}] {error}") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _hint(kind: Any, key: str, *, where: str, section: str) -> Any:
    """The type of a key; a ValueError that suggests the nearest when there is no such key."""
    known = _hints(kind)
    if key in known:
        return known[key]
    near = nearest(key, known)
    if section:
        wrong, hint = f"unknown key {key!r} in [{section}]", repr(near)
        names = ", ".join(known)
    else:
        wrong, hint = f"unknown section [{key}]", f"[{near}]"
        names = ", ".join(f"[{name}]" for name in known)
    hint = f"there are {names}" if near is None else f"did you mean {hint}?"
    raise ValueError(f"{where}: {wrong}; {hint}")


_SINGLE = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def _words(hint: Any) -> str:
    """A type as users say it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(_words(each) for each in args if each is not type(None))
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{_PLURAL[args[0]]}"
    return _SINGLE[hint]
