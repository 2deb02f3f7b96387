"""`update="step"` in `hotrow.graphed` and `Trainer`: captured or not, as a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from click_models import ClickModel, click_batches
from hotrow.inputs.tree import to_device

ROWS = (300, 200)
BATCHES = click_batches(24, ROWS, size=32)


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def model_of(device: str, strategy: str, update: str = "step", rule: Any = None) -> ClickModel:
    sizes = zip("ab", ROWS, strict=True)
    tables = [hotrow.EmbeddingBagConfig(name, rows, 8, [f"f{name}"]) for name, rows in sizes]
    options: Any = {"seed": 3, "strategy": strategy, "device": device, "update": update}
    return ClickModel(hotrow.EmbeddingBagCollection(tables, rule, "60%", **options), 3)


def trained(
    model: ClickModel, optimizer: Any, schedule: Any = None, **options: Any
) -> list[Tensor]:
    step = hotrow.graphed(
        model, F.binary_cross_entropy_with_logits, optimizer, batch_size=32, **options
    )
    for batch in hotrow.ahead(BATCHES, model, ids=lambda b: b.sparse, step=step):
        step(batch)
        if schedule is not None:
            schedule.step()
    if step.landing is not None:
        assert step.landing.num_graphs
    return model.bits()


def plain_loop(model: ClickModel, optimizer: Any, clip: float | None) -> list[Tensor]:
    for batch in BATCHES:
        batch = to_device(batch, model.embedding.device)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.bits()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("strategy", ["lookahead", "all-fast"])
@on_both
def test_a_graphed_step_is_a_plain_loop(device: str, strategy: str, clip: float | None) -> None:
    found, expected = model_of(device, strategy), model_of(device, strategy)
    makes = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (found, expected)]
    bits = trained(found, makes[0], clip_norm=clip)
    for x, y in zip(bits, plain_loop(expected, makes[1], clip), strict=True):
        assert torch.equal(x, y)


# On a GPU a schedule of numbers captures the step anew each time.
@pytest.mark.filterwarnings("ignore:the dense optimizer's settings change:UserWarning")
@on_both
def test_rows_follow_a_schedule_and_save_with_their_optimizer(device: str) -> None:
    model, other = model_of(device, "lookahead"), model_of(device, "all-fast")
    ends = []
    for each in (model, other):
        optimizer = torch.optim.Adagrad(each.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ends.append((trained(each, optimizer, schedule), optimizer.state_dict()))
    (bits, state), (other_bits, other_state) = ends
    assert all(map(torch.equal, bits, other_bits))
    assert state["state"][0]["step"] == len(BATCHES)
    assert torch.equal(state["state"][0]["sum"], other_state["state"][0]["sum"])
    assert state["state"][0]["sum"].shape == (300, 8)


@on_both
def test_rows_updated_in_backward_have_the_same_bits(device: str) -> None:
    found, expected = (
        model_of(device, "lookahead"),
        model_of(device, "lookahead", "backward", hotrow.SGD(lr=0.1)),
    )
    bits = trained(found, torch.optim.SGD(found.parameters(), lr=0.1))
    dense = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert all(map(torch.equal, bits, trained(expected, dense)))


@on_both
def test_a_step_without_an_optimizer_of_the_rows_is_refused(device: str) -> None:
    model = model_of(device, "all-fast")
    with pytest.raises(RuntimeError, match="0 optimizers hold the stand-ins"):
        trained(model, torch.optim.SGD(model.top.parameters(), lr=0.1))
