"""Which way rows move between the store and the slots: asked for, or measured and chosen.

Knows the forms and the machine; nothing about batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import WriteBack
from hotrow.engine.gpu.fill_forms import FillChoice, by_rates
from hotrow.engine.gpu.planner import id_type_of
from hotrow.engine.gpu.staged import Staged
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill
from hotrow.store.ram import Store
from hotrow.support.streams import Lanes, synchronize


class Level(NamedTuple):
    """What a fill may take of the device."""

    fill_blocks: int  # where rows are read and written, each takes a multiprocessor away
    read_blocks: int  # where they are only read
    in_bulk: bool  # whether leaving rows may go back in bulk, at the speed of the CPU


# More blocks slow down matrix products, which want all multiprocessors; the last saturate the link.
LEVELS = (Level(2, 1, True), Level(4, 4, True), Level(16, 16, False))
FULL = len(LEVELS) - 1
_LOOKS = 4  # the mean of so many decides
_WAITS = 0.25  # of a step: rows come too late
_WAITS_NOT = 0.02
_PATIENCE = 64  # looks before less is tried again

_LEAST_CORES = {"bulk": 4, "staged": 8}  # bulk's threads have little to do
_MOVES, _LEAST_MOVES = 8192, 512  # of a batch, each way; with fewer, the times say little
_MOST_BYTES = 1 << 23  # of them
# Batches; the last ones' rows are written by the CPU when all others have moved, so there are some.
_WARM_UP, _TIMED = 2, 12


class Effort:
    """How much of the device fills get: little beside training, more while that waits for them.

    Where training has little to do, the link is what limits it, and then nothing is disturbed.
    """

    def __init__(self, number: int = 0, *, is_fixed: bool = False) -> None:
        self.number, self._is_fixed = number, is_fixed
        self._looks: list[float] = []
        self._calm = 0  # looks since training last waited
        self._patience = _PATIENCE
        self._was_lowered = False

    @property
    def level(self) -> Level:
        return LEVELS[self.number]

    def note(self, waited: float) -> None:
        """Training has waited for rows, for a part of a step."""
        if self._is_fixed:
            return
        self._looks.append(waited)
        if len(self._looks) < _LOOKS:
            return
        mean = sum(self._looks) / len(self._looks)
        self._looks.clear()
        self._calm = 0 if mean > _WAITS_NOT else self._calm + _LOOKS
        if mean > _WAITS and self.number < FULL:
            self.number += 1
            if self._was_lowered:  # and should not have been
                self._patience *= 2
            self._was_lowered = False
        elif self._calm >= self._patience and self.number > 0:
            self.number -= 1
            self._calm, self._was_lowered = 0, True


def choose(
    store: Store,
    device: torch.device,
    lanes: Lanes,
    *,
    bulk: bool,
    cores: int | None = None,
    rates: Callable[..., dict[str, float]] | None = None,
) -> FillChoice:
    """Measure with a store, which stays as it is; `bulk`: whether that may be.

    Tests give the number of `cores`, and other `rates` than those of `measure`.
    """
    cores = torch.get_num_threads() if cores is None else cores
    others = [form for form, least in _LEAST_CORES.items() if cores >= least]
    if not bulk and "bulk" in others:
        others.remove("bulk")
    if not others:
        return FillChoice("zero-copy", f"{cores} cores have enough to do")
    forms = ("zero-copy", *others)
    moves = _moves_for(store, len(forms))
    if moves < _LEAST_MOVES:
        return FillChoice("zero-copy", f"{len(store.rows):,} rows are too few to measure")
    return by_rates((rates or measure)(store, device, lanes, moves, forms))


class _Batch(NamedTuple):
    moves: Moves
    entering: Tensor  # on the host, as a plan tells it


_Run = Callable[[list[_Batch]], None]


def measure(
    store: Store,
    device: torch.device,
    lanes: Lanes,
    moves: int,
    forms: Sequence[str],
    *,
    is_zero: bool = True,
) -> dict[str, float]:
    """Moves per second of each form, batch behind batch as in training; `is_zero`: all rows are.

    No batch moves a row that another has moved: what lies in the CPU's caches would cost nothing.
    """
    count, found = _WARM_UP + _TIMED, {}
    with lanes.on("rows"):
        ids = _distinct(len(store.rows), 2 * moves * count * len(forms), device)
        ids = ids.to(id_type_of(len(store.rows)))
        slots = torch.zeros(moves, store.rows.shape[1], device=device)
        places = torch.arange(moves, dtype=torch.int32, device=device)
        pairs = [pair.split(moves) for pair in ids.split(2 * moves)]
        batches = [_Batch(Moves(places, *pair), pair[1].cpu()) for pair in pairs]
        # Zeros move, and what was read then is written over other rows.
        leaving = torch.cat([pair[0] for pair in pairs]).long().cpu()
        kept = None if is_zero else store.rows[leaving]
        for place, form in enumerate(forms):
            run = _RUNS[form](store, slots, ids.dtype, lanes)
            found[form] = _rate(run, batches[place * count : (place + 1) * count], device)
    if kept is not None:
        store.rows[leaving] = kept
    return found


def _zero_copy(store: Store, slots: Tensor, id_type: torch.dtype, lanes: Lanes) -> _Run:
    counted = _counted(slots)

    def run(batches: list[_Batch]) -> None:
        for moves, _ in batches:
            fill.fill(
                slots, store.rows, moves.slots, moves.leaving, moves.entering, counted,
                LEVELS[0].fill_blocks,
            )  # fmt: skip

    return run


def _in_bulk(store: Store, slots: Tensor, id_type: torch.dtype, lanes: Lanes) -> _Run:
    counted = _counted(slots)
    back = WriteBack(store, slots, most=len(slots), lanes=lanes)

    def run(batches: list[_Batch]) -> None:
        for moves, _ in batches:
            packet = back.take(len(slots), certain=len(batches))
            back.pack(packet, moves.slots, moves.leaving, counted, None)
            fill.fill(
                slots, store.rows, moves.slots, None, moves.entering, counted,
                LEVELS[0].read_blocks,
            )  # fmt: skip
        back.wait()

    return run


def _staged(store: Store, slots: Tensor, id_type: torch.dtype, lanes: Lanes) -> _Run:
    counted = _counted(slots)
    staged = Staged(store, slots, most=len(slots), packets=3, id_type=id_type, lanes=lanes)

    def run(batches: list[_Batch]) -> None:
        sent = None
        for moves, entering in batches:
            packet = staged.collect(moves, counted, entering, evicts=True)
            staged.write(packet)
            if sent is not None:
                staged.insert(sent)
            sent = packet
        if sent is not None:
            staged.insert(sent)
        staged.wait()

    return run


_RUNS = {"zero-copy": _zero_copy, "bulk": _in_bulk, "staged": _staged}


def _counted(slots: Tensor) -> Tensor:
    return torch.tensor([len(slots)], dtype=torch.int32, device=slots.device)


def _rate(run: _Run, batches: list[_Batch], device: torch.device) -> float:
    run(batches[:_WARM_UP])  # compiles kernels, too
    _wait(device)
    started = perf_counter()
    run(batches[_WARM_UP:])
    _wait(device)
    moves = sum(each.entering.numel() for each in batches[_WARM_UP:])
    return moves / (perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)


def _moves_for(store: Store, forms: int) -> int:
    num_rows, width = store.rows.shape
    return min(_MOVES, _MOST_BYTES // (4 * width), num_rows // (2 * (_WARM_UP + _TIMED) * forms))


def _distinct(num_rows: int, count: int, device: torch.device) -> Tensor:
    """Ids at random, with a generator of their own: a user's seed stays what it was."""
    generator = torch.Generator(device).manual_seed(0)

    def shuffled(size: int) -> Tensor:
        return torch.randperm(size, generator=generator, device=device)[:count]

    if num_rows < 8 * count:
        return shuffled(num_rows)
    drawn: Tensor = torch.randint(num_rows, (2 * count,), generator=generator, device=device)
    drawn = drawn.unique()
    return drawn[shuffled(drawn.numel())]
