"""Packages import downwards only, and files and classes stay small enough to read."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hotrow
from hotrow.support.startup import MOVED

SOURCE = Path(hotrow.__file__).parent
PATHS = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}

# From the bottom up: a package imports only from those before it. docs/architecture.md says what
# each one is for.
PACKAGES = [
    "support",
    "kernels",
    "inputs",
    "store",
    "engine",
    "sizing",
    "distributed",
    "embedding",
    "training",
    "systems",
    "checkpoint",
    "data",
    "models",
    "run",
    "study",
    "report",
    "cli",
]


def _imports(node: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """Yield full names of what is imported; with `at_import`, only what runs with the module."""
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            assert child.module is not None
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, at_import=at_import)


def imported_by(module: str, *, at_import: bool = False) -> set[str]:
    """Return the hotrow modules that a module imports."""
    modules = set()
    for name in _imports(ast.parse(PATHS[module].read_text()), at_import=at_import):
        if name.split(".")[0] == "hotrow":
            while name not in PATHS:  # a name in a module: the module
                name = name.rpartition(".")[0]
            modules.add(name)
    return modules - {module}


def package_of(module: str) -> str:
    """hotrow.kernels.reference -> kernels"""
    return module.split(".")[1]


def packages_imported_by(module: str) -> set[str]:
    others = imported_by(module)
    assert "hotrow" not in others or module == "hotrow.__main__", "the root imports all packages"
    return {package_of(other) for other in others - {"hotrow"}} - {package_of(module)}


INSIDE = [name for name in PATHS if name not in ("hotrow", "hotrow.__main__")]


def test_the_root_holds_packages_alone() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__"}
    assert {package_of(name) for name in INSIDE} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_from_those_below_it(package: str) -> None:
    below = set(PACKAGES[: PACKAGES.index(package)])
    upward = {
        f"{module} imports {other}"
        for module in INSIDE
        if package_of(module) == package
        for other in imported_by(module) - {"hotrow"}
        if package_of(other) not in below | {package}
    }
    assert not upward


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_one_object_under_both_names(old: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    assert importlib.import_module(old).__name__ == MOVED[old]


def test_no_two_modules_import_each_other_however_indirectly() -> None:
    graph = {name: imported_by(name, at_import=True) - {"hotrow"} for name in INSIDE}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the modules


MOVING = {
    f"hotrow.engine.{name}" for name in ("rows", "mover", "memory", "gpu.movers", "gpu.memory")
}
DECIDING = ["planner", "rules", "gpu.planner", "evict", "profile"]


def test_what_decides_does_not_know_what_moves_bytes() -> None:
    for name in DECIDING:
        assert "store" not in packages_imported_by(f"hotrow.engine.{name}")
        assert not imported_by(f"hotrow.engine.{name}") & MOVING


def test_models_stand_alone() -> None:
    """But for kernels, which a model asks for when its tensors are on a GPU."""
    for name in PATHS:
        if name.startswith("hotrow.models"):
            assert packages_imported_by(name) <= {"embedding", "inputs", "kernels"}
            early = imported_by(name, at_import=True) - {"hotrow"}
            assert not any(package_of(other) == "kernels" for other in early)


def test_reports_read_records_alone() -> None:
    for name in PATHS:
        if name.startswith("hotrow.report"):
            assert packages_imported_by(name) <= {"support"}


@pytest.mark.parametrize(
    "module",
    [
        "torchrec",
        "triton",
        "torchmetrics",
        "safetensors",
        "typer",
        "rich",
        "hotrow.cli",
        "hotrow.data",
    ],
)
def test_importing_the_package_leaves_out(module: str, imported: set[str]) -> None:
    assert module not in imported


def test_torchmetrics_waits_until_it_is_used() -> None:
    """It takes a second, which nobody who reads data should wait for."""
    for name, path in PATHS.items():
        found = _imports(ast.parse(path.read_text()), at_import=True)
        assert not any(each.startswith("torchmetrics") for each in found), name


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Every module that `import hotrow` brings along, beyond torch's own."""
    script = (
        "import sys, torch; before = set(sys.modules); import hotrow; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    names = set(done.stdout.split())
    assert "hotrow.embedding.collection" in names
    return names


# What rows on a GPU are made of; everything else is there without Triton.
WITHOUT_TRITON = {f"hotrow.engine.gpu.{name}" for name in ("id_check", "mover_choice", "plan_room")}
ENGINE = {name for name in PATHS if name.startswith("hotrow.engine.gpu.")} - WITHOUT_TRITON


def test_only_rows_on_a_gpu_need_triton() -> None:
    kernels = {name for name in PATHS if name.startswith("hotrow.kernels.triton.")}
    # What measures kernels; and what would run.
    needs = {"hotrow.sizing.fill_rates", "hotrow.__main__"}
    others = sorted(PATHS.keys() - kernels - ENGINE - needs)
    script = """
        import importlib, sys, torch
        sys.modules["triton"] = None  # every import of it fails
        for name in sys.argv[1:]:
            importlib.import_module(name)
        import hotrow
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget=4000)
        for batch in hotrow.ahead([torch.tensor([[1], [2]])], embedding):
            embedding(batch).values().sum().backward()
        try:
            hotrow.embedding.row_groups.engine_for(torch.device("cuda"), hotrow.STRATEGIES["lru"])
        except RuntimeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *others], capture_output=True, text=True
    )
    assert done.stdout.startswith("rows on a GPU need Triton"), done.stderr
