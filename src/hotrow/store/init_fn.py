"""Tables that a function fills in place, as TorchRec's `init_fn` does, chunk by chunk."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.inputs.tables import EmbeddingBagConfig

_CHUNK_FLOATS = 1 << 20
_LOCK = threading.Lock()  # functions draw from torch's default generator
# Their numbers depend on how many rows the tensor has, and a chunk has fewer than its table.
_BY_ROWS = (
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
)
_BY_MODE = (nn.init.kaiming_uniform_, nn.init.kaiming_normal_)


def rows_of_chunk(dim: int) -> int:
    """Return the rows of a chunk, which depend on nothing else: rows start alike everywhere."""
    return max(1, _CHUNK_FLOATS // dim)


def check_init_fn(table: EmbeddingBagConfig) -> None:
    """Refuse torch's functions that need the whole table, if a chunk does not hold it."""
    settings: dict[str, Any] = {}
    inner, step = table.init_fn, rows_of_chunk(table.embedding_dim)
    while isinstance(inner, partial):
        settings, inner = {**inner.keywords, **settings}, inner.func
    needs_all = inner in _BY_ROWS or (inner in _BY_MODE and settings.get("mode") == "fan_out")
    if needs_all and table.num_embeddings > step:
        raise ValueError(
            f"table {table.name!r}: {getattr(inner, '__name__', inner)} depends on the number of "
            f"rows, and init_fn gets chunks of {step:,} of its {table.num_embeddings:,} rows; give "
            "init=hotrow.Uniform or hotrow.Normal with the numbers for the whole table"
        )


def filled(
    function: Any, dim: int, first: int, last: int, num_rows: int, *, word: int, table: str
) -> Tensor:
    """Return the rows first..last-1 as the function fills the chunks that they lie in."""
    step = rows_of_chunk(dim)
    parts = []
    for begin in range(first - first % step, last, step):
        chunk = _fill(function, min(step, num_rows - begin), dim, begin, word, table)
        parts.append(chunk[max(0, first - begin) : last - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fill(function: Any, count: int, dim: int, begin: int, word: int, table: str) -> Tensor:
    chunk = torch.full((count, dim), float("nan"), device="cpu")
    with _LOCK, torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((word + begin) % 2**63)
        function(chunk)
    if bool(chunk.isnan().any()):
        raise ValueError(
            f"table {table!r}: init_fn left numbers of its chunk unset, or NaN; it must fill the "
            "tensor that it gets in place, as torch.nn.init.normal_ does"
        )
    return chunk
