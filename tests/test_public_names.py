"""Public names are listed, exist, and have a docstring."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import hotrow

SOURCE = Path(hotrow.__file__).parent

CALLABLE = {
    name: getattr(hotrow, name) for name in hotrow.__all__ if callable(getattr(hotrow, name))
}


def own_docstring(value: object) -> str:
    """Return the docstring that is written for a class or function, "" if there is none."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    written_by_dataclass = f"{getattr(value, '__name__', '')}("
    return "" if text is None or text.startswith(written_by_dataclass) else text


def test_all_lists_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(hotrow).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert visible <= set(hotrow.__all__)
    assert len(hotrow.__all__) == len(set(hotrow.__all__))


def test_a_star_import_gives_the_listed_names_and_no_module() -> None:
    names: dict[str, object] = {}
    exec("from hotrow import *", names)
    del names["__builtins__"]
    assert set(names) == set(hotrow.__all__)
    assert not any(isinstance(value, ModuleType) for value in names.values())


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    assert [name for name, value in CALLABLE.items() if not own_docstring(value)] == []


def test_every_public_name_belongs_to_this_package() -> None:
    outside = {name: value.__module__ for name, value in CALLABLE.items()}
    assert [name for name, module in outside.items() if not module.startswith("hotrow.")] == []


def test_every_module_says_what_it_is() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_the_version_is_a_version() -> None:
    assert [part.isdigit() for part in hotrow.__version__.split(".")[:2]] == [True, True]
