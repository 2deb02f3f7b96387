"""What the machine at hand can do, measured in about a second: a `Machine` like those with a name.

`benchmarks/ceilings.py` measures the same with more care and in more detail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.machines import THIS, Machine, Points, at, machines
from hotrow.sizing.simulator import simulate
from hotrow.store.ram import Store
from hotrow.support.host_memory import available_bytes
from hotrow.support.streams import lanes_of, synchronize

_GIB = 2**30
_REPEATS = 3
_COPIED = 1 << 26  # bytes
_WIDTHS = (16, 64, 256)  # floats of a row
_ROWS = 1 << 14  # that move at once
_PLANNED = 30  # batches
_LOOKUPS, _TABLE_ROWS = 1 << 13, 1 << 17
_MOST_LOCKED = 8 * _GIB
_ERROR = 0.25  # of what is predicted from a second of measuring


def machine_at(device: torch.device) -> Machine:
    """The machine with its GPU's name, if it is known; else it is measured."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        for known in machines().values():
            if known.gpu == gpu:
                return known
    return measure(device)


def measure(device: torch.device) -> Machine:
    """Ceilings of this machine, with `device` for fast memory."""
    return _measured_gpu(device) if device.type == "cuda" else _measured_cpu()


def _measured_cpu() -> Machine:
    cpu = torch.device("cpu")
    copied = _copy_gb(cpu)
    sort_ns, plan_ns = _planning_ns()
    return Machine(
        name=THIS,
        device="cpu",
        gpu="",
        cores=os.cpu_count() or 1,
        memory_gib=(available_bytes() or 0) / _GIB,
        link_gb=copied / 2,
        hbm_gb=copied,
        rows_part=0.5,
        dense_tflops=_multiply_tflops(cpu),
        row_rates=(),
        sorted_gain=(),
        sort_ns=sort_ns,
        plan_ns=plan_ns,
        host_ms=0.0,
        plan_drag=1.0,
        read_drag=1.0,
        fill_drag=1.0,
        error=_ERROR,
        host_rows=_host_rows(),
    )


def _measured_gpu(device: torch.device) -> Machine:
    """What plans take is not measured, but a known GPU's, by how fast memory is."""
    like = next(iter(machines().values()))
    hbm = _copy_gb(device)
    slower = like.hbm_gb / hbm
    found = torch.cuda.get_device_properties(device)
    forms, spread = _forms(device)
    rates: Points = like.row_rates
    if forms:
        zero_copy = 2 * forms["zero-copy"][-1][1]
        # By how much memory rows are spread over is how the known one has it.
        known = at(like.row_rates, spread)
        rates = tuple((gib, rate * zero_copy / known) for gib, rate in like.row_rates)
    return replace(
        like,
        name=THIS,
        gpu=found.name,
        cores=os.cpu_count() or 1,
        memory_gib=found.total_memory / _GIB,
        link_gb=_link_gb(device),
        hbm_gb=hbm,
        dense_tflops=_multiply_tflops(device),
        row_rates=rates,
        sort_ns=like.sort_ns * slower,
        plan_ns=like.plan_ns * slower,
        error=_ERROR,
        forms=forms,
        host_rows=_host_rows(),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    taken = []
    for repeat in range(_REPEATS + 1):
        _wait(device)
        started = perf_counter()
        work()
        _wait(device)
        if repeat:  # the first one warms up
            taken.append(perf_counter() - started)
    return median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)


def _copy_gb(device: torch.device) -> float:
    """GB/s inside a memory, read and written."""
    size = _COPIED if device.type == "cpu" else _GIB
    left, right = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / 1e9 / _seconds(lambda: left.copy_(right), device)


def _link_gb(device: torch.device) -> float:
    there = torch.zeros(4 * _COPIED, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=device)
    return there.numel() / 1e9 / _seconds(lambda: here.copy_(there, non_blocking=True), device)


def _multiply_tflops(device: torch.device) -> float:
    size = 512 if device.type == "cpu" else 4096
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return 2 * size**3 / 1e12 / _seconds(lambda: a @ b, device)


def _host_rows() -> dict[str, Points]:
    """Million rows per second that torch's threads gather and scatter, by the bytes of a row."""
    cpu = torch.device("cpu")
    found: dict[str, list[tuple[float, float]]] = {"gather": [], "scatter": []}
    generator = torch.Generator().manual_seed(0)
    for width in _WIDTHS:
        store = Store(torch.zeros(_COPIED // (4 * width), width))
        rows = torch.zeros(_ROWS, width)
        for name, move in (("gather", store.read), ("scatter", store.write)):
            # Others each time: those that were moved just now are in a core's own memory.
            ids = iter(torch.randperm(len(store.rows), generator=generator).split(_ROWS))
            seconds = _seconds(lambda: move(next(ids), rows), cpu)  # noqa: B023
            found[name].append((4.0 * width, _ROWS / 1e6 / seconds))
    return dict(found)


def _planning_ns() -> tuple[float, float]:
    """Per lookup on a CPU: sorting, and what look-ahead does beyond it."""
    trace = list(_trace())
    (found,) = simulate(
        trace,
        num_rows=_TABLE_ROWS,
        choices=[(replace(STRATEGIES["lookahead"], look_ahead=8), _TABLE_ROWS // 8)],
        warm_up=_PLANNED // 2,
        as_trained=True,
    )
    sorting = _seconds(lambda: torch.sort(trace[-1], stable=True), torch.device("cpu"))
    sort_ns = sorting / _LOOKUPS * 1e9
    return sort_ns, max(0.0, 1e9 / found.lookups_per_second - sort_ns)


def _trace() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_PLANNED):
        # About as often as by Zipf's law with an exponent of 1.
        share = torch.rand(_LOOKUPS, generator=generator)
        yield (_TABLE_ROWS**share).long().clamp(max=_TABLE_ROWS - 1)


def _forms(device: torch.device) -> tuple[dict[str, Points], float]:
    """Million moves per second of each form that cores suffice for, and the GiB that rows were
    spread over. Without page-locked memory, or without Triton, there are none."""
    try:
        from hotrow.engine.gpu.mover_choice import choose
        from hotrow.store.pinned import locked_rows
    except ImportError:
        return {}, 0.0
    size = min(_MOST_LOCKED, (available_bytes() or _MOST_LOCKED) // 4)
    width = _WIDTHS[1]
    found = locked_rows(size // (4 * width), width)
    if not found.locked:
        return {}, 0.0
    rates = choose(Store(found.rows), device, lanes_of(device), bulk=True).moves_per_second
    found.close()
    return {name: ((4.0 * width, rate / 1e6),) for name, rate in rates.items()}, size / _GIB
