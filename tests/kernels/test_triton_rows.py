"""Triton's lookups and row updates agree with the reference, and a row's bits with nothing but
the row: the interpreter runs them where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hotrow.kernels import reference
from hotrow.kernels.reference import bits_of
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowRule, RowWiseAdagrad
from hotrow.kernels.triton import segments, update
from hotrow.kernels.triton.lookup import pool, weight_grads
from hotrow.kernels.triton.segments import Segments
from hotrow.kernels.triton.update import NUM_SCALARS, sum_by_row, update_rows, update_slots

NUM_ROWS = 1000  # ids are below; padding is this id
BASES = [0, 10, 400, 777]  # first ids of four tables
RULES = [
    SGD(lr=0.1, weight_decay=0.3),
    Adagrad(lr=0.1, initial_accumulator_value=0.2),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    AdamW(lr=0.1, weight_decay=0.4),
]
DIMS = [1, 3, 16, 33, 64, 128]


def name_of(value: Any) -> str:
    return (" ".join(value) or "plain") if isinstance(value, dict) else type(value).__name__


each_rule = pytest.mark.parametrize("rule", RULES, ids=name_of)


def segments_of(ids: Tensor) -> Segments:
    """The lookups sorted by id; what has no meaning beyond the count is poison."""
    found = segments.segments_of(ids)
    found.ids[int(found.count) :] = torch.iinfo(ids.dtype).min
    found.starts[int(found.count) + 1 :] = torch.iinfo(torch.int32).min
    return found


def shuffled(lengths: dict[int, int], device: torch.device) -> Tensor:
    """Ids, each as often as asked, mixed."""
    parts = [torch.full([length], id) for id, length in lengths.items()]
    ids = torch.cat(parts)
    return ids[torch.randperm(ids.numel())].to(device)


# Around the chunk's length, twice it, once; padding among them, long as well. Few lookups in all:
# the interpreter is slow.
MIXED = {5: 31, 9: 32, 11: 33, 300: 65, 400: 3, 776: 1, 777: 2, 999: 96, NUM_ROWS: 40}
SHORT = {id: 1 + id % 7 for id in range(0, 999, 90)} | {NUM_ROWS: 4}
HOT = {3: 7, 8: 1100, 9: 2}  # more chunks than a tile holds


class Case:
    """Lookups of some bags, with all that an update may be given."""

    def __init__(
        self,
        ids: Tensor,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        bags: bool = False,
        weighted: bool = False,
        mean: bool = False,
    ) -> None:
        device, size = ids.device, ids.numel()
        self.ids, self.dim = ids, dim
        self.segments = segments_of(ids)
        num_bags = max(1, size // 3) if bags else size
        self.bag_of = torch.randint(num_bags, (size,), device=device).sort()[0] if bags else None
        self.grads = torch.randn(num_bags, dim, device=device).to(dtype)
        self.weights = torch.rand(size, device=device) if weighted else None
        lengths = torch.randint(1, 9, (num_bags, 1), device=device)
        self.divisor = lengths.float() if mean else None

    @property
    def terms(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.grads, self.bag_of, self.weights, self.divisor

    def only(self, id: int) -> Case:
        """The same lookups of one row, and no other."""
        mine = self.ids == id
        alone = Case(self.ids[mine], self.dim)
        bag_of = torch.arange(self.ids.numel(), device=mine.device)
        alone.bag_of = (bag_of if self.bag_of is None else self.bag_of)[mine]
        alone.grads, alone.divisor = self.grads, self.divisor
        alone.weights = None if self.weights is None else self.weights[mine]
        return alone


KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16},
    {"bags": True},
    {"bags": True, "weighted": True},
    {"bags": True, "mean": True, "dtype": torch.bfloat16},
    {"bags": True, "mean": True, "weighted": True},
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=name_of)


def summed_in_float64(case: Case) -> dict[int, Tensor]:
    grads = case.grads.double()
    if case.divisor is not None:
        grads = grads / case.divisor.double()
    terms = grads if case.bag_of is None else grads[case.bag_of]
    if case.weights is not None:
        terms = terms * case.weights.double()[:, None]
    return {int(id): terms[case.ids == id].sum(0).float() for id in case.ids.unique()}


def sums(case: Case) -> dict[int, Tensor]:
    found = sum_by_row(*case.terms, case.segments)
    assert found.shape == (case.ids.numel(), case.dim)
    count = int(case.segments.count)
    return dict(zip(case.segments.ids[:count].tolist(), found, strict=False))


# -- pool --------------------------------------------------------------------------------


def rows_of(count: int, width: int, device: torch.device) -> Tensor:
    rows = torch.randn(count + 1, width, device=device)
    rows[-1] = 0  # the null slot
    return rows


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    if dtype == torch.bfloat16 and found.device.type == "cpu":
        # Triton's interpreter cuts bits off instead of rounding to the nearest.
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", DIMS)
def test_one_lookup_per_bag_is_a_copy(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = rows_of(40, 2 * dim + 1, device)
    slots = torch.randint(41, (65,), device=device, dtype=torch.int32)
    found = pool(rows, slots, None, None, None, dim, dtype)
    assert_rounded(found, rows[slots.long(), :dim], dtype)


def bags_of(lengths: list[int], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    offsets = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device)
    slots = torch.randint(rows + 1, (sum(lengths),), device=device, dtype=torch.int32)
    return slots, offsets


@pytest.mark.parametrize(("weighted", "mean"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dim", DIMS)
def test_a_bag_is_the_reference_s(
    dim: int, weighted: bool, mean: bool, device: torch.device
) -> None:
    rows = rows_of(40, dim + 3, device)
    slots, offsets = bags_of([0, 1, 3, 4, 5, 14, 0], 40, device)
    weights = torch.rand(slots.numel(), device=device) if weighted else None
    divisor = torch.randint(1, 9, (7, 1), device=device).float() if mean else None
    found = pool(rows, slots, offsets, weights, divisor, dim)
    vectors = rows[:, :dim].contiguous()
    right = reference.pool(vectors, slots.long(), offsets, weights, divisor)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    low = pool(rows, slots, offsets.int(), weights, divisor, dim, torch.bfloat16)
    assert_rounded(low, found, torch.bfloat16)  # once, at the end


def test_a_bag_has_the_same_bits_alone_and_in_company(device: torch.device) -> None:
    rows = rows_of(40, 33, device)
    slots, offsets = bags_of([3, 17, 0, 30, 1], 40, device)
    weights = torch.rand(slots.numel(), device=device)
    together = pool(rows, slots, offsets, weights, None, 33)
    for bag in range(5):
        mine = slice(int(offsets[bag]), int(offsets[bag + 1]))
        own = torch.tensor([0, mine.stop - mine.start], device=device)
        alone = pool(rows, slots[mine], own, weights[mine], None, 33)
        assert torch.equal(alone[0], together[bag])


def test_no_lookups_and_no_bags(device: torch.device) -> None:
    rows = rows_of(9, 4, device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    offsets = torch.zeros(4, dtype=torch.int64, device=device)
    assert torch.equal(pool(rows, none, offsets, None, None, 4), rows.new_zeros(3, 4))
    assert pool(rows, none, offsets[:1], None, None, 4).shape == (0, 4)
    assert pool(rows, none, None, None, None, 4).shape == (0, 4)
    assert weight_grads(rows, none, none, rows.new_zeros(3, 4), 4).shape == (0,)


# -- weight_grads ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", DIMS)
def test_a_weight_s_gradient_is_the_reference_s(
    dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows = rows_of(40, dim + 2, device)
    slots = torch.randint(41, (33,), device=device, dtype=torch.int32)
    bag_of = torch.randint(9, (33,), device=device).sort()[0]
    grads = torch.randn(9, dim, device=device).to(dtype)
    found = weight_grads(rows, slots, bag_of.int(), grads, dim)
    vectors = rows[:, :dim].contiguous()
    right = reference.weight_grads(vectors, slots.long(), bag_of, grads.float())
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight_grads(rows, slots, None, grads[bag_of], dim), found)
    assert torch.equal(weight_grads(rows, slots[5:6], bag_of[5:6], grads, dim), found[5:6])


# -- sum_by_row --------------------------------------------------------------------------


def assert_summed(case: Case) -> None:
    found, right = sums(case), summed_in_float64(case)
    assert set(found) == set(right)
    for id, values in right.items():
        torch.testing.assert_close(found[id], values, rtol=1e-5, atol=1e-4)


@pytest.mark.thinned(2)
@each_kind
def test_a_rows_gradient_is_the_sum_over_its_lookups(
    kind: dict[str, Any], device: torch.device
) -> None:
    assert_summed(Case(shuffled(MIXED, device), 3, **kind))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dim", [*DIMS, 500])  # so wide that chunks are taken in parts
def test_a_rows_gradient_may_have_any_width(dim: int, device: torch.device) -> None:
    assert_summed(Case(shuffled({4: 70, **SHORT}, device), dim, bags=True, weighted=True))


def test_a_row_may_be_hot(device: torch.device) -> None:
    case = Case(shuffled(HOT, device), 2)
    found = sums(case)
    torch.testing.assert_close(found[8], summed_in_float64(case)[8], rtol=1e-5, atol=1e-4)
    assert torch.equal(found[8], sums(case.only(8))[8])


def test_thousands_of_small_gradients_survive_beside_a_large_one(device: torch.device) -> None:
    # One after the other, every 1 would be lost: 2**24 + 1 is 2**24 in float32.
    case = Case(torch.full((600,), 3, device=device), 1)
    case.grads.fill_(1.0)
    case.grads[0] = 2.0**24
    assert abs(float(sums(case)[3]) - (2**24 + 599)) <= reference.CHUNK


@pytest.mark.parametrize("before", [0, 1, 31])
def test_a_row_is_summed_whole_wherever_its_run_begins(before: int, device: torch.device) -> None:
    # Whole numbers, so that no sum rounds and every lookup must be there exactly once.
    lengths = {2: before, 7: 33, 8: 1, 9: 65, 10: 32, 11: 31, 12: 64, 13: 34}
    case = Case(shuffled(lengths, device), 1)
    case.grads = torch.randint(-99, 99, case.grads.shape, device=device).float()
    found = sums(case)
    for id, values in summed_in_float64(case).items():
        assert torch.equal(found[id], values)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=name_of)
def test_a_rows_gradient_has_the_same_bits_alone_and_in_company(
    kind: dict[str, Any], device: torch.device
) -> None:
    case = Case(shuffled(MIXED, device), 33, **kind)
    together = sums(case)
    for id in (9, 11, 300, 400):
        assert torch.equal(sums(case.only(id))[id], together[id])


def test_only_as_many_rows_as_there_are_are_written(device: torch.device) -> None:
    case = Case(shuffled(SHORT, device), 3)
    found = sum_by_row(*case.terms, case.segments)
    if device.type == "cpu":  # where conftest's poison is
        assert bool(found[len(SHORT) :].isnan().all())
    assert not bool(found[: len(SHORT)].isnan().any())


def test_gradients_may_be_a_view(device: torch.device) -> None:
    case = Case(shuffled(SHORT, device), 5)
    right = sums(case)
    case.grads = torch.cat([case.grads, case.grads], dim=1)[:, :5]
    assert all(torch.equal(values, right[id]) for id, values in sums(case).items())


# -- updates -----------------------------------------------------------------------------


def scalars_of(rule: RowRule, tables: int, device: torch.device) -> Tensor:
    """Different settings for each table, [T, K] float32."""
    lines = []
    for table in range(tables):
        less = 1 - table / (2 * tables)
        setting = {"lr": 0.1 * less, "weight_decay": 0.2 * less, "eps": 1e-3 * less}
        betas = {"betas": (0.8 * less, 0.9 * less)}
        lines.append(list(rule.scalars({**setting, **betas}, 3 + table).values()))
    return torch.tensor(lines, device=device)


@pytest.fixture
def _nearest_sqrt(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """On a CPU, torch's square root (MKL's) is off by one bit now and then; numpy's is not."""
    if device.type == "cpu":
        monkeypatch.setattr(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


def apply(rule: RowRule, rows: Tensor, grads: Tensor, scalars: Tensor, dim: int) -> None:
    """optim.py's own update of all `rows`, each with its own line of `scalars`."""
    names = _scalar_names(rule)
    settings = {name: scalars[:, [i]] for i, name in enumerate(names)}
    state = [rows[:, columns] for columns in rule.state_columns(dim).values()]
    rule.update(rows[:, :dim], grads, state, settings)


def _scalar_names(rule: RowRule) -> list[str]:
    setting = {"lr": 0.5, "weight_decay": 0.5, "eps": 0.5, "betas": (0.5, 0.5)}
    return list(rule.scalars(setting, 1))


def table_of(ids: Tensor) -> Tensor:
    bases = torch.tensor(BASES, device=ids.device)
    return torch.searchsorted(bases, ids, right=True) - 1


class Slots:
    """Rows with their state at some slots, the null slot last."""

    def __init__(self, case: Case, rule: RowRule, *, spare: int = 7) -> None:
        self.count = int(case.segments.count)
        unique = case.segments.ids[: self.count]
        self.width = case.dim + rule.state_width(case.dim)
        device = unique.device
        self.null = self.count + spare
        # What a row holds follows from its id, so that it is the same in every company.
        content = torch.rand(NUM_ROWS + 1, self.width, generator=torch.Generator().manual_seed(1))
        content = content.to(device)
        self.rows = torch.rand(self.null + 1, self.width, device=device)
        self.rows[-1] = 0
        places = torch.randperm(self.null, device=device)[: self.count]
        self.row_slots = torch.full_like(case.segments.order, torch.iinfo(torch.int32).min)
        self.row_slots[: self.count] = torch.where(unique == NUM_ROWS, self.null, places).int()
        self.ids = unique[unique < NUM_ROWS]
        self.rows[self.of(self.ids)] = content[self.ids]
        self.bases = torch.tensor(BASES, device=device)
        self.scalars = scalars_of(rule, len(BASES), device)

    def of(self, ids: Tensor) -> Tensor:
        """The slots of ids: unique ids are ascending, and so is `ids`."""
        return self.row_slots[: ids.numel()].long()

    def contents(self) -> dict[int, Tensor]:
        return dict(zip(self.ids.tolist(), self.rows[self.of(self.ids)], strict=True))

    def update(
        self, case: Case, rule: RowRule, *, tables: bool = True, frozen: Tensor | None = None
    ) -> None:
        step = rule, self.scalars, self.bases if tables else None
        update_slots(
            self.rows,
            self.row_slots,
            case.segments,
            *case.terms,
            *step,
            self.null,
            case.dim,
            frozen,
        )


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal to the bit: a zero's sign counts, and a NaN is itself."""
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.thinned(4)
@each_rule
@pytest.mark.parametrize("dim", DIMS)
def test_the_step_is_the_rule_s_own(dim: int, rule: RowRule, device: torch.device) -> None:
    case = Case(shuffled(MIXED if dim == 16 else SHORT, device), dim)  # long rows, too
    slots = Slots(case, rule)
    before, right = slots.rows.clone(), slots.rows[slots.of(slots.ids)]
    grads = torch.stack([summed_in_float64(case)[id] for id in slots.ids.tolist()])
    apply(rule, right, grads, slots.scalars[table_of(slots.ids)], dim)
    slots.update(case, rule)
    at = slots.of(slots.ids)
    torch.testing.assert_close(slots.rows[at], right, rtol=1e-4, atol=1e-4)
    others = torch.ones(slots.null + 1, dtype=torch.bool, device=device)
    others[at] = False
    assert_same_bits(slots.rows[others], before[others])  # the null slot among them


@pytest.mark.thinned(4)
@pytest.mark.usefixtures("_nearest_sqrt")
@each_rule
@pytest.mark.parametrize("dim", DIMS)
def test_a_step_from_a_summed_gradient_has_the_bits_of_the_rule_s_own(
    dim: int, rule: RowRule, device: torch.device
) -> None:
    ids = torch.randint(NUM_ROWS, (20,), device=device)
    scalars = scalars_of(rule, len(BASES), device)
    rows = torch.rand(20, dim + rule.state_width(dim), device=device)
    grads, right = torch.randn(20, dim, device=device), rows.clone()
    apply(rule, right, grads, scalars[table_of(ids)], dim)
    bases = torch.tensor(BASES, device=device)
    update_rows(rows, None, ids, None, grads, rule, scalars, bases, dim)
    if rule.row_wise and dim & (dim - 1):  # columns are halved as if there were zeros behind
        torch.testing.assert_close(rows, right)
    else:
        assert_same_bits(rows, right)


@each_rule
def test_the_order_of_the_scalars_is_the_rule_s(rule: RowRule) -> None:
    names = _scalar_names(rule)
    adam = ["keep1", "keep2", "size", "eps"]
    known = {"SGD": ["lr", "decay"], "Adam": adam, "AdamW": [*adam, "shrink"]}
    assert names == known.get(type(rule).__name__, ["lr", "eps"])
    assert len(names) == NUM_SCALARS[type(rule).__name__]


# Each kind once and each rule at least once: all pairs would take long.
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "rule"), list(zip(KINDS, [*RULES, RULES[0]], strict=True)), ids=name_of
)
def test_sum_and_step_in_one_have_the_bits_of_sum_and_then_step(
    kind: dict[str, Any], rule: RowRule, device: torch.device
) -> None:
    case = Case(shuffled(MIXED, device), 20, **kind)
    slots = Slots(case, rule)
    rows = slots.rows.clone()
    slots.update(case, rule)
    update_rows(
        rows,
        slots.row_slots,
        case.segments.ids,
        case.segments.count,
        sum_by_row(*case.terms, case.segments),
        rule,
        slots.scalars,
        slots.bases,
        case.dim,
        null_slot=slots.null,
    )
    assert_same_bits(rows, slots.rows)


@pytest.mark.thinned(2)
@each_rule
def test_a_row_has_the_same_bits_alone_and_in_company_and_at_any_slot(
    rule: RowRule, device: torch.device
) -> None:
    case = Case(shuffled(MIXED, device), 33, bags=True, weighted=True, mean=True)
    slots = Slots(case, rule)
    slots.update(case, rule)
    together = slots.contents()
    for id in (300, 400):
        alone = case.only(id)
        own = Slots(alone, rule, spare=40)
        own.update(alone, rule)
        assert_same_bits(own.contents()[id], together[id])


def test_how_many_programs_share_the_rows_plays_no_part(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = Case(shuffled(SHORT, device), 64)  # four rows per tile
    found = []
    for programs in (update.MOST_PROGRAMS, 2):
        monkeypatch.setattr(update, "MOST_PROGRAMS", programs)
        slots = Slots(case, SGD())
        slots.update(case, SGD())
        rows = torch.stack(list(slots.contents().values()))
        update_rows(rows, None, slots.ids, None, rows * 2, SGD(), slots.scalars, slots.bases, 64)
        found.append(rows)
    assert_same_bits(found[0], found[1])


def test_without_bases_all_tables_share_the_first_settings(device: torch.device) -> None:
    rule = Adam()
    case = Case(shuffled(SHORT, device), 5)
    one, each = Slots(case, rule), Slots(case, rule)
    each.scalars[:] = each.scalars[0].clone()
    one.update(case, rule, tables=False)
    each.update(case, rule)
    assert_same_bits(
        torch.stack(list(one.contents().values())), torch.stack(list(each.contents().values()))
    )


@pytest.mark.parametrize("tables", [1, 2, 3, 5, 8, 26])
def test_each_id_finds_its_table(tables: int, device: torch.device) -> None:
    bases = torch.arange(tables, device=device) * 2**33  # ids beyond 32 bits
    ids = torch.cat([bases, bases + 1, bases + 2**33 - 1])
    scalars = torch.stack([torch.arange(tables), torch.zeros(tables)], dim=1).float().to(device)
    rows = torch.zeros(ids.numel(), 1, device=device)
    update_rows(rows, None, ids, None, torch.full_like(rows, -1.0), SGD(), scalars, bases, 1)
    assert torch.equal(rows[:, 0], torch.arange(tables, device=device).float().repeat(3))


def test_only_the_counted_rows_are_updated_and_never_the_null_slot(device: torch.device) -> None:
    rows = torch.rand(9, 4, device=device)
    before = rows.clone()
    index = torch.tensor([4, 8, 2, 6, 1], dtype=torch.int32, device=device)
    update_rows(
        rows,
        index,
        index,
        torch.tensor([3], dtype=torch.int32, device=device),
        torch.ones(5, 4, device=device),
        SGD(),
        torch.tensor([[0.5, 0.0]], device=device),
        None,
        4,
        null_slot=8,
    )
    right = before.clone()
    right[[4, 2]] -= 0.5
    assert torch.equal(rows, right)


def test_a_batch_without_lookups_changes_nothing(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    empty = Segments(order=none, rank=none, starts=zero, ids=none, count=zero)
    rows, scalars = torch.rand(3, 2, device=device), torch.ones(1, 2, device=device)
    before, grads = rows.clone(), torch.zeros(0, 2, device=device)
    assert sum_by_row(grads, None, None, None, empty).shape == (0, 2)
    update_slots(rows, none, empty, grads, None, None, None, SGD(), scalars, None, 2, 2)
    update_rows(rows, none, none, zero, grads, SGD(), scalars, None, 2)
    assert torch.equal(rows, before)


# -- frozen rows -------------------------------------------------------------------------

FROZEN = [9, 300, 400, 999]  # short and long runs, around a table's first id


@pytest.mark.thinned(2)
@each_rule
def test_frozen_rows_stay_and_the_others_have_the_same_bits(
    rule: RowRule, device: torch.device
) -> None:
    case = Case(shuffled(MIXED, device), 5, bags=True, weighted=True)
    slots = Slots(case, rule)
    frozen = bits_of(torch.tensor(FROZEN, device=device), NUM_ROWS + 1)
    before = slots.rows.clone()
    slots.update(case, rule)
    right, slots.rows = slots.rows, before.clone()
    for at in slots.of(slots.ids)[torch.isin(slots.ids, torch.tensor(FROZEN, device=device))]:
        right[at] = before[at]
    slots.update(case, rule, frozen=frozen)
    assert not torch.equal(slots.rows, before)
    assert_same_bits(slots.rows, right)


@pytest.mark.parametrize(("rule", "dtype"), [(RULES[0], torch.int32), (RULES[4], torch.int64)])
def test_frozen_rows_stay_where_gradients_are_already_summed(
    rule: RowRule, dtype: torch.dtype, device: torch.device
) -> None:
    ids = torch.randperm(NUM_ROWS, device=device)[:40].to(dtype)
    rows = torch.rand(40, 6 + rule.state_width(6), device=device)
    grads, scalars = torch.randn(40, 6, device=device), scalars_of(rule, len(BASES), device)
    bases, before, right = torch.tensor(BASES, device=device), rows.clone(), rows.clone()
    update_rows(right, None, ids, None, grads, rule, scalars, bases, 6)
    right[::3] = before[::3]
    frozen = bits_of(ids[::3].long(), NUM_ROWS + 1)
    update_rows(rows, None, ids, None, grads, rule, scalars, bases, 6, frozen=frozen)
    assert_same_bits(rows, right)
