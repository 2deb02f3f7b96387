"""Multi-hot training on a GPU, captured or eager, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from hotrow.data import ClickBatch

STEPS, SIZE = 70, 128
Table = hotrow.EmbeddingBagConfig
TABLES = {
    "one-width": [Table("a", 5000, 16, ["f", "h"]), Table("b", 300, 16, ["g"])],
    "mean": [
        Table("a", 5000, 16, ["f", "h"], pooling="mean", padding_idx=0),
        Table("b", 300, 16, ["g"]),
    ],
    "two-widths": [Table("a", 5000, 16, ["f", "h"]), Table("b", 300, 24, ["g"])],
}
RULES = {
    "sgd": hotrow.SGD(lr=0.1),
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "adamw": hotrow.AdamW(lr=0.01),
}
Found = dict[str, Tensor]


def batches(
    *, steps: int = STEPS, weighted: bool = False, large: int | None = None, most: int = 7
) -> Iterator[ClickBatch]:
    """Bags of 0 to `most` lookups; the last batch is short, and one may be large."""
    rows = {"f": 5000, "g": 300, "h": 5000}  # keys stand in an order of their own
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        size = SIZE // 3 if step == steps - 1 else SIZE
        longest = 4 * most if step == large else most
        lengths = torch.randint(0, longest + 1, (3, size), generator=generator)
        ids = [
            (torch.rand(int(each.sum()), generator=generator) ** 4 * count).long()
            for count, each in zip(rows.values(), lengths, strict=True)
        ]
        values = torch.cat(ids)
        weights = torch.rand(values.numel(), generator=generator) if weighted else None
        yield ClickBatch(
            dense=torch.rand(size, 13, generator=generator),
            sparse=hotrow.KeyedJaggedTensor(
                list(rows), values, lengths=lengths.flatten(), weights=weights
            ),
            label=torch.randint(0, 2, (size,), generator=generator).float(),
        )


class Model(nn.Module):
    """Pooled vectors, per-sample weights that are learned, and a small dense part."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = embedding
        width = sum(t.embedding_dim * len(t.feature_names) for t in embedding.tables)
        self.top = nn.Sequential(nn.Linear(width + 13, 32), nn.ReLU(), nn.Linear(32, 1))
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, batch: ClickBatch) -> Tensor:
        ids: Any = batch.sparse
        if (weights := ids.weights_or_none()) is not None:
            ids = hotrow.KeyedJaggedTensor(
                ids.keys(), ids.values(), offsets=ids.offsets(), weights=weights * self.scale
            )
        vectors = torch.cat([self.embedding(ids).values(), batch.dense], dim=1)
        logits: Tensor = self.top(vectors).squeeze(1)
        return logits


class Run:
    """A model, its optimizers and their schedules."""

    def __init__(
        self,
        tables: str = "one-width",
        rule: str = "adagrad",
        strategy: str = "all-fast",
        budget: str | None = None,
        *,
        dense: str = "sgd",
    ) -> None:
        self.embedding = hotrow.EmbeddingBagCollection(
            TABLES[tables], RULES[rule], budget, strategy=strategy, device="cuda", seed=0
        )
        self.model = Model(self.embedding).cuda()
        parameters = self.model.parameters()
        lr = torch.tensor(0.1, device="cuda")
        self.dense: torch.optim.Optimizer
        if dense == "adagrad":
            self.dense = torch.optim.Adagrad(parameters, lr=0.05)
        elif dense == "adam":
            self.dense = torch.optim.Adam(parameters, lr=lr * 0.1, fused=True, capturable=True)
        else:
            self.dense = torch.optim.SGD(parameters, lr=lr, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR
        self.schedules = [schedule(self.embedding.optimizer, 15, 0.7)]
        # A number that changes captures the step anew: once is enough for a test.
        self.schedules.append(schedule(self.dense, 40 if dense == "adagrad" else 20, 0.5))
        self.losses: list[Tensor] = []
        self.step: Any = None

    def stream(self, source: Any) -> hotrow.Ahead:
        return hotrow.ahead(source, self.model, ids=lambda b: b.sparse, step=self.step)

    def train(self, batch: ClickBatch) -> None:
        """One step: captured where there is one, else eager."""
        if self.step is not None:
            self._note(self.step(batch))
            return
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()
        self._note(loss.detach())

    def by_hand(self, source: Any) -> Run:
        """An eager loop, without hotrow.graphed."""
        for batch in self.stream(source):
            self.train(batch)
        return self

    def captured(self, loss_fn: Any = F.binary_cross_entropy_with_logits, **options: Any) -> Run:
        """From now on steps are captured."""
        self.step = hotrow.graphed(self.model, loss_fn, self.dense, **options)
        return self

    def graphed(self, source: Any, **options: Any) -> Run:
        if self.step is None:
            self.captured(**options)
        return self.by_hand(source)

    def trained(self, source: Any, *, graphs: bool) -> Run:
        trainer: hotrow.Trainer[ClickBatch] = hotrow.Trainer(
            self.model,
            F.binary_cross_entropy_with_logits,
            dense_optimizer=self.dense,
            ids=lambda batch: batch.sparse,
            device="cuda",
            graphs=graphs,
        )
        self.step = trainer._step
        records = []
        for record in trainer.run(source):
            records.append(record)
            self._note(None)
        self.losses = [torch.tensor(record.loss) for record in records]
        return self

    def _note(self, loss: Tensor | None) -> None:
        if loss is not None:
            self.losses.append(loss)
        for schedule in self.schedules:
            schedule.step()

    @property
    def num_graphs(self) -> int:
        return self.step.landing.num_graphs

    def found(self) -> Found:
        self.embedding.check()
        values = {key: value.cpu() for key, value in self.model.state_dict().items()}
        for table, pieces in self.embedding.optimizer.state_dict()["state"].items():
            values |= {f"{table}.{key}": torch.as_tensor(each) for key, each in pieces.items()}
        for place, state in enumerate(self.dense.state.values()):
            values |= {f"{place}.{key}": torch.as_tensor(x).cpu() for key, x in state.items()}
        return {**values, "losses": torch.stack(self.losses).cpu()}


def same_bits(left: Found, right: Found) -> bool:
    assert left.keys() == right.keys()
    unlike = [key for key in left if not torch.equal(left[key], right[key])]
    assert not unlike
    return True
