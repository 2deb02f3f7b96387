"""hotrow in the benchmarks. The only file here that knows its trainer and collections."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from dense import dense_module, dense_optimizer
from torch import Tensor, nn
from traces import NUM_DENSE, feature_names, hottest_rows, share_of_lookups

import hotrow
from hotrow.data import ClickBatch
from systems import Unavailable

if TYPE_CHECKING:
    from suite import Bench

LR = 0.01
RULES = {
    "sgd": hotrow.SGD,
    "rowwise-adagrad": hotrow.RowWiseAdagrad,
    "adagrad": hotrow.Adagrad,
    "adam": hotrow.Adam,
}


def collection(
    rows: Iterable[int],
    dim: int,
    *,
    strategy: str,
    optimizer: str,
    budget_bytes: int,
    device: torch.device,
    output_dtype: torch.dtype = torch.float32,
    fill: str = "auto",
    features: list[list[str]] | None = None,
    is_pooled: bool = True,
    **options: Any,
) -> hotrow.EmbeddingBagCollection:
    """Tables of one width; `features` names those of each table, by default one."""
    if strategy not in hotrow.STRATEGIES:
        raise Unavailable(f"this version of hotrow has no strategy {strategy!r}")
    rows = list(rows)
    features = features or [[name] for name in feature_names(len(rows))]
    tables = [
        hotrow.EmbeddingBagConfig(f"table_{table}", num_rows, dim, names)
        for table, (num_rows, names) in enumerate(zip(rows, features, strict=True))
    ]
    on_gpu = {"output_dtype": output_dtype, "fill": fill} if device.type == "cuda" else {}
    kind = hotrow.EmbeddingBagCollection if is_pooled else hotrow.EmbeddingCollection
    return kind(
        tables,
        optimizer=RULES[optimizer](lr=LR),
        budget=None if strategy == "all-fast" else budget_bytes,
        strategy=strategy,
        device=device,
        seed=0,
        **on_gpu,
        **options,
    )


def trainer(
    model: nn.Module,
    dense: torch.optim.Optimizer | None,
    *,
    loss: Any,
    device: torch.device,
    compile: bool,
    graphs: bool,
    system: Any = None,
) -> hotrow.Trainer[ClickBatch]:
    on_gpu = {"graphs": graphs, "compile": compile} if device.type == "cuda" else {}
    return hotrow.Trainer(
        model,
        loss,
        dense_optimizer=dense,
        ids=lambda batch: batch.sparse,
        device=device,
        system=system,
        **on_gpu,
    )


class Clicks(nn.Module):
    """An embedding and the dense part that every system trains."""

    def __init__(self, embedding: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.embedding, self.dense = embedding, dense

    def forward(self, batch: ClickBatch) -> Tensor:
        return self.dense(batch.dense, self.embedding(batch.sparse).values())


class EmbeddingAlone(nn.Module):
    """A loss whose gradient for the vectors is given, and costs nothing."""

    def __init__(self, embedding: nn.Module, gradient: Tensor) -> None:
        super().__init__()
        self.embedding, self.gradient = embedding, gradient

    def forward(self, batch: ClickBatch) -> Tensor:
        return _Given.apply(self.embedding(batch.sparse).values(), self.gradient)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return vectors.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def predictions_are_losses(predictions: Tensor, labels: Tensor) -> Tensor:
    return predictions


class Hotrow:
    def __init__(
        self,
        bench: Bench,
        strategy: str,
        *,
        written: bool = False,
        system: Any = None,
        **given: Any,
    ) -> None:
        """`written`: as if every row had been written before. `system`: what orders, splits or
        leaves out samples. `given` is for the collection."""
        setting, options, device = bench.setting, bench.options, bench.device
        self.counted = bench.counted
        self.embedding = collection(
            setting.rows,
            setting.dim,
            strategy=strategy,
            optimizer=setting.optimizer,
            budget_bytes=setting.budget_bytes,
            device=device,
            output_dtype=setting.output_dtype,
            fill=bench.fill,
            is_pooled=setting.is_pooled,
            **given,
        )
        for group in self.embedding.groups if written else ():
            group.expect_changes()  # so that every row has to be read
        optimizer: torch.optim.Optimizer | None = None
        if setting.has_dense:
            count = len(setting.rows)
            dense = dense_module(setting.model, NUM_DENSE, count, setting.dim, options).to(device)
            model: nn.Module = Clicks(self.embedding, dense)
            optimizer, loss = dense_optimizer(dense, options), F.binary_cross_entropy_with_logits
        else:
            model, loss = (
                EmbeddingAlone(self.embedding, bench.given_gradient),
                predictions_are_losses,
            )
        self.model, self.optimizer, self.loss = model, optimizer, loss
        # Others may train the same model, one after the other.
        self.trainer_with = partial(
            trainer,
            model,
            optimizer,
            loss=loss,
            device=device,
            compile=options.compile and setting.has_dense,
            graphs=options.graphs,
        )
        self.trainer = self.trainer_with(system=system)
        if setting.hotness != 1:  # else the first batch tells as much
            names = feature_names(len(setting.rows))
            self.embedding.reserve(setting.batch, dict(zip(names, setting.hot, strict=True)))

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        records = self.trainer.run(batches)
        try:
            for _ in records:
                yield
        finally:
            records.close()

    def table_bytes(self) -> int:
        return sum(self.embedding.memory().values())

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        return facts_of(self.embedding, steps, self.counted)


class HotrowLoop(Hotrow):
    """An ordinary loop, in which every operation is launched from Python."""

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        known = hotrow.ahead(batches, self.model, ids=lambda batch: batch.sparse)
        try:
            for batch in known:
                if self.optimizer is not None:
                    self.optimizer.zero_grad()
                self.loss(self.model(batch), batch.label).backward()
                if self.optimizer is not None:
                    self.optimizer.step()
                yield
        finally:
            known.close()


def true_profile(bench: Bench) -> dict[str, tuple[Tensor, Tensor]]:
    """As many rows as the budget has room for at the most, by how often batches read them."""
    s = bench.setting
    found = hottest_rows(s.rows, s.skew, int(s.budget * sum(s.rows)))
    profile = {}
    for table, (ids, num_rows) in enumerate(zip(found, s.rows, strict=True)):
        rank = torch.arange(1, len(ids) + 1, dtype=torch.float64)
        # Of all lookups of a table, those of its hottest row first.
        profile[f"table_{table}"] = (
            torch.from_numpy(ids), rank**-s.skew * share_of_lookups(num_rows, s.skew, 1)
        )  # fmt: skip
    return profile


def facts_of(
    embedding: hotrow.EmbeddingBagCollection, steps: Iterator[object], count: int
) -> dict[str, Any]:
    """Traffic of the next steps, after the timed ones: a cold start would say nothing."""
    before = embedding.traffic()
    for _ in range(count):
        next(steps)
    after, memory = embedding.traffic(), embedding.memory()
    lookups = after.lookups - before.lookups
    fetched = after.fetched_rows - before.fetched_rows
    evicted = after.evicted_rows - before.evicted_rows
    per_slot = sum(memory.get(part, 0) for part in ("slot state", "row-to-slot map", "planning"))
    return {
        "hotrow": hotrow.__version__,
        "slots": embedding.num_slots,
        "fills": {dim: str(choice) for dim, choice in embedding.fills().items()},
        "efforts": [g.mover.effort.number for g in embedding.groups if hasattr(g.mover, "effort")],
        "memory": memory,
        "bytes_per_slot": per_slot / max(1, embedding.num_slots),
        "hit_rate": 1 - fetched / lookups if lookups else 1.0,
        "unique_rows_per_step": (after.unique_rows - before.unique_rows) / count,
        "fetched_rows_per_step": fetched / count,
        # They were never written before, so they crossed no link.
        "made_rows_per_step": (after.made_rows - before.made_rows) / count,
        "evicted_rows_per_step": evicted / count,
        "chunked_batches": after.chunked_batches,
    }
