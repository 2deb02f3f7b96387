"""FAE on several ranks: hot batches exchange no rows, and every rank decides as one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from click_models import trainer_of
from hotrow.systems.fae.fae import FAE
from rank_processes import run
from rank_systems import Epoch, Stored, assert_like_alone, loader, model, trained, whole

STEPS = 24
BUDGET = "3KiB"


def fae(**changes: Any) -> FAE:
    options = {"hot_budget": BUDGET, "sample_rate": 0.5, "test": Epoch(40, 43), "shuffle_rate": 10}
    return FAE(**{**options, **changes})


def static(device: str = "cpu") -> Any:
    optimizer = hotrow.Adagrad(lr=0.3)
    return model("static", replicate=BUDGET, optimizer=optimizer, device=device)


def outcome(system: FAE, batches: Any, device: str) -> dict[str, Any]:
    found = trained(system, static(device), batches)
    hot: Any = system.hot
    numbers = {table.name: hot.rows(table.name).tolist() for table in hot.places.tables}
    masks = [hot.mask(table.name) for table in hot.places.tables]
    columns = [zip(masks, x[1].unbind(1), strict=True) for x in found["seen"]]
    are_hot = [all(bool(mask[ids].all()) for mask, ids in pairs) for pairs in columns]
    return found | {"hot": numbers, "are hot": are_hot}


def every_loader(rank: int, world: int, device: str = "cpu") -> dict[str, Any]:
    cases: dict[str, Any] = {
        "numbers": (fae(), loader(STEPS, epochs=2)),
        "copies": (fae(epochs=2, seed=3), whole(0, STEPS)),
        "threshold": (fae(choose="threshold", small_table_bytes=0, most_samples=700), loader(12)),
        "hybrid": (fae(cold="hybrid", epochs=1), whole(0, 12)),
        "skipping": (fae(skip=hotrow.RandomDrop(share=0.2)), loader(12)),
    }
    return {name: outcome(*case, device) for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return every_loader(0, 1)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_the_same_segments(world: int, alone: dict[str, Any]) -> None:
    assert_same_segments(run(world, every_loader), alone)
    assert len(alone["numbers"]["record"]["rates"]) > 1  # by rising losses
    assert alone["numbers"]["record"]["switches"] > 4


@pytest.mark.gpu
def test_ranks_on_a_gpu_train_the_same_segments() -> None:
    expected = every_loader(0, 1, "cuda")
    assert_same_segments(run(2, every_loader, "cuda", timeout=280), expected)


def assert_same_segments(results: list[Any], alone: dict[str, Any]) -> None:
    for case, expected in alone.items():
        of_ranks = [result[case] for result in results]
        assert_like_alone(of_ranks, expected)
        for found in of_ranks:
            assert found["hot"] == expected["hot"]
            assert found["are hot"] == expected["are hot"]
            assert_same_decisions(found["record"], expected["record"])
            assert found["record"]["test_losses"] == of_ranks[0]["record"]["test_losses"]
            assert_hot_batches_exchange_gradients_alone(found)


def assert_same_decisions(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in expected:
        if key == "test_losses":
            one, other = (torch.tensor(x[key]) for x in (found, expected))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        elif key == "synchronised_bytes":  # of this rank
            assert (found[key] > 0) == (expected[key] > 0)
        elif "seconds" not in key:
            assert found[key] == expected[key], key


def assert_hot_batches_exchange_gradients_alone(found: dict[str, Any]) -> None:
    steps = list(zip(found["are hot"], found["sent"], strict=True))
    hot, cold = ([sent for is_hot, sent in steps if is_hot is kind] for kind in (True, False))
    assert {(ids, rows) for ids, rows, _ in hot} == {(0, 0)}
    # A small batch may need no row of another rank.
    assert all(sum(sent[kind] for sent in cold) > len(cold) for kind in range(3))
    assert sum(grads for _, _, grads in hot) > len(hot) > 0


# -- a folder ----------------------------------------------------------------------------


def in_folder(rank: int, world: int, folder: Path) -> list[Any]:
    """Two runs; of the second one the samples are known."""
    found = []
    for _ in range(2):
        system = fae(folder=folder)
        losses = [x.loss for x in trainer_of(static(), system).run(loader(12))]
        found.append((losses, system.record.reused))
        torch.distributed.barrier()
    return found


def test_the_first_rank_writes_sample_numbers_and_all_read_them(tmp_path: Path) -> None:
    results = run(2, in_folder, tmp_path)
    assert results[0] == results[1]
    (losses, reused), (again, reused_again) = results[0]
    assert losses == again
    assert (reused, reused_again) == (False, True)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "cold.numbers",
        "hot.numbers",
        "sets.json",
    ]


def twice(rank: int, world: int) -> list[Any]:
    """Two runs of one system over one loader, which is read whole."""
    noted: list[str] = []
    system = fae(progress=lambda what, count: noted.append(what))
    trainer, batches = trainer_of(static(), system), loader(12)
    found: list[Any] = []
    for _ in range(2):
        noted.clear()
        found += [len(list(trainer.run(batches))), sorted(set(noted))]
    return found


def test_a_second_run_over_the_same_loader_counts_nothing_again() -> None:
    for steps, noted, steps_again, noted_again in run(2, twice):
        assert noted == ["counting", "separating"]
        assert noted_again == []
        assert steps == steps_again > 10


def cannot_write(rank: int, world: int, folder: Path) -> str:
    try:
        list(trainer_of(static(), fae(folder=folder)).run(loader(12)))
    except (OSError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_folder_that_the_first_rank_cannot_write_raises_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run(2, cannot_write, tmp_path / "file" / "sets", group_timeout=20)
    assert "file" in first
    assert second == f"rank 0: {first}"


# -- ranks that differ, and what is missing ----------------------------------------------


class Broken:
    """A loader that fails on the second rank."""

    def __init__(self, rank: int, at: int) -> None:
        self._at = at if rank else -1

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        for number, batch in enumerate(whole(0, 12)):
            if number == self._at:
                raise OSError("the disk is gone")
            yield batch


def failures(rank: int, world: int) -> list[str]:
    cases: list[Any] = [
        (fae(), 5),  # while samples are counted
        (hotrow.RandomDrop(share=0.2), 0),  # before the first pass
        (hotrow.RandomDrop(share=0.2), 7),
    ]
    said = []
    for system, at in cases:
        try:
            list(trainer_of(static(), system).run(Broken(rank, at)))
            said.append("nothing")
        except (OSError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, second = run(2, failures, group_timeout=20)
    assert second == ["the disk is gone"] * 3
    assert first[0].startswith("ranks do different things: rank 0 calls a method that all ranks")
    assert first[1:] == ["rank 1: the disk is gone"] * 2


class OtherSamples(Stored):
    """On the second rank the first sample looks up another row."""

    def __init__(self, batches: int, rank: int) -> None:
        super().__init__(batches)
        for batch in self._batches[: 8 * rank]:
            batch.sparse[:, 0] = 77


def refusals(rank: int, world: int) -> list[str]:
    def of_rank() -> Any:
        return hotrow.data.Loader(OtherSamples(12, rank), batch_size=40, workers=1)

    cases: list[Any] = [
        lambda: trainer_of(static(), fae()).run(of_rank()),
        lambda: trainer_of(model("static"), fae()).run(loader(12)),
    ]
    said = []
    for case in cases:
        try:
            list(case())
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_is_refused_on_all_ranks() -> None:
    first, second = run(2, refusals, group_timeout=20)
    assert first == second
    assert first[0].startswith("rank 1 has other data than rank 0: what FAE has counted differs")
    assert "replicate=" in first[1]


# -- runs that end early -----------------------------------------------------------------


def failing(rank: int, world: int, cold: str) -> None:
    """The model of rank 0 fails in a step, when the batch was looked up."""
    model = static()
    trainer = trainer_of(model, fae(cold=cold, epochs=1))

    def fail(module: Any, arguments: Any, result: Any) -> None:
        if rank == 0 and torch.is_grad_enabled() and trainer.step == 7:
            raise ValueError("no room on this rank")

    model.register_forward_hook(fail)
    list(trainer.run(whole(0, STEPS)))


@pytest.mark.parametrize("cold", ["fetched", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_an_error_on_one_rank_is_shown_and_ends_the_others(cold: str) -> None:
    first, second = run(2, failing, cold, expect_errors=True, alone=True, group_timeout=5)
    assert (first.kind, first.message) == ("ValueError", "no room on this rank")
    assert "lost the others" in second.message


def left(rank: int, world: int, at: int | None) -> tuple[list[int], list[bool]]:
    """Leave a run after a step, and then train a whole one."""
    model = static()
    trainer = trainer_of(model, fae(cold="hybrid", epochs=1))
    steps, on_host = [], []
    for record in trainer.run(whole(0, STEPS)):
        steps.append(record.step)
        on_host.append(model.embedding.pins.is_on_host)
        if record.step == at:
            break
    steps += [record.step for record in trainer.run(whole(0, STEPS))]
    return steps, [any(on_host), model.embedding.pins.is_on_host]


def test_ranks_leave_a_run_while_the_cpu_trains_and_begin_another() -> None:
    for steps, (was_on_host, is_on_host) in run(2, left, 2):
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > 2 + STEPS
        assert was_on_host
        assert not is_on_host
