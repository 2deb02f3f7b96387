"""What ranks on this machine would use: backends, GPUs and their links, cores. Starts no rank."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from hotrow.support.messages import many

_SECONDS = 10.0  # for one call of nvidia-smi
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
_BUS = (
    "nvidia-smi", "--query-gpu=index,pcie.link.gen.max,pcie.link.width.max",
    "--format=csv,noheader",
)  # fmt: skip
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_MEANINGS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "the host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}


def output_of(*command: str) -> str:
    """Return what a command prints; empty: there is none, it fails, or it takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return done.stdout
    return ""


def rank_facts(
    count: int | None = None,
    *,
    cuda: Any = torch.cuda,
    distributed: Any = torch.distributed,
    variables: Mapping[str, str] = os.environ,
    output: Callable[..., str] = output_of,
) -> dict[str, Any]:
    """Return what `--ranks COUNT` would use here; by default as many ranks as torchrun has started
    on this machine, or a rank for each GPU, and at least two."""
    backends = _backends(distributed)
    gpus = cuda.device_count() if cuda.is_available() else 0
    started = _torchrun(variables)
    local = 1 if started is None else started["ranks_here"]
    count = count or (local if local > 1 else max(2, gpus))
    cores = len(os.sched_getaffinity(0))
    devices = [f"cuda:{rank % gpus}" for rank in range(count)] if gpus else []
    has_own = count <= gpus and "nccl" in backends
    return {
        "ranks": count,
        "backends": backends,
        "cores_per_rank": cores / count,
        "backend_on_cpu": "gloo" if "gloo" in backends else None,
        "backend_on_cuda": (("nccl" if has_own else "gloo") if gpus else None),
        "devices_on_cuda": devices,
        "gpu_links": _gpu_links(cuda, gpus, output) if gpus > 1 else [],
        "host_links": _host_links(gpus, output) if gpus else [],
        "torchrun": started,
    }


def _backends(distributed: Any) -> dict[str, str | None]:
    """Return the backends of torch.distributed, with their versions where they have any."""
    found: dict[str, str | None] = {}
    if not distributed.is_available():
        return found
    if distributed.is_gloo_available():
        found["gloo"] = None
    if distributed.is_nccl_available():
        found["nccl"] = None
        with suppress(Exception):  # without a driver it may not say
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _torchrun(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what torchrun has told this process; None: it has not started it."""

    def number(name: str, default: int) -> int:
        text = variables.get(name, "")
        return int(text) if text.isdecimal() else default

    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    ranks = number("WORLD_SIZE", 1)
    return {
        "rank": number("RANK", 0),
        "ranks": ranks,
        "rank_here": number("LOCAL_RANK", number("RANK", 0)),
        "ranks_here": number("LOCAL_WORLD_SIZE", ranks),
        "meet_at": f"{variables.get('MASTER_ADDR', '')}:{variables.get('MASTER_PORT', '')}",
        "restarts": number("TORCHELASTIC_RESTART_COUNT", 0),
        "threads": variables.get("OMP_NUM_THREADS"),
    }


def _gpu_links(cuda: Any, gpus: int, output: Callable[..., str]) -> list[dict[str, Any]]:
    """Return how each pair of GPUs is linked, as far as that can be found out."""
    kinds = {
        (place, other): kind
        for place, (links, _, _) in _topology(output(*_TOPOLOGY), gpus).items()
        for other, kind in enumerate(links)
    }
    return [
        {
            "gpus": [a, b],
            "link": kinds.get((a, b)),
            "reads_directly": cuda.can_device_access_peer(a, b),
        }
        for a in range(gpus)
        for b in range(a + 1, gpus)
    ]


def _host_links(gpus: int, output: Callable[..., str]) -> list[dict[str, Any]]:
    """Return the bus of each GPU, and the cores that are near it."""
    near = _topology(output(*_TOPOLOGY), gpus)
    buses = {}
    for line in output(*_BUS).splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and all(cell.isdecimal() for cell in cells):
            buses[int(cells[0])] = f"PCIe {cells[1]}, {cells[2]} lanes"
    every = []
    for gpu in range(gpus):
        _, cores, node = near.get(gpu, ([], None, None))
        every.append({"gpu": gpu, "bus": buses.get(gpu), "cores": cores, "numa_node": node})
    return every


def _topology(text: str, gpus: int) -> dict[int, tuple[list[str], str | None, str | None]]:
    """Return, by GPU, the kinds of its links to all GPUs, its cores and its NUMA node, from what
    `nvidia-smi topo -m` prints."""
    lines = [_STYLE.sub("", line).split("\t") for line in text.splitlines()]
    heads = next((list(map(str.strip, line)) for line in lines if "GPU0" in line), [])
    found = {}
    for line in lines:
        cells = dict(zip(heads, map(str.strip, line), strict=False))
        name = re.fullmatch(r"GPU(\d+)", line[0].strip())
        if name and len(line) > 1 and all(f"GPU{other}" in cells for other in range(gpus)):
            links = [cells[f"GPU{other}"] for other in range(gpus)]
            found[int(name[1])] = (
                links,
                cells.get("CPU Affinity") or None,
                cells.get("NUMA Affinity") or None,
            )
    return found


def in_words(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts for people, by name."""
    backends = [name if not v else f"{name} {v}" for name, v in facts["backends"].items()]
    count, cores = facts["ranks"], facts["cores_per_rank"]
    told = {
        "backends": ", ".join(backends) or "none: this torch has no torch.distributed",
        f"--ranks {count} on cpu": _on_cpu(facts["backend_on_cpu"], count, cores),
        f"--ranks {count} on cuda": _on_cuda(facts),
    }
    if facts["gpu_links"]:
        told["GPU to GPU"] = "\n".join(map(_pair_in_words, facts["gpu_links"]))
    if facts["host_links"]:
        told["GPU to host"] = "\n".join(map(_host_in_words, facts["host_links"]))
    told["started by torchrun"] = _started_in_words(facts["torchrun"])
    return told


def _on_cpu(backend: str | None, count: int, cores: float) -> str:
    if backend is None:
        return "not possible: there is no gloo"
    text = f"{backend}, {cores:.3g} {'core' if cores == 1 else 'cores'} for each rank"
    return text if cores >= 1 else f"{text}: {many(count, 'rank')} share fewer cores"


def _on_cuda(facts: Mapping[str, Any]) -> str:
    devices, backend = facts["devices_on_cuda"], facts["backend_on_cuda"]
    if not devices:
        return "not possible: torch sees no GPU"
    shown = ", ".join(f"rank {rank} {device}" for rank, device in enumerate(devices[:8]))
    more = f" and {len(devices) - 8:,} more" if len(devices) > 8 else ""
    gpus = len(set(devices))
    why = ""
    if backend == "gloo":
        why = (
            f": {many(gpus, 'GPU')} for {many(len(devices), 'rank')}, and ranks of nccl need one "
            "each"
            if gpus < len(devices)
            else ": there is no nccl"
        )
    return f"{backend}{why}; {shown}{more}"


def _pair_in_words(pair: Mapping[str, Any]) -> str:
    kind, (a, b) = pair["link"], pair["gpus"]
    direct = "directly" if pair["reads_directly"] else "through the host"
    meaning = _MEANINGS.get(re.sub(r"\d+$", "", kind or ""), "")
    known = "link unknown" if not kind else f"{kind} ({meaning})" if meaning else kind
    return f"cuda:{a} and cuda:{b}: {known}, read {direct}"


def _host_in_words(host: Mapping[str, Any]) -> str:
    near = f", near cores {host['cores']}" if host["cores"] else ""
    node = host["numa_node"]
    near += f" (NUMA node {node})" if node and node.isdecimal() else ""
    return f"cuda:{host['gpu']}: {host['bus'] or 'bus unknown'}{near}"


def _started_in_words(started: Mapping[str, Any] | None) -> str:
    if started is None:
        return "no"
    threads = f", OMP_NUM_THREADS {started['threads']}" if started["threads"] else ""
    restarts = f", restarted {many(started['restarts'], 'time')}" if started["restarts"] else ""
    return (
        f"rank {started['rank']} of {started['ranks']} ({started['rank_here']} of "
        f"{started['ranks_here']} on this machine), meeting at {started['meet_at']}"
        f"{threads}{restarts}"
    )
