"""Imports go one way: from what wires to what decides and moves, down to the kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hotrow

SOURCE = Path(hotrow.__file__).parent
PATHS = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def _imports(node: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Full names of what is imported; what only type checkers see is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            assert child.module is not None
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, everywhere=everywhere)


def imported_by(module: str, *, everywhere: bool = True) -> set[str]:
    """The hotrow modules that a module imports; `everywhere`: inside functions, too."""
    found = set()
    for name in _imports(ast.parse(PATHS[module].read_text()), everywhere=everywhere):
        if name.split(".")[0] == "hotrow":
            while name not in PATHS:  # a name in a module: the module
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {module, "hotrow"}


def part_of(module: str) -> str:
    """hotrow.kernels.reference -> kernels"""
    return module.split(".")[1]


def parts_imported_by(module: str) -> set[str]:
    return {part_of(each) for each in imported_by(module)} - {part_of(module)}


# From the bottom up: a part imports only from the lines above its own.
LAYERS = [
    {
        "clock",
        "disk",
        "forks",
        "forms",
        "hashing",
        "kernels",
        "interrupt",
        "kept",
        "lanes",
        "manifests",
        "masters",
        "progress",
        "random_states",
        "reuse",
        "scalars",
        "support",
        "told",
        "watch",
        "writer",
    },
    {
        "tables",
        "blocks",
        "budget",
        "changed",
        "evict",
        "id_check",
        "machine",
        "scratchpad",
        "traffic",
        "records",
    },
    {"host_memory", "snapshot", "threads"},
    {"batch", "store", "pinned", "profile", "optim", "planner", "plan_buffers", "uploads"},
    {"parts", "dense_steps"},
    {
        "stages",
        "device_planner",
        "device_start",
        "staged",
        "samples",
        "order",
        "hotset",
        "estimate",
    },
    {"writeback", "everything", "device_work", "copied", "calibrate"},
    {"schedule", "strategy", "fills", "separate", "loggers"},
    {"cost", "rows", "simulate"},
    {"ceilings", "step", "device_memory"},
    {"device_fill"},
    {"device_rows", "plan_room"},
    {"hybrid"},
    {"static_hybrid", "sizing"},
    {"embedding"},
    {"ahead", "checkpoint", "shadow", "staleness"},
    {"captured", "sorting"},
    {"skip", "split"},
    {"graphed"},
    {"trainer"},
    {"fae", "per_sample", "slipstream"},
    {"hotline"},
]
LAYERED = [name for name in PATHS if name != "hotrow" and part_of(name) in set().union(*LAYERS)]


@pytest.mark.parametrize("module", LAYERED)
def test_a_part_imports_only_from_the_layers_below_it(module: str) -> None:
    below: set[str] = set()
    for layer in LAYERS:
        if part_of(module) in layer:
            break
        below |= layer
    assert parts_imported_by(module) <= below


def test_every_part_of_the_layers_exists() -> None:
    assert {part_of(name) for name in LAYERED} == set().union(*LAYERS)


def test_no_two_modules_import_each_other_however_indirectly() -> None:
    graph = {name: imported_by(name, everywhere=False) for name in PATHS}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the modules


KERNELS = [name for name in PATHS if name.startswith("hotrow.kernels")]


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_know_nothing_but_kernels(module: str) -> None:
    assert parts_imported_by(module) == set()


@pytest.mark.parametrize(
    "part", ["planner", "device_planner", "evict", "store", "pinned", "scratchpad", "lanes"]
)
def test_the_foundation_knows_nothing_of_what_is_built_on_it(part: str) -> None:
    upper = {"stages", "schedule", "strategy", "rows", "embedding", "ahead", "trainer", "config"}
    assert not parts_imported_by(f"hotrow.{part}") & upper


def test_what_decides_does_not_know_what_moves_bytes() -> None:
    for part in ("planner", "device_planner", "evict", "profile"):
        moving = {"store", "pinned", "rows", "device_rows", "optim"}
        assert not parts_imported_by(f"hotrow.{part}") & moving


def test_what_moves_bytes_does_not_know_what_decides() -> None:
    for part in ("store", "pinned", "scratchpad", "kernels"):
        deciding = {"planner", "device_planner", "evict", "profile"}
        assert not parts_imported_by(f"hotrow.{part}") & deciding


ENDS = {"cli", "data", "models", "report"}
# A run's settings include those of its data, so config is no part of the core.
CORE = [
    name
    for name, path in PATHS.items()
    if path.parent == SOURCE and path.stem not in ("__init__", "__main__", "config")
]


@pytest.mark.parametrize("module", CORE)
def test_the_core_never_imports_commands_data_models_or_reports(module: str) -> None:
    assert not parts_imported_by(module) & ENDS


def test_models_stand_alone() -> None:
    """But for kernels, which a model asks for when its tensors are on a GPU."""
    for name in PATHS:
        if name.startswith("hotrow.models"):
            assert parts_imported_by(name) <= {"embedding", "batch", "tables", "kernels"}
            at_once = imported_by(name, everywhere=False)
            assert not any(part_of(each) == "kernels" for each in at_once)


def test_master_weights_stand_alone() -> None:
    assert imported_by("hotrow.masters") == set()
    assert all("hotrow.masters" not in imported_by(name) for name in CORE)


def test_reports_read_records_alone() -> None:
    for name in PATHS:
        if name.startswith("hotrow.report"):
            assert parts_imported_by(name) <= {"records", "budget", "told"}


def test_records_import_nothing() -> None:
    assert imported_by("hotrow.records") == set()


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
        found = _imports(ast.parse(path.read_text()), everywhere=False)
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
    assert "hotrow.embedding" in names
    return names


# What rows on a GPU are made of; everything else is there without Triton.
ENGINE = {
    f"hotrow.{name}"
    for name in (
        "device_fill", "device_memory", "device_planner", "device_rows", "device_start",
        "device_work", "everything", "fills", "plan_buffers", "staged", "writeback",
    )
}  # fmt: skip


def test_only_rows_on_a_gpu_need_triton() -> None:
    kernels = {name for name in PATHS if name.startswith("hotrow.kernels.triton.")}
    others = sorted(PATHS.keys() - kernels - ENGINE - {"hotrow.__main__"})  # which would run
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
            hotrow.embedding._engine(torch.device("cuda"))
        except RuntimeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *others], capture_output=True, text=True
    )
    assert done.stdout.startswith("rows on a GPU need Triton"), done.stderr
