"""`hotrow doctor`: what this machine has, and what hotrow will use. Changes nothing."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hotrow.cli._options import JsonFlag
from hotrow.cli._output import show
from hotrow.cli._rank_facts import in_words, output_of, rank_facts
from hotrow.embedding.arguments import OLDEST_CAPABILITY
from hotrow.report.page import Document, Section, facts_table
from hotrow.run.files import environment, package_version
from hotrow.store.writer import why_not
from hotrow.support.units import show_bytes

_PACKAGES = ("torch", "numpy", "triton", "torchmetrics", "msgspec", "rich", "typer")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_DRIVER = Path("/proc/driver/nvidia/version")


def doctor(
    as_json: JsonFlag = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Ranks to say for which backend and device each would use.",
            show_default="one for each GPU, at least 2",
        ),
    ] = None,
) -> None:
    """Say what this machine has and what will be used.

    **Examples**

    - `hotrow doctor`

    - `hotrow doctor --ranks 4`: which backend and device each rank would use here

    - `hotrow doctor --json | jq .used`

    - `torchrun --nproc-per-node 2 -m hotrow doctor`: what torchrun's ranks use, once per machine
    """
    facts = examine(ranks=ranks)
    started = facts["ranks"]["torchrun"]
    if started is not None and started["rank_here"]:
        return  # the first rank of this machine says it
    sections = [
        Section(
            title.replace("_", " "),
            [facts_table(in_words(part) if title == "ranks" else _named(part))],
        )
        for title, part in facts.items()
    ]
    show(Document("", sections, [facts]), as_json=as_json)


def examine(
    *,
    ranks: int | None = None,
    cuda: Any = torch.cuda,
    driver: Path = _DRIVER,
    why_no_writer: Callable[[], str | None] = why_not,
) -> dict[str, dict[str, Any]]:
    """Return all facts, by heading."""
    about = environment("cpu")
    devices = []
    if cuda.is_available():
        devices = [_cuda_device(cuda, number) for number in range(cuda.device_count())]
    reasons, no_writer = _reasons_against_cuda(devices), why_no_writer()
    page_lock_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_no_limit = page_lock_limit == resource.RLIM_INFINITY
    return {
        "versions": {
            "hotrow": about["versions"]["hotrow"],
            "python": about["python"],
            **{name: package_version(name) for name in _PACKAGES},
        },
        "machine": {
            "platform": about["platform"],
            "cores": len(os.sched_getaffinity(0)),
            "torch_threads": about["threads"],
            "cuda_devices": devices,
            "driver": _driver_version(driver),
            "memory_bytes": _memory("MemTotal"),
            "memory_available_bytes": _memory("MemAvailable"),
            "memory_limit_bytes": _cgroup_limit(),
            "page_lock_limit_bytes": None if has_no_limit else page_lock_limit,
        },
        "used": {
            "device": "cpu",
            "kernels": "reference",
            "fast_memory": "a bounded share of RAM",
            "slow_memory": "RAM",
            "deterministic_algorithms": True,
        },
        "on_cuda": {
            "usable": not reasons,
            "why_not": reasons,
            "kernels": "triton",
            "fast_memory": "the GPU's",
            "slow_memory": "page-locked RAM",
            "leaving_rows": (
                "in bulk, by threads of C"
                if no_writer is None
                else f"by the GPU alone ({no_writer})"
            ),
            "deterministic_algorithms": True,
        },
        "ranks": rank_facts(ranks, cuda=cuda),
    }


def _reasons_against_cuda(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why `run.device = "cuda"` cannot be used; empty: it can."""
    reasons = []
    capabilities = [
        tuple(int(part) for part in device["compute_capability"].split(".")) for device in devices
    ]
    if not devices:
        reasons.append(f"torch {torch.__version__} sees no CUDA device")
    elif max(capabilities) < OLDEST_CAPABILITY:
        least = ".".join(map(str, OLDEST_CAPABILITY))
        reasons.append(f"no device has compute capability {least}, which the kernels need")
    try:
        import_module("triton")
    except ImportError as error:
        reasons.append(f"triton cannot be imported ({error})")
    return reasons


def _cuda_device(cuda: Any, number: int) -> dict[str, Any]:
    about = cuda.get_device_properties(number)
    try:
        free, _ = cuda.mem_get_info(number)
    except RuntimeError:  # another process uses it exclusively
        free = None
    return {
        "device": f"cuda:{number}",
        "name": about.name,
        "memory_bytes": about.total_memory,
        "memory_free_bytes": free,
        "compute_capability": f"{about.major}.{about.minor}",
    }


def _driver_version(driver: Path) -> str | None:
    """Return the version of NVIDIA's driver; None: there is none, or it does not say."""
    try:
        text = driver.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    match = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return match[0] if match else None


def _memory(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _cgroup_limit() -> int | None:
    """Return the memory limit of the container; None: no limit."""
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


_LABELS = {"leaving_rows": "evicted rows"}
_NONE = {
    "triton": "not installed",
    "cuda_devices": "none",
    "driver": "none",
    "why_not": "-",
    "memory_limit_bytes": "no limit",
    "page_lock_limit_bytes": "no limit",
}


def _named(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        _LABELS.get(key, key.removesuffix("_bytes").replace("_", " ")): _words(key, value)
        for key, value in facts.items()
    }


def _words(key: str, value: Any) -> str:
    if value is None or value == []:
        return _NONE.get(key, "unknown")
    if isinstance(value, bool):
        yes, no = ("yes", "no") if key == "usable" else ("on", "off")
        return yes if value else no
    if key.endswith("_bytes"):
        return show_bytes(value)
    if key == "cuda_devices":
        return "\n".join(map(_device_words, value))
    return "; ".join(value) if isinstance(value, list) else str(value)


def _device_words(device: Mapping[str, Any]) -> str:
    free = device["memory_free_bytes"]
    return (
        f"{device['device']}: {device['name']}, {show_bytes(device['memory_bytes'])} "
        f"({'unknown' if free is None else show_bytes(free)} free), "
        f"compute capability {device['compute_capability']}"
    )
