"""The state of rows in the state dicts of torch's optimizers, where the table's own would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotrow.embedding.arguments import refuse_state_dict
from hotrow.embedding.stand_ins import stand_in_of
from hotrow.support.host_memory import available_bytes
from hotrow.support.units import show_bytes


def include_rows(optimizer: Optimizer) -> None:
    """Let `state_dict()` and `load_state_dict()` of an optimizer hold the state of rows."""
    optimizer.register_state_dict_post_hook(_with_rows)
    optimizer.register_load_state_dict_pre_hook(_load_rows)


def _stand_ins(optimizer: Optimizer) -> Iterator[tuple[int, Tensor, str, Any]]:
    """Yield the number that torch gives each stand-in, the stand-in, its table and what owns it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        stands_for = stand_in_of(param)
        if stands_for is not None:
            if stands_for.owner() is None:
                stands_for.build()
            owner = stands_for.owner()
            if owner is not None:
                yield number, param, stands_for.table, owner


def _with_rows(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    # A checkpoint that saves rows on their own has their state there.
    held = [x for x in _stand_ins(optimizer) if not x[3].rows.is_apart]
    if any(owner.rows.is_shared for *_, owner in held):
        refuse_state_dict("rows(table)")
    _check_room(sum(owner.state_bytes(table) for _, _, table, owner in held))
    state = dict(saved["state"])
    for number, param, table, owner in held:
        state[number] = state_of(optimizer, param, table, owner)
        if not state[number]:
            del state[number]
    return {**saved, "state": state}


def state_of(optimizer: Optimizer, param: Tensor, table: str, owner: Any) -> dict[str, Any]:
    """Return the state that an optimizer has of a table's rows, as torch keeps it, on the CPU."""
    has_stepped, own = owner.has_stepped(optimizer, table), optimizer.state.get(param, {})
    steps = owner.steps(table) if has_stepped else 0
    if has_stepped:
        rows = owner.rows.copy_state(table)
    elif has_stepped is None:  # lost, as its next step says
        rows = {}
    else:  # what it has from its construction on; another one's state stays until it steps
        shapes = owner.rows.state_shapes(table)
        rows = {x: torch.full(shapes[x], float(own[x].flatten()[0])) for x in shapes if x in own}
    starts_with_gradient = isinstance(optimizer, torch.optim.SGD)  # torch's buffer is not zeros
    if not rows or (starts_with_gradient and not steps):
        return {}
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return {"step": steps if is_sparse else torch.tensor(float(steps)), **rows}


def _check_room(needed: int) -> None:
    free = available_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"the optimizer's state of all rows has {show_bytes(needed)}, and {show_bytes(free)} "
            "of RAM are free; hotrow.save_checkpoint() streams it to disk"
        )


def _load_rows(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Load the state of rows, and leave to torch what is a stand-in's own."""
    state, found = dict(saved["state"]), []
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for place, param, table, owner in _stand_ins(optimizer):
        given = state.get(numbers[place]) if place < len(numbers) else None
        if given is None:
            is_own = owner.has_stepped(optimizer, table) and not owner.rows.is_apart
            if is_own and owner.steps(table) and owner.rows.state_widths(table):
                owner.start_anew(table)  # as torch does with a param that has no state
            continue
        if owner.rows.is_apart:
            owner.has_state_of(optimizer, table)
            continue
        names = owner.rows.state_widths(table)
        rows = {name: given[name] for name in names if name in given}
        owner.rows.check_state(table, rows)
        found.append((owner, table, rows, given.get("step")))
        own = {name: torch.zeros_like(param.data) for name in rows}
        state[numbers[place]] = {**given, **own}
    for owner, table, rows, step in found:
        if step is None:  # torch's SGD counts none
            step = 1 if rows else 0
        owner.load_state(optimizer, table, rows, int(step))
    return {**saved, "state": state}
