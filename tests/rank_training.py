"""A loop on several ranks, which tests of checkpoints save, stop and resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotrow
from hotrow.checkpoint import Loaded, Save
from hotrow.checkpoint.parts import rows_apart
from hotrow.kernels.dense_rules import DenseAdam

Bag = hotrow.EmbeddingBagConfig
# Several widths, a last block of rows that is not whole, and fewer rows than ranks.
TABLES = (Bag("item", 2_600, 8, ["item"]), Bag("tag", 3, 4, ["tag"]), Bag("user", 700, 8, ["user"]))
RULES: dict[str, Any] = {
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise-adagrad": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "dense-adam": DenseAdam(lr=0.01),
}
OWN = ("random", "numpy", "python")  # what a rank has of its own
SAMPLES = 96  # of a batch, on all ranks together
Everything = dict[str, Tensor]


@contextmanager
def small_files(shard: int = 12_000, piece: int = 1_000) -> Iterator[None]:
    """Several shards to a table and pieces to a shard; no machine is lost here."""
    with ExitStack() as stack:
        for name, value in (("SHARD_BYTES", shard), ("PIECE_BYTES", piece)):
            stack.enter_context(mock.patch(f"hotrow.checkpoint.tensors.{name}", value))
        stack.enter_context(mock.patch("os.fsync", return_value=None))
        yield


class RankModel(nn.Module):
    def __init__(self, rule: str, **options: Any) -> None:
        super().__init__()
        options = {"strategy": "lookahead", "budget": "70%", "seed": 1, **options}
        self.embedding = hotrow.EmbeddingBagCollection(TABLES, RULES[rule], **options)
        torch.manual_seed(3)
        self.dense = nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))

    def forward(self, ids: Tensor) -> Tensor:
        predicted: Tensor = self.dense(self.embedding(ids).values())
        return predicted.squeeze(1)


class RankLoop:
    def __init__(self, rank: int, world: int, rule: str = "adam", **options: Any) -> None:
        self.rank, self.world = rank, world
        self.model = RankModel(rule, **options)
        self.embedding = self.model.embedding
        self.optimizer = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.embedding.optimizer, 2, 0.5)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + rank)  # each rank drops other samples

    def batch(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        sizes = [table.num_embeddings for table in TABLES]
        ids = torch.stack([torch.randint(n, (SAMPLES,), generator=draw) for n in sizes], dim=1)
        return ids.tensor_split(self.world)[self.rank]

    def train(self, first: int, last: int, after: Callable[[int], Any] = lambda _: None) -> None:
        batches = [self.batch(step) for step in range(first, last)]
        for step, ids in enumerate(hotrow.ahead(batches, self.model), first + 1):
            self.model(ids).square().mean().backward()
            self.average(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            after(step)

    def average(self, model: nn.Module) -> None:
        """Average gradients over ranks, as DistributedDataParallel does."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return hotrow.save_checkpoint(folder, self.model, step=step, **options, **self.parts)

    def begin(self, folder: Path, step: int, **options: Any) -> Save:
        return hotrow.begin_checkpoint(folder, self.model, step=step, **options, **self.parts)

    def load(self, folder: Path) -> Loaded:
        return hotrow.load_checkpoint(folder, self.model, **self.parts)

    @property
    def has_replicas(self) -> bool:
        """Whether some rows are on every rank."""
        return len(self.embedding.groups) > len({table.embedding_dim for table in TABLES})

    def rows(self) -> dict[str, Tensor]:
        """All rows of all ranks with their state, on every rank."""
        tables = [table.name for table in TABLES]
        return {x: torch.cat([rows for _, rows in self.embedding.rows(x)]) for x in tables}

    def everything(self) -> Everything:
        """Copies of all bits that training depends on."""
        found = {f"rows {name}": rows for name, rows in self.rows().items()}
        with rows_apart(self.model):
            found |= {f"dense {k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {k}": torch.as_tensor(v).clone() for k, v in state.items()}
        groups = (*self.optimizer.param_groups, *self.embedding.optimizer.param_groups)
        found["rates"] = torch.tensor([float(group["lr"]) for group in groups])
        found["steps"] = torch.tensor(self.embedding.optimizer.steps)
        found["random"] = torch.get_rng_state()
        found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
        found["python"] = torch.tensor(random.getstate()[1])
        return found
