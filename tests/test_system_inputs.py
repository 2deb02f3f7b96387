"""Inputs that plain training takes are taken by systems, too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from hotrow.fae import FAE
from hotrow.hotline import Hotline
from hotrow.optim import RowRule

Item = dict[str, Any]


class Weighed(nn.Module):
    """Whose per-sample weights are learned."""

    def __init__(self, strategy: str, rule: RowRule) -> None:
        super().__init__()
        tables = [hotrow.EmbeddingBagConfig("a", 300, 4, ["f"])]
        self.embedding = hotrow.EmbeddingBagCollection(tables, rule, "6KiB", strategy=strategy)
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


def trained(model: nn.Module, batches: list[Item], system: Any = None) -> Any:
    trainer: hotrow.Trainer[Item] = hotrow.Trainer(
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
        tables = [
            hotrow.EmbeddingBagConfig("a", 200, 4, ["f"]),
            hotrow.EmbeddingBagConfig("b", 200, 8, ["g"]),
        ]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(lr=0.1), "12KiB", strategy="static"
        )
        self.top = nn.Linear(12, 1)

    def forward(self, batch: Item) -> Tensor:
        found: Tensor = self.top(self.embedding(batch["ids"]).values()).squeeze(1)
        return found


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
