"""What tests of systems on several ranks train: generated clicks, read in several ways."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import hotrow
from click_models import ClickModel, trainer_of
from hotrow.data import ClickBatch, Loader, SyntheticClicks, SyntheticConfig
from hotrow.data.sources import Samples
from hotrow.engine.split_batch import Parted
from hotrow.inputs.tree import tensors_in

SIZE = 48
CONFIG = SyntheticConfig(rows=(2_000, 60, 9), batch_size=SIZE, num_dense=3, skew=1.3, seed=5)


def model(strategy: str = "lookahead", **options: Any) -> ClickModel:
    tables = [
        hotrow.EmbeddingBagConfig(f"cat_{k}", rows, 4, [f"cat_{k}"])
        for k, rows in enumerate(CONFIG.rows)
    ]
    options = {"optimizer": hotrow.Adagrad(lr=0.05), "budget": "50%", "seed": 0, **options}
    return ClickModel(hotrow.EmbeddingBagCollection(tables, strategy=strategy, **options), 3)


@cache
def clicks(**changes: Any) -> SyntheticClicks:
    return SyntheticClicks(SyntheticConfig(**(asdict(CONFIG) | changes)))


def whole(first: int, last: int) -> list[ClickBatch]:
    """Whole batches on every rank, as a loader of the user's own may give them."""
    return list(map(clicks().batch, range(first, last)))


class Epoch:
    """A loader of parts that is read again, and that can give whole batches."""

    def __init__(self, first: int, last: int) -> None:
        self._span = first, last

    def __iter__(self) -> Iterator[ClickBatch]:
        return clicks().batches(*self._span)

    def __len__(self) -> int:
        return self._span[1] - self._span[0]

    def whole_batches(self) -> list[ClickBatch]:
        return whole(*self._span)


class Stored:
    """Generated clicks as a source, whose samples have numbers."""

    features = single = tuple(f"cat_{k}" for k in range(len(CONFIG.rows)))
    identity = "generated clicks"

    def __init__(self, batches: int) -> None:
        self._batches = whole(0, batches)
        self.sizes = np.full(batches, SIZE)

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        chosen = [self._batches[block] for block in blocks]
        ids, dense, label = (
            np.concatenate([getattr(x, name).numpy() for x in chosen])
            for name in ("sparse", "dense", "label")
        )
        return Samples(ids, dense, label.astype(np.uint8), {})


def loader(batches: int, epochs: int = 1) -> Loader:
    """A hotrow loader with a short last batch, and samples that have numbers."""
    return Loader(Stored(batches), batch_size=SIZE - 5, seed=1, epochs=epochs, mixed=400, workers=1)


def trained(
    system: Any, model: ClickModel, batches: Iterable[Any], test: Iterable[Any] | None = None
) -> dict[str, Any]:
    """Train by a system; return what it decided, what was trained, and what came of it."""
    trainer = trainer_of(model, system)
    test = Epoch(50, 52) if test is None else test
    seen: list[list[torch.Tensor]] = []
    first: list[int] = []  # samples of first parts
    forwards: list[int] = []  # samples of forward passes with gradients
    passes = system.passes

    def count(module: Any, arguments: Any) -> None:
        if module.training and torch.is_grad_enabled():
            forwards.append(len(arguments[0].label))

    model.register_forward_pre_hook(count)

    def noted(batch: Any) -> Any:
        is_parted = isinstance(batch, Parted)
        first.append(batch.first if is_parted else 0)
        seen.append([x.cpu().clone() for x in tensors_in(batch.batch if is_parted else batch)])
        return batch

    system.passes = lambda batches: (map(noted, segment) for segment in passes(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of small budgets
        records = list(trainer.run(batches))
    return {
        "losses": [x.loss for x in records],
        "samples": [x.samples for x in records],
        "sent": [(x.bytes_of_ids, x.bytes_of_rows, x.bytes_of_grads) for x in records],
        "record": asdict(system.record),
        "seen": seen,
        "first": first,
        "forwards": forwards,
        "evaluation": trainer.mean_loss(test, whole=True),
        "bits": model.bits(),
    }


def same_tensors(one: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))


def assert_like_alone(results: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All ranks did the same, bit for bit, and what one rank does alone up to rounding."""
    first = results[0]
    assert same_tensors(first["seen"], alone["seen"])
    for key in ("samples", "first"):
        assert first[key] == alone[key], key
    torch.testing.assert_close(first["losses"], alone["losses"], rtol=1e-5, atol=1e-6)
    assert abs(first["evaluation"] - alone["evaluation"]) < 1e-5
    for one, other in zip(first["bits"], alone["bits"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for other in results[1:]:
        assert same_tensors(other["seen"], first["seen"])
        assert all(map(torch.equal, other["bits"], first["bits"]))
        for key in ("losses", "samples", "first", "evaluation"):
            assert other[key] == first[key], key
