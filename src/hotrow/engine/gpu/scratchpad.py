"""Slots in a GPU's memory, and the map from rows to slots. Knows numbers of rows, not batches."""

from __future__ import annotations

import torch

from hotrow.engine.scratchpad import Scratchpad
from hotrow.kernels.triton.maps import FREE, DeviceMap, places_for

_MOST_SLOTS = 2**31 - 2


def id_type_of(num_rows: int) -> torch.dtype:
    # Padding is the id `num_rows`, so that must fit, too.
    return torch.int32 if num_rows < 2**31 - 1 else torch.int64


def refuse_too_many(slots: int) -> None:
    """Slots are numbered by 32 bits, of which the kernels need a number more."""
    if slots > _MOST_SLOTS:
        raise ValueError(
            f"{slots:,} rows of one width are to be in fast memory at once, and there can be "
            f"{_MOST_SLOTS:,}; give a smaller budget, another strategy than all-fast, or split the "
            "tables over two collections"
        )


class DeviceScratchpad(Scratchpad):
    """Slots on the device, and one more that always reads zero."""

    def __init__(
        self, num_slots: int, width: int, num_rows: int, device: torch.device, *, dense_map: bool
    ) -> None:
        refuse_too_many(num_slots)
        self.num_slots, self.num_rows = num_slots, num_rows
        self.slots = torch.zeros(num_slots + 1, width, device=device)
        self.id_type = id_type_of(num_rows)
        self.row_of_slot = torch.full((num_slots,), FREE, dtype=self.id_type, device=device)
        self.map = DeviceMap(self.row_of_slot, num_rows, dense=dense_map)

    @property
    def num_bytes(self) -> dict[str, int]:
        return {"slots": self.slots.nbytes, "row-to-slot map": self.map.num_bytes}

    def clear(self) -> None:
        """Every slot is free again."""
        self.row_of_slot.fill_(FREE)
        self.map.table.fill_(FREE)


class FutureScratchpad(DeviceScratchpad):
    """Stands for slots that are not allocated yet: it knows how many there will be.

    No row has a slot, so every row is found in the store.
    """

    def __init__(self, width: int, num_rows: int, device: torch.device) -> None:
        super().__init__(1, width, num_rows, device, dense_map=False)

    def resize(self, num_slots: int, *, dense_map: bool) -> None:
        refuse_too_many(num_slots)
        self.num_slots, self._dense_map = num_slots, dense_map

    @property
    def num_bytes(self) -> dict[str, int]:
        slots = 4 * (self.num_slots + 1) * self.slots.shape[1]
        places = self.num_rows if self._dense_map else places_for(self.num_slots)
        return {"slots": slots, "row-to-slot map": 4 * places}

    def check(self) -> None:
        assert bool((self.row_of_slot == FREE).all()), "a row has a slot before there are any"
