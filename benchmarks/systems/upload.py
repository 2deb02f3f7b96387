"""Batches on their way to the GPU, two ahead of training, for systems that have no loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.data import ClickBatch

AHEAD = 2


@dataclass(frozen=True)
class Uploaded:
    """A batch on the GPU; `wait()` on every stream that reads it."""

    indices: Tensor  # [features * batch * hotness], feature by feature
    dense: Tensor
    label: Tensor
    ready: torch.cuda.Event

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.ready)
        for tensor in (self.indices, self.dense, self.label):
            tensor.record_stream(stream)


def uploaded(batches: Iterable[ClickBatch]) -> Iterator[Uploaded]:
    """Copies run on a stream of their own."""
    stream, known = torch.cuda.Stream(), deque[Uploaded]()
    for batch in batches:
        known.append(_start(batch, stream))
        if len(known) > AHEAD:
            yield known.popleft()
    yield from known


def _start(batch: ClickBatch, stream: torch.cuda.Stream) -> Uploaded:
    with torch.cuda.stream(stream):
        moved = batch.to("cuda", non_blocking=True)
        ids = moved.sparse
        indices = ids.t().reshape(-1) if isinstance(ids, Tensor) else ids.values()
        ready = torch.cuda.Event()
        ready.record(stream)
    return Uploaded(indices, moved.dense, moved.label, ready)
