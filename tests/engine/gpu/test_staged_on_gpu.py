"""Staged rows where copies and kernels really run beside each other, and some of them late."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import hotrow
import hotrow.engine.gpu.staged
import hotrow.store.pinned
from builders import CASES, RULES, Outcome, outcome, readout, shuffled, tight_budget, train, variant
from gpu_training import Run, batches, same_bits
from hotrow.engine.gpu.staged import Packet, Staged
from hotrow.engine.stages import SPLIT
from hotrow.engine.strategy import Strategy
from hotrow.engine.tuning import Tuning
from hotrow.sizing.fill_rates import measure
from hotrow.store.pinned import locked_rows
from hotrow.store.ram import Store
from hotrow.support.streams import lanes_of

pytestmark = pytest.mark.gpu

STEPS = 150
SLEEP = 3_000_000  # clock ticks of the GPU: more than a millisecond


def build(
    case: Any, rule: str, strategy: str | Strategy = "all-fast", **options: Any
) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        case.tables, RULES[rule], strategy=strategy, seed=3, device="cuda", **options
    )


def stages_for(strategy: Strategy, fill: str) -> Strategy:
    """The stages that a way of moving rows needs."""
    if fill != "staged" or strategy.staged:
        return strategy
    return replace(strategy, stages=SPLIT)


@cache
def all_fast(case: str, rule: str) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(STEPS))


def tight(
    case: str, rule: str, name: str, fill: str, victims: str = "most-recent", **options: Any
) -> hotrow.EmbeddingBagCollection:
    strategy = replace(variant(name, victims=victims), pinned_part=0.0, **options)
    hold = stages_for(strategy, fill).hold
    budget = tight_budget(CASES[case], CASES[case].batches(STEPS), hold)
    return build(CASES[case], rule, strategy, budget=budget, fill=fill)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("victims", ["random", "most-recent"])
@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("lookahead", "staged"),
        ("scratchpipe", "staged"),
        ("scratchpipe", "zero-copy"),
        ("lru", "staged"),
        ("uncached", "staged"),
    ],
)
def test_every_form_gives_the_bits_of_all_fast(
    name: str, fill: str, victims: str, rule: str
) -> None:
    for case in ("one-hot", "multi-hot"):
        overlapped = hotrow.STRATEGIES[name].overlapped  # otherwise a cycle has one batch's stages
        order = {"order": shuffled} if overlapped else {}
        embedding = tight(case, rule, name, fill, victims, **order)
        assert train(embedding, CASES[case].batches(STEPS)).same_bits(all_fast(case, rule))
        assert embedding.traffic().evicted_rows > STEPS
        assert embedding.traffic().chunked_batches == 0


def slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    """Let the background be late, as a busy CPU is."""
    real: Callable[..., None] = getattr(hotrow.engine.gpu.staged, name)

    def sleeping(*args: Any) -> None:
        time.sleep(seconds)
        real(*args)

    monkeypatch.setattr(hotrow.engine.gpu.staged, name, sleeping)


def late(monkeypatch: pytest.MonkeyPatch, method: str, lane: Any) -> None:
    """Let a lane sleep before what a method launches there."""
    real: Callable[..., Any] = getattr(Staged, method)

    def sleeping(self: Staged, packet: Packet, *args: Any, **options: Any) -> Any:
        with self._lanes.on(lane):
            torch.cuda._sleep(SLEEP)
        return real(self, packet, *args, **options)

    monkeypatch.setattr(Staged, method, sleeping)


@pytest.mark.parametrize("where", ["gather", "write", "collect", "depart", "arrive", "train"])
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_whatever_is_late_is_waited_for(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where in ("gather", "write"):
        slow(monkeypatch, {"gather": "_gather", "write": "write_rows"}[where], seconds=0.004)
    elif where != "train":
        late(monkeypatch, where, "back" if where == "depart" else "rows")
    embedding = tight("one-hot", "adam", name, "staged")
    losses = []
    for batch in hotrow.ahead(CASES["one-hot"].batches(STEPS), embedding):
        if where == "train":
            torch.cuda._sleep(SLEEP)
        loss = readout(embedding(batch))
        loss.backward()
        losses.append(loss.detach())
    assert outcome(embedding, losses).same_bits(all_fast("one-hot", "adam"))


def test_packets_that_are_too_small_and_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotrow.engine.tuning.DEFAULT", Tuning(most_packed=5, least_certain=0))
    for name in ("lookahead", "scratchpipe"):
        found = train(tight("one-hot", "adam", name, "staged"), CASES["one-hot"].batches(STEPS))
        assert found.same_bits(all_fast("one-hot", "adam"))


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe", "lru", "uncached"])
def test_a_store_that_the_system_does_not_lock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotrow.store.pinned, "_cuda_register", lambda address, size: "not today")
    for most in (5, 1 << 16):
        monkeypatch.setattr("hotrow.engine.tuning.DEFAULT", Tuning(most_packed=most))
        with pytest.warns(UserWarning, match="refused to page-lock the rows: not today"):
            embedding = tight("one-hot", "adam", name, "staged")
        choice = embedding.fills()[4]
        assert (choice.form, choice.why) == ("staged", "the store is not page-locked")
        found = train(embedding, CASES["one-hot"].batches(STEPS))
        assert found.same_bits(all_fast("one-hot", "adam"))


def slots(count: int) -> Any:
    """A budget with packets that hold whatever a batch moves."""
    return hotrow.Budget((hotrow.Share(count, 512, False),), window_bytes=1 << 18)


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
@pytest.mark.parametrize("fill", ["zero-copy", "bulk", "staged", "auto"])
def test_captured_steps_over_staged_rows_are_exact(name: str, fill: str) -> None:
    reference = Run().train(batches())
    for budget in ("35%", slots(3400)):  # packets that are too small for most batches, and not
        run = Run(name, budget, fill=fill).train(batches())
        assert run.num_graphs > 1
        assert run.embedding.traffic().evicted_rows > 0
        assert same_bits(run.found(), reference.found())


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_evaluation_between_captured_steps_changes_no_bit(name: str) -> None:
    reference = Run().train(batches()).found()
    run = Run(name, slots(3400), fill="staged")
    for record in run.trainer.run(batches()):
        for schedule in run.schedules:
            schedule.step()
        run.losses.append(record.loss)
        if record.step % 7 == 0:
            run.trainer.evaluate(list(batches(3)))
    assert same_bits(run.found(), reference)


def test_a_batch_that_does_not_fit_passes_through_among_staged_ones() -> None:
    def source() -> Any:
        for step, batch in enumerate(batches()):
            if step in (20, 21, 35):
                wide = torch.arange(256).unsqueeze(1) * torch.tensor([19, 1, 78, 0, 3])
                batch.sparse[:] = wide[: len(batch.sparse)] + step
                batch.sparse[:, 3] %= 40
            yield batch

    for fill in ("bulk", "staged"):
        run = Run("lookahead", slots(1000), fill=fill).train(source())
        assert run.embedding.traffic().chunked_batches > 0
        assert same_bits(run.found(), Run().train(source()).found())


def test_the_forms_are_measured() -> None:
    random = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    device = torch.device("cuda", 0)
    locked = locked_rows(300_000, 64)
    forms = ("zero-copy", "bulk", "staged")
    rates = measure(Store(locked.rows), device, lanes_of(device), 1024, forms)
    assert tuple(rates) == forms
    assert not locked.rows.any()
    locked.close()
    now = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    assert all(map(torch.equal, random, now))


def test_the_host_does_not_wait_for_rows_that_come_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launching thread finds the background's work done, when training takes its time."""
    waited: list[bool] = []
    real = hotrow.engine.gpu.staged.finish

    def finish(job: Any) -> None:
        if job is not None:
            waited.append(not job.done())
        real(job)

    monkeypatch.setattr(hotrow.engine.gpu.staged, "finish", finish)
    embedding = tight("one-hot", "adam", "lookahead", "staged")
    for place, batch in enumerate(hotrow.ahead(CASES["one-hot"].batches(STEPS), embedding)):
        readout(embedding(batch)).backward()
        torch.cuda.synchronize()
        if place == 20:
            waited.clear()
    assert len(waited) > STEPS
    assert sum(waited) < len(waited) / 20
