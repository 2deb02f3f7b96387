"""Dense rules are torch's dense optimizers, and keep the step of each row's last gradient."""

from typing import Any

import pytest
import torch

from hotrow.kernels.dense_rules import (
    DenseAdagrad,
    DenseAdam,
    DenseAdamW,
    DenseRMSprop,
    DenseRule,
    DenseSGD,
    step_bits,
)
from hotrow.kernels.idle_history import History, setting_of
from hotrow.kernels.rules import Adagrad, RowWiseAdagrad, per_row
from idle_rows import DIM, RULES, TORCH, Rows


def test_defaults_are_those_of_torch() -> None:
    for rule in (DenseSGD(), DenseAdam(), DenseAdamW(), DenseAdagrad(), DenseRMSprop()):
        optimizer = TORCH[type(rule).__name__]([torch.zeros(1, requires_grad=True)])
        for name, value in setting_of(rule).items():
            assert optimizer.defaults[name] == value, (rule, name)


@pytest.mark.parametrize("name", [*RULES, "RMSprop, centered", "RMSprop, L2", "Adagrad, start"])
def test_steps_on_all_rows_are_those_of_torch(name: str) -> None:
    more: dict[str, DenseRule] = {
        "RMSprop, centered": DenseRMSprop(1e-3, centered=True),
        "RMSprop, L2": DenseRMSprop(1e-3, weight_decay=1e-2, momentum=0.5),
        "Adagrad, start": DenseAdagrad(initial_accumulator_value=0.5, weight_decay=0.1),
    }
    rule = {**RULES, **more}[name]
    weight = torch.randn(20, DIM)
    param = torch.nn.Parameter(weight.double())
    optimizer = TORCH[type(rule).__name__]([param], **setting_of(rule))
    rows = Rows(rule, weight)
    for _ in range(30):
        grads = torch.randn(20, DIM)
        rows.step(torch.arange(20), grads, setting_of(rule))
        param.grad = grads.double()
        optimizer.step()
    own = rows.read()
    state = optimizer.state[param]
    torch.testing.assert_close(own.pop("weight").double(), param.detach(), rtol=1e-5, atol=2e-6)
    assert step_bits(own.pop("last")).unique().tolist() == [30]
    assert list(own) == [key for key in state if key != "step" and state[key] is not None]
    for key, values in own.items():
        torch.testing.assert_close(values.double(), state[key], rtol=1e-4, atol=1e-6)


def test_a_row_has_the_state_that_its_rule_needs_and_a_step() -> None:
    assert DenseSGD().state_names == ("last",)
    assert DenseSGD(momentum=0.9).state_names == ("momentum_buffer", "last")
    rule = DenseRMSprop(momentum=0.9, centered=True)
    assert rule.state_columns(4) == {
        "square_avg": slice(4, 8),
        "momentum_buffer": slice(8, 12),
        "grad_avg": slice(12, 16),
        "last": slice(16, 20),
    }
    assert rule.state_width(4) == 16  # rows are multiples of 16 bytes
    adagrad = DenseAdagrad(initial_accumulator_value=0.25)
    assert adagrad.state_start(3) == [0.25, 0.25, 0.25, 0.0, 0.0]


def test_other_rules_keep_their_columns() -> None:
    assert RowWiseAdagrad().state_columns(4) == {"sum": slice(4, 5)}
    assert RowWiseAdagrad(initial_accumulator_value=0.5).state_start(4) == [0.5]
    assert Adagrad().state_columns(4) == {"sum": slice(4, 8)}


@pytest.mark.parametrize("step", [1, 2**24 + 1, 2**31 - 1])
def test_rows_keep_the_number_of_a_step_exactly(step: int) -> None:
    rule, rows = DenseSGD(), torch.zeros(3, 5)
    numbers = rule.scalars(setting_of(rule), step)
    scalars = {key: torch.tensor([value], dtype=torch.float64) for key, value in numbers.items()}
    rule.update(rows[:, :4], torch.ones(3, 4), [rows[:, 4:]], per_row(scalars, None))
    assert step_bits(rows[:, 4:]).flatten().tolist() == [step] * 3


def test_tables_at_different_steps_mark_their_rows_with_their_own() -> None:
    scalars = {"step": torch.tensor([2**24 + 1, 7], dtype=torch.float64)}
    columns = per_row(scalars, torch.tensor([1, 0, 1]))
    assert columns["step"].dtype == torch.int32
    assert columns["step"].flatten().tolist() == [7, 2**24 + 1, 7]


@pytest.mark.parametrize(
    ("make", "setting", "message"),
    [
        (DenseAdam, {"betas": (0.9, 1.0)}, "betas must be two numbers below 1"),
        (DenseAdamW, {"weight_decay": -1.0}, "weight_decay must be a number of at least 0"),
        (DenseAdam, {"lr": float("nan")}, "lr must be a finite number"),
        (DenseSGD, {"nesterov": True}, "needs a momentum above 0 and dampening=0"),
        (DenseSGD, {"nesterov": 1}, "nesterov must be True or False"),
        (DenseRMSprop, {"alpha": "0.9"}, "alpha must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    make: Any, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**setting)
    rule = make()
    with pytest.raises(ValueError, match=message):
        History(rule).append({**setting_of(rule), **setting})


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        (DenseSGD(momentum=0.9), {"momentum": 0.0}),
        (DenseSGD(), {"momentum": 0.9}),
        (DenseRMSprop(), {"centered": True}),
        (DenseSGD(momentum=0.9), {"nesterov": True}),
    ],
)
def test_settings_that_would_change_the_state_of_rows_are_refused(
    rule: DenseRule, setting: dict[str, Any]
) -> None:
    history = History(rule)
    for call in (history.append, lambda x: rule.scalars(x, 5)):
        with pytest.raises(ValueError, match="would change the state of each row"):
            call({**setting_of(rule), **setting})
    assert history.now == 0


def test_settings_may_be_tensors_and_lists() -> None:
    history, plain = History(DenseAdam()), History(DenseAdam())
    history.append({"lr": torch.tensor(0.5), "betas": [torch.tensor(0.5), 0.999], "name": "x"})
    plain.append({"lr": 0.5, "betas": (0.5, 0.999)})
    assert torch.equal(history.tables().near, plain.tables().near)
