"""Train public models plain and converted by `hotrow.convert`, and compare: see README.md."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from compare import Case, Result, compare
from rich.console import Console
from rich.table import Table

MODULES = ("with_deepctr", "with_rechub", "with_recbole", "with_lightning", "with_accelerate")
_NOTE_LINES = 8  # of a traceback; the JSON file has all of it
_COLORS = {"FAILED": "red", "equal": "green"}


def main() -> int:
    args = _arguments()
    torch.set_num_threads(args.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    results = []
    for module in args.modules:
        for case in importlib.import_module(module).cases(args.steps):
            for optimizer in case.optimizers:
                name = f"{case.source}/{case.name}/{optimizer}"
                if all(part.lower() in name.lower() for part in args.only):
                    results.append(_run(case, optimizer, args.plain))
                    console.print(f"{name}: {results[-1].outcome}", highlight=False)
    console.print(_table(results))
    for result in results:
        if result.note and result.outcome not in ("equal", "plain", "rounding"):
            note = "\n".join(result.note.splitlines()[-_NOTE_LINES:])
            console.print(
                f"\n{result.source} {result.model}, {result.optimizer}: {note}", markup=False
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(not results or any(result.failed for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clients", description=__doc__)
    parser.add_argument("--plain", action="store_true", help="compare plain with plain: no convert")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has these parts")
    parser.add_argument("--modules", nargs="*", default=MODULES, help="only these modules")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def _run(case: Case, optimizer: str, plain_only: bool) -> Result:
    try:
        return compare(case, optimizer, plain_only)
    except Exception:
        note = traceback.format_exc()
        return Result(case.source, case.name, optimizer, outcome="FAILED", note=note)


def _table(results: list[Result]) -> Table:
    table = Table()
    numbers = ("lines", "tables", "loss", "rows", "other", "noise", "moved", "evicted", "seconds")
    for name in ("model", "optimizer", *numbers, "outcome"):
        justify = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for x in results:
        color = _COLORS.get(x.outcome, "default")
        names, outcome = (f"{x.source} {x.model}", x.optimizer), f"[{color}]{x.outcome}"
        if not x.steps:
            table.add_row(*names, *["-"] * 9, outcome)
            continue
        other, noise = max(x.apart["dense"], x.apart["scores"]), max([0.0, *x.noise.values()])
        values = (x.apart["loss"], x.apart["rows"], other, noise, x.moved)
        differences = [f"{value:.1e}" if value else "0" for value in values]
        seconds = f"{x.plain_seconds:.1f} / {x.seconds:.1f}"
        counts = (str(x.lines), x.tables or "-")
        table.add_row(*names, *counts, *differences, f"{x.evictions:,}", seconds, outcome)
    return table


if __name__ == "__main__":
    start = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - start:.0f} seconds")
    sys.exit(code)
