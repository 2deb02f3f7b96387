"""Every model with tables, batches and a twin in plain PyTorch, for tests of them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from builders import skewed
from hotrow.data import ClickBatch, SequenceBatch
from hotrow.models import DLRM, TBSM, DCNv2, DeepFM

Bag, Config = hotrow.EmbeddingBagConfig, hotrow.EmbeddingConfig
NUM_DENSE, NUM_STEPS, DIM = 5, 6, 8
ROWS = (3000, 40, 900)
STEP_FEATURES = ("user", "item", "category")


class Twin(nn.Module):
    """A model in torch's own words, from the weights of ours; parameters go by the same names."""

    pooling = "sum"

    def __init__(self, state: dict[str, Tensor], tables: Sequence[Bag]) -> None:
        super().__init__()
        self.tables = {name: table for table in tables for name in table.feature_names}
        rows = {key.split(".")[2]: each for key, each in state.items() if "embedding" in key}
        self.rows = nn.ModuleDict(
            {table.name: self.table(rows[table.name].clone(), table) for table in tables}
        )
        self.names = [key for key in state if "embedding" not in key]
        self.dense = nn.ParameterList(nn.Parameter(state[key].clone()) for key in self.names)

    def table(self, weight: Tensor, table: Bag) -> nn.Module:
        return nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum")

    def weight(self, name: str) -> Tensor:
        found: Tensor = self.dense[self.names.index(name)]
        return found

    def layers(self, name: str, x: Tensor, *, ends_in_relu: bool) -> Tensor:
        """Linear layers with ReLU between them."""
        places = [int(key.split(".")[1]) for key in self.names if key.startswith(f"{name}.")]
        for place in sorted(set(places)):
            x = F.linear(
                x, self.weight(f"{name}.{place}.weight"), self.weight(f"{name}.{place}.bias")
            )
            if place < max(places) or ends_in_relu:
                x = x.relu()
        return x

    def pooled(self, sparse: Any) -> list[Tensor]:
        """A vector per feature."""
        if isinstance(sparse, Tensor):
            columns = zip(self.tables.items(), sparse.T, strict=True)
            return [self.rows[table.name](ids[:, None]) for (_, table), ids in columns]
        found, offsets = [], sparse.offsets()
        size = (offsets.numel() - 1) // len(self.tables)
        for place, name in enumerate(sparse.keys()):
            mine = offsets[place * size : (place + 1) * size + 1]
            ids = sparse.values()[mine[0] : mine[-1]]
            found.append(self.rows[self.tables[name].name](ids, mine[:-1] - mine[0]))
        return found

    def state(self) -> dict[str, Tensor]:
        """Named as in our model's state dict."""
        kind = "embedding_bags" if self.pooling == "sum" else "embeddings"
        rows = {f"embedding.{kind}.{key}.weight": each.weight for key, each in self.rows.items()}
        dense = zip(self.names, self.dense, strict=True)
        return {key: each.detach() for key, each in [*rows.items(), *dense]}


def dots(vectors: Sequence[Tensor]) -> list[Tensor]:
    """The dot products of all pairs, [B] each."""
    return [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]


class PlainDLRM(Twin):
    def forward(self, batch: ClickBatch) -> Tensor:
        dense = self.layers("bottom", batch.dense, ends_in_relu=True)
        products = dots([dense, *self.pooled(batch.sparse)])
        joined = torch.cat([dense, torch.stack(products, dim=1)], dim=1)
        return self.layers("top", joined, ends_in_relu=False)[:, 0]


class PlainDCNv2(Twin):
    def forward(self, batch: ClickBatch) -> Tensor:
        dense = self.layers("bottom", batch.dense, ends_in_relu=True)
        start = x = torch.cat([dense, *self.pooled(batch.sparse)], dim=1)
        for layer in range(2):
            inner = x
            if f"cross.{layer}.down.weight" in self.names:
                inner = inner @ self.weight(f"cross.{layer}.down.weight").T
            product = inner @ self.weight(f"cross.{layer}.up.weight").T
            x = start * (product + self.weight(f"cross.{layer}.up.bias")) + x
        return self.layers("top", x, ends_in_relu=False)[:, 0]


class PlainDeepFM(Twin):
    def forward(self, batch: ClickBatch) -> Tensor:
        rows = self.weight("dense_rows")
        fields = [batch.dense[:, [j]] * rows[j] for j in range(len(rows))]
        fields += self.pooled(batch.sparse)
        vectors = [field[:, :DIM] for field in fields]
        first_order = sum(field[:, DIM] for field in fields) + self.weight("bias")
        deep = self.layers("deep", torch.cat(vectors, dim=1), ends_in_relu=False)[:, 0]
        return first_order + sum(dots(vectors)) + deep


class PlainTBSM(Twin):
    """Step by step."""

    pooling = "none"

    def table(self, weight: Tensor, table: Bag) -> nn.Module:
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=table.padding_idx)

    def forward(self, batch: SequenceBatch) -> Tensor:
        size = len(batch.label)
        ids = batch.sparse.values().view(len(STEP_FEATURES), size, NUM_STEPS + 1)
        steps = []
        for step in range(NUM_STEPS + 1):
            dense = self.layers("bottom", batch.dense[:, step], ends_in_relu=True)
            found = [self.rows[name](ids[i, :, step]) for i, name in enumerate(STEP_FEATURES)]
            products = torch.stack(dots([dense, *found]), dim=1)
            vector = self.layers("top", torch.cat([dense, products], dim=1), ends_in_relu=True)
            steps.append(vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-12))
        *past, target = steps
        is_real = [batch.lengths >= NUM_STEPS - step for step in range(NUM_STEPS)]
        past = [each * real[:, None] for each, real in zip(past, is_real, strict=True)]
        mapped = target @ self.weight("metric").T
        likeness = [((each @ self.weight("metric").T) * mapped).sum(1) for each in past]
        weights = self.layers(
            "sequence", torch.stack(likeness, dim=1), ends_in_relu=False
        ).sigmoid()
        context = sum(weights[:, [step]] * each for step, each in enumerate(past))
        assert isinstance(context, Tensor)
        return self.layers("final", torch.cat([context, target], dim=1), ends_in_relu=False)[:, 0]


def clicks(count: int, *, most: int = 1, size: int = 32) -> list[ClickBatch]:
    """With up to `most` ids of a feature."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(count):
        lengths = torch.randint(1, most + 1, (len(ROWS), size), generator=generator)
        ids = [
            skewed(generator, rows, int(each.sum()))
            for rows, each in zip(ROWS, lengths, strict=True)
        ]
        names = [f"f{i}" for i in range(len(ROWS))]
        jagged = hotrow.KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths.flatten())
        found.append(
            ClickBatch(
                dense=torch.randn(size, NUM_DENSE, generator=generator),
                sparse=torch.stack(ids, dim=1) if most == 1 else jagged,
                label=torch.rand(size, generator=generator).round(),
            )
        )
    return found


def histories(count: int, *, size: int = 16) -> list[SequenceBatch]:
    """Some are short, and one has no past at all; padding is id 0."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(count):
        lengths = torch.randint(1, NUM_STEPS + 1, (size,), generator=generator)
        lengths[0], lengths[1] = 0, NUM_STEPS
        is_padding = torch.arange(NUM_STEPS + 1) < NUM_STEPS - lengths[:, None]
        ids = {}
        for name, rows in zip(STEP_FEATURES, ROWS, strict=True):
            drawn = 1 + skewed(generator, rows - 1, size * (NUM_STEPS + 1))
            ids[name] = drawn.view(size, -1).masked_fill(is_padding, 0)
        dense = torch.rand(size, NUM_STEPS + 1, 1, generator=generator)
        label = torch.rand(size, generator=generator).round()
        found.append(SequenceBatch.from_ids(dense, ids, label, lengths))
    return found


@dataclass(frozen=True)
class ModelCase:
    tables: list[Bag]
    make: Callable[..., nn.Module]  # of the embedding and options
    batches: Callable[[int], list[Any]]
    twin: type[Twin]
    padded: tuple[str, ...]  # layers whose inputs `pad_to` rounds

    @property
    def collection(self) -> type[hotrow.EmbeddingBagCollection]:
        is_pooled = self.tables[0].pooling != "none"
        return hotrow.EmbeddingBagCollection if is_pooled else hotrow.EmbeddingCollection

    def embedding(self, rule: Any = None, **options: Any) -> hotrow.EmbeddingBagCollection:
        options = {"strategy": "all-fast", "seed": 3, **options}
        return self.collection(self.tables, rule or hotrow.SGD(lr=0.1), **options)

    def build(self, embedding: nn.Module | None = None, **options: Any) -> nn.Module:
        """Two calls give the same weights."""
        options = {"generator": torch.Generator().manual_seed(3), **options}
        return self.make(embedding or self.embedding(), **options)

    def twin_of(self, model: nn.Module) -> Twin:
        state = {key: each.cpu() for key, each in model.state_dict().items()}
        return self.twin(state, self.tables)


def tables(*dims: int) -> list[Bag]:
    sizes = zip(ROWS, dims, strict=True)
    return [Bag(f"t{i}", rows, dim, [f"f{i}"]) for i, (rows, dim) in enumerate(sizes)]


def dcnv2(rank: int | None) -> Callable[..., nn.Module]:
    def make(embedding: nn.Module, **options: Any) -> nn.Module:
        options = {"cross_layers": 2, "cross_rank": rank, **options}
        return DCNv2(embedding, NUM_DENSE, (16, 7), (12, 1), **options)

    return make


MODEL_CASES = {
    "dlrm": ModelCase(
        tables(DIM, DIM, DIM),
        lambda embedding, **options: DLRM(embedding, NUM_DENSE, (16, DIM), (12, 1), **options),
        clicks,
        PlainDLRM,
        padded=("bottom", "top"),
    ),
    "dcnv2": ModelCase(
        tables(DIM, 4, DIM), dcnv2(5), lambda n: clicks(n, most=4), PlainDCNv2, padded=("bottom",)
    ),
    "dcnv2-full": ModelCase(
        tables(DIM, DIM, DIM), dcnv2(None), clicks, PlainDCNv2, padded=("bottom",)
    ),
    "deepfm": ModelCase(
        tables(DIM + 1, DIM + 1, DIM + 1),
        lambda embedding, **options: DeepFM(embedding, NUM_DENSE, DIM, (16, 12, 1), **options),
        clicks,
        PlainDeepFM,
        padded=("deep",),
    ),
    "deepfm-multi-hot": ModelCase(
        tables(DIM + 1, DIM + 1, DIM + 1),
        lambda embedding, **options: DeepFM(embedding, NUM_DENSE, DIM, (16, 12, 1), **options),
        lambda n: clicks(n, most=4),
        PlainDeepFM,
        padded=("deep",),
    ),
    "tbsm": ModelCase(
        [
            Config(name, rows, DIM, [name], padding_idx=0)
            for name, rows in zip(STEP_FEATURES, ROWS, strict=True)
        ],
        lambda embedding, **options: TBSM(
            embedding, 1, NUM_STEPS, (DIM,), (9, 7), (5, 5), (12, 1), **options
        ),
        histories,
        PlainTBSM,
        padded=("bottom", "top", "sequence", "final"),
    ),
}
