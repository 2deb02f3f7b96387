"""Idle rows are where torch's dense optimizers take them, whenever and with whichever rows."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.kernels import idle
from hotrow.kernels.dense_rules import (
    DenseAdagrad,
    DenseAdam,
    DenseAdamW,
    DenseRMSprop,
    DenseRule,
    DenseSGD,
)
from hotrow.kernels.idle import catch_up
from hotrow.kernels.idle_history import BLOCK, History, setting_of
from idle_rows import DIM, RULES, SCHEDULES, Job, Rows, differences

BETAS = [(0.9, 0.98), (0.9, 0.95), (0.5, 0.999), (0.95, 0.999), (0.0, 0.999)]
PAIRS = [(name, plan) for name in RULES for plan in SCHEDULES]
KINDS = {
    "linear": DenseSGD(0.01, momentum=0.9, weight_decay=1e-3),
    "series": DenseAdamW(1e-2, weight_decay=0.1),
    "replay": DenseAdam(1e-2, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def warned_of_replays() -> Iterator[None]:
    """Rows that are replayed are warned of once; one test asks for it."""
    before = set(idle._warned)
    idle._warned.update(type(rule).__name__ for rule in RULES.values())
    yield
    idle._warned.clear()
    idle._warned.update(before)


def check(job: Job, state: float = 1e-4) -> None:
    result = differences(job)
    assert result.truth <= 1e-5, result
    # torch's own float32 is sometimes farther off than that.
    assert result.weight <= 1e-5 + result.torch, result
    assert result.state <= state, result


@pytest.mark.parametrize(("name", "plan"), [*zip(RULES, cycle(SCHEDULES), strict=False)])
def test_rows_with_gaps_are_those_of_torch(name: str, plan: str) -> None:
    check(Job(RULES[name], plan, steps=250, rows=40))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_rows_with_gaps_up_to_a_thousand_steps_are_those_of_torch(name: str, plan: str) -> None:
    check(Job(RULES[name], plan))


@pytest.mark.parametrize("betas", BETAS)
def test_betas_far_from_the_usual_ones(betas: tuple[float, float]) -> None:
    check(Job(DenseAdam(1e-3, betas), "constant", steps=250, rows=40))


@pytest.mark.slow
@pytest.mark.parametrize("plan", SCHEDULES)
@pytest.mark.parametrize("betas", [*BETAS, (0.99, 0.999), (0.95, 0.97), (0.9, 0.9)])
def test_betas_far_from_the_usual_ones_under_schedules(
    betas: tuple[float, float], plan: str
) -> None:
    check(Job(DenseAdamW(1e-3, betas), plan))


@pytest.mark.parametrize("scale", [1e-8, 1e-12])
def test_gradients_so_small_that_eps_matters(scale: float) -> None:
    job = Job(DenseAdam(1e-2), "cosine", steps=250, scale=scale, rows=40)
    assert differences(job).truth <= 1e-6
    assert differences(replace(job, rule=DenseAdamW(1e-2, eps=1e-13))).truth <= 1e-5


def test_values_without_a_gradient_rest_without_eps() -> None:
    rule = DenseAdam(1e-2, eps=0.0)
    rows, setting = Rows(rule, torch.randn(6, DIM)), setting_of(rule)
    grads = torch.randn(6, DIM)
    grads[:, 3:] = 0
    rows.step(torch.arange(5), grads[:5], setting)
    for _ in range(40):
        rows.step(torch.arange(0), grads[:0], setting)
    weight, start = rows.read()["weight"], rows.rows[:, :DIM]
    assert bool(weight.isfinite().all())
    assert torch.equal(weight[:5, 3:], start[:5, 3:])
    assert torch.equal(weight[5], start[5])
    assert bool((weight[:5, :3] != start[:5, :3]).all())
    expected = stepped(rule, rows, 1e-300)
    torch.testing.assert_close(weight.double(), expected["weight"], rtol=1e-6, atol=1e-7)


def stepped(rule: DenseRule, rows: Rows, eps: float | None = None) -> dict[str, Tensor]:
    """Return rows after one dense step after the other, in float64."""
    pieces = {name: rows.rows[:, place].clone() for name, place in rows.columns.items()}
    last = pieces.pop("last").view(torch.int32)[:, 0]
    weight, *state = (piece.double() for piece in pieces.values())
    for step, used in rows.history.settings():
        numbers = used.scalars(setting_of(used), step)
        if eps is not None:
            numbers["eps"] = eps
        scalars = {
            name: torch.tensor([[value]], dtype=torch.float64) for name, value in numbers.items()
        }
        idle = last < step
        before = [piece.clone() for piece in (weight, *state)]
        rule.dense_step(weight, torch.zeros_like(weight), state, scalars)
        for piece, old in zip((weight, *state), before, strict=True):
            piece.copy_(torch.where(idle[:, None], piece, old))
    return dict(zip(pieces, (weight, *state), strict=True))


def around_blocks(rule: DenseRule, steps: int, settings: Any = None) -> Rows:
    """Return rows with a gradient in one step each, many of them at the ends of blocks."""
    ends = [block * BLOCK + place for block in range(steps // BLOCK + 1) for place in (-1, 0, 1)]
    chosen = {*ends, *range(1, steps, max(steps // 40, 1)), 2, steps}
    moments = sorted(step for step in chosen if 0 < step <= steps)
    rows, place = Rows(rule, torch.randn(len(moments) + 1, DIM)), 0
    for step in range(1, steps + 1):
        setting = {**setting_of(rule), **(settings(step) if settings else {})}
        ids = torch.arange(place, place + (moments[place : place + 1] == [step]))
        rows.step(ids, torch.randn(len(ids), DIM), setting)
        place += len(ids)
    return rows


def check_stepped(rule: DenseRule, rows: Rows, tolerance: float = 1e-6) -> None:
    expected, own = stepped(rule, rows), rows.read()
    for name, values in expected.items():
        # Values near zero are sums that cancel: the largest of a row tells how far they may be off.
        largest = values.abs().amax(0 if name == "weight" else 1, keepdim=True)
        apart = (own[name] - values).abs() - 1e-37  # float32 underflows
        assert float((apart - tolerance * largest).max()) <= 0, (name, (apart / largest).max())


@pytest.mark.parametrize("name", ["linear", "series"])
def test_rows_at_the_ends_of_blocks(name: str) -> None:
    check_stepped(KINDS[name], around_blocks(KINDS[name], 3 * BLOCK + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "series"])
def test_rows_that_were_idle_for_twenty_thousand_steps(name: str) -> None:
    check_stepped(KINDS[name], around_blocks(KINDS[name], 20_000))


@pytest.mark.parametrize("rule", [DenseAdamW(2.0, weight_decay=0.9), DenseSGD(2.0, 0.0, 0.0, 0.9)])
def test_decay_that_turns_the_sign_of_weights(rule: DenseRule) -> None:
    rows = around_blocks(rule, 41)
    check_stepped(rule, rows)
    assert (
        float(rows.read()["weight"][-1].sign().eq(rows.rows[-1, :DIM].sign()).float().mean()) == 0
    )


def test_settings_that_let_rows_grow_without_bound_leave_float32_without_a_warning() -> None:
    rule = DenseSGD(1.0, momentum=1.9)
    rows = Rows(rule, torch.ones(2, DIM))
    for step in range(2 * BLOCK):
        rows.step(torch.arange(step == 0), torch.ones(int(step == 0), DIM), setting_of(rule))
    assert not bool(rows.read()["weight"][0].isfinite().any())


@pytest.mark.parametrize(
    "settings",
    [
        lambda step: {"betas": (0.9, 0.999 if step < 300 else 0.97)},
        lambda step: {"betas": (0.9 if step < 300 else 0.99, 0.999)},
        lambda step: {"betas": (0.9 if step < 300 else 0.0, 0.999)},
        lambda step: {"lr": 0.0 if step < 300 else 0.01},
        lambda step: {"weight_decay": step / 1000},
    ],
)
def test_settings_that_change_in_training(settings: Any) -> None:
    rule = DenseAdamW(1e-2)
    rows = around_blocks(rule, 700, settings)
    assert rows.history.kind == "series"
    check_stepped(rule, rows, 2e-6)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (DenseAdam(1e-2), {"weight_decay": 0.1}),
        (DenseAdam(1e-2), {"eps": 1e-3}),
        (DenseAdam(1e-2), {"betas": (0.9, 0.9)}),
        (DenseAdagrad(1e-2), {"weight_decay": 0.1}),
        (DenseRMSprop(1e-2, momentum=0.5), {"weight_decay": 0.1}),
    ],
)
def test_settings_without_a_closed_form_are_replayed_from_the_first_step(
    rule: DenseRule, settings: dict[str, Any]
) -> None:
    rows = around_blocks(rule, 40, lambda step: settings if step > 20 else {})
    assert rows.history.kind == "replay"
    check_stepped(rule, rows, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_at_its_own_step_keeps_its_bits(kind: str) -> None:
    rule, history = KINDS[kind], History(KINDS[kind])
    for _ in range(5):
        history.append(setting_of(rule))
    values = torch.tensor([-0.0, float("nan"), float("inf"), -1e-42, 3.0])
    pieces = [values.expand(4, -1).clone() for _ in ("weight", *rule.kept_states())]
    last = torch.tensor([5, 5, 2, 5], dtype=torch.int32)
    catch_up(rule, pieces[0], pieces[1:], last, history.tables())
    for piece in pieces:
        bits = piece[last == 5].view(torch.int32)
        assert torch.equal(bits, values.view(torch.int32).expand(3, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_depend_on_the_row_alone(kind: str) -> None:
    rows = around_blocks(KINDS[kind], BLOCK + 300)
    every = rows.read()
    for ids in (torch.randperm(len(rows.rows)), torch.tensor([3]), torch.tensor([9, 2, 30])):
        for name, values in rows.read(ids).items():
            assert torch.equal(values.view(torch.int32), every[name][ids].view(torch.int32)), name
    saved = History.load(rows.rule, rows.history.state())
    for name, values in rows.read(history=saved).items():
        assert torch.equal(values.view(torch.int32), every[name].view(torch.int32)), name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_many_pieces_and_in_columns_of_wider_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = around_blocks(KINDS[kind], BLOCK + 40)
    every = rows.read()
    monkeypatch.setattr(idle, "_AT_ONCE", 3 * DIM)
    wide = rows.rows.clone()
    weight, *state, last = (wide[:, place] for place in rows.columns.values())
    catch_up(rows.rule, weight, state, last.view(torch.int32)[:, 0], rows.history.tables())
    for name, place in rows.columns.items():
        assert torch.equal(wide[:, place].view(torch.int32), every[name].view(torch.int32)), name


@pytest.mark.parametrize("rule", [DenseSGD(), DenseAdagrad(lr_decay=0.1)])
def test_rules_that_leave_idle_rows_alone_say_so(rule: DenseRule) -> None:
    rows = around_blocks(rule, 30)
    assert rows.history.tables().still
    assert torch.equal(rows.read()["weight"], rows.rows[:, :DIM])
    assert not around_blocks(replace(rule, weight_decay=0.1), 3).history.tables().still


def test_long_replays_are_warned_of_once() -> None:
    rule, history = DenseAdam(weight_decay=0.1), History(DenseAdam(weight_decay=0.1))
    for _ in range(idle.LONG_REPLAY + 1):
        history.append(setting_of(rule))
    idle._warned.clear()
    pieces = [torch.ones(2, 4) for _ in range(3)]
    near = torch.full((2,), 1, dtype=torch.int32)
    catch_up(rule, pieces[0], pieces[1:], near, history.tables())
    with pytest.warns(UserWarning, match="last 1,001 steps one by one; use DenseAdamW"):
        catch_up(rule, pieces[0], pieces[1:], near - 1, history.tables())
    catch_up(rule, pieces[0], pieces[1:], near - 1, history.tables())


def test_rows_of_a_later_step_than_the_history_are_refused() -> None:
    rule = DenseAdamW()
    pieces, last = [torch.ones(2, 4) for _ in range(3)], torch.ones(2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="a step to come"):
        catch_up(rule, pieces[0], pieces[1:], last, History(rule).tables())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_a_gpu_are_those_of_a_cpu_up_to_rounding(kind: str) -> None:
    rows = around_blocks(KINDS[kind], BLOCK + 300)
    pieces = [rows.rows[:, place].cuda() for place in rows.columns.values()]
    weight, *state, last = pieces
    tables = rows.history.tables().to("cuda")
    catch_up(rows.rule, weight, state, last.view(torch.int32)[:, 0], tables)
    for piece, expected in zip(pieces, rows.read().values(), strict=True):
        torch.testing.assert_close(piece.cpu(), expected, rtol=1e-5, atol=1e-6)
