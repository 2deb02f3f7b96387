"""A recipe: a converted model in an ordinary LightningModule, trained by `lightning.Trainer`."""

from __future__ import annotations

import logging
import tempfile
import warnings

import lightning
import torch
from compare import Case, optimizer_parts, recorded
from recipe import Clicks, clicks_loader, score
from torch import Tensor, nn
from torch.nn import functional

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class ClicksModule(lightning.LightningModule):
    """Trains any model of users, items and tags, plain or converted."""

    def __init__(self, model: nn.Module, optimizer: str, losses: list[float]) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.loss = recorded(functional.binary_cross_entropy_with_logits, losses)
        # Lightning has several optimizers at once in manual optimization only.
        self.automatic_optimization = optimizer != "SparseAdam"

    def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, label = batch
        loss = self.loss(self.model(*inputs), label)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizer_parts(self.model, self.optimizer)


def cases(steps: int) -> list[Case]:
    def train(model: nn.Module, optimizer: str, losses: list[float]) -> None:
        warnings.filterwarnings("ignore", module="lightning")
        with tempfile.TemporaryDirectory() as folder:
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                default_root_dir=folder,  # its checkpoint is written there after the epoch
            )
            trainer.fit(ClicksModule(model, optimizer, losses), clicks_loader(steps))

    return [Case("lightning", "recipe", Clicks, train, score)]
