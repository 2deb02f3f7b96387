"""The end of every serve.py: loads tables and a model from files. Needs torch and numpy alone.

hotrow.run.serving copies it; above it in the copy is the source of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Batch(NamedTuple):
    """The input of a model. `sparse`: ids [batch, features], or (values, offsets) by feature and
    sample; `lengths`: the lengths of histories, if the model reads any."""

    dense: Tensor
    sparse: Any
    lengths: Tensor | None = None


class Table(NamedTuple):
    name: str
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str
    padding_idx: int | None
    weight: Tensor  # mapped from its file: lookups read rows


class Vectors:
    """The vectors of a batch, by feature."""

    def __init__(self, vectors: dict[str, Tensor]) -> None:
        self._vectors = vectors

    def __getitem__(self, feature: str) -> Tensor:
        return self._vectors[feature]

    def values(self) -> Tensor:
        return torch.cat(list(self._vectors.values()), dim=1)


class Tables(nn.Module):
    """Looks up rows in mapped files."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.tables = list(tables)
        self.features = [name for table in tables for name in table.feature_names]

    def forward(self, sparse: Any) -> Vectors:
        ids = self._ids(sparse)
        return Vectors(
            {
                name: _look_up(table, *ids[name])
                for table in self.tables
                for name in table.feature_names
            }
        )

    def _ids(self, sparse: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
        if isinstance(sparse, Tensor):
            columns = sparse.cpu().long().unbind(1)
            return {name: (ids, None) for name, ids in zip(self.features, columns, strict=True)}
        values, offsets = (
            sparse if isinstance(sparse, tuple) else (sparse.values(), sparse.offsets())
        )
        values, offsets = values.cpu().long(), offsets.cpu().long()
        size = (len(offsets) - 1) // len(self.features)
        ids = {}
        for place, name in enumerate(self.features):
            ends = offsets[place * size : (place + 1) * size + 1]
            ids[name] = values[ends[0] : ends[-1]], ends - ends[0]
        return ids


def _look_up(table: Table, ids: Tensor, offsets: Tensor | None) -> Tensor:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table.weight):
        raise ValueError(f"table {table.name!r} has rows 0 to {len(table.weight) - 1:,}")
    vectors = table.weight[ids]
    if table.pooling == "none":
        return vectors  # padding reads its stored row, as in nn.Embedding
    is_padding = torch.zeros(len(ids), dtype=torch.bool)
    if table.padding_idx is not None:
        is_padding = ids == table.padding_idx
        vectors[is_padding] = 0
    if offsets is None and table.pooling == "sum":
        return vectors
    if offsets is None:
        offsets = torch.arange(len(ids) + 1)
    bag = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    pooled = torch.zeros(len(offsets) - 1, table.embedding_dim).index_add_(0, bag, vectors)
    if table.pooling == "mean":
        counts = torch.zeros(len(pooled)).index_add_(0, bag, (~is_padding).float())
        pooled /= counts.clamp(min=1)[:, None]
    return pooled


def _tensors(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    memory = (
        np.memmap(path, np.uint8, "c", 8 + length) if path.stat().st_size > 8 + length else None
    )
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, (first, last) = _TYPES[about["dtype"]], about["data_offsets"]
        if last - first != math.prod(about["shape"]) * dtype.itemsize:
            raise ValueError(f"{path} is damaged")
        if last == first or memory is None:
            tensors[name] = torch.zeros(about["shape"], dtype=dtype)
        else:
            part = torch.from_numpy(memory[first:last])
            part = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
            tensors[name] = part.view(dtype).view(about["shape"])
    return tensors


def load(folder: str | Path = Path(__file__).parent) -> nn.Module:
    """Return the model, ready to score: `torch.sigmoid(load()(Batch(dense, ids)))`."""
    folder = Path(folder)
    about = json.loads((folder / "model.json").read_text())
    tables = [
        Table(weight=_tensors(folder / table.pop("file"))["weight"], **table)
        for table in about["tables"]
    ]
    model: nn.Module = globals()[about["model"]](
        Tables(tables), about["num_dense"], **about["arguments"]
    )
    model.load_state_dict({k: v.clone() for k, v in _tensors(folder / "dense.safetensors").items()})
    return model.eval()
