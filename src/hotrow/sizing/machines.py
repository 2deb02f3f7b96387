"""What a machine can do at best: by name, from `machines.toml`, or measured on this machine."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.links import Between, Link, checked, read_between, read_link
from hotrow.sizing.simulator import simulate
from hotrow.store.ram import Store
from hotrow.support import toml
from hotrow.support.host_memory import available_bytes
from hotrow.support.messages import did_you_mean
from hotrow.support.streams import lanes_of, synchronize

Points = Sequence[Sequence[float]]  # [n, 2]: x ascending, and its value
THIS = "this"
_GIB = 2**30
_REPEATS = 3
_COPIED = 1 << 26  # bytes
_WIDTHS = (16, 64, 256)  # floats of a row
_ROWS = 1 << 14  # moved together
_PLANNED = 30  # batches
_LOOKUPS, _TABLE_ROWS = 1 << 13, 1 << 17
_MOST_LOCKED = 8 * _GIB
_ERROR = 0.25  # of predictions from a second of measuring


@dataclass(frozen=True)
class Machine:
    """Ceilings of one machine. On a CPU the link is from RAM to RAM, and nothing overlaps training.

    Rates of rows count each row once, in either direction; a move is a row in and a row out.
    """

    name: str
    device: str  # "cuda" or "cpu"
    gpu: str  # as its driver names it; "" on a CPU
    cores: int
    memory_gib: float  # of fast memory
    link_gb: float  # GB/s each way
    hbm_gb: float  # GB/s in fast memory, read and written
    rows_part: float  # the share of it that lookups and updates reach
    dense_tflops: float  # what a dense part reaches
    row_rates: Points  # a GPU's million rows/s over the link, by the GiB that rows are spread over
    sorted_gain: Points  # times as many, by how many rows move together
    sort_ns: float  # per lookup
    plan_ns: float  # per lookup, beyond sorting
    host_ms: float  # to launch a step
    plan_drag: float  # time that training loses to planning beside it, over the planning's time
    read_drag: float  # likewise to reading rows
    fill_drag: float  # likewise to reading and writing rows
    error: float  # four in five predictions are as near as this
    forms: Mapping[str, Points] = field(default_factory=dict)  # million moves/s, by bytes of a row
    host_rows: Mapping[str, Points] = field(default_factory=dict)  # gather, scatter: by the CPU
    ranks: Between | None = None  # how several of them meet; None: not known

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


def at(points: Points, x: float) -> float:
    """Return a curve's value: straight in logarithms between its points, constant beyond them."""
    if x <= points[0][0]:
        return float(points[0][1])
    for (low, below), (high, above) in pairwise(points):
        if x <= high:
            part = math.log(x / low) / math.log(high / low)
            return float(below * (above / below) ** part)
    return float(points[-1][1])


@cache
def _known() -> tuple[dict[str, Machine], dict[str, Link]]:
    text = resources.files("hotrow.sizing").joinpath("machines.toml").read_text(encoding="utf-8")
    return _read(tomllib.loads(text), where="machines.toml")


def machines() -> dict[str, Machine]:
    """Return the machines that are known by name."""
    return _known()[0]


def links() -> dict[str, Link]:
    """Return the links between ranks that are known by name."""
    return _known()[1]


def _read(
    tables: dict[str, dict[str, Any]], *, where: str, known: Mapping[str, Link] | None = None
) -> tuple[dict[str, Machine], dict[str, Link]]:
    """Return the machines of a file, and its links beside those that are known."""
    given = tables.pop("links", {})
    every = dict(known or {})
    every |= {name: read_link(link, name, where=where) for name, link in given.items()}
    found = {}
    for name, figures in tables.items():
        if not isinstance(figures, dict):
            raise ValueError(f"{where}: {name} stands outside of a machine's table, such as [h200]")
        ranks = figures.pop("ranks", None)
        between = (
            None if ranks is None else read_between(ranks, every, where=f"{where}: [{name}.ranks]")
        )
        figures = {"forms": {}, "host_rows": {}, **figures}
        kept = checked(
            figures, Machine, where=f"{where}: [{name}]", without=("name", "device", "ranks")
        )
        found[name] = Machine(name=name, device="cuda", **kept, ranks=between)
    return found, every


def find_machine(name: str) -> Machine:
    """Return a machine by its name, or the one that a TOML file describes."""
    if name.endswith(".toml"):
        read, _ = _read(toml.read(Path(name)), where=name, known=links())
        if len(read) != 1:
            raise ValueError(
                f"{name} describes {len(read)} machines; give a file with one, in the form of "
                "hotrow/sizing/machines.toml"
            )
        return next(iter(read.values()))
    known = machines()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    raise ValueError(
        f"there is no machine {name!r}{hint}; known are {', '.join(known)}, {THIS!r}, which is "
        "measured, and TOML files that describe one, such as mine.toml"
    )


def between_of(machine: Machine) -> Between:
    """Return how ranks of a machine meet."""
    if machine.ranks is None:
        check_links(machine.name)
        raise ValueError(
            f"the links between ranks of machine {machine.name!r} are not known; add a table "
            "[NAME.ranks] to its file, in the form of hotrow/sizing/machines.toml"
        )
    return machine.ranks


def check_links(name: str) -> None:
    """Raise if ranks are asked for on this machine, before it is measured: its links are not."""
    if name == THIS:
        known = [name for name, other in machines().items() if other.ranks is not None]
        raise ValueError(
            f"the links between ranks of machine {THIS!r} are not known; name another one: "
            f"{', '.join(known)}, or a TOML file that describes one"
        )


# -- the machine at hand, measured in about a second; benchmarks/ceilings.py takes more care -----


def machine_at(device: torch.device) -> Machine:
    """Return the machine with this GPU's name, if it is known; else measure this one."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        for known in machines().values():
            if known.gpu == gpu:
                return known
    return measure(device)


def measure(device: torch.device) -> Machine:
    """Measure this machine, with `device` for fast memory."""
    if device.type == "cuda":
        return _measured_gpu(device)
    copied = _copy_gb(device)
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
        dense_tflops=_multiply_tflops(device),
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
    """Plans are not measured: their time is a known GPU's, scaled by the speed of memory."""
    like = next(iter(machines().values()))
    hbm = _copy_gb(device)
    slower = like.hbm_gb / hbm
    properties = torch.cuda.get_device_properties(device)
    forms, spread = _forms(device)
    rates: Points = like.row_rates
    if forms:
        zero_copy = 2 * forms["zero-copy"][-1][1]
        # The known GPU says how the rate falls with the memory that rows are spread over.
        known = at(like.row_rates, spread)
        rates = tuple((gib, rate * zero_copy / known) for gib, rate in like.row_rates)
    return replace(
        like,
        name=THIS,
        ranks=None,
        gpu=properties.name,
        cores=os.cpu_count() or 1,
        memory_gib=properties.total_memory / _GIB,
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
    for _ in range(_REPEATS + 1):
        _wait(device)
        started = perf_counter()
        work()
        _wait(device)
        taken.append(perf_counter() - started)
    return median(taken[1:])  # the first one warms up


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)


def _copy_gb(device: torch.device) -> float:
    """GB/s inside a memory, read and written."""
    size = _COPIED if device.type == "cpu" else _GIB
    left, right = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / 1e9 / _seconds(lambda: left.copy_(right), device)


def _link_gb(device: torch.device) -> float:
    host = torch.zeros(4 * _COPIED, dtype=torch.uint8, pin_memory=True)
    copy = torch.empty_like(host, device=device)
    return host.numel() / 1e9 / _seconds(lambda: copy.copy_(host, non_blocking=True), device)


def _multiply_tflops(device: torch.device) -> float:
    size = 512 if device.type == "cpu" else 4096
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return 2 * size**3 / 1e12 / _seconds(lambda: a @ b, device)


def _host_rows() -> dict[str, Points]:
    """Million rows per second that torch's threads gather and scatter, by the bytes of a row."""
    cpu = torch.device("cpu")
    rates: dict[str, list[tuple[float, float]]] = {"gather": [], "scatter": []}
    generator = torch.Generator().manual_seed(0)
    for width in _WIDTHS:
        store = Store(torch.zeros(_COPIED // (4 * width), width))
        rows = torch.zeros(_ROWS, width)
        for name, move in (("gather", store.read), ("scatter", store.write)):
            # Other rows each time: rows that were moved before are in a core's cache.
            ids = iter(torch.randperm(len(store.rows), generator=generator).split(_ROWS))
            seconds = _seconds(lambda: move(next(ids), rows), cpu)  # noqa: B023
            rates[name].append((4.0 * width, _ROWS / 1e6 / seconds))
    return dict(rates)


def _planning_ns() -> tuple[float, float]:
    """Nanoseconds per lookup on a CPU: of sorting, and of look-ahead's planning beyond it."""
    generator, trace = torch.Generator().manual_seed(0), []
    for _ in range(_PLANNED):
        # About as often as by Zipf's law with an exponent of 1.
        share = torch.rand(_LOOKUPS, generator=generator)
        trace.append((_TABLE_ROWS**share).long().clamp(max=_TABLE_ROWS - 1))
    (simulated,) = simulate(
        trace,
        num_rows=_TABLE_ROWS,
        choices=[(replace(STRATEGIES["lookahead"], look_ahead=8), _TABLE_ROWS // 8)],
        warm_up=_PLANNED // 2,
        as_trained=True,
    )
    sorting = _seconds(lambda: torch.sort(trace[-1], stable=True), torch.device("cpu"))
    sort_ns = sorting / _LOOKUPS * 1e9
    return sort_ns, max(0.0, 1e9 / simulated.lookups_per_second - sort_ns)


def _forms(device: torch.device) -> tuple[dict[str, Points], float]:
    """Million moves per second of each form that has enough cores, and the GiB that rows were
    spread over; none without page-locked memory or Triton."""
    try:
        from hotrow.sizing.fill_rates import fill_rates
        from hotrow.store.pinned import locked_rows
    except ImportError:
        return {}, 0.0
    size = min(_MOST_LOCKED, (available_bytes() or _MOST_LOCKED) // 4)
    width = _WIDTHS[1]
    locked = locked_rows(size // (4 * width), width)
    if not locked.locked:
        return {}, 0.0
    measured = fill_rates(Store(locked.rows), device, lanes_of(device))
    locked.close()
    return {name: ((4.0 * width, rate / 1e6),) for name, rate in measured.items()}, size / _GIB
