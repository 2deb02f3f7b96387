"""A user's own loop, which tests of checkpoints save, stop and resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow.checkpoint import Checkpoint, Loaded, Save
from hotrow.kernels.dense_rules import DenseAdam
from hotrow.run.job import same_bits

Bag = hotrow.EmbeddingBagConfig
# Two widths, and one of them with tables on both sides of the other.
TABLES = (
    Bag("item", 500, 8, ["item", "last"]),
    Bag("tag", 30, 4, ["tag"]),
    Bag("user", 200, 8, ["user"]),
)
_draw = torch.Generator().manual_seed(0)
BATCHES = [
    torch.stack([torch.randint(n, (32,), generator=_draw) for n in (500, 500, 30, 200)], dim=1)
    for _ in range(12)
]
RULES: dict[str, Any] = {
    "sgd": hotrow.SGD(lr=0.1),
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise-adagrad": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "adamw": hotrow.AdamW(lr=0.01),
    "dense-adam": DenseAdam(lr=0.01),
}
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu(*values: Any) -> Any:
    """A case of a parametrized test that is run where there is a GPU."""
    return pytest.param(*values, marks=pytest.mark.gpu)


class Small(nn.Module):
    """Dropout, and a normalisation with its counter."""

    def __init__(self, rule: Any = RULES["adam"], *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        options = {"strategy": "all-fast", "seed": seed, **options}
        self.embedding = hotrow.EmbeddingBagCollection(TABLES, rule, **options)
        self.first = nn.Linear(28, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 1)
        self.to(self.embedding.device)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.embedding(ids).values().to(self.first.weight.dtype)
        hidden = self.drop(self.norm(self.first(vectors).float()))
        return self.last(hidden.to(self.last.weight.dtype)).squeeze(1)


class OpenFile:
    """A file that is open for writing; subclasses change `write`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Loop:
    def __init__(
        self,
        rule: str = "adam",
        dense: Optimizer = lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        *,
        batches: Sequence[Tensor] = BATCHES,
        **options: Any,
    ) -> None:
        self.model, self.batches = Small(RULES[rule], **options), batches
        self.embedding, self.optimizer = self.model.embedding, dense(self.model)
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for optimizer in (self.optimizer, self.embedding.optimizer)
        ]

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "schedule": self.schedules[0],
            "rows_schedule": self.schedules[1],
        }

    def train(self, first: int, last: int, after: Callable[[int], Any] = lambda _: None) -> None:
        step = first
        for batch in hotrow.ahead(self.batches[first:last], self.model):
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for schedule in self.schedules:
                schedule.step()
            step += 1
            after(step)

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return hotrow.save_checkpoint(folder, self.model, step=step, **options, **self.parts)

    def begin(self, folder: Path, step: int, **options: Any) -> Save:
        return hotrow.begin_checkpoint(folder, self.model, step=step, **options, **self.parts)

    def load(self, folder: Path) -> Loaded:
        return hotrow.load_checkpoint(folder, self.model, **self.parts)

    def everything(self) -> dict[str, Tensor]:
        """Copies of all bits that training depends on."""
        rows = self.embedding.optimizer
        found: dict[str, Any] = {f"model {k}": v for k, v in self.model.state_dict().items()}
        for table in TABLES:
            state = rows.state_dict()["state"][table.name]
            found |= {f"{table.name} {k}": torch.as_tensor(v) for k, v in state.items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {k}": torch.as_tensor(v) for k, v in state.items()}
        groups = (*self.optimizer.param_groups, *rows.param_groups)
        found["rates"] = torch.tensor([float(group["lr"]) for group in groups])
        found["random"] = torch.get_rng_state()
        return {key: tensor.clone() for key, tensor in found.items()}


def same(left: Loop | dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    own = left.everything() if isinstance(left, Loop) else left
    return own.keys() == right.keys() and all(same_bits(own[key], right[key]) for key in own)


def rows_of(embedding: hotrow.EmbeddingBagCollection) -> list[Tensor]:
    return [torch.cat([rows for _, rows in embedding.rows(table.name)]) for table in TABLES]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has no parent."""
    return Checkpoint(folder).manifest.parent is None


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
