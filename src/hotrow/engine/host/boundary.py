"""Where a captured step is cut: the host looks rows up before the graph, and updates them after."""

from __future__ import annotations

from torch import Tensor


class GraphBoundary:
    """Where a captured step is cut: vectors come from the host's rows, gradients go there."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors  # [bags, dim], read by the graph
        self.grads: Tensor | None = None  # likewise, written by it; None: it has no update
        self.used: tuple[bool, ...] | None = None  # the features that have gradients; None: all

    @property
    def num_bytes(self) -> int:
        return self.vectors.nbytes + (0 if self.grads is None else self.grads.nbytes)
