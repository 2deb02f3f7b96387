"""Captured multi-hot steps on a GPU: the same bits as eager ones, and as with every row there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from builders import no_synchronisation
from gpu_multi_hot import RULES, SIZE, STEPS, TABLES, Model, Run, batches, same_bits
from hotrow.data import ClickBatch

pytestmark = pytest.mark.gpu

# Read by cuBLAS when it first runs; torch's deterministic mode asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """As Trainer does, for loops of one's own."""
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = False
    yield
    torch.set_deterministic_debug_mode("default")
    memory.fill_uninitialized_memory = filling


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tables", TABLES)
def test_captured_multi_hot_steps_give_the_bits_of_eager_ones(tables: str, rule: str) -> None:
    """A short last batch, and schedules of rows and dense part; whole tables are compared."""
    weighted = tables != "mean"
    expected = Run(tables, rule).by_hand(batches(weighted=weighted)).found()
    for strategy, budget in (("all-fast", None), ("lookahead", "60%"), ("lru", "60%")):
        run = Run(tables, rule, strategy, budget).graphed(batches(weighted=weighted))
        assert run.num_graphs > 1
        assert same_bits(run.found(), expected)
        if budget:
            assert run.embedding.traffic().evicted_rows > 0
    eager = Run(tables, rule, "lookahead", "60%").by_hand(batches(weighted=weighted))
    assert same_bits(eager.found(), expected)


def test_another_schedule_gives_other_bits() -> None:
    """Or the tests above could not tell."""
    run, other = Run(), Run()
    other.schedules = []
    found = run.graphed(batches()).found()
    unlike = other.graphed(batches()).found()
    assert not torch.equal(found["losses"], unlike["losses"])


@pytest.mark.parametrize("tables", TABLES)
def test_a_trainer_captures_jagged_batches(tables: str) -> None:
    expected = Run(tables).trained(batches(), graphs=False).found()
    run = Run(tables, strategy="lookahead", budget="60%").trained(batches(), graphs=True)
    assert run.num_graphs > 1
    assert same_bits(run.found(), expected)


@pytest.mark.parametrize("dense", ["adagrad", "adam"])
def test_optimizers_of_the_dense_part_with_state_are_captured(dense: str) -> None:
    expected = Run(dense=dense).by_hand(batches()).found()
    run = Run(strategy="lookahead", budget="60%", dense=dense).graphed(batches())
    assert run.num_graphs > 1
    assert same_bits(run.found(), expected)
    steps = [float(state["step"]) for state in run.dense.state.values()]
    # Nothing weighs the lookups, so the scale has no gradient, and Adagrad never counted it.
    assert {step for step in steps if step} == {float(STEPS)}


def test_an_optimizer_that_asks_the_host_for_its_steps_is_told_of() -> None:
    run, twin = Run(strategy="lookahead", budget="60%"), Run()
    for each in (run, twin):
        each.dense = torch.optim.Adam(each.model.parameters(), lr=0.01)
        each.schedules.pop()
    with pytest.warns(UserWarning, match=r"Adam counts its steps on the host.*capturable=True"):
        run.graphed(batches())
    assert run.num_graphs == 0
    assert same_bits(run.found(), twin.by_hand(batches()).found())


@pytest.mark.parametrize("limited", [True, False], ids=["max_lookups", "room that grows"])
def test_a_batch_larger_than_the_room(limited: bool) -> None:
    source = list(batches(large=30))
    most = max(b.sparse.values().numel() for b in source[:30])  # type: ignore[union-attr]
    options = {"batch_size": SIZE, "max_lookups": most + 50} if limited else {}
    run = Run("two-widths", "adam", "lookahead", "40%").graphed(source, **options)
    assert run.num_graphs > 1
    assert same_bits(run.found(), Run("two-widths", "adam").by_hand(source).found())


def test_the_room_for_lookups_is_given_once() -> None:
    source = list(batches())
    most = max(batch.sparse.values().numel() for batch in source)  # type: ignore[union-attr]
    run = Run(strategy="lookahead", budget="60%").graphed(source, batch_size=SIZE, max_lookups=most)
    assert len(run.step.landing._shapes) == 1
    assert run.num_graphs <= 6
    assert same_bits(run.found(), Run().by_hand(source).found())


def test_plans_of_jagged_batches_are_replayed() -> None:
    run = Run(strategy="lookahead", budget="60%").graphed(batches())
    kinds = [key[0] for key in run.embedding.groups[0].planner.recorder._graphs]
    assert 0 < kinds.count("plan") <= 24
    assert 0 < kinds.count("expect") <= 8


def test_batches_pulled_together_skipped_and_evaluated_in_between() -> None:
    source = list(batches())
    run, twin = Run(strategy="lookahead", budget="60%").captured(), Run()
    stream, trained = run.stream(source), []
    for batch in stream:
        place = stream.position() - 1
        if place % 7 == 3:
            continue
        pulled = [batch]
        if place % 10 == 1 and place < STEPS - 2:
            pulled.append(next(stream))
        for each in pulled:
            run.train(each)
        trained += source[place : place + len(pulled)]
        if place % 13 == 0:
            assert isinstance(batch.sparse, hotrow.KeyedJaggedTensor)
            run.model.eval()
            with torch.no_grad():
                run.model(batch)  # which has no padding
            run.model.train()
    assert run.num_graphs > 1
    assert same_bits(run.found(), twin.by_hand(trained).found())


def test_a_bad_id_leaves_the_bits_of_the_steps_before_it() -> None:
    source, bad = list(batches()), 50
    sparse: Any = source[bad].sparse
    sparse.values()[int(sparse.offsets()[SIZE])] = 300  # the first of g
    run, twin = Run("two-widths", "adam", "lookahead", "60%"), Run("two-widths", "adam")
    message = r"feature 'g', position \d+, sample \d+: id 300 is outside table 'b'"
    with pytest.raises(ValueError, match=message):
        run.graphed(source)
    assert run.num_graphs > 1
    assert same_bits(run.found(), twin.by_hand(source[:bad]).found())
    assert same_bits(
        run.graphed(source[bad + 1 :]).found(), twin.by_hand(source[bad + 1 :]).found()
    )


def test_a_batch_that_does_not_fit_passes_through_from_its_berth() -> None:
    def wide(batch: ClickBatch, place: int) -> ClickBatch:
        sparse: Any = batch.sparse
        values = sparse.values().clone()
        ends = sparse.offsets()[::SIZE].tolist()
        for low, high in ((ends[0], ends[1]), (ends[2], ends[3])):
            values[low:high] = torch.arange(high - low) * 4 + place
        return ClickBatch(
            batch.dense,
            hotrow.KeyedJaggedTensor(sparse.keys(), values, offsets=sparse.offsets()),
            batch.label,
        )

    source = [wide(b, i) if i in (30, 31, 50) else b for i, b in enumerate(batches(most=4))]
    run = Run(strategy="lookahead", budget="12%")
    with pytest.warns(UserWarning, match="different rows does not fit"):
        run.graphed(source)
    assert run.num_graphs > 0
    assert run.embedding.traffic().chunked_batches >= 3
    assert same_bits(run.found(), Run().by_hand(source).found())


def test_a_loss_that_raises_leaves_everything_usable() -> None:
    def picky(logits: Tensor, labels: Tensor) -> Tensor:
        if len(labels) != SIZE:
            raise ValueError("labels nobody likes")
        return F.binary_cross_entropy_with_logits(logits, labels)

    source = list(batches())
    run, twin = Run(strategy="lookahead", budget="60%").captured(picky), Run()
    step = run.step
    with pytest.raises(ValueError, match="labels nobody likes"):
        run.graphed(source)
    assert run.num_graphs > 1
    assert len(run.losses) == STEPS - 1
    run.graphed(source[:20])
    assert run.step is step
    twin.by_hand(source[:-1]).by_hand(source[:20])
    assert same_bits(run.found(), twin.found())


def test_gradients_may_be_clipped_inside_the_step() -> None:
    def clip(optimizer: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.01)

    run, twin = Run(strategy="lookahead", budget="60%"), Run()
    for each in (run, twin):
        each.dense.register_step_pre_hook(clip)
    run.graphed(batches())
    assert run.num_graphs > 1
    assert same_bits(run.found(), twin.by_hand(batches()).found())


@pytest.mark.parametrize("frozen", [True, False])
def test_updates_are_counted_only_where_there_are_any(frozen: bool) -> None:
    class Frozen(Model):
        def forward(self, batch: ClickBatch) -> Tensor:
            vectors = self.embedding(batch.sparse).values().detach()
            logits: Tensor = self.top(torch.cat([vectors, batch.dense], dim=1)).squeeze(1)
            return logits

    run = Run(rule="adam", strategy="lookahead", budget="30%")
    if frozen:
        run.model.__class__ = Frozen
        run.schedules.clear()  # torch warns of a schedule for an optimizer that takes no step
    run.graphed(batches())
    assert run.embedding.optimizer.steps == [0 if frozen else STEPS] * 2


@pytest.mark.filterwarnings("ignore:.*ids:UserWarning")  # changed ones are planned on the spot
@pytest.mark.parametrize("change", ["ids", "dense", "accumulate"])
def test_what_a_loop_does_between_steps_is_seen(change: str) -> None:
    def steps(run: Run, source: Any) -> Iterator[ClickBatch]:
        joined = run.embedding.accumulate()
        for number, batch in enumerate(source):
            sparse: Any = batch.sparse
            if number == 30 and change == "ids":
                sparse.values().remainder_(100)
            if number == 30 and change == "dense":
                object.__setattr__(batch, "dense", torch.log1p(batch.dense))
            if number == 30 and change == "accumulate":
                joined.__enter__()
            if number == 32 and change == "accumulate":
                joined.__exit__(None, None, None)
            yield batch

    twin = Run("two-widths")
    run = Run("two-widths", strategy="lookahead", budget="60%").captured()
    for each in (twin, run):
        for batch in steps(each, each.stream(batches())):
            each.train(batch)
    assert run.num_graphs > 1
    assert run.embedding.optimizer.steps == [STEPS - (change == "accumulate")] * 2
    assert same_bits(run.found(), twin.found())
    assert not torch.equal(
        run.found()["losses"], Run("two-widths").by_hand(batches()).found()["losses"]
    )


# -- features without a gradient, and frozen rows --------------------------------------------


class Unused(Model):
    """Of table b nothing is part of the loss, and of table a nothing that h looks up."""

    def forward(self, batch: ClickBatch) -> Tensor:
        out = self.embedding(batch.sparse)
        parts = [out["f"], out["h"].detach(), out["g"].detach(), batch.dense]
        parts[0] *= self.scale  # in place, as a model may
        logits: Tensor = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tables", TABLES)
def test_captured_steps_leave_features_without_a_gradient_alone(tables: str, rule: str) -> None:
    source = list(batches())
    run, twin = Run(tables, rule, "lookahead", "60%"), Run(tables, rule)
    start = run.embedding.state_dict()
    for each in (run, twin):
        each.model.__class__ = Unused
    assert same_bits(run.graphed(source).found(), twin.by_hand(source).found())
    assert run.num_graphs > 1
    assert run.embedding.optimizer.steps == [STEPS, 0]
    now = run.embedding.state_dict()
    assert torch.equal(now["embedding_bags.b.weight"], start["embedding_bags.b.weight"])
    read_by_f = torch.zeros(5000, dtype=torch.bool)
    for batch in source:
        sparse: Any = batch.sparse
        read_by_f[sparse.values()[: int(sparse.offsets()[len(batch.label)])]] = True
    before, after = start["embedding_bags.a.weight"], now["embedding_bags.a.weight"]
    assert torch.equal(before[~read_by_f], after[~read_by_f])
    assert not torch.equal(before, after)


def test_features_without_a_gradient_make_nobody_wait() -> None:
    run = Run("one-width", "adam", "lookahead", "60%")
    run.model.__class__ = Unused
    for place, batch in enumerate(run.stream(batches())):
        loss = F.binary_cross_entropy_with_logits(run.model(batch), batch.label)
        run.dense.zero_grad()
        with no_synchronisation() if place > 3 else nullcontext():
            loss.backward()
        run.dense.step()


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_captured_steps_follow_when_rows_are_frozen_and_trained_again(rule: str) -> None:
    source, outcomes = list(batches()), []
    for graphs in (True, False):
        run = Run("two-widths", rule, "lookahead", "60%")
        if graphs:
            run.captured()
        frozen = None
        for place, batch in enumerate(run.stream(source)):
            if place in (25, 45):
                run.embedding.requires_grad_(place == 45)
                now = run.embedding.state_dict()
                assert frozen is None or all(torch.equal(now[key], frozen[key]) for key in now)
                frozen = now
            run.train(batch)
        if graphs:
            assert run.num_graphs > 1
        assert run.embedding.optimizer.steps == [STEPS - 20] * 2
        outcomes.append(run.found())
    assert same_bits(*outcomes)
