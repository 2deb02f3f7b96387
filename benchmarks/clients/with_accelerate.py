"""A recipe: a converted model in an ordinary loop of accelerate."""

from __future__ import annotations

import tempfile

from accelerate import Accelerator
from compare import Case, optimizer_parts, recorded
from recipe import Clicks, clicks_loader, score
from torch import nn
from torch.nn import functional


def cases(steps: int) -> list[Case]:
    def train(model: nn.Module, optimizer: str, losses: list[float]) -> None:
        compute_loss = recorded(functional.binary_cross_entropy_with_logits, losses)
        accelerator = Accelerator(cpu=True)
        parts = optimizer_parts(model, optimizer)
        model, loader, *parts = accelerator.prepare(model, clicks_loader(steps), *parts)
        model.train()
        for *inputs, label in loader:
            loss = compute_loss(model(*inputs), label)
            accelerator.backward(loss)
            for part in parts:
                part.step()
                part.zero_grad()
        with tempfile.TemporaryDirectory() as folder:  # a checkpoint that is loaded again
            accelerator.save_state(folder)
            accelerator.load_state(folder)

    return [Case("accelerate", "recipe", Clicks, train, score)]
