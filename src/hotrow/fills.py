"""Which way rows move between the store and the slots: asked for, or measured and chosen.

Knows the forms and the machine; nothing about batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from hotrow.device_planner import id_type_of
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill
from hotrow.lanes import Lanes
from hotrow.staged import Staged
from hotrow.store import Store

FILL_BLOCKS = 2  # each takes a multiprocessor away from training
READ_BLOCKS = 1  # more of them slow down matrix products, which want all multiprocessors

# How many times as fast another form has to be alone to be taken: zero-copy takes two
# multiprocessors from training; the others take cores from whoever loads data and launches. One
# that was 2.2 times as fast alone, on all cores, was slower beside training (benchmarks/LOG.md).
CLEARLY = 2.5
_LEAST_CORES = 8
_MOVES, _LEAST_MOVES = 8192, 512  # of a batch, each way; with fewer, the times say little
_MOST_BYTES = 1 << 23  # of them
_WARM_UP, _TIMED = 2, 4  # batches


@dataclass(frozen=True)
class FillChoice:
    """The form that is used, why, and how many moves per second each form that was tried made."""

    form: str  # zero-copy, bulk, staged
    why: str
    moves_per_second: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rates = [f"{form} {rate / 1e6:.1f}" for form, rate in self.moves_per_second.items()]
        measured = f"; million moves per second: {', '.join(rates)}" if rates else ""
        return f"{self.form} ({self.why}{measured})"


def choose(store: Store, device: torch.device, lanes: Lanes) -> FillChoice:
    """Measure with a store that is still all zero, and stays so."""
    cores, moves = torch.get_num_threads(), _moves_for(store)
    if cores < _LEAST_CORES:
        return FillChoice("zero-copy", f"{cores} cores have enough to do")
    if moves < _LEAST_MOVES:
        return FillChoice("zero-copy", f"{len(store.rows):,} rows are too few to measure")
    return by_rates(measure(store, device, lanes, moves))


def by_rates(moves_per_second: Mapping[str, float]) -> FillChoice:
    """Zero-copy, unless another form is clearly faster; then the fastest."""
    fastest = max(moves_per_second, key=lambda form: moves_per_second[form])
    if moves_per_second[fastest] >= CLEARLY * moves_per_second["zero-copy"]:
        return FillChoice(fastest, f"{CLEARLY:g} times as fast, or more", moves_per_second)
    return FillChoice("zero-copy", f"no other is {CLEARLY:g} times as fast", moves_per_second)


def measure(store: Store, device: torch.device, lanes: Lanes, moves: int) -> dict[str, float]:
    """Moves per second of each form, batch behind batch as in training.

    No batch moves a row that another has moved: what lies in the CPU's caches would cost nothing.
    """
    ids = _distinct(len(store.rows), 2 * moves * (_WARM_UP + _TIMED))
    ids = ids.to(device, id_type_of(len(store.rows)))
    slots = torch.zeros(moves, store.rows.shape[1], device=device)
    counted = torch.tensor([moves], dtype=torch.int32, device=device)
    places = torch.arange(moves, dtype=torch.int32, device=device)
    batches = [Moves(places, *pair.split(moves)) for pair in ids.split(2 * moves)]
    # A plan tells the host what enters.
    told = {id(each): each.entering.cpu() for each in batches}

    def zero_copy(some: list[Moves]) -> None:
        for each in some:
            fill.fill(
                slots, store.rows, each.slots, each.leaving, each.entering, counted, FILL_BLOCKS
            )

    def through(staged: Staged, some: list[Moves]) -> None:
        sent = None
        for each in some:
            packet = staged.collect(each, counted, told[id(each)], evicts=True)
            staged.write(packet)
            if sent is not None:
                staged.insert(sent)
            sent = packet
        if sent is not None:
            staged.insert(sent)
        staged.wait()

    found = {}
    with lanes.on("rows"):
        found["zero-copy"] = _rate(zero_copy, batches, device)
        staged = Staged(store, slots, most=moves, packets=3, id_type=ids.dtype, lanes=lanes)
        found["staged"] = _rate(partial(through, staged), batches, device)
    return found


def _rate(run: Callable[[list[Moves]], None], batches: list[Moves], device: torch.device) -> float:
    run(batches[:_WARM_UP])  # compiles kernels, too
    _wait(device)
    started = perf_counter()
    run(batches[_WARM_UP:])
    _wait(device)
    moves = sum(each.slots.numel() for each in batches[_WARM_UP:])
    return moves / (perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _moves_for(store: Store) -> int:
    num_rows, width = store.rows.shape
    return min(_MOVES, _MOST_BYTES // (4 * width), num_rows // (2 * (_WARM_UP + _TIMED)))


def _distinct(num_rows: int, count: int) -> Tensor:
    """Ids at random, with a generator of their own: a user's seed stays what it was."""
    generator = torch.Generator().manual_seed(0)
    if num_rows < 8 * count:
        return torch.randperm(num_rows, generator=generator)[:count]
    drawn: Tensor = torch.randint(num_rows, (2 * count,), generator=generator).unique()
    return drawn[torch.randperm(drawn.numel(), generator=generator)][:count]
