"""Inputs that plain training takes are taken by systems, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotrow
from hotrow.inputs import samples
from hotrow.kernels.rules import RowRule
from hotrow.systems.fae.fae import FAE
from hotrow.systems.hotline.hotline import Hotline

Item = dict[str, Any]


class Weighed(nn.Module):
    """Whose per-sample weights are learned."""

    def __init__(self, strategy: str, rule: RowRule) -> None:
        super().__init__()
        tables = [hotrow.EmbeddingBagConfig("a", 300, 4, ["f"])]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, rule, "6KiB", strategy=strategy, seed=0
        )
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(300, generator=draw))
        self.top = nn.Parameter(torch.rand(4, generator=draw))

    def forward(self, batch: Item) -> Tensor:
        ids = batch["ids"]
        weights = self.weight[ids.values()]
        weighed = hotrow.KeyedJaggedTensor(
            ids.keys(), ids.values(), offsets=ids.offsets(), weights=weights
        )
        found: Tensor = self.embedding(weighed).values() @ self.top
        return found


def trained(model: nn.Module, batches: Iterable[Any], system: Any = None) -> Any:
    trainer: hotrow.Trainer[Any] = hotrow.Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch["ids"],
        labels=lambda batch: batch["label"],
        system=system,
    )
    for _ in trainer.run(batches):
        pass
    return trainer


@pytest.mark.parametrize("rule", [hotrow.SGD(lr=0.1), hotrow.Adam(lr=0.01, eps=1e-3)])
def test_weights_that_are_learned_stay_out_of_the_rows(rule: RowRule) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(30):
        values = (torch.rand(32, generator=draw) ** 6 * 300).long()
        ids = hotrow.KeyedJaggedTensor(["f"], values, offsets=torch.arange(0, 33, 2))
        batches.append({"ids": ids, "label": torch.rand(16, generator=draw).round()})
    found, expected = Weighed("static", rule), Weighed("all-fast", rule)
    system = Hotline()
    trained(found, batches, system)
    trained(expected, batches)
    assert system.record.split_batches > 10
    for one, other in zip(
        (found.weight, found.top, found.embedding.state_dict()["embedding_bags.a.weight"]),
        (expected.weight, expected.top, expected.embedding.state_dict()["embedding_bags.a.weight"]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class TwoWidths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            hotrow.EmbeddingBagConfig("a", 200, 4, ["f"]),
            hotrow.EmbeddingBagConfig("b", 200, 8, ["g"]),
        ]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(lr=0.1), "12KiB", strategy="static", seed=0
        )
        self.top = nn.Linear(12, 1)

    def forward(self, batch: Item) -> Tensor:
        found: Tensor = self.top(self.embedding(batch["ids"]).values()).squeeze(1)
        return found


@pytest.mark.filterwarnings("ignore:none of 72 samples is popular")
@pytest.mark.parametrize("system", [Hotline(), FAE(sample_rate=1.0)])
def test_a_first_batch_may_lack_a_feature(system: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    batches = []
    for number in range(10):
        lengths = torch.ones(16, dtype=torch.long)
        lengths[8:] = number > 0
        values = torch.randint(200, (int(lengths.sum()),), generator=draw)
        ids = hotrow.KeyedJaggedTensor(["f", "g"], values, lengths=lengths)
        batches.append({"ids": ids, "label": torch.rand(8, generator=draw).round()})
    assert trained(TwoWidths(), batches, system).step >= 10


class LikeTorchRecs:
    """Has the methods of TorchRec's KeyedJaggedTensor that are asked for, and nothing of ours."""

    def __init__(self, ids: hotrow.KeyedJaggedTensor) -> None:
        self._ids = ids

    def keys(self) -> list[str]:
        return self._ids.keys()

    def values(self) -> Tensor:
        return self._ids.values()

    def offsets(self) -> Tensor:
        return self._ids.offsets()

    def weights_or_none(self) -> Tensor | None:
        return self._ids.weights_or_none()

    def to(self, device: torch.device, non_blocking: bool = False) -> LikeTorchRecs:
        return LikeTorchRecs(self._ids.to(device, non_blocking))


SYSTEMS: dict[str, Callable[[], Any]] = {
    "hotline": Hotline,
    "fae": lambda: FAE(sample_rate=1.0, test=jagged_batches(1)),
    "random-drop": lambda: hotrow.RandomDrop(0.3),
    "slipstream": lambda: hotrow.Slipstream(
        target=0.3, tolerance=0.29, hot_budget="100%", validate_every=0, watched=0.1
    ),
}


def jagged_batches(count: int = 30, weighted: bool = False) -> list[Item]:
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        lengths = torch.randint(3, (16,), generator=draw)
        values = (torch.rand(int(lengths.sum()), generator=draw) ** 4 * 200).long()
        weights = torch.rand(len(values), generator=draw) if weighted else None
        ids = hotrow.KeyedJaggedTensor(["f", "g"], values, lengths=lengths, weights=weights)
        batches.append({"ids": ids, "label": torch.rand(8, generator=draw).round()})
    return batches


@pytest.mark.thinned(2)  # each system once, with weights or without
@pytest.mark.parametrize(
    ("name", "weighted"),
    [(name, place % 2 == flag) for place, name in enumerate(SYSTEMS) for flag in (0, 1)],
)
def test_ids_that_only_look_like_ours_are_trained_like_ours(name: str, weighted: bool) -> None:
    ours = jagged_batches(weighted=weighted)
    theirs = [{**each, "ids": LikeTorchRecs(each["ids"])} for each in ours]
    models = TwoWidths(), TwoWidths()
    steps = [
        trained(model, batches, SYSTEMS[name]()).step
        for model, batches in zip(models, (ours, theirs), strict=True)
    ]
    assert steps[0] == steps[1]
    assert steps[0] < 30 or name in ("hotline", "fae")
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(one, other)


class Untold(IterableDataset[Item]):
    def __iter__(self) -> Iterator[Item]:
        yield from jagged_batches(30)


def test_a_loader_whose_length_is_an_error_has_none() -> None:
    loader = DataLoader(Untold(), batch_size=None)
    with pytest.raises(TypeError):
        len(loader)
    assert trained(TwoWidths(), loader, SYSTEMS["random-drop"]()).step < 30
    for name in ("slipstream", "hotline"):
        with pytest.raises(ValueError, match="give batches_per_epoch="):
            trained(TwoWidths(), loader, SYSTEMS[name]())
    assert trained(TwoWidths(), loader, Hotline(batches_per_epoch=30)).step == 30


class Pair:
    """A batch of an unknown class."""

    def __init__(self, ids: Any, label: Tensor) -> None:
        self.ids, self.label = ids, label

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def test_batches_of_any_class_are_told_apart_by_functions_of_their_own() -> None:
    batches = jagged_batches()
    pairs = [Pair(each["ids"], each["label"]) for each in batches]

    def take(pair: Pair, places: Tensor) -> Pair:
        return Pair(samples.take(pair.ids, places, size=len(pair.label)), pair.label[places])

    def join(pairs: Sequence[Pair]) -> Pair:
        labels = torch.cat([each.label for each in pairs])
        return Pair(samples.join([each.ids for each in pairs]), labels)

    options: dict[str, Any]
    models, options = (TwoWidths(), TwoWidths()), {"sample_rate": 1.0, "test": batches[:1]}
    trained(models[0], batches, FAE(**options))
    system = FAE(take=take, join=join, **options)
    trained(models[1], pairs, system)
    assert 0 < system.record.hot_samples < 8 * 30
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"holds a .*Pair, of which .* take= and join="):
        trained(TwoWidths(), pairs, FAE(**options))
    for alone in (partial(FAE, take=take), partial(hotrow.RandomDrop, 0.1, join=join)):
        with pytest.raises(ValueError, match=r"(take|join)= goes with (join|take)=, which is not"):
            alone()
