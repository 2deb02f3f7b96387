"""Whether ids that are looked up are those that were planned, found out by a device without a wait.

Writes by `.data` or by numpy leave a tensor's version as it is, so the host cannot see them. A
kernel compares, in training's lane, and puts a key into page-locked memory where ids differ. The
host looks there later. Knows no plans and no batches but by key and number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.inputs.tables import WidthGroup


def feature_facts(layout: WidthGroup) -> Tensor:
    """Return base, limit, padding index or -1, and column of each feature, [F, 4] int64."""
    x = layout.feature_numbers(torch.device("cpu"))
    padding = torch.full_like(x.base, -1) if x.skipped is None else x.skipped
    return torch.stack([x.base, x.last + 1, padding, x.column], 1)


class IdCheck:
    """The comparisons of one width group."""

    def __init__(self, features: Tensor, num_rows: int) -> None:
        """`features`: as `feature_facts` gives them, on the device that compares."""
        self._features, self._num_rows = features, num_rows
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=features.is_cuda)
        self._seen = self._flag.numpy()
        self._numbers: dict[int, int] = {}

    def note(self, key: int, number: int) -> None:
        """A batch with this number is compared under a key, until the next one is. A key that was
        not noted is the number itself."""
        self._numbers[key] = number

    def launch(
        self,
        given: tuple[Tensor, ...],
        places: Tensor | None,
        num_samples: int,
        planned: Tensor,
        sorted_by: tuple[Tensor, Tensor] | None,
        key: int,
    ) -> None:
        """Compare the user's tensors with the ids that were planned, see `compare_ids`."""
        from hotrow.kernels.triton.window import compare_ids  # brings Triton along

        compare_ids(
            given, places, num_samples, self._features, planned, sorted_by, self._num_rows,
            self._flag, key + 1,
        )  # fmt: skip

    def take(self) -> int | None:
        """The number of a batch whose ids were found changed, once; None: of none so far."""
        key = int(self._seen[0]) - 1
        if key < 0:
            return None
        self._seen[0] = 0
        return self._numbers.get(key, key)
