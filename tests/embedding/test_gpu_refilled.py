"""Loaders that fill the same buffers again, and ids that change behind a plan, on a GPU.

Uploads happen long after reading there, and copies from page-locked memory later still.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hotrow

pytestmark = pytest.mark.gpu

ROWS, SIZE, STEPS = 20_000, 512, 200
TABLES = [
    hotrow.EmbeddingBagConfig("a", ROWS, 16, ["f"]),
    hotrow.EmbeddingBagConfig("b", ROWS, 16, ["g"]),
]
STRATEGIES = [
    "all-fast", "hybrid", "static-hybrid", "uncached", "static", "lru", "scratchpipe", "lookahead",
]  # fmt: skip
Parts = dict[str, Any]


class Model(nn.Module):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = hotrow.EmbeddingBagCollection(
            TABLES, hotrow.SGD(lr=0.1), "20%", strategy=strategy, seed=1, device="cuda"
        )
        self.top = nn.Linear(35, 1)

    def forward(self, batch: Parts) -> Tensor:
        vectors = self.embedding(batch["ids"]).values()
        logits: Tensor = self.top(torch.cat([batch["dense"], vectors], 1)).squeeze(1)
        return logits


def some(count: int = STEPS, *, jagged: bool = False) -> list[Parts]:
    draw = torch.Generator().manual_seed(5)
    found: list[Parts] = []
    for number in range(count):
        ids: Any = (torch.rand(SIZE, 2, generator=draw) ** 3 * ROWS).long()
        if jagged:
            ids = hotrow.KeyedJaggedTensor(
                ["f", "g"], ids.t().flatten(), offsets=torch.arange(2 * SIZE + 1)
            )
        dense = torch.rand(SIZE, 3, generator=draw)
        found.append({"ids": ids, "dense": dense, "label": torch.full((SIZE,), float(number))})
    return found


def copied(batch: Parts) -> Parts:
    return {name: part.clone() for name, part in batch.items()}


# -- loaders -------------------------------------------------------------------------------


def tensors_of(batch: Parts) -> list[Tensor]:
    ids = batch["ids"]
    mine = [ids] if isinstance(ids, Tensor) else [ids.values(), ids.offsets()]
    return [*mine, batch["dense"], batch["label"]]


def refilled(
    batches: list[Parts],
    make: Callable[[Parts], Parts],
    write: Callable[[Tensor, Tensor], Any],
    buffers: int,
) -> Iterator[Parts]:
    rooms = [make(batches[0]) for _ in range(buffers)]
    for number, batch in enumerate(batches):
        room = rooms[number % buffers]
        for there, part in zip(tensors_of(room), tensors_of(batch), strict=True):
            write(there, part)
        yield dict(room)


def by_torch(there: Tensor, part: Tensor) -> None:
    there.copy_(part)


def by_data(there: Tensor, part: Tensor) -> None:
    there.data.copy_(part)


def by_numpy(there: Tensor, part: Tensor) -> None:
    there.numpy()[:] = part.numpy()


def pinned(batch: Parts) -> Parts:
    return {name: part.clone().pin_memory() for name, part in batch.items()}


def on_gpu(batch: Parts) -> Parts:
    return {name: part.to("cuda") for name, part in batch.items()}


LOADERS: dict[str, tuple[Any, Any]] = {
    "ordinary": (copied, by_torch),
    "ordinary-numpy": (copied, by_numpy),
    "page-locked": (pinned, by_torch),
    "page-locked-numpy": (pinned, by_numpy),
    "on-the-gpu": (on_gpu, by_torch),
    "on-the-gpu-data": (on_gpu, by_data),
}


# -- loops ---------------------------------------------------------------------------------


class Run:
    """A training run, and what its loop was given."""

    def __init__(self, strategy: str) -> None:
        self.model = Model(strategy).cuda()
        lr = torch.tensor(0.01, device="cuda")
        self.dense = torch.optim.SGD(self.model.parameters(), lr=lr, fused=True)
        self.labels: list[Tensor] = []

    def train(self, loader: Any, *, captured: bool, change: Any = None, **options: Any) -> Run:
        step = hotrow.graphed(
            self.model,
            functional.mse_loss,
            self.dense,
            labels=lambda batch: batch["label"] / STEPS,
            batch_size=SIZE,
        )
        stream = hotrow.ahead(
            loader,
            self.model,
            ids=lambda batch: batch["ids"],
            step=step if captured else None,
            **options,
        )
        for number, batch in enumerate(stream):
            self.labels.append(batch["label"].clone())
            if change is not None:
                change(number, batch)
            if captured:
                step(batch)
            else:
                loss = functional.mse_loss(self.model(batch), batch["label"] / STEPS)
                self.dense.zero_grad()
                loss.backward()
                self.dense.step()
        return self

    def found(self) -> tuple[list[float], list[Tensor]]:
        labels = [float(each[0]) for each in self.labels if bool((each == each[0]).all())]
        return labels, [each.cpu().clone() for each in self.model.state_dict().values()]


def assert_same(found: Run, expected: Run) -> None:
    labels, bits = found.found()
    assert labels == [float(number) for number in range(STEPS)]
    assert all(map(torch.equal, bits, expected.found()[1]))


either = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
AHEAD = [
    "all-fast",
    "lookahead",
    "scratchpipe",
]  # what a captured step and several buffers matter to


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("strategy", "buffers", "captured"),
    [
        *itertools.product(AHEAD, (1, 3), (False, True)),
        *((strategy, 1, False) for strategy in STRATEGIES if strategy not in AHEAD),
    ],
)
def test_a_loader_may_fill_its_buffers_again(
    strategy: str, buffers: int, captured: bool, loader: str
) -> None:
    expected = Run(strategy).train(some(), captured=captured)
    source = refilled(some(), *LOADERS[loader], buffers)
    assert_same(Run(strategy).train(source, captured=captured), expected)


def read_one_by_one(strategy: str, source: Any, **options: Any) -> Run:
    """Train, and check that each batch is read when the one before it was trained."""
    read = 0

    def counted() -> Iterator[Parts]:
        nonlocal read
        for batch in source:
            read += 1
            yield batch

    def check(number: int, batch: Parts) -> None:
        assert read == number + 1

    return Run(strategy).train(counted(), captured=False, change=check, **options)


@pytest.mark.parametrize("loader", ["ordinary", "page-locked-numpy", "on-the-gpu"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_depth_of_zero_reads_nothing_ahead(strategy: str, loader: str) -> None:
    expected = Run(strategy).train(some(), captured=False)
    found = read_one_by_one(strategy, refilled(some(), *LOADERS[loader], 1), depth=0)
    assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["uncached", "static", "lru"])
def test_strategies_that_know_no_batch_ahead_read_none(strategy: str) -> None:
    read_one_by_one(strategy, some(40))


@either
def test_jagged_ids_may_be_refilled(captured: bool) -> None:
    expected = Run("lookahead").train(some(jagged=True), captured=captured)
    source = refilled(some(jagged=True), pinned, by_numpy, 1)
    assert_same(Run("lookahead").train(source, captured=captured), expected)


class Samples(Dataset[Parts]):
    def __init__(self) -> None:
        self.batches = some()

    def __len__(self) -> int:
        return STEPS * SIZE

    def __getitem__(self, place: int) -> Parts:
        batch = self.batches[place // SIZE]
        return {name: part[place % SIZE] for name, part in batch.items()}


@either
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_with_page_locked_memory(captured: bool) -> None:
    expected = Run("lookahead").train(some(), captured=captured)
    loader = DataLoader(Samples(), batch_size=SIZE, num_workers=2, pin_memory=True)
    assert_same(Run("lookahead").train(loader, captured=captured), expected)


# -- writes after a batch was yielded ------------------------------------------------------


def write_at(place: int, how: str) -> Callable[[int, Parts], None]:
    def change(number: int, batch: Parts) -> None:
        if number == place:
            ids = batch["ids"] if isinstance(batch["ids"], Tensor) else batch["ids"].values()
            if how == "data":
                ids.data.clamp_(max=100)
            else:
                ids.clamp_(max=100)

    return change


@either
@pytest.mark.parametrize(
    ("strategy", "place", "jagged"),
    [
        *itertools.product(AHEAD, (0, 50, STEPS - 1), (False, True)),
        *((strategy, 50, False) for strategy in STRATEGIES if strategy not in AHEAD),
    ],
)
def test_a_write_that_no_version_shows_is_an_error(
    strategy: str, place: int, jagged: bool, captured: bool
) -> None:
    run = Run(strategy)
    with pytest.raises(RuntimeError, match=rf"batch {place} of this pass, .* ids were changed"):
        run.train(some(jagged=jagged), captured=captured, change=write_at(place, "data"))
    assert len(run.labels) <= min(STEPS, place + 32)
    run.model.embedding.check()


@either
@pytest.mark.filterwarnings("ignore:these ids are not the ones")
def test_a_write_that_a_version_shows_is_looked_up_as_it_is(captured: bool) -> None:
    batches = some()
    batches[50]["ids"].clamp_(max=100)
    expected = Run("lookahead").train(batches, captured=captured)
    found = Run("lookahead").train(some(), captured=captured, change=write_at(50, "version"))
    assert_same(found, expected)


@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ids_that_stay_as_they_are_are_no_error(strategy: str, jagged: bool) -> None:
    for captured in (False, True):
        Run(strategy).train(some(60, jagged=jagged), captured=captured)


def test_ids_of_32_bits_are_compared_as_they_are_now() -> None:
    batches = some(60)
    for batch in batches:
        batch["ids"] = batch["ids"].int()
    for captured in (False, True):
        Run("lookahead").train(map(dict, batches), captured=captured)
        with pytest.raises(RuntimeError, match=r"batch 50 of this pass, .* ids were changed"):
            Run("lookahead").train(
                map(dict, batches), captured=captured, change=write_at(50, "data")
            )


# -- systems and evaluation ----------------------------------------------------------------


class Again:
    """Batches in one set of page-locked buffers, as often as they are asked for."""

    def __init__(self, batches: list[Parts], *, refills: bool) -> None:
        self._batches, self._refills = batches, refills

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Parts]:
        if self._refills:
            return refilled(self._batches, pinned, by_numpy, 1)
        return map(copied, self._batches)


SYSTEMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "none": ("lookahead", lambda: None),
    "hotline": ("static", hotrow.Hotline),
    "slipstream": ("lookahead", lambda: hotrow.Slipstream(validate_every=0)),
    "random-drop": ("lookahead", lambda: hotrow.RandomDrop(0.2)),
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.filterwarnings("ignore:.*(search|reached|popular|inputs)")
def test_systems_and_evaluation_may_be_given_a_loader_that_refills(system: str) -> None:
    strategy, make = SYSTEMS[system]
    batches, draw = some(), torch.Generator().manual_seed(1)
    for each in batches:
        each["label"] = torch.randint(0, 2, (SIZE,), generator=draw).double()
    losses, measured = [], []
    for refills in (False, True):
        model = Model(strategy).cuda()
        trainer: hotrow.Trainer[Parts] = hotrow.Trainer(
            model,
            lambda logits, labels: functional.binary_cross_entropy_with_logits(
                logits, labels.float()
            ),
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            ids=lambda batch: batch["ids"],
            labels=lambda batch: batch["label"],
            device="cuda",
            system=make(),
        )
        records = list(trainer.run(Again(batches, refills=refills)))
        losses.append([record.loss for record in records])
        measured.append(trainer.evaluate(Again(batches[:50], refills=refills)))
    assert losses[0] == losses[1]
    assert measured[0] == measured[1]
