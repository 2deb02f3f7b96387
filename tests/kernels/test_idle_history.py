"""What steps do to idle rows, as tables: their errors, their growth, and their saved form."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.kernels.dense_rules import DenseAdam, DenseAdamW, DenseRule, DenseSGD
from hotrow.kernels.idle_history import BLOCK, History, IdleTables, setting_of
from hotrow.kernels.idle_recursions import MOST_ERROR, TERMS, Linear, Series

Settings = Callable[[int], dict[str, Any]]
CASES: dict[str, tuple[DenseRule, Settings]] = {
    "linear": (DenseSGD(0.01, momentum=0.9), lambda step: {"momentum": 0.9 - 0.1 / step}),
    "series": (DenseAdamW(1e-2), lambda step: {"lr": 1e-2 * math.cos(step / 2000)}),
    "constant": (DenseAdamW(1e-2), lambda step: {}),
    "refined": (DenseAdam(1e-2, (0.9, 0.95)), lambda step: {}),
    "replay": (DenseAdam(1e-2, weight_decay=0.1), lambda step: {"lr": 1e-2 / step}),
}


def grown(case: str, steps: int, history: History | None = None) -> History:
    rule, settings = CASES[case]
    history = History(rule) if history is None else history
    while history.now < steps:
        history.append({**setting_of(rule), **settings(history.now + 1)})
    return history


def assert_equal(first: IdleTables, second: IdleTables) -> None:
    assert (first.kind, first.now, first.still) == (second.kind, second.now, second.still)
    assert (first.eps, first.scalar_names) == (second.eps, second.scalar_names)
    for name in ("near", "far", "steps"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("steps", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_history_has_the_same_tables_and_goes_on_alike(case: str, steps: int) -> None:
    history = grown(case, steps)
    loaded = History.load(history.rule, history.state())
    assert_equal(loaded.tables(), history.tables())
    more = steps + BLOCK // 2
    assert_equal(grown(case, more, loaded).tables(), grown(case, more, history).tables())


def test_a_saved_history_is_short_where_settings_do_not_change() -> None:
    state = grown("constant", 2 * BLOCK).state()
    assert all(len(values) == 1 for values in state["values"].values())
    assert [counts.tolist() for counts in state["counts"].values()] == [[2 * BLOCK]] * 5
    assert state["entries"].size <= 2 * BLOCK * 19


def test_a_history_of_another_rule_is_refused() -> None:
    state = grown("linear", 3).state()
    with pytest.raises(ValueError, match="use the optimizer that the rows were trained with"):
        History.load(DenseAdam(), state)
    with pytest.raises(ValueError, match="this history of steps has blocks of 7 steps"):
        History.load(CASES["linear"][0], {**state, "block": 7})


@pytest.mark.parametrize("case", CASES)
def test_rows_of_tables_that_did_not_change_are_named(case: str) -> None:
    history = grown(case, 1)
    for step in (5, BLOCK - 1, BLOCK, BLOCK + 3, 2 * BLOCK, 2 * BLOCK + 100):
        before = history.tables()
        near, steps = before.near.clone(), before.steps.clone()
        tables = grown(case, step, history).tables()
        final = min(tables.near_changed_since(before.now), len(tables.near))
        assert torch.equal(tables.near[:final], near[:final])
        assert torch.equal(tables.steps[: len(steps)], steps)
        assert len(tables.near) == (1 if tables.kind == "replay" else step + 1)
        assert len(tables.far) == (1 if tables.kind == "replay" else step // BLOCK + 1)


def test_a_step_changes_no_entry_of_finished_blocks_and_one_far_entry_of_each() -> None:
    history = grown("series", 4 * BLOCK + 3)
    near, far = history.tables().near.clone(), history.tables().far.clone()
    grown("series", 4 * BLOCK + 4, history)
    tables = history.tables()
    changed = (tables.near[: len(near)] != near).any(1).nonzero().flatten().tolist()
    assert changed == list(range(4 * BLOCK, 4 * BLOCK + 4))
    assert bool((tables.far[:-1] != far[:-1]).any(1).all())
    assert torch.equal(tables.far[-1], far[-1])


@pytest.mark.parametrize(
    ("betas", "terms"),
    [
        ((0.9, 0.999), TERMS[0]),
        ((0.9, 0.98), TERMS[0]),
        ((0.95, 0.999), TERMS[0]),
        ((0.9, 0.95), TERMS[1]),
        ((0.99, 0.999), TERMS[1]),
        ((0.95, 0.97), TERMS[2]),
    ],
)
def test_the_series_is_as_near_as_its_bound_says(betas: tuple[float, float], terms: int) -> None:
    rule = DenseAdam(1e-3, betas)
    history = History(rule)
    for _ in range(3):
        history.append(setting_of(rule))
    assert (history.kind, history.tables().near.shape[1]) == ("series", 5 + terms)
    for start in (1, 2, 10, 300):
        for gap in (1, 3, 30, 400):
            error, bound = series_error(rule, terms, start, gap)
            assert error <= bound + 1e-13
            assert bound <= MOST_ERROR


def series_error(rule: DenseAdam, terms: int, start: int, gap: int) -> tuple[float, float]:
    """Return the largest error relative to the movement for any size of moments, and its bound."""
    series = Series(terms)
    entry = np.array(series.start(start, rule.idle_step(start)))[:, None]
    y = np.concatenate([[0.0], np.logspace(-12, 4, 100)])
    exact, kept1, kept2 = np.zeros_like(y), 1.0, 1.0
    for step in range(start + 1, start + gap + 1):
        term = rule.idle_step(step)
        series.advance(entry, term)
        kept1, kept2 = kept1 * term.beta1, kept2 * term.beta2
        e = math.sqrt(kept2 / term.correction2)
        exact += term.lr * kept1 / term.correction1 / (y * e + rule.eps)
    centre, width = entry[series.CENTRE], entry[series.WIDTH]
    size = y * centre + rule.eps
    k = width * (1 - 2 * rule.eps / size)
    root = np.sqrt((1 - k) * (1 + k))
    p = -k / (1 + root)
    first, *others = entry[series.FIRST_TERM : series.rows]
    total = first + 2 * sum(term * p ** (j + 1) for j, term in enumerate(others))
    return float(np.abs(total / (root * size) / exact - 1).max()), series.error(entry)


def test_factors_that_no_float32_can_hold_become_zero() -> None:
    rule = DenseAdamW(1e-2, (0.6, 0.8), weight_decay=50.0)
    sgd = DenseSGD(1e-2, momentum=0.6)
    for recursion, used, places in ((Series(11), rule, [0, 1, 2]), (Linear(), sgd, [3])):
        entry = np.array(recursion.start(1, used.idle_step(1)))[:, None]
        for step in range(2, 2200):
            recursion.advance(entry, used.idle_step(step))
        assert (entry[places] == 0).all()
        assert np.isfinite(entry).all()


@pytest.mark.parametrize(
    "betas", [(0.9, 0.9), (0.98, 0.98), (0.7, 0.5), (0.9, 0.3), (0.9, 0.0), (0.0, 0.0)]
)
def test_betas_for_which_the_series_is_too_far_off_are_replayed(
    betas: tuple[float, float],
) -> None:
    rule = DenseAdam(1e-3, betas)
    history = History(rule)
    for _ in range(3):
        history.append(setting_of(rule))
    assert history.kind == "replay"
    assert len(history.tables().steps) == 4
