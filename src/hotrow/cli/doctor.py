"""`hotrow doctor`: what this machine has, and what hotrow will use of it. Changes nothing."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hotrow.cli._options import JsonFlag
from hotrow.cli._output import show
from hotrow.embedding.arguments import OLDEST_CAPABILITY
from hotrow.report.document import Document, Section, facts_table
from hotrow.run.files import environment, package_version
from hotrow.store.writer import why_not
from hotrow.support.units import show_bytes

PACKAGES = ("torch", "numpy", "triton", "torchmetrics", "msgspec", "rich", "typer")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
DRIVER = Path("/proc/driver/nvidia/version")


def doctor(as_json: JsonFlag = False) -> None:
    """Say what this machine has and what will be used.

    **Examples**

    - `hotrow doctor`

    - `hotrow doctor --json | jq .used`
    """
    facts = examine()
    sections = [
        Section(title.replace("_", " "), [facts_table(_named(part))])
        for title, part in facts.items()
    ]
    show(Document("", sections, [facts]), as_json=as_json)


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
            "driver": _driver(),
            "memory_bytes": _memory("MemTotal"),
            "memory_available_bytes": _memory("MemAvailable"),
            "memory_limit_bytes": _cgroup_limit(),
            "page_lock_limit_bytes": _page_lock_limit(),
        },
        "used": _used(),
        "on_cuda": _on_cuda(),
    }


def _used() -> dict[str, Any]:
    return {
        "device": "cpu",
        "kernels": "reference",
        "fast_memory": "a bounded share of RAM",
        "slow_memory": "RAM",
        "deterministic_algorithms": True,
    }


def _on_cuda() -> dict[str, Any]:
    """What would be used with `run.device = "cuda"`, and why it cannot be."""
    reasons = _reasons_against_cuda()
    return {
        "usable": not reasons,
        "why_not": reasons,
        "kernels": "triton",
        "fast_memory": "the GPU's",
        "slow_memory": "page-locked RAM",
        "leaving_rows": _leaving_rows(),
        "deterministic_algorithms": True,
    }


def _leaving_rows() -> str:
    reason = why_not()
    return "in bulk, by threads of C" if reason is None else f"by the GPU alone ({reason})"


def _reasons_against_cuda() -> list[str]:
    found = []
    devices = _cuda_devices()
    if not devices:
        found.append(f"torch {torch.__version__} sees no CUDA device")
    elif all(_capability(each) < OLDEST_CAPABILITY for each in devices):
        least = ".".join(map(str, OLDEST_CAPABILITY))
        found.append(f"no device has compute capability {least}, which the kernels need")
    try:
        import_module("triton")
    except ImportError as error:
        found.append(f"triton cannot be imported ({error})")
    return found


def _capability(device: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in device["compute_capability"].split("."))


def _cuda_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    return [_cuda_device(number) for number in range(torch.cuda.device_count())]


def _cuda_device(number: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(number)
    try:
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError:  # another process has it for itself
        free = None
    return {
        "device": f"cuda:{number}",
        "name": about.name,
        "memory_bytes": about.total_memory,
        "memory_free_bytes": free,
        "compute_capability": f"{about.major}.{about.minor}",
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver; None: there is none, or it does not say."""
    try:
        text = DRIVER.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = _ask_nvidia_smi()
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return found[0] if found else None


def _ask_nvidia_smi() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


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
    "driver": "none",
    "why_not": "-",
    "memory_limit_bytes": "no limit",
    "page_lock_limit_bytes": "no limit",
}


def _named(facts: dict[str, Any]) -> dict[str, str]:
    return {
        key.removesuffix("_bytes").replace("_", " "): _words(key, value)
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


def _device_words(device: dict[str, Any]) -> str:
    free = device["memory_free_bytes"]
    return (
        f"{device['device']}: {device['name']}, {show_bytes(device['memory_bytes'])} "
        f"({'unknown' if free is None else show_bytes(free)} free), "
        f"compute capability {device['compute_capability']}"
    )
