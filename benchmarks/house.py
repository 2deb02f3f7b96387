"""How a checkout is arranged: packages, layers, and the lengths of files, functions and lines.

    python benchmarks/house.py [CHECKOUT ...]

Reads source text and imports none of it.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "hotrow"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One source file, with all nodes of its syntax tree."""

    path: Path  # relative to src/hotrow or to tests
    lines: list[str]
    nodes: list[ast.AST]


def modules_in(folder: Path) -> list[Module]:
    modules = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        modules.append(Module(path.relative_to(folder), text.splitlines(), nodes))
    return modules


def length(node: ast.stmt) -> int:
    """Lines of a class or function, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def largest_class(nodes: Iterable[ast.AST]) -> str:
    sizes = [(length(node), node.name) for node in nodes if isinstance(node, ast.ClassDef)]
    lines, name = max(sizes, default=(0, "-"))
    return f"{name} {lines:,}"


def packages_imported(nodes: Iterable[ast.AST], packages: set[str]) -> set[str]:
    """Which of the packages are imported anywhere, also for type checking."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    seconds = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
    return {name if name in packages else "(root)" for name in seconds}


def reach(name: str, below: dict[str, set[str]]) -> set[str]:
    """Packages that a package imports, directly or through others."""
    seen, new = set[str](), below[name]
    while new:
        seen |= new
        new = {other for package in new for other in below[package]} - seen
    return seen


def spread(values: Iterable[int]) -> str:
    """Median, 90th percentile and maximum."""
    ranked = sorted(values) or [0]
    median, p90 = (ranked[int(share * (len(ranked) - 1))] for share in (0.5, 0.9))
    return f"{median} / {p90} / {ranked[-1]:,}"


def show_table(*rows: Sequence[str]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print()


def show(checkout: Path) -> None:
    source, tests = modules_in(checkout / "src" / PACKAGE), modules_in(checkout / "tests")
    parts: dict[str, list[Module]] = {}
    for module in source:
        package = module.path.parts[0] if len(module.path.parts) > 1 else "(root)"
        parts.setdefault(package, []).append(module)
    nodes = {name: [node for module in parts[name] for node in module.nodes] for name in parts}
    below = {name: packages_imported(nodes[name], set(parts)) - {name} for name in parts}

    rows = [("package", "modules", "lines", "largest file", "largest class", "imports from")]
    for name in sorted(parts, key=lambda name: len(reach(name, below))):  # the lowest layer first
        sizes = {module.path.as_posix(): len(module.lines) for module in parts[name]}
        lines, path = max((lines, path) for path, lines in sizes.items())
        largest = (f"{path} {lines:,}", largest_class(nodes[name]))
        layers = ", ".join(sorted(below[name])) or "-"
        rows.append((name, f"{len(sizes)}", f"{sum(sizes.values()):,}", *largest, layers))
    print(checkout.resolve())
    show_table(*rows)

    rows = [("median / p90 / max", "files", "lines", "file", "function", "line, characters")]
    for name, modules in (("src", source), ("tests", tests)):
        lines = [line for module in modules for line in module.lines]
        files = spread(len(module.lines) for module in modules)
        functions = spread(
            length(node) for part in modules for node in part.nodes if isinstance(node, FUNCTION)
        )
        widths = spread(len(line) for line in lines if line.strip())
        rows.append((name, f"{len(modules)}", f"{len(lines):,}", files, functions, widths))
    show_table(*rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="*", default=[Path(__file__).parents[1]])
    for checkout in parser.parse_args().checkout:
        show(checkout)
