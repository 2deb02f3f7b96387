"""Frozen rows and their state stay as they are, and no other row changes by a bit.

The definition: a step on all rows, after which the frozen ones are put back as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import (
    CASES,
    RULES,
    Case,
    Outcome,
    build,
    outcome,
    readout,
    score_trainer,
    tight_budget,
    variant,
)
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.host.rows import HostRows
from hotrow.engine.rows import cpu_rows
from hotrow.engine.strategy import as_listed
from hotrow.inputs.tree import to_device
from hotrow.kernels.reference import bits_of, in_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 6
# From which step on which part of the rows is frozen: some, others, none, and some again.
CHANGES = {1: 0.4, 2: 0.7, 4: None, 5: 0.5}
Frozen = Mapping[str, Tensor] | None


def frozen_at(case: Case, step: int) -> Frozen:
    """Rows that are frozen from a step on, at random; of the last table a mask."""
    part = CHANGES[step]
    if part is None:
        return None
    draw = torch.Generator().manual_seed(step)
    masks = {t.name: torch.rand(t.num_embeddings, generator=draw) < part for t in case.tables}
    last = case.tables[-1].name
    return {name: m if name == last else m.nonzero().squeeze(1) for name, m in masks.items()}


def trained(embedding: Any, case: Case, **options: Any) -> Outcome:
    losses = []
    source = hotrow.ahead(case.batches(STEPS), embedding, **options)
    for step, batch in enumerate(source):
        if step in CHANGES:
            embedding.freeze_rows(frozen_at(case, step))
        loss = readout(embedding(batch))
        loss.backward()
        losses.append(loss.detach())
    return outcome(embedding, losses)


def put_back(embedding: Any, case: Case) -> Outcome:
    """The same by its definition."""
    losses, frozen = [], None
    for step, batch in enumerate(case.batches(STEPS)):
        frozen = frozen_at(case, step) if step in CHANGES else frozen
        kept = kept_rows(embedding, frozen)
        loss = readout(embedding(to_device(batch, embedding.device)))
        loss.backward()
        for group, ids, rows in kept:
            group.scatter(ids, rows)
        losses.append(loss.detach())
    return outcome(embedding, losses)


def kept_rows(embedding: Any, frozen: Frozen) -> list[tuple[Any, Tensor, Tensor]]:
    """Return frozen rows as they are: their groups, ids and bits."""
    kept = []
    for table, rows in ({} if frozen is None else frozen).items():
        group, base, _ = embedding._rows.find(table)
        ids = (rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows) + base
        kept.append((group, ids, group.gather(ids, torch.zeros(len(ids), group.width))))
    return kept


def tight(
    case: Case, rule: str, name: str, victims: str, *, part: float = 1.0, **options: Any
) -> Any:
    """As few slots as the batches in flight need, and victims that show every mistake."""
    strategy = replace(variant(name, victims=victims), order=as_listed)
    budget = tight_budget(case, case.batches(STEPS), strategy.hold, part=part)
    return build(case, rule, strategy, budget=budget, **options)


# Each case, rule and way at least once; all of them would take long.
WAYS = [("lookahead", "random", 1.0), ("scratchpipe", "most-recent", 1.0), ("lru", "random", 0.6)]
CHOICES = [
    (case, rule, *way)
    for case, rule, way in zip(CASES, itertools.cycle(RULES), itertools.cycle(WAYS), strict=False)
]
CHOICES += [("one-hot", rule, *WAYS[0]) for rule in ("row-wise", "adamw")]


@pytest.mark.parametrize(("case", "rule", "name", "victims", "part"), CHOICES)
def test_on_a_cpu(case: str, rule: str, name: str, victims: str, part: float) -> None:
    right = put_back(build(CASES[case], rule, "all-fast"), CASES[case])
    assert trained(build(CASES[case], rule, "all-fast"), CASES[case]).same_bits(right)
    embedding = tight(CASES[case], rule, name, victims, part=part)
    assert trained(embedding, CASES[case]).same_bits(right)
    assert bool(embedding.traffic().chunked_batches) is (part < 1)


@pytest.mark.parametrize(
    ("rule", "form"), [*((rule, "bags") for rule in RULES), ("adagrad", "rows")]
)
def test_where_the_host_updates_rows(rule: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRows, "rows_cross", lambda *_: form == "rows")
    case = CASES["two-widths"]
    right = put_back(build(case, rule, "hybrid", device=DEVICE), case)
    assert trained(build(case, rule, "hybrid", device=DEVICE), case).same_bits(right)


def test_an_update_that_is_owed_is_of_rows_that_were_not_frozen_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a link, an update waits for the next reader."""
    monkeypatch.setattr(HostRows, "rows_cross", lambda *_: False)
    case = CASES["one-hot"]
    embedding, plain = (build(case, "adagrad", "hybrid") for _ in range(2))
    embedding.groups[0].link.exists = True
    for each in (embedding, plain):
        readout(each(case.batches(1)[0])).backward()
    assert embedding.groups[0].table._owed is not None
    embedding.freeze_rows({"a": torch.ones(60, dtype=torch.bool)})
    assert outcome(embedding, []).same_bits(outcome(plain, []))


@pytest.mark.parametrize("engine", [cpu_rows, gpu_rows])
def test_late_and_joined_gradients_leave_them_alone(engine: Any) -> None:
    case, device = CASES["multi-hot"], DEVICE.type if engine is gpu_rows else "cpu"
    found = []
    for freezes in (True, False):
        embedding = build(case, "adam", "all-fast", device=device, engine=engine)
        embedding.grad_scale = 8.0  # gradients are looked at before the update
        frozen = frozen_at(case, 2)
        kept = kept_rows(embedding, frozen)
        if freezes:
            embedding.freeze_rows(frozen)
        with embedding.accumulate():
            for batch in case.batches(3):
                readout(embedding(to_device(batch, embedding.device)), 8.0).backward()
        for group, ids, rows in () if freezes else kept:
            group.scatter(ids, rows)
        found.append(outcome(embedding, []))
    assert found[0].same_bits(found[1])


def test_without_freezing_something_else_comes_out() -> None:
    case = CASES["one-hot"]
    right = put_back(build(case, "sgd", "all-fast"), case)
    frozen, CHANGES[1] = CHANGES[1], None
    try:
        assert not trained(build(case, "sgd", "all-fast"), case).same_bits(right)
    finally:
        CHANGES[1] = frozen


def test_none_freezes_no_row_and_takes_no_memory() -> None:
    embedding = build(CASES["one-hot"], "sgd", "all-fast")
    before = embedding.memory()
    embedding.freeze_rows({"a": torch.tensor([3, 3])})
    assert embedding.memory()["which rows are frozen"] == 4 * 4  # 101 bits
    embedding.freeze_rows({})
    assert not embedding.groups[0].store.frozen.bits.any()
    embedding.freeze_rows(None)
    assert embedding.groups[0].store.frozen.bits is None
    assert embedding.memory() == before


@pytest.mark.parametrize("strategy", ["lookahead", "hybrid"])
def test_rows_stay_frozen_when_an_optimizer_brings_state(strategy: str) -> None:
    """Rows are built again for the state of an optimizer that is made later."""
    sizes = {"a": (900, 4), "b": (900, 2)}
    tables = [hotrow.EmbeddingBagConfig(name, *size, [name]) for name, size in sizes.items()]
    embedding = hotrow.EmbeddingBagCollection(
        tables, None, "50%", update="step", strategy=strategy, seed=1
    )
    embedding.freeze_rows({"a": torch.arange(0, 900, 2)})
    before = embedding.row_access.copy_weights("a")
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    embedding(torch.arange(16).reshape(8, 2) % 9).values().sum().backward()
    optimizer.step()
    moved = (embedding.row_access.copy_weights("a") != before).any(1).nonzero().squeeze(1)
    assert moved.tolist() == [1, 3, 5]


def test_bits_stay_at_one_place_while_some_row_is_frozen() -> None:
    """Captured steps read them there."""
    embedding = build(CASES["one-hot"], "sgd", "all-fast")
    embedding.freeze_rows({"a": torch.tensor([3])})
    before = embedding.groups[0].store.frozen.bits.data_ptr()
    embedding.freeze_rows({"b": torch.tensor([0, 39])})
    assert embedding.groups[0].store.frozen.bits.data_ptr() == before
    every = torch.arange(100)
    assert every[in_bits(embedding.groups[0].store.frozen.bits, every)].tolist() == [60, 99]


@pytest.mark.parametrize("ids", [[], [0], [31], [32], [31, 63, 95, 99], list(range(100))])
def test_bits(ids: list[int]) -> None:
    bits = bits_of(torch.tensor(ids, dtype=torch.int64), 100)
    assert bits.shape == (4,)
    every = torch.arange(100)
    assert every[in_bits(bits, every)].tolist() == ids


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"c": torch.tensor([1])}, "no table 'c'; there are a, b"),
        ({"a": torch.tensor([1, 60])}, "table 'a' has rows 0 to 59, and no row 60"),
        ({"a": torch.tensor([-1])}, "no row -1"),
        ({"a": torch.tensor([0.5])}, "got torch.float32"),
        ({"a": torch.ones(59, dtype=torch.bool)}, "a bool for each of its 60 rows"),
    ],
)
def test_what_is_no_row_is_refused_before_anything_changes(rows: Any, said: str) -> None:
    embedding = build(CASES["one-hot"], "sgd", "all-fast")
    with pytest.raises((KeyError, ValueError), match=said):
        embedding.freeze_rows(rows)
    assert embedding.groups[0].store.frozen.bits is None


def run_of(embedding: Any, *, graphs: bool) -> Outcome:
    """Freezes some rows, others, none by name, and none."""
    changes = {12: torch.arange(4), 18: torch.arange(6, 9), 24: None, 28: torch.arange(2)}
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(40, (8, 2), generator=draw) for _ in range(36)]
    for record in score_trainer(embedding, graphs=graphs).run(batches):
        if record.step in changes:
            rows = changes[record.step]
            embedding.freeze_rows({} if rows is None else {"a": rows})
        if record.step == 32:
            embedding.freeze_rows(None)
    return outcome(embedding, [])


def test_the_trainer_s_loop_may_freeze_rows() -> None:
    case = CASES["one-hot"]
    budget = hotrow.Budget((hotrow.Share(40, 16, True),), window_bytes=1 << 14)
    found = run_of(build(case, "adam", "lookahead", budget=budget), graphs=False)
    assert found.same_bits(run_of(build(case, "adam", "all-fast"), graphs=False))
    frozen = build(case, "adam", "all-fast")
    frozen.freeze_rows = lambda rows: None
    assert not found.same_bits(run_of(frozen, graphs=False))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [0, 40])
def test_captured_steps_follow(slots: int) -> None:
    """To the bit of eager ones; tests/test_graphed.py counts the captures."""
    options: dict[str, Any] = {"strategy": "all-fast"}
    if slots:
        budget = hotrow.Budget((hotrow.Share(slots, 16, True),), window_bytes=1 << 14)
        options = {"strategy": "lookahead", "budget": budget}
    found = [
        run_of(build(CASES["one-hot"], "adam", **options, device="cuda"), graphs=graphs)
        for graphs in (True, False)
    ]
    assert found[0].same_bits(found[1])
