"""Checkpoints of models inside torch's wrappers have the names and tensors of bare ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import latest_in
from hotrow.distributed.owners import TableOwners
from hotrow.run.job import same_bits
from rank_processes import run
from rank_training import RankLoop, RankModel


def wrapped(kind: str, model: RankModel) -> nn.Module:
    if kind == "whole":
        return DistributedDataParallel(model)
    if kind == "dense":
        model.dense = DistributedDataParallel(model.dense)
    if kind == "cut":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.dense)
    return model


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {
        name.replace("module.", ""): whole(x).detach().clone()
        for name, x in model.named_parameters()
    }
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {key}": whole(x).clone() for key, x in state.items()}
    embedding = next(x for x in model.modules() if isinstance(x, hotrow.EmbeddingBagCollection))
    for table in embedding.tables:
        rows = [rows for _, rows in embedding.rows(table.name)]
        found[table.name] = torch.cat(rows)
    return found


def through(
    rank: int, world: int, folder: Path, before: str, after: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train and save in one wrapper, and load in another."""
    loop, found = RankLoop(rank, world), []
    for kind in (before, after):
        model = wrapped(kind, RankModel("adam", seed=len(found)))
        optimizer = torch.optim.Adam([x for x in model.parameters() if x.numel()], lr=0.01)
        for step in range(2):
            model(loop.batch(step)).square().mean().backward()
            if kind == "bare":
                loop.average(model)
            optimizer.step()
            optimizer.zero_grad()
        if found:
            hotrow.load_checkpoint(folder, model, optimizer=optimizer)
            other = wrapped(kind, RankModel("adam", seed=8))
            hotrow.load_model(folder / "model", other)
            names = dict(other.named_parameters())
            for name, parameter in model.named_parameters():
                assert same_bits(whole(parameter).detach(), whole(names[name]).detach())
        else:
            hotrow.save_checkpoint(folder, model, step=2, optimizer=optimizer)
            hotrow.save_model(folder / "model", model)
        found.append(bits(model, optimizer))
    return found[0], found[1]


KINDS = ("whole", "cut", "dense", "bare", "cut")


def through_all(rank: int, world: int, folder: Path) -> list[tuple[str, ...]]:
    unlike = []
    for number, pair in enumerate(pairwise(KINDS)):
        saved, loaded = through(rank, world, folder / str(number), *pair)
        assert saved.keys() == loaded.keys()
        unlike += [(*pair, key) for key in saved if not same_bits(saved[key], loaded[key])]
    return unlike


def test_wrappers_change_no_name_and_no_bit(tmp_path: Path) -> None:
    assert run(2, through_all, tmp_path) == [[], []]
    plain = RankModel("adam")
    for number in range(len(KINDS) - 1):
        checkpoint = Checkpoint(latest_in(tmp_path / str(number)) or "")
        names = {name for name, _ in plain.dense.named_parameters()}
        assert checkpoint.dense.keys() == {f"dense.{name}" for name in names}
        assert [table.key for table in checkpoint.tables] == [
            f"embedding.embedding_bags.{table.name}.weight" for table in plain.embedding.tables
        ]
        hotrow.load_model(tmp_path / str(number) / "model", plain)


def test_rows_stay_where_checkpoints_have_them() -> None:
    """Another form of this needs another format of checkpoints."""
    owners = TableOwners("item", 2_600, 3)
    assert owners.counts.tolist() == [869, 865, 866]
    ranks, numbers = owners.find(np.array([0, 1, 2, 1023, 1024, 2047, 2048, 2599]))
    assert ranks.tolist() == [1, 0, 2, 1, 1, 1, 0, 2]
    assert numbers.tolist() == [186, 16, 101, 153, 461, 560, 841, 686]
    for rank, count in enumerate(owners.counts):
        rows = owners.rows_of(rank, np.arange(count))
        assert np.array_equal(np.stack(owners.find(rows)), [[rank] * count, np.arange(count)])


def stepped(rank: int, world: int, folder: Path, saves: bool) -> list[dict[str, Tensor]]:
    """Rows and state that a torch optimizer updates."""
    model = RankModel("adagrad", seed=1 + saves, update="step")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    loop, found = RankLoop(rank, world), []

    def train(first: int) -> None:
        for step in range(first, first + 2):
            optimizer.zero_grad()
            torch.manual_seed(step)  # of units that are dropped
            model(loop.batch(step)).square().mean().backward()
            loop.average(model.dense)
            optimizer.step()
        found.append({name: x.detach().clone() for name, x in model.dense.named_parameters()})
        for table in model.embedding.tables:
            rows = [rows for _, rows in model.embedding.rows(table.name)]
            found[-1][table.name] = torch.cat(rows)

    train(0)
    if saves:
        hotrow.save_checkpoint(folder, model, step=2, optimizer=optimizer)
    else:
        hotrow.load_checkpoint(folder, model, optimizer=optimizer)
    train(2)
    return found


def test_rows_of_torch_optimizers_go_on(tmp_path: Path) -> None:
    for saved, resumed in zip(
        run(2, stepped, tmp_path, True), run(2, stepped, tmp_path, False), strict=True
    ):
        assert all(same_bits(saved[-1][key], resumed[-1][key]) for key in saved[-1])
        assert not same_bits(saved[0]["item"], resumed[0]["item"])


class Towers(nn.Module):
    def __init__(self, seed: int, *, in_parts: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user, self.item = (nn.Sequential(nn.Embedding(rows, 4)) for rows in (3_000, 1_500))
        for part in (self.user, self.item) if in_parts else (self,):
            hotrow.convert(part, "40%", show=False)

    def rows(self) -> list[Tensor]:
        modules: list[Any] = [self.user[0], self.item[0]]
        return [torch.cat([chunk for _, chunk in module.weights()]) for module in modules]


def other_names(
    rank: int, world: int, folder: Path, in_parts: bool
) -> tuple[list[Tensor], list[Tensor], str, bool]:
    """What is saved, and loaded into a model whose tables have other names."""
    model, other = Towers(1, in_parts=in_parts), Towers(2, in_parts=not in_parts)
    hotrow.save_model(folder / "model", model)
    hotrow.save_checkpoint(folder, model, step=1)
    before, why = other.rows(), ""
    try:
        hotrow.load_checkpoint(folder, other)
    except ValueError as error:
        why = str(error)
    is_untouched = all(map(same_bits, before, other.rows()))
    hotrow.load_model(folder / "model", other)
    return model.rows(), other.rows(), why, is_untouched


@pytest.mark.parametrize("in_parts", [False, True])
def test_tables_of_modules_may_have_other_names(in_parts: bool, tmp_path: Path) -> None:
    """The name of a table says which rank has which rows."""
    for saved, loaded, why, is_untouched in run(2, other_names, tmp_path, in_parts):
        assert all(map(same_bits, saved, loaded))
        assert "was saved with other collections: 'user.0' has the tables" in why
        assert is_untouched
