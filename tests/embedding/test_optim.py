"""Row optimizers: torch's defaults and schedulers, one step per update, the same bits anywhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import hotrow
from builders import CASES, RULES, build, learn, outcome, tight_budget, variant
from hotrow.kernels.rules import RowRule, per_row

Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 30, 4, ["f"]), Table("b", 20, 4, ["g"]), Table("c", 10, 3, ["h"])]


def collection(rule: RowRule, **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"strategy": "all-fast", "seed": 0, **options}
    return hotrow.EmbeddingBagCollection(TABLES, rule, **options)


def some_ids() -> Tensor:
    return torch.stack([torch.randint(10, (6,)) for _ in TABLES], dim=1)


def update(embedding: hotrow.EmbeddingBagCollection, scale: float = 1.0) -> None:
    (embedding(some_ids()).values().square().sum() * scale).backward()


# -- settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (hotrow.SGD, torch.optim.SGD),
        (hotrow.Adagrad, torch.optim.Adagrad),
        (hotrow.RowWiseAdagrad, torch.optim.Adagrad),
        (hotrow.Adam, torch.optim.SparseAdam),
        (hotrow.AdamW, torch.optim.AdamW),
    ],
)
def test_defaults_are_torchs(ours: type[RowRule], torchs: type) -> None:
    theirs = inspect.signature(torchs).parameters
    mine = {field.name: getattr(ours(), field.name) for field in fields(ours)}
    assert mine == {name: theirs[name].default for name in mine}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hotrow.SGD(lr=-0.1), "SGD: lr must be a number of at least 0, not -0.1"),
        (lambda: hotrow.SGD(weight_decay=-1), "SGD: weight_decay must be"),
        (lambda: hotrow.SGD(lr="0.1"), "SGD: lr must be a number, not '0.1'"),
        (lambda: hotrow.SGD(lr=None), "SGD: lr must be a number, not None"),
        (lambda: hotrow.SGD(lr=True), "SGD: lr must be a number, not True"),
        (lambda: hotrow.SGD(lr=math.nan), "SGD: lr must be a finite number, not nan"),
        (lambda: hotrow.SGD(lr=math.inf), "SGD: lr must be a finite number, not inf"),
        (lambda: hotrow.SGD(lr=1e30), r"SGD: lr must be a number below 1e\+30, not 1e\+30"),
        (lambda: hotrow.Adagrad(eps=-1e-9), "Adagrad: eps must be"),
        (lambda: hotrow.Adagrad(initial_accumulator_value=-1.0), "initial_accumulator_value must"),
        (lambda: hotrow.Adam(betas=(-0.1, 0.9)), r"Adam: betas must be .* not \(-0.1, 0.9\)"),
        (lambda: hotrow.Adam(betas=(0.9, 1.0)), "Adam: betas"),  # NaN in the first update
        (lambda: hotrow.Adam(betas=(1.5, 0.9)), "Adam: betas"),
        (lambda: hotrow.Adam(betas=(0.9,)), "Adam: betas"),  # type: ignore[arg-type]
        (lambda: hotrow.AdamW(weight_decay=-0.1), "AdamW: weight_decay must be"),
    ],
)
def test_a_bad_setting_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_table_has_a_param_group_with_the_rules_settings() -> None:
    groups = collection(hotrow.AdamW(lr=0.5, eps=1e-6)).optimizer.param_groups
    assert [group["name"] for group in groups] == ["a", "b", "c"]
    for group in groups:
        assert (group["lr"], group["eps"], group["weight_decay"]) == (0.5, 1e-6, 0.01)


# -- torch's schedulers ------------------------------------------------------------------


def rates(embedding: hotrow.EmbeddingBagCollection) -> list[float]:
    return [group["lr"] for group in embedding.optimizer.param_groups]


Plateau = lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: lr_scheduler.StepLR(x, step_size=2, gamma=0.5), [0.25, 0.25, 0.25]),
        (
            lambda x: lr_scheduler.LambdaLR(
                x, [lambda n: 1.0, lambda n: 1 / max(n, 1), lambda n: 0.5**n]
            ),
            [1.0, 0.2, 0.03125],
        ),
        (lambda x: Plateau(x, factor=0.1, patience=1), [0.01, 0.01, 0.01]),
    ],
)
def test_a_schedule_drives_each_table(make: Any, expected: list[float]) -> None:
    embedding = collection(hotrow.SGD(lr=1.0))
    scheduler = make(embedding.optimizer)
    for _ in range(5):
        update(embedding)
        scheduler.step(*([1.0] if isinstance(scheduler, Plateau) else []))
    assert rates(embedding) == pytest.approx(expected)


def test_one_cycle_lr_drives_rate_and_first_beta() -> None:
    embedding = collection(hotrow.Adam(lr=0.1))
    scheduler = lr_scheduler.OneCycleLR(embedding.optimizer, max_lr=1.0, total_steps=10)
    highest, betas = 0.0, set()
    for _ in range(9):
        update(embedding)
        scheduler.step()
        highest = max(highest, rates(embedding)[0])
        betas.add(embedding.optimizer.param_groups[0]["betas"][0])
    assert 0.9 < highest <= 1.0
    assert min(betas) < 0.9 < max(betas)


def test_a_scheduler_before_the_first_update_is_warned_of_as_in_torch() -> None:
    embedding = collection(hotrow.SGD())
    scheduler = lr_scheduler.StepLR(embedding.optimizer, step_size=2)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        scheduler.step()


def test_an_update_uses_the_rate_of_its_moment() -> None:
    embedding = collection(hotrow.SGD(lr=0.5))
    scheduler = lr_scheduler.StepLR(embedding.optimizer, step_size=1, gamma=0.5)
    ids = torch.tensor([[3, 3, 3]])
    for rate in (0.5, 0.25, 0.125):
        before = embedding.state_dict()["embedding_bags.a.weight"][3]
        embedding(ids)["f"].sum().backward()
        after = embedding.state_dict()["embedding_bags.a.weight"][3]
        assert torch.equal(after, before - rate)
        scheduler.step()


def test_a_rate_of_one_table_acts_on_that_table_alone() -> None:
    torch.manual_seed(1)
    alike, other = collection(hotrow.Adagrad(lr=0.1)), collection(hotrow.Adagrad(lr=0.1))
    other.optimizer.param_groups[1]["lr"] = 0.01
    ids = some_ids()
    moved = []
    for embedding in (alike, other):
        before = embedding.state_dict()
        embedding(ids).values().square().sum().backward()
        after = embedding.state_dict()
        moved.append({key.split(".")[1]: after[key] - before[key] for key in before})
    assert torch.equal(moved[0]["a"], moved[1]["a"])
    assert torch.equal(moved[0]["c"], moved[1]["c"])
    torch.testing.assert_close(moved[1]["b"], moved[0]["b"] / 10, rtol=1e-3, atol=1e-6)
    assert bool(moved[0]["b"].any())


def test_rows_are_updated_in_backward_and_step_does_nothing() -> None:
    embedding = collection(hotrow.SGD(lr=0.1))
    update(embedding)
    before = embedding.state_dict()
    assert embedding.optimizer.step(lambda: 7) == 7
    embedding.optimizer.zero_grad()
    assert all(torch.equal(before[key], value) for key, value in embedding.state_dict().items())


# -- Adam's step -------------------------------------------------------------------------


def steps(embedding: hotrow.EmbeddingBagCollection) -> list[int]:
    return [each["step"] for each in embedding.optimizer.state_dict()["state"].values()]


def test_an_update_counts_for_every_table_also_for_one_without_lookups() -> None:
    embedding = collection(hotrow.Adam())
    lengths = torch.tensor([1, 1, 0, 0, 1, 1])  # table b is not looked up
    kjt = hotrow.KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 2, 3, 4]), lengths=lengths)
    embedding(kjt).values().sum().backward()
    assert steps(embedding) == [1, 1, 1]


def test_what_updates_no_row_is_no_step() -> None:
    embedding = collection(hotrow.Adam())
    embedding(some_ids())
    embedding.eval()(some_ids())
    embedding.train()
    assert steps(embedding) == [0, 0, 0]
    with embedding.accumulate():
        for _ in range(3):
            update(embedding)
        assert steps(embedding) == [0, 0, 0]
    assert steps(embedding) == [1, 1, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("on_nonfinite", ["skip", "error"])
def test_an_update_that_is_not_finite_is_no_step(on_nonfinite: str, value: float) -> None:
    embedding = collection(hotrow.Adam(), on_nonfinite=on_nonfinite)
    update(embedding)
    before = outcome(embedding, [])
    refused = pytest.raises(FloatingPointError, match=r"update 2: .* of table 'a' holds")
    with refused if on_nonfinite == "error" else nullcontext():
        update(embedding, scale=value)
    assert outcome(embedding, []).same_bits(before)
    update(embedding)
    assert steps(embedding) == [2, 2, 2]


# -- saving and loading ------------------------------------------------------------------


@pytest.mark.parametrize("second", ["all-fast", "lru", "scratchpipe", "lookahead"])
@pytest.mark.parametrize("rule", RULES)
def test_a_loaded_optimizer_goes_on_with_the_same_bits(rule: str, second: str) -> None:
    case = CASES["two-widths"]
    batches = case.batches(20)
    whole = build(case, rule, "all-fast")
    learn(whole, batches[:10])
    whole.optimizer.param_groups[1]["lr"] /= 2
    rest = learn(whole, batches[10:])

    lru = variant("lru")
    first = build(case, rule, lru, budget=tight_budget(case, batches, lru.hold))
    learn(first, batches[:10])
    first.optimizer.param_groups[1]["lr"] /= 2
    strategy = variant(second)
    budget = None if strategy.everything else tight_budget(case, batches, strategy.hold)
    next_ = build(case, rule, strategy, budget=budget)
    next_.load_state_dict(first.state_dict())
    next_.optimizer.load_state_dict(first.optimizer.state_dict())
    assert outcome(next_, learn(next_, batches[10:])).same_bits(outcome(whole, rest))


def test_a_state_dict_survives_a_file(tmp_path: Any) -> None:
    embedding, other = collection(hotrow.AdamW()), collection(hotrow.AdamW())
    update(embedding)
    expected, state = outcome(embedding, []), embedding.optimizer.state_dict()
    other.load_state_dict(embedding.state_dict())
    update(embedding)  # the state is a copy
    torch.save(state, tmp_path / "optimizer.pt")
    other.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert outcome(other, []).same_bits(expected)


def test_row_wise_state_is_one_value_per_row() -> None:
    embedding = collection(hotrow.RowWiseAdagrad())
    state = embedding.optimizer.state_dict()["state"]
    assert [each["sum"].shape for each in state.values()] == [(30, 1), (20, 1), (10, 1)]


def without_step(saved: Any) -> None:
    del saved["state"]["c"]["step"]


def without_table(saved: Any) -> None:
    saved["param_groups"] = saved["param_groups"][:2]


def another_shape(saved: Any) -> None:
    saved["state"]["c"]["sum"] = torch.zeros(10, 4)


def another_rule(saved: Any) -> None:
    other = collection(hotrow.Adam())
    saved.update(other.optimizer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_shape, r"state 'sum' of table 'c' must have shape \[10, 3\], got \[10, 4\]"),
        (another_rule, r"table 'a': Adagrad has no state 'exp_avg'; this state belongs to another"),
        (without_step, "no table 'c', or no step for it"),
        (without_table, "the optimizer's state has no table 'c'"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(
    change: Callable[[Any], None], message: str
) -> None:
    embedding, other = collection(hotrow.Adagrad(lr=0.1)), collection(hotrow.Adagrad(lr=0.1))
    update(embedding)
    before, saved = outcome(other, []), embedding.optimizer.state_dict()
    change(saved)
    with pytest.raises(ValueError, match=message):
        other.optimizer.load_state_dict(saved)
    assert outcome(other, []).same_bits(before)


def test_an_optimizer_without_its_collection_says_so() -> None:
    optimizer = collection(hotrow.SGD()).optimizer
    with pytest.raises(RuntimeError, match="the collection whose rows this optimizer updates"):
        optimizer.state_dict()


# -- a row's bits are its own ------------------------------------------------------------


def updated(rule: RowRule, rows: Tensor, grads: Tensor, tables: int = 1) -> Tensor:
    """Rows after one update, as a collection does it: in one tensor, with their state."""
    rows, dim = rows.clone(), grads.shape[1]
    setting = {field.name: getattr(rule, field.name) for field in fields(rule)}
    scalars = {
        name: torch.full((tables,), value, dtype=torch.float64)
        for name, value in rule.scalars(setting, 3).items()
    }
    owner = None if tables == 1 else torch.arange(len(rows)) % tables
    state = [rows[:, place] for place in rule.state_columns(dim).values()]
    rule.update(rows[:, :dim], grads.clone(), state, per_row(scalars, owner))
    return rows


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 33, 64])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_the_same_bits_alone_and_among_a_thousand(rule: str, dim: int) -> None:
    each = RULES[rule]
    rows = torch.rand(1000, dim + each.state_width(dim))
    grads = torch.randn(1000, dim)
    together = updated(each, rows, grads)
    for place in range(0, 1000, 67):
        one = slice(place, place + 1)
        assert torch.equal(updated(each, rows[one], grads[one]), together[one])


@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_the_same_bits_wherever_it_stands_and_by_table(rule: str) -> None:
    each = RULES[rule]
    rows, grads = torch.rand(101, 7 + each.state_width(7)), torch.randn(101, 7)
    order, expected = torch.randperm(101), updated(each, rows, grads)
    assert torch.equal(updated(each, rows[order], grads[order]), expected[order])
    assert torch.equal(updated(each, rows, grads, tables=3), expected)


def test_row_wise_state_is_fed_by_the_mean_of_the_squares() -> None:
    rows, grads = torch.zeros(1, 5), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    rule = hotrow.RowWiseAdagrad(lr=1.0, eps=0.0)
    found = updated(rule, rows, grads)
    assert float(found[0, 4]) == 7.5
    torch.testing.assert_close(found[0, :4], -grads[0] / 7.5**0.5)


# -- the numbers of an update --------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_numbers_are_new_when_a_setting_or_a_step_is_and_only_then(rule: str) -> None:
    each = RULES[rule]
    optimizer = collection(each).optimizer
    names = tuple(optimizer.names)

    def numbers() -> list[tuple[float, ...]]:
        found = optimizer.table_scalars(names)
        assert found is optimizer.table_scalars(names)
        columns = optimizer.scalars(names).values()
        assert torch.stack(list(columns), 1).tolist() == [list(line) for line in found]
        return found

    first = numbers()  # before any update: those of the first one
    optimizer.count_step()
    assert numbers() == first
    optimizer.count_step()
    assert (numbers() != first) == each.uses_step
    now = numbers()
    optimizer.param_groups[1]["lr"] *= 2
    assert [i for i, line in enumerate(numbers()) if line != now[i]] == [1]
    rate = torch.tensor(0.25)
    optimizer.param_groups[1]["lr"] = rate
    now = numbers()
    rate.mul_(2)  # as torch's schedules do
    assert [i for i, line in enumerate(numbers()) if line != now[i]] == [1]
    if "betas" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["betas"] = [0.5, 0.75]
        now = numbers()
        optimizer.param_groups[0]["betas"][0] = 0.25
        assert [i for i, line in enumerate(numbers()) if line != now[i]] == [0]
