"""What a forked child must not free.

A store's memory is no child's, and whatever the child has mapped there since would go with it. Nor
has it the threads that read ahead: to finish what they were at would write to that memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

_bound: WeakSet[Any] = WeakSet()


def bind_to_this_process(each: Any) -> None:
    """Children that are forked from now on keep it until their end, and so all that it holds."""
    _bound.add(each)


def _keep() -> None:
    # Not by a list, which goes at the end of the interpreter.
    for each in list(_bound):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_keep)
