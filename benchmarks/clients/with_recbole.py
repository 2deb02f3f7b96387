"""SASRec, DeepFM and BPR of recbole, trained by its `Trainer`, which also evaluates."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import Case, optimizer_of, recorded, seed_all
from generated import ROWS, labels, skewed
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer
from torch import Tensor, nn

_BATCH, _LENGTH = 128, 10
_CASE_FIELDS = ("budget", "expect", "not_in_torch")
_FOLDER = tempfile.TemporaryDirectory(prefix="clients-")
_COMMON = {
    "data_path": _FOLDER.name,
    "checkpoint_dir": _FOLDER.name,
    "load_col": {"inter": ["user_id", "item_id", "label", "timestamp"]},
    "train_batch_size": _BATCH,
    "epochs": 1,
    "embedding_size": 16,
    "use_gpu": False,
    "state": "ERROR",
    "log_wandb": False,
}
_ALL = {"RS": [1.0, 0.0, 0.0]}
_SEQUENCES = {
    "MAX_ITEM_LIST_LENGTH": _LENGTH,
    "hidden_size": 32,
    "inner_size": 64,
    "eval_args": {"split": _ALL, "order": "TO", "group_by": "user", "mode": "full"},
}
_PAIRS = {"train_neg_sample_args": {"distribution": "uniform", "sample_num": 1, "dynamic": False}}


def _write(name: str, users: np.ndarray, items: np.ndarray) -> None:
    folder = Path(_FOLDER.name, name)
    folder.mkdir()
    rows = zip(users, items, labels(users, items), np.arange(len(users)), strict=True)
    lines = ["user_id:token\titem_id:token\tlabel:float\ttimestamp:float"]
    lines += [f"u{user}\ti{item}\t{label}\t{time}" for user, item, label, time in rows]
    (folder / f"{name}.inter").write_text("\n".join(lines) + "\n")


def _generate(steps: int) -> None:
    count = steps * _BATCH
    _write("clicks", skewed(ROWS, count, 1), skewed(ROWS, count, 2))
    # A user's first item is no sample, as nothing comes before it.
    users = np.repeat(np.arange(count // _LENGTH), _LENGTH + 1)
    _write("sequences", users, skewed(ROWS, len(users), 3))


class _Job:
    """What recbole needs for one model; data loaders are built anew for each training."""

    def __init__(self, model: str, dataset: str, options: dict[str, Any]) -> None:
        self.config = Config(model, dataset, config_dict={**_COMMON, **options})
        logging.disable(logging.WARNING)
        self.dataset = create_dataset(self.config)

    def loader(self) -> Any:
        return data_preparation(self.config, copy.deepcopy(self.dataset))[0]  # it changes its data

    def build(self) -> nn.Module:
        return get_model(self.config["model"])(self.config, self.loader()._dataset)

    def train(self, model: Any, optimizer: str, losses: list[float]) -> None:
        loader = self.loader()
        seed_all()
        model.calculate_loss = recorded(model.calculate_loss, losses)
        with contextlib.chdir(_FOLDER.name):  # its logs go to the working directory
            kind = get_trainer(self.config["MODEL_TYPE"], self.config["model"])
            trainer = kind(self.config, model)
            trainer.optimizer = optimizer_of(model, optimizer)
            trainer.fit(loader, saved=True, verbose=False)

    def score(self, model: Any) -> Tensor:
        model.eval()
        seed_all()
        batch = next(iter(self.loader()))
        whole = [] if self.config["model"] == "DeepFM" else [model.full_sort_predict(batch)[:5]]
        return torch.cat([scores.reshape(-1) for scores in (model.predict(batch), *whole)])


def _case(name: str, dataset: str, title: str = "", **options: Any) -> Case:
    of_case = {key: options.pop(key) for key in _CASE_FIELDS if key in options}
    job = cache(lambda: _Job(name, dataset, options))
    return Case(
        "recbole",
        title or name,
        lambda: job().build(),
        lambda *args: job().train(*args),
        lambda model: job().score(model),
        **of_case,
    )


def cases(steps: int) -> list[Case]:
    _generate(steps)
    by_click = {"eval_args": {"split": _ALL, "order": "RO", "mode": "full"}}
    labelled = {
        "eval_args": {"split": _ALL, "order": "RO", "mode": "labeled"},
        "train_neg_sample_args": None,
        "metrics": ["AUC"],
        "valid_metric": "AUC",
    }
    dense = {"SparseAdam": "the softmax over all items makes the gradient of the table dense"}
    tied = {"loss_type": "CE", "train_neg_sample_args": None, "not_in_torch": dense}
    return [
        _case("SASRec", "sequences", loss_type="BPR", **_SEQUENCES, **_PAIRS),
        _case("SASRec", "sequences", "SASRec, tied", budget="400%", **_SEQUENCES, **tied),
        _case("SASRec", "sequences", "SASRec, tied, 20%", expect="refused", **_SEQUENCES, **tied),
        _case("DeepFM", "clicks", **labelled),
        _case("BPR", "clicks", **by_click, **_PAIRS),
    ]
