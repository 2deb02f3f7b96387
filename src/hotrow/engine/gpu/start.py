"""How rows begin, on a GPU: in the store, or in their slots. Its kernels know no tables."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.inputs.tables import Constant, EmbeddingBagConfig, Normal, Uniform, WidthGroup
from hotrow.kernels.triton import start
from hotrow.store.ram import initialise, seed_words
from hotrow.support.streams import synchronize


def initialise_on_gpu(
    store: Tensor, layout: WidthGroup, state: list[float], seed: int, device: torch.device
) -> None:
    """Start every row of page-locked host memory; a GPU fills it as fast as the link goes."""
    columns = torch.tensor(state, device=device)
    for table, base in zip(layout.tables, layout.bases, strict=True):
        beginning = _beginning(table, on_gpu=True)
        if beginning.kind == "other":
            synchronize(device)
            initialise(store, layout, state, seed, tables=[table])
        else:
            rows = store[base : base + table.num_embeddings]
            start.start_rows(rows, columns, beginning, seed_words(seed, table.name, layout.dim))
    synchronize(device)


def unwritten_rows(
    layout: WidthGroup, state: list[float], seed: int, device: torch.device, *, on_gpu: bool
) -> start.Unwritten:
    """A bit for each row, and what it takes to start one; `on_gpu`: as the store was started."""
    return start.Unwritten(
        [*layout.bases, layout.num_rows],
        [_beginning(table, on_gpu=on_gpu) for table in layout.tables],
        [seed_words(seed, table.name, layout.dim) for table in layout.tables],
        state,
        device,
    )


def _beginning(table: EmbeddingBagConfig, *, on_gpu: bool) -> start.Beginning:
    """How a table's rows start, where a GPU makes the same bits."""
    padding = -1 if table.padding_idx is None else table.padding_idx
    begin = table.start
    if isinstance(begin, Constant):
        return start.Beginning("constant", (begin.value, 0.0), padding)
    if isinstance(begin, Uniform):
        return start.Beginning("uniform", (begin.low, begin.high - begin.low), padding)
    if isinstance(begin, Normal) and on_gpu:
        return start.Beginning("normal", (begin.mean, begin.std), padding)
    return start.Beginning("other")
