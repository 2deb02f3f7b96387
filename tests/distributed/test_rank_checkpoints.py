"""What several ranks save, any number of ranks loads: rows and their state, to the bit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotrow
from hotrow.checkpoint import Checkpoint, SavedModel
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.tables import export_tables, import_tables, open_weights
from hotrow.run.job import same_bits
from rank_cases import TOLERANCE
from rank_processes import run
from rank_training import OWN, TABLES, Everything, RankLoop, RankModel, small_files


def trained_and_saved(
    rank: int, world: int, folder: Path, rule: str, steps: int, strategy: str
) -> tuple[Everything, Everything]:
    """What is saved after some steps, and what training ends with three steps later."""
    loop, saved = RankLoop(rank, world, rule, strategy=strategy), {}

    def after(step: int) -> None:
        if step == steps:
            loop.save(folder, step, extra={"rank": rank})
            saved.update(loop.everything())

    loop.train(0, steps + 3, after)
    loop.embedding.check()
    return saved, loop.everything()


def loaded(
    rank: int, world: int, folder: Path, rule: str, trains: bool, options: dict[str, Any]
) -> tuple[Everything, Everything, Any]:
    """What is loaded, and what training ends with after three more steps."""
    with small_files():
        loop = RankLoop(rank, world, rule, **{"seed": 7, **options})
        loop.train(50, 53)  # so that rows have slots, and other values
        found = loop.load(folder)
        state = loop.everything()
        loop.embedding.check()
        if trains:
            loop.train(found.step, found.step + 3)
        return state, loop.everything(), found.extra


def small_and_saved(rank: int, world: int, *args: Any) -> tuple[Everything, Everything]:
    with small_files():
        return trained_and_saved(rank, world, *args)


def differing(found: Everything, expected: Everything) -> list[str]:
    assert found.keys() == expected.keys()
    return [key for key in found if not same_bits(found[key], expected[key])]


@pytest.mark.parametrize("world", [2, 4])
def test_as_many_ranks_go_on_with_the_same_bits(world: int, tmp_path: Path) -> None:
    saved = run(world, small_and_saved, tmp_path, "adam", 4, "lookahead")
    (folder,) = saved_in(tmp_path)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert (manifest["format"], manifest["ranks"]) == (2, world)
    results = run(world, loaded, tmp_path, "adam", True, {"budget": "40%", "strategy": "lru"})
    for rank, ((at_save, at_end), (state, end, extra)) in enumerate(
        zip(saved, results, strict=True)
    ):
        assert differing(state, at_save) == []
        assert differing(end, at_end) == []
        assert extra == {"rank": rank}
    assert not same_bits(results[0][0]["random"], results[1][0]["random"])


PAIRS = [
    ("adam", 4, 1, "lookahead", "lookahead"), ("row-wise-adagrad", 4, 3, "lookahead", "cpu"),
    ("adam", 1, 2, "hybrid", "static-hybrid"), ("adagrad", 2, 4, "lookahead", "lookahead"),
    ("adam", 2, 1, "hybrid", "lookahead"), ("dense-adam", 2, 3, "lookahead", "hybrid"),
    pytest.param("adagrad", 3, 2, "static-hybrid", "hybrid", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "before", "after", "one", "other"), PAIRS)
def test_other_numbers_of_ranks_load_the_same_bits(
    rule: str, before: int, after: int, one: str, other: str, tmp_path: Path
) -> None:
    saved = run(before, small_and_saved, tmp_path, rule, 4, one)
    results = run(after, loaded, tmp_path, rule, False, {"strategy": other})
    for rank, (state, _, extra) in enumerate(results):
        of_rank = saved[rank if rank < before else 0][0]
        unlike = differing(state, of_rank)
        assert unlike == ([] if rank < before else list(OWN))
        assert extra == {"rank": 0}
    for (first, _, _), (second, _, _) in pairwise(results):
        assert not same_bits(first["random"], second["random"])


@pytest.mark.parametrize(
    ("one", "other"),
    [("hybrid", "static-hybrid"), pytest.param("static-hybrid", "cpu", marks=pytest.mark.slow)],
)
def test_as_many_ranks_go_on_with_rows_on_the_host(one: str, other: str, tmp_path: Path) -> None:
    saved = run(2, small_and_saved, tmp_path, "adam", 4, one)
    results = run(2, loaded, tmp_path, "adam", True, {"strategy": other})
    for (_, expected), (_, found, _) in zip(saved, results, strict=True):
        for key, value in expected.items():
            assert torch.allclose(found[key].double(), value.double(), **TOLERANCE), key


def saved_in_steps(
    rank: int, world: int, folder: Path, background: bool, replicate: str | None, strategy: str
) -> tuple[list[Everything], list[bool]]:
    """A whole checkpoint, and two that hold what has changed since, the last as a model, too."""
    with small_files():
        loop = RankLoop(rank, world, replicate=replicate, strategy=strategy)
        kept, written = [], []
        assert loop.has_replicas == (replicate is not None)

        def after(step: int) -> None:
            options = {"full_every": 9, "keep": 1}
            kept.append(loop.everything())
            if background:
                save = loop.begin(folder / "checkpoints", step, log="100%", **options)
                written.append(save.why_at_once is None)
            else:
                loop.save(folder / "checkpoints", step, **options)

        loop.train(0, 3, after)
        hotrow.save_model(folder / "model", loop.model)
        kept.append(loop.everything())
        if background:
            loop.begin(folder / "checkpoints", 4).wait()
        return kept, written


def opened(
    rank: int, world: int, folder: Path, replicate: str | None
) -> tuple[list[Everything], Everything]:
    with small_files():
        loop, found = RankLoop(rank, world, seed=4, replicate=replicate), []
        assert loop.has_replicas == (replicate is not None)
        for path in saved_in(folder / "checkpoints"):
            loop.load(path)
            found.append(loop.everything())
        other = RankLoop(rank, world, seed=5, replicate=replicate)
        hotrow.load_model(folder / "model", other.model)
        return found, other.everything()


@pytest.mark.parametrize(
    ("before", "after", "background", "replicate", "strategy"),
    [
        (3, 2, False, (None, "80KiB"), "lookahead"), (2, 2, True, (None, None), "lookahead"),
        (2, 3, True, ("80KiB", None), "lookahead"), (2, 2, True, ("80KiB", None), "hybrid"),
        pytest.param(2, 3, False, (None, None), "cpu", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_incremental_ones_and_models(
    before: int, after: int, background: bool, replicate: tuple[str | None, ...], strategy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Also where they are read: in a process without torch.distributed."""
    (kept, written), *_ = run(before, saved_in_steps, tmp_path, background, replicate[0], strategy)
    assert written == [True] * 3 * background
    found = saved_in(tmp_path / "checkpoints")
    steps = [1, 3, 4] if background else [1, 3]
    assert [path.name for path in found] == [f"{n:05}-step-{n}" for n in steps]
    manifest = Checkpoint(found[1]).manifest
    assert manifest.parent is not None
    for table, size in zip(manifest.tables, TABLES, strict=True):
        assert sum(shard.rows for shard in table.shards) <= min(2 * 96, size.num_embeddings)
    expected = [kept[n - 1] for n in steps]
    for states, model in run(after, opened, tmp_path, replicate[1]):
        for state, other in zip(states, expected, strict=True):
            assert [key for key in differing(state, other) if key not in OWN] == []
        for key in (key for key in model if key.startswith("dense ")):
            assert same_bits(model[key], expected[-1][key])
        for table in TABLES:
            weights = expected[-1][f"rows {table.name}"][:, : table.embedding_dim]
            assert same_bits(model[f"rows {table.name}"][:, : table.embedding_dim], weights)
    in_one_process(tmp_path, [kept[n - 1] for n in steps])


def in_one_process(folder: Path, expected: list[Everything]) -> None:
    keys = {f"embedding.embedding_bags.{table.name}.weight": table for table in TABLES}
    for path, state in zip(saved_in(folder / "checkpoints"), expected, strict=True):
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        for key, table in keys.items():
            rows = torch.cat([rows for _, rows in checkpoint.rows(key)])
            assert same_bits(rows, state[f"rows {table.name}"])
    last = expected[-1]
    SavedModel(folder / "model").verify()
    for source in ("checkpoints", "model"):
        for key, table in keys.items():
            weights = torch.cat([x for _, x in open_weights(folder / source).weights(key)])
            assert same_bits(weights, last[f"rows {table.name}"][:, : table.embedding_dim])
    export_tables(folder / "checkpoints", folder / "tables")
    model = RankModel("adam")
    assert len(import_tables(folder / "tables", model)) == len(TABLES)
    for table in TABLES:
        weights = torch.cat([x for _, x in model.embedding.weights(table.name)])
        assert same_bits(weights, last[f"rows {table.name}"][:, : table.embedding_dim])
    alone = RankModel("adam", seed=9)
    hotrow.load_model(folder / "model", alone)
    for table in TABLES:
        weights = torch.cat([x for _, x in alone.embedding.weights(table.name)])
        assert same_bits(weights, last[f"rows {table.name}"][:, : table.embedding_dim])


def saved_without_backward(rank: int, world: int, folder: Path) -> list[Path]:
    """Rank 1 leaves out the last batch's backward(), as programs do with a loss that is NaN."""
    model = nn.ModuleDict()
    for table in TABLES[:2]:
        rule = hotrow.Adagrad(lr=0.1)
        model[table.name] = hotrow.EmbeddingBagCollection([table], rule, strategy="all-fast")
    for step in range(2):
        ids = torch.arange(3).unsqueeze(1)
        loss = sum(rows(ids).values().sum() for rows in model.values())
        if rank == 0 or step == 0:
            loss.backward()
    saved = [hotrow.save_checkpoint(folder, model, step=2)]
    saved.append(hotrow.begin_checkpoint(folder, model, step=3).wait())
    hotrow.save_model(folder / "model", model)
    return saved


def test_a_rank_may_leave_backward_out_before_it_saves(tmp_path: Path) -> None:
    (saved, begun), other = run(2, saved_without_backward, tmp_path, group_timeout=20)
    assert other == [saved, begun]
    for table in TABLES[:2]:
        key = f"{table.name}.embedding_bags.{table.name}.weight"
        sums = [
            torch.cat([rows for _, rows in Checkpoint(path).rows(key)])[:3, table.embedding_dim :]
            for path in (saved, begun)
        ]
        assert same_bits(*sums)
        # Gradients are 1: of both ranks in the first step, and of one in the second.
        assert torch.allclose(sums[0], torch.tensor(1 + 0.25))
