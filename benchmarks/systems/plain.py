"""Plain PyTorch: nn.EmbeddingBag with sparse gradients on the CPU, the dense part on the GPU; and
the dense part alone."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotrow.data import ClickBatch
from systems import Unavailable

if TYPE_CHECKING:
    from suite import Bench

LR = 0.01
RULES = {
    "sgd": torch.optim.SGD,
    "rowwise-adagrad": torch.optim.Adagrad,  # torch has no row-wise one
    "adam": torch.optim.SparseAdam,
}
BLOCK_ROWS = 4096


class PlainHybrid:
    def __init__(self, bench: Bench) -> None:
        setting = bench.setting
        if setting.hotness != 1:
            raise Unavailable("this comparison is for one id per feature")
        self.bench = bench
        weights = bench.host_memory.tensor((sum(setting.rows), setting.dim), torch.float32)
        _fill(weights)
        self.bags = [
            nn.EmbeddingBag(num_rows, setting.dim, mode="sum", sparse=True, _weight=part)
            for num_rows, part in zip(setting.rows, weights.split(setting.rows), strict=True)
        ]
        parameters = [bag.weight for bag in self.bags]
        self.optimizer = RULES[setting.optimizer](parameters, lr=LR)

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        device, dtype = self.bench.device, self.bench.setting.output_dtype
        for batch in batches:
            assert isinstance(batch.sparse, Tensor)
            columns = batch.sparse.split(1, dim=1)
            pooled = torch.cat(
                [bag(ids) for bag, ids in zip(self.bags, columns, strict=True)], dim=1
            )
            vectors = pooled.detach().to(device).to(dtype)
            grad = self.bench.gradient(vectors, batch.dense.to(device), batch.label.to(device))
            pooled.backward(grad.float().cpu())
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def table_bytes(self) -> int:
        return 0

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}


class DenseAlone:
    """The dense part with vectors that never change: what a step takes without an embedding."""

    def __init__(self, bench: Bench) -> None:
        setting = bench.setting
        if not setting.has_dense:
            raise Unavailable("this setting has no dense part")
        self.bench = bench
        shape = (setting.batch, len(setting.rows) * setting.dim)
        self.vectors = torch.zeros(shape, dtype=setting.output_dtype, device=bench.device)

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        for batch in batches:
            moved = [
                each.to(self.bench.device, non_blocking=True) for each in (batch.dense, batch.label)
            ]
            self.bench.gradient(self.vectors, *moved)
            yield

    def table_bytes(self) -> int:
        return 0

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        return {}


def _fill(weights: Tensor) -> None:
    """Some small numbers in every row; torch draws on one core, which would take minutes."""
    block = 1e-3 * torch.randn(BLOCK_ROWS, weights.shape[1])
    for part in weights.split(BLOCK_ROWS):
        part.copy_(block[: len(part)])
