"""`hotrow doctor`: what this machine has, and what hotrow will use of it. Changes nothing."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hotrow import kernels
from hotrow.budget import show_bytes
from hotrow.run.files import environment, package_version, to_json

PACKAGES = ("torch", "numpy", "triton", "torchmetrics", "rich", "typer")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same facts for machines.")] = False,
) -> None:
    """Say what this machine has and what will be used.

    **Examples**

    - `hotrow doctor`

    - `hotrow doctor --json | jq .used`
    """
    facts = examine()
    if as_json:
        typer.echo(to_json(facts))
        return
    console = Console()
    for title, part in facts.items():
        console.print(_table(title, part))


def examine() -> dict[str, dict[str, Any]]:
    """All facts, by heading."""
    about = environment(device="cpu", threads=torch.get_num_threads())
    return {
        "versions": {
            "hotrow": about["versions"]["hotrow"],
            "python": about["python"],
            **{name: package_version(name) for name in PACKAGES},
        },
        "machine": {
            "platform": about["platform"],
            "cores": len(os.sched_getaffinity(0)),
            "torch_threads": about["threads"],
            "cuda_devices": _cuda_devices(),
            "memory_bytes": _memory("MemTotal"),
            "memory_available_bytes": _memory("MemAvailable"),
            "memory_limit_bytes": _cgroup_limit(),
            "page_lock_limit_bytes": _page_lock_limit(),
        },
        "used": _used(),
    }


def _used() -> dict[str, Any]:
    device = torch.device("cpu")
    return {
        "device": str(device),
        "kernels": getattr(kernels.for_device(device), "__name__", "").rpartition(".")[2],
        "fast_memory": "a bounded share of RAM",
        "slow_memory": "RAM",
        "deterministic_algorithms": True,
    }


def _cuda_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{each.name}, {show_bytes(each.total_memory)}" for each in found]


def _memory(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _cgroup_limit() -> int | None:
    """What a container may use; None: as much as there is."""
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 says "no limit" with a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _page_lock_limit() -> int | None:
    """Bytes a process may lock; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


_NONE = {
    "triton": "not installed",
    "cuda_devices": "none",
    "memory_limit_bytes": "no limit",
    "page_lock_limit_bytes": "no limit",
}


def _table(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for key, value in facts.items():
        table.add_row(key.removesuffix("_bytes").replace("_", " "), _words(key, value))
    return table


def _words(key: str, value: Any) -> str:
    if value is None or value == []:
        return _NONE.get(key, "unknown")
    if isinstance(value, bool):
        return "on" if value else "off"
    if key.endswith("_bytes"):
        return show_bytes(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
