"""DIN and WideDeep of torch-rechub, trained by `CTRTrainer.fit` with validation."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from compare import Case, optimizer_of, recorded
from generated import ROWS, labels, skewed
from torch import Tensor, nn
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.basic.initializers import RandomNormal
from torch_rechub.models.ranking import DIN, WideDeep
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator

_BATCH, _HISTORY, _CHECKED = 256, 10, 2048
_NORMAL = RandomNormal(0, 0.05)


def _sparse(name: str, rows: int, width: int = 16) -> SparseFeature:
    return SparseFeature(name, rows, width, initializer=_NORMAL)


def _din() -> nn.Module:
    history = SequenceFeature("history", ROWS, 16, "concat", "item", padding_idx=0)
    return DIN(
        [_sparse("user", ROWS), _sparse("hour", 24)],
        [history],
        [SparseFeature("item", ROWS, 16, padding_idx=0, initializer=_NORMAL)],
        mlp_params={"dims": [64, 32], "dropout": 0.2},
        attention_mlp_params={"dims": [32]},
    )


def _wide_deep() -> nn.Module:
    return WideDeep(
        [_sparse("cross", 2 * ROWS), _sparse("user", ROWS)],
        [_sparse("user", ROWS), _sparse("item", ROWS), DenseFeature("price")],
        mlp_params={"dims": [64, 32], "dropout": 0.2, "activation": nn.SiLU},
    )


def _inputs(steps: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    count = steps * _BATCH + _CHECKED
    x = {"user": skewed(ROWS, count, 1), "item": skewed(ROWS, count, 2, first=1)}
    x["hour"] = np.arange(count) % 24
    x["cross"] = skewed(2 * ROWS, count, 3)
    x["history"] = skewed(ROWS, count * _HISTORY, 4, first=1).reshape(count, _HISTORY)
    x["history"][:, -1] = 0  # padding
    x["price"] = np.random.default_rng(5).random(count, dtype=np.float32)
    return x, labels(x["user"], x["item"])


def cases(steps: int) -> list[Case]:
    x, y = _inputs(steps)

    def train(model: nn.Module, optimizer: str, losses: list[float]) -> None:
        train_x = {name: values[:-_CHECKED] for name, values in x.items()}
        check_x = {name: values[-_CHECKED:] for name, values in x.items()}
        data = DataGenerator(train_x, y[:-_CHECKED])
        check = (check_x, y[-_CHECKED:])
        loader, checks, _ = data.generate_dataloader(*check, *check, batch_size=_BATCH)
        with tempfile.TemporaryDirectory() as folder:
            trainer = CTRTrainer(
                model,
                optimizer_fn=lambda _: optimizer_of(model, optimizer),
                optimizer_params={},
                n_epoch=1,
                model_path=folder,
            )
            trainer.criterion = recorded(trainer.criterion, losses)
            trainer.fit(loader, checks)

    def score(model: Any) -> Tensor:
        model.eval()
        return model({name: torch.as_tensor(values[-_CHECKED:]) for name, values in x.items()})

    return [
        Case("torch-rechub", "DIN", _din, train, score),
        Case("torch-rechub", "WideDeep", _wide_deep, train, score),
    ]
