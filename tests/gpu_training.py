"""Small training on a GPU, captured or eager, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import hotrow
from hotrow.data import ClickBatch
from hotrow.models import DLRM

ROWS = (5000, 300, 20000, 40, 1000)
STEPS = 60
Found = tuple[list[float], dict[str, torch.Tensor]]


def batches(steps: int = STEPS, size: int = 256) -> Iterator[ClickBatch]:
    """The last one is short."""
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        count = size // 3 if step == steps - 1 else size
        ids = [(torch.rand(count, generator=generator) ** 4 * rows).long() for rows in ROWS]
        yield ClickBatch(
            dense=torch.rand(count, 13, generator=generator),
            sparse=torch.stack(ids, dim=1),
            label=torch.randint(0, 2, (count,), generator=generator).float(),
        )


class Run:
    def __init__(
        self,
        strategy: str = "all-fast",
        budget: Any = None,
        rule: Any = None,
        *,
        graphs: bool = True,
        compile: bool = False,
        **options: Any,
    ) -> None:
        tables = [hotrow.EmbeddingBagConfig(f"t{i}", n, 16, [f"f{i}"]) for i, n in enumerate(ROWS)]
        rule = rule or hotrow.SGD(lr=0.1)
        self.embedding = hotrow.EmbeddingBagCollection(
            tables,
            rule,
            budget,
            strategy=strategy,
            device="cuda",
            **{"seed": 0, **options},
        )
        self.model = DLRM(
            self.embedding, 13, (64, 16), (64, 1), generator=torch.Generator().manual_seed(3)
        ).cuda()
        self.dense = torch.optim.SGD(
            self.model.parameters(), lr=torch.tensor(0.1, device="cuda"), fused=True
        )
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(self.dense, 20, 0.5),
            torch.optim.lr_scheduler.StepLR(self.embedding.optimizer, 15, 0.7),
        ]
        self.trainer: hotrow.Trainer[ClickBatch] = hotrow.Trainer(
            self.model,
            F.binary_cross_entropy_with_logits,
            dense_optimizer=self.dense,
            ids=lambda batch: batch.sparse,
            device="cuda",
            graphs=graphs,
            compile=compile,
        )
        self.losses: list[float] = []

    def train(self, source: Any) -> Run:
        records = []
        try:
            for record in self.trainer.run(source):
                records.append(record)
                for schedule in self.schedules:
                    schedule.step()
        finally:
            self.losses += [record.loss for record in records]
        return self

    def found(self) -> Found:
        self.embedding.check()
        values = {key: value.cpu() for key, value in self.model.state_dict().items()}
        for table, pieces in self.embedding.optimizer.state_dict()["state"].items():
            values |= {f"{table}.{key}": torch.as_tensor(each) for key, each in pieces.items()}
        return self.losses, values

    @property
    def num_graphs(self) -> int:
        captured = self.trainer._captured
        return 0 if captured is None else captured.num_graphs


def same_bits(left: Found, right: Found) -> bool:
    return left[0] == right[0] and all(torch.equal(left[1][k], right[1][k]) for k in left[1])
