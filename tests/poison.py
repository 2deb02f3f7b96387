"""New memory that is poisoned: it is often zero by luck, which hides reads before writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.empty`, or a function like it, so that its tensors hold NaN or the smallest
    integer."""

    def poisoned(*args: Any, **options: Any) -> Tensor:
        tensor = make(*args, **options)
        with torch.no_grad():
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            if tensor.dtype in (torch.int32, torch.int64):
                return tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    return poisoned
