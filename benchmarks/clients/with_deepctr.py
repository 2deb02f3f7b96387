"""DeepFM of deepctr-torch, trained by `model.fit`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from compare import Case, optimizer_of, quiet, recorded
from generated import ROWS, labels, skewed
from torch import Tensor, nn
from torch.nn import functional

with quiet():  # it asks the network for its latest version
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names
    from deepctr_torch.models import DeepFM

_BATCH = 256
_TABLES = {"user": 2 * ROWS, "item": ROWS, "page": ROWS + 5_000, "hour": 24}
_HISTORY = 8


def _columns() -> list[Any]:
    sparse = [
        SparseFeat(name, vocabulary_size=rows, embedding_dim=8) for name, rows in _TABLES.items()
    ]
    history = SparseFeat(
        "history", vocabulary_size=ROWS, embedding_dim=8, embedding_name="item"
    )  # the items' table
    return [*sparse, VarLenSparseFeat(history, _HISTORY, "mean"), DenseFeat("price", 1)]


def _inputs(steps: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    count = steps * _BATCH
    x = {name: skewed(rows, count, seed) for seed, (name, rows) in enumerate(_TABLES.items())}
    y = labels(x["user"], x["item"])
    x["history"] = skewed(ROWS, count * _HISTORY, 11).reshape(count, _HISTORY)
    x["price"] = np.random.default_rng(12).random(count)
    assert set(x) == set(get_feature_names(_columns()))
    return x, y


def _build(**options: Any) -> nn.Module:
    columns = _columns()
    return DeepFM(
        columns, columns, init_std=0.05, dnn_activation=nn.SiLU, dnn_dropout=0.2, **options
    )


def _mean_loss(predicted: Tensor, wanted: Tensor, reduction: str) -> Tensor:
    # Their loop asks for sums, which would need a learning rate that depends on the batch.
    return functional.binary_cross_entropy(predicted, wanted)


def cases(steps: int) -> list[Case]:
    x, y = _inputs(steps)

    def train(model: Any, optimizer: str, losses: list[float]) -> None:
        loss = recorded(_mean_loss, losses)
        model.compile(optimizer_of(model, optimizer), loss, metrics=["auc"])
        model.fit(dict(x), y, batch_size=_BATCH, epochs=1, verbose=0)

    def score(model: Any) -> Tensor:
        return torch.from_numpy(model.predict({name: ids[:2048] for name, ids in x.items()}, 256))

    def without_l2() -> nn.Module:
        return _build(l2_reg_linear=0, l2_reg_embedding=0, l2_reg_dnn=0)

    # The model's lists for L2 terms hold the weights of its tables even where all terms are 0.
    dense = {"SparseAdam": "the L2 terms of the loss make gradients of tables dense"}
    replace = {"held": "replace"}
    new = partial(Case, "deepctr-torch", train=train, score=score)
    return [
        new("DeepFM", without_l2, options=replace),
        new("DeepFM, L2", _build, expect="kept", not_in_torch=dense),
        new("DeepFM, L2, replaced", _build, expect="refused", not_in_torch=dense, options=replace),
    ]
