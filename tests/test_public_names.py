"""What users may import is listed, is there, and says what it is."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import hotrow

SOURCE = Path(hotrow.__file__).parent
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def test_a_star_import_gives_the_listed_names_and_no_module() -> None:
    names: dict[str, object] = {}
    exec("from hotrow import *", names)
    del names["__builtins__"]
    assert set(names) == set(hotrow.__all__)
    assert len(hotrow.__all__) == len(set(hotrow.__all__))
    visible = {name for name in vars(hotrow) if not name.startswith("_")}
    modules = {name for name, value in vars(hotrow).items() if isinstance(value, ModuleType)}
    assert visible - modules <= set(hotrow.__all__)
    assert not any(isinstance(value, ModuleType) for value in names.values())


DOCUMENTED = [name for name in hotrow.__all__ if callable(getattr(hotrow, name))]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_is_of_this_package_and_has_its_own_docstring(name: str) -> None:
    value = getattr(hotrow, name)
    assert value.__module__.startswith("hotrow.")
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "a dataclass wrote it by itself"


def test_every_module_says_what_it_is() -> None:
    silent = [
        module
        for module in MODULES
        if not ast.get_docstring(ast.parse((SOURCE / module).read_text()))
    ]
    assert silent == []
