"""Hot rows on the device, beside rows that stay on the host: a small table of their own.

Slots are in the order of ids, so that a row's slot is found by binary search and no map is needed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.host.link import in_any_order
from hotrow.engine.host.plan import HostPlan, HotLookups
from hotrow.engine.idle import idle_rows
from hotrow.engine.profile import hottest, small_tables
from hotrow.engine.settings import Settings
from hotrow.engine.uploads import TableScalars
from hotrow.inputs.batch import PADDING, Lookups
from hotrow.kernels import reference
from hotrow.kernels.reference import bits_of, in_bits, sort_ids
from hotrow.kernels.rules import per_row
from hotrow.kernels.triton.segments import segments_of
from hotrow.store.ram import Store
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import capturing

_NONE = torch.zeros(1, dtype=torch.int64)


class HotRows:
    """The hottest rows, with their state, on the device. Without slots there are none."""

    def __init__(self, settings: Settings, store: Store, room: int) -> None:
        self._settings, self._store, self._layout = settings, store, settings.layout
        self._device, self._lanes, self._dim = settings.device, settings.lanes, settings.dim
        layout, profile, self._tuning = settings.layout, settings.profile, settings.tuning
        if profile is None or not room:
            hot = small_tables(layout, room // 2)
        else:
            hot = hottest(profile, layout, room)
            room = len(hot)  # rows never used need no slot
        self.exists = room > 0
        # The last slot stays zero: it is read for rows that are not hot.
        self._null = room
        self.slots = torch.zeros(room + 1, settings.width, device=self._device)
        self._key_type = torch.int32 if layout.num_rows < 2**31 - 1 else torch.int64
        self._bases = torch.tensor([*layout.bases, layout.num_rows])
        self._version = self._batches = self._times_learned = 0
        self._by_kernels = self._device.type == "cuda"
        self._idle = idle_rows(settings, store)
        self._table_scalars = TableScalars(settings)
        # The cold rows of each batch so far, on the host, while it is learned which are hot.
        self._seen: list[Tensor] | None = [] if profile is None and room else None
        self.ids = hot.sort()[0]  # of hot rows, on the host
        self._take(self.ids)

    @property
    def num_slots(self) -> int:
        return self._null

    # -- which rows are hot ------------------------------------------------------------

    def _take(self, ids: Tensor) -> None:
        """Let these rows be hot, given in order; the store has the newest bytes of all rows."""
        with uninterrupted():
            self._lanes.join()  # ids may be looked for just now
            self.ids = ids
            self._device_ids = ids.to(self._key_type).to(self._device)
            # Slots are in the order of ids, so that those of a table lie side by side.
            slot_bases = torch.searchsorted(ids, self._bases)
            self._slot_bases = slot_bases.to(self._device)
            self._slot_edges = slot_bases.int().to(self._device)
            for first in range(0, len(ids), self._tuning.chunk_rows):
                part = ids[first : first + self._tuning.chunk_rows]
                rows = self._store.rows.index_select(0, part)
                self.slots[first : first + len(part)].copy_(rows)
            self.freeze()
            self._version += 1
            self._lanes.join()

    def load(self) -> None:
        """Read hot rows again from the store."""
        self._take(self.ids)

    def choose(self, ids: Tensor) -> Tensor:
        """Take the rows that a caller names; learn no more. Returns the ids of all hot rows."""
        self._seen = None
        self._take(ids[: self.num_slots].cpu().sort()[0])
        return self.ids

    @property
    def is_learning_due(self) -> bool:
        return (
            self._seen is not None
            and self._batches >= self._tuning.learn_after[self._times_learned]
        )

    def learn(self) -> Tensor:
        """Let rows that at least two batches have used be hot as well, the most used first.

        The store is up to date. Returns the ids of rows that were loaded.
        """
        assert self._seen is not None
        ids, uses = torch.cat(self._seen).unique(return_counts=True)
        is_hot, _ = self._slots_among(ids)  # since the last time
        ids, uses = ids[~is_hot], uses[~is_hot]
        room = self.num_slots - len(self.ids)
        order = torch.sort(uses, descending=True, stable=True)[1][:room]
        more = ids[order][uses[order] > 1]
        if len(more):
            self._take(torch.cat([self.ids, more]).sort()[0])
        self._times_learned += 1
        if self._times_learned == len(self._tuning.learn_after) or len(more) == room:
            self._seen = None
        return self.ids if len(more) else self.ids[:0]

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each lookup, and the keys of those that have none; the others' are
        padding."""
        ids, null = self._device_ids, self._null
        if not len(ids):
            return torch.full_like(keys, null, dtype=torch.int32), keys
        place = torch.searchsorted(ids, keys).clamp_(max=len(ids) - 1)
        is_hot = ids.index_select(0, place) == keys
        cold = torch.where(is_hot, self._layout.num_rows, keys)
        return torch.where(is_hot, place, null).int(), cold

    def split(self, keys: Tensor) -> tuple[HotLookups | None, Tensor, list[Tensor]]:
        """Return the lookups of hot rows, the keys with these as padding, and facts to count."""
        if not self.exists:
            return None, keys, []
        version = self._version  # first: another thread may let other rows be hot meanwhile
        slots, cold = self._find(keys)
        hot = segments_of(slots)
        # Of each table, where its lookups begin among the sorted ones, and its different rows.
        edges = torch.searchsorted(hot.ids.index_select(0, hot.rank), self._slot_edges)
        rows = torch.cat([hot.rank, hot.count]).index_select(0, edges)
        return HotLookups(slots, hot, version), cold, [edges, rows]

    def is_current(self, plan: HostPlan) -> bool:
        """Whether the rows that are hot are those that were when a plan was made."""
        return plan.hot is None or plan.hot.version == self._version

    # -- lookup and update -------------------------------------------------------------

    def pool(self, plan: HostPlan, x: Lookups) -> Tensor | None:
        """Return one vector per bag from hot rows alone; None: there are none."""
        if not len(self.ids):
            return None
        dtype, slots = self._settings.output_dtype, _hot(plan).slots
        if self._by_kernels:
            vectors: Tensor = kernels()[0].pool(
                self.slots, slots, x.offsets, x.weights, x.divisor, self._dim, dtype
            )
            return vectors
        every = torch.arange(plan.num_lookups, device=self._device)
        vectors = self._vectors_of(slots)
        return reference.pool(vectors, every, x.offsets, x.weights, x.divisor).to(dtype)

    def _vectors_of(self, slots: Tensor) -> Tensor:
        """Return the vector of each lookup, of zeros for rows that are not hot."""
        if self._idle is None:
            return reference.take(self.slots, slots.long(), self._dim)
        different, place = slots.long().unique(return_inverse=True)
        is_hot = different != self._null
        vectors = torch.zeros(len(different), self._dim)
        different = different[is_hot]
        rows = self.slots.index_select(0, different)
        vectors[is_hot] = self._idle.now(rows, self.ids[different])
        return vectors[place]

    def weight_grads(
        self, plan: HostPlan, bag_of: Tensor | None, x: Lookups, grads: Tensor
    ) -> Tensor | None:
        """Return gradients of per-sample weights from hot rows alone; None: there are none."""
        if not self.exists:
            return None
        slots = _hot(plan).slots
        if self._by_kernels:
            weight_grads: Tensor = kernels()[0].weight_grads(
                self.slots, slots, bag_of, grads, self._dim
            )
            return weight_grads
        every = torch.arange(plan.num_lookups, device=self._device)
        vectors = self._vectors_of(slots)
        bags = replace(x, ids=plan.keys).bag_of()
        return reference.weight_grads(vectors, every, bags, grads.float())

    def update(self, plan: HostPlan, bag_of: Tensor | None, x: Lookups, grads: Tensor) -> None:
        """Update the hot rows of a batch."""
        if not len(self.ids):
            return
        hot, null = _hot(plan), self._null
        if self._by_kernels:
            scalars, bases = self._table_scalars.now(self._slot_bases[:-1])
            kernels()[1].update_slots(
                self.slots, hot.segments.ids, hot.segments, grads, bag_of, x.weights, x.divisor,
                self._settings.optimizer.rule, scalars, bases, null, self._dim, self._frozen_slots,
            )  # fmt: skip
            return
        slots = sort_ids(torch.where(hot.slots == null, PADDING, hot.slots).long(), null)
        grads = grads.float() if x.divisor is None else grads.float() / x.divisor
        bags = replace(x, ids=plan.keys).bag_of()
        self._step(slots.ids, reference.sum_by_row(grads, bags, x.weights, slots))

    def update_rows(self, ids: Tensor, grads: Tensor) -> Tensor | None:
        """Update the hot ones among some rows; return a mask of them, None if there are none."""
        if not self.exists:
            return None
        slots, _ = self._find(ids.to(self._key_type))
        is_hot = slots != self._null
        with torch.no_grad():
            self._step(slots[is_hot].long(), grads[is_hot])
        return is_hot

    def _step(self, slots: Tensor, grads: Tensor) -> None:
        """Make one optimizer step from gradients already summed; each slot is given once."""
        settings = self._settings
        if self._by_kernels:
            scalars, bases = self._table_scalars.now(self._slot_bases[:-1])
            kernels()[1].update_rows(
                self.slots, slots, slots, None, grads, settings.optimizer.rule, scalars, bases,
                self._dim, frozen=self._frozen_slots,
            )  # fmt: skip
            return
        if self._frozen_slots is not None:
            moves = ~in_bits(self._frozen_slots, slots)
            slots, grads = slots[moves], grads[moves]
        rows = self.slots.index_select(0, slots)
        if self._idle is not None:
            self._idle.catch_up(rows, self.ids[slots], steps_now=True)
        numbers = settings.optimizer.scalars(settings.table_names)
        alike = all(bool((values == values[0]).all()) for values in numbers.values())
        tables = None if alike else self._layout.table_of(self.ids[slots])
        state = [rows[:, place] for place in settings.state_columns.values()]
        settings.optimizer.rule.update(rows[:, : self._dim], grads, state, per_row(numbers, tables))
        self.slots.index_copy_(0, slots, rows)

    # -- rows --------------------------------------------------------------------------

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Copy hot rows to their places in `out`."""
        places, slots = self._slots_among(ids)
        out[places] = self.slots.index_select(0, slots).to(out.device)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace the hot ones among some rows."""
        places, slots = self._slots_among(ids)
        self.slots.index_copy_(0, slots, rows[places].to(self._device))

    def _slots_among(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some ids, on the host, are hot, and their slots on the device."""
        if not len(self.ids):
            return torch.zeros(len(ids), dtype=torch.bool), ids.new_empty(0).to(self._device)
        at = torch.searchsorted(self.ids, ids)
        is_hot = at < len(self.ids)
        is_hot &= self.ids.index_select(0, at.clamp(max=len(self.ids) - 1)) == ids
        return is_hot, at[is_hot].to(self._device)

    def flush(self) -> None:
        """Write hot rows to the store."""
        with uninterrupted(), in_any_order():
            for first in range(0, len(self.ids), self._tuning.chunk_rows):
                ids = self.ids[first : first + self._tuning.chunk_rows]
                self._store.write(ids, self.slots[first : first + len(ids)].cpu())

    def freeze(self) -> None:
        """Follow the frozen rows of the store."""
        self._frozen_slots: Tensor | None = None
        moves = self._store.frozen.moving(self.ids) if self.exists else None
        if moves is not None:
            slots = (~moves).nonzero().squeeze(1)
            self._frozen_slots = bits_of(slots.to(self._device), len(self.slots))

    # -- facts -------------------------------------------------------------------------

    def count(self, plan: HostPlan) -> tuple[Tensor, Tensor]:
        """Return lookups and different rows of hot rows, by table; learn from the others."""
        if not self.exists:
            return _NONE, _NONE
        size = len(self._bases)
        lookups, rows = plan.facts[-2 * size :].view(2, size).diff()
        self._batches += 1
        if self._seen is not None:
            self._seen.append(plan.ids.clone())
        return lookups, rows

    def num_bytes(self) -> dict[str, int]:
        frozen = (
            {} if self._frozen_slots is None else {"which slots are frozen": self._frozen_slots}
        )
        if not self.exists:
            return {}
        parts = {"slots": self.slots, "ids of slots": self._device_ids, **frozen}
        return {name: part.nbytes for name, part in parts.items()}

    def check(self) -> None:
        assert bool((self.ids.diff() > 0).all()), "ids of slots are not in order"
        assert torch.equal(self._device_ids.cpu().long(), self.ids), "the device has other ids"
        assert not self.slots[-1].any(), "the padding slot was written to"


@cache
def kernels() -> tuple[Any, Any]:
    """Return the device's kernels. Not at import: a CPU has no need of Triton."""
    from hotrow.kernels.triton import lookup, update

    return lookup, update


def _hot(plan: HostPlan) -> HotLookups:
    assert plan.hot is not None
    return plan.hot


def refuse_capture() -> None:
    if capturing():
        raise RuntimeError("rows are updated by the CPU, by the gradients of one lookup alone")
