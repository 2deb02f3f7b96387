"""Loops that users write, for a collection or for plain tables with a step of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hotrow
from builders import readout


@dataclass
class Training:
    """What a loop trains with: a collection, or plain tables with a step of their own."""

    look_up: Callable[[Any], hotrow.Embedded]
    batches: Iterator[Any]
    end: Callable[[], None] = lambda: None
    joined: Callable[[], AbstractContextManager[None]] = nullcontext
    device: torch.device | str = "cpu"


def of_collection(
    loop: Callable[[Training], Iterator[Tensor]],
) -> Callable[[hotrow.EmbeddingBagCollection, list[Any]], list[Tensor]]:
    """The loop as a function of a collection and its batches."""

    @wraps(loop)
    def run(embedding: hotrow.EmbeddingBagCollection, batches: list[Any]) -> list[Tensor]:
        stream = iter(hotrow.ahead(batches, embedding))
        training = Training(embedding, stream, joined=embedding.accumulate, device=embedding.device)
        return [loss.detach() for loss in loop(training)]

    return run


def one_loss_of_two_batches(run: Training) -> Iterator[Tensor]:
    for first in run.batches:
        second = next(run.batches)
        loss = readout(run.look_up(first)) + readout(run.look_up(second), scale=0.5)
        loss.backward()
        run.end()
        yield loss


def product_of_two_batches(run: Training) -> Iterator[Tensor]:
    for first in run.batches:
        loss = (readout(run.look_up(first)) * readout(run.look_up(next(run.batches)))).tanh()
        loss.backward()
        run.end()
        yield loss


def batches_pulled_together(run: Training) -> Iterator[Tensor]:
    for group in iter(lambda: list(itertools.islice(run.batches, 3)), []):
        for batch in reversed(group):
            loss = readout(run.look_up(batch))
            loss.backward()
            run.end()
            yield loss


def accumulated(run: Training) -> Iterator[Tensor]:
    for first in run.batches:
        with run.joined():
            for batch in (first, *itertools.islice(run.batches, 2)):
                loss = readout(run.look_up(batch))
                loss.backward()
                yield loss
        run.end()


def some_without_backward(run: Training) -> Iterator[Tensor]:
    unused = []
    for place, batch in enumerate(run.batches):
        loss = readout(run.look_up(batch))
        unused.append(run.look_up(batch))
        if place % 3:
            loss.backward()
            run.end()
        yield loss


def checkpointed(run: Training) -> Iterator[Tensor]:
    """Every other one reentrantly."""
    for place, batch in enumerate(run.batches):
        slope = torch.ones((), requires_grad=True)  # a reentrant checkpoint wants such an input

        def part(scale: Tensor, batch: Any = batch) -> Tensor:
            return readout(run.look_up(batch)) * scale.to(run.device)

        ways = {"use_reentrant": place % 2 == 0}
        loss = checkpoint(part, slope, **ways) + checkpoint(part, slope * 0.5, **ways)
        loss.backward()
        run.end()
        yield loss


def learned_weights(run: Training) -> Iterator[Tensor]:
    """Weights of samples get their gradient from rows before the update."""
    scale = torch.tensor(1.5, device=run.device, requires_grad=True)
    for batch in run.batches:
        weighted = hotrow.KeyedJaggedTensor(
            batch.keys(), batch.values(), offsets=batch.offsets(),
            weights=batch.weights_or_none() * scale,
        )  # fmt: skip
        loss = readout(run.look_up(weighted))
        loss.backward()
        run.end()
        assert scale.grad is not None
        yield loss
        yield scale.grad.clone()
        scale.grad = None
