"""What a device knows and the host reads without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.support.streams import capturing

_TURNS = 8  # between two looks at a flag of a GPU


class LateFlag:
    """A flag of a device. On a GPU the host reads it some steps late."""

    def __init__(self, device: torch.device) -> None:
        self.there = torch.zeros(1, dtype=torch.int32, device=device)
        self._is_late, self._asked = device.type == "cuda", 0
        self._copied: Any = None
        self._here = torch.zeros(1, dtype=torch.int32, pin_memory=self._is_late)

    def add(self, is_set: Tensor) -> None:
        """Set the flag if a bool on the device is true."""
        self.there |= is_set

    def is_set(self, *, waits: bool = False) -> bool:
        """Return whether the flag is set, and reset it."""
        if not self._is_late or waits:
            is_set = bool(self.there)
            self.there.zero_()
            return is_set
        self._asked += 1
        if self._asked % _TURNS or capturing():
            return False
        if self._copied is not None and not self._copied.query():
            return False
        is_set = self._copied is not None and bool(self._here)
        if is_set:
            self.there.zero_()
        self._here.copy_(self.there, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return is_set


class LateCount:
    """A number on a device that the host knows some time after it was computed."""

    def __init__(self, there: Tensor, before: LateCount | None = None, more: int = 0) -> None:
        """The number is at most `more` larger than the one `before`."""
        self._here: Tensor | None = there
        self._copied: Any = None
        self._before, self._more = before, more
        if there.is_cuda:
            self._here = None
            if not capturing():
                self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
                self._here.copy_(there, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()

    def now(self) -> int | None:
        """Return the number; None: it is not known yet, or must not be asked for in a capture."""
        if self._here is None:
            return None
        if self._copied is not None and (capturing() or not self._copied.query()):
            return None
        return int(self._here)

    def at_most(self) -> int | None:
        """Return the number, or a limit of it that follows from those before; None: not known."""
        late: LateCount | None = self
        more = 0
        while late is not None:
            known = late.now()
            if known is not None:
                late._before = None
                return known + more
            more += late._more
            late = late._before
        return None
