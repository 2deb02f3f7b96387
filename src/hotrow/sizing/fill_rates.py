"""How fast rows move between the store and the slots in each way. Knows no batches of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import WriteBack
from hotrow.engine.gpu.mover_choice import LEVELS
from hotrow.engine.gpu.scratchpad import id_type_of
from hotrow.engine.gpu.staged import Staged
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill
from hotrow.store.ram import Store
from hotrow.support.streams import Lanes, synchronize

_LEAST_CORES = {"bulk": 4, "staged": 8}
_MOVES, _LEAST_MOVES = 8192, 512  # of a batch, each way; with fewer, the times say little
_MOST_BYTES = 1 << 23  # of them
# Batches; the last ones' rows are written by the CPU when all others have moved, so there are some.
_WARM_UP, _TIMED = 2, 12


def fill_rates(store: Store, device: torch.device, lanes: Lanes) -> dict[str, float]:
    """Measure moves per second of each form, with a store that is all zero, and stays so."""
    cores = torch.get_num_threads()
    forms = ["zero-copy", *(form for form, least in _LEAST_CORES.items() if cores >= least)]
    moves = _moves_for(store, len(forms))
    return measure(store, device, lanes, moves, forms) if moves >= _LEAST_MOVES else {}


class _Batch(NamedTuple):
    moves: Moves
    entering: Tensor  # on the host, as a plan tells it


_Run = Callable[[list[_Batch]], None]


def measure(
    store: Store, device: torch.device, lanes: Lanes, moves: int, forms: Sequence[str]
) -> dict[str, float]:
    """Moves per second of each form, batch behind batch as in training.

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
        for place, form in enumerate(forms):
            run = _RUNS[form](store, slots, ids.dtype, lanes)
            found[form] = _rate(run, batches[place * count : (place + 1) * count], device)
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
