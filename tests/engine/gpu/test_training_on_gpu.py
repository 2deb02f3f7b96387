"""Captured training on a GPU: the same bits as eager steps, and as with every row there."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

import hotrow
from compiling import note_compiled
from gpu_training import Run, batches, same_bits
from hotrow.data import ClickBatch
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.tuning import Tuning

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler uses what torch deprecates, and steps that are not captured warn.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

# Plans are part of the budget, however small that is.
ALL_COUNTED = {"engine": partial(gpu_rows, tuning=Tuning(plans_on_top=0))}
RULES = {
    "sgd": hotrow.SGD(lr=0.1),
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "adamw": hotrow.AdamW(lr=0.01),
}


@pytest.mark.parametrize("rule", RULES)
def test_captured_steps_give_the_bits_of_eager_ones_in_every_strategy(rule: str) -> None:
    reference = Run(rule=RULES[rule], graphs=False).train(batches())
    captured = Run(rule=RULES[rule]).train(batches())
    assert captured.num_graphs > 1
    assert same_bits(captured.found(), reference.found())
    for strategy, budget in (("lookahead", "20%"), ("lookahead", "8%"), ("lru", "20%")):
        run = Run(strategy, budget, RULES[rule]).train(batches())
        assert run.num_graphs > 1
        assert same_bits(run.found(), reference.found()), (strategy, budget)


def test_rows_that_leave_by_way_of_the_host_are_the_same_rows() -> None:
    reference = Run().train(batches()).found()
    run = Run("lookahead", "20%", fill="bulk").train(batches())
    assert run.embedding.traffic().evicted_rows > 0
    assert same_bits(run.found(), reference)


def test_a_compiled_model_with_half_wide_vectors_is_exact_too() -> None:
    options: dict[str, Any] = {"compile": True, "output_dtype": torch.bfloat16}
    reference = Run(**options).train(batches()).found()
    assert same_bits(Run("lookahead", "20%", **options).train(batches()).found(), reference)


def test_a_smaller_batch_is_not_compiled_where_the_others_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = note_compiled(
        monkeypatch, lambda each: len(each.label) if isinstance(each, ClickBatch) else None
    )
    sizes = {len(batch.label) for batch in batches()}
    assert len(sizes) > 1
    run = Run(compile=True)
    for _ in range(2):  # in the second run all but the smaller one are replayed
        run.train(batches())
    assert set(compiled) == {max(sizes)}


def test_captured_steps_stay_within_the_budget() -> None:
    """Pass after pass, of which the short last batch is captured, too, in the end."""
    budget = 1_300_000
    run, reference = Run("lookahead", budget, **ALL_COUNTED), Run()
    before = run.embedding.num_slots
    for _ in range(6):
        run.train(batches())
        reference.train(batches())
        assert sum(run.embedding.memory().values()) <= budget
    (group,) = run.embedding.groups
    assert group.memory.pad.num_slots < before
    assert run.num_graphs > 1
    pool = group.planning._buffers
    assert pool.num_sets <= 7
    assert pool.num_bytes <= group.planning.plan_bytes(group.planner.capacity, 7)
    assert same_bits(run.found(), reference.found())


def test_slots_that_gave_way_were_never_there() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, budget = torch.cuda.memory_reserved(), 200_000_000
    torch.cuda.reset_peak_memory_stats()
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("t", 2_000_000, 64, ["f"])],
        hotrow.SGD(), budget, device="cuda", fill="zero-copy", **ALL_COUNTED,
    )  # fmt: skip
    slots = embedding.num_slots
    embedding.reserve(200_000)
    embedding.groups[0].plan_room.allocate()  # as the first batch does
    assert 0.5 * slots < embedding.num_slots < 0.9 * slots
    assert torch.cuda.max_memory_reserved() - before < 1.4 * budget


def test_a_budget_that_does_not_fit_is_told_beforehand() -> None:
    tables = [hotrow.EmbeddingBagConfig("t", 10**9, 128, ["f"])]
    with pytest.raises(ValueError, match=r"do not fit cuda:0: .* are free"):
        hotrow.EmbeddingBagCollection(tables, hotrow.SGD(), strategy="all-fast", device="cuda")


def test_without_dense_weights_rows_are_updated_where_they_were_looked_up() -> None:
    """Whichever of torch's threads says that backward has ended: a busy machine shows both."""
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("a", 100, 8, ["a"])],
        hotrow.SGD(lr=0.1),
        strategy="all-fast",
        device="cuda",
    )
    seen: set[tuple[int, int]] = set()
    (group,) = embedding.groups
    update = group.update_planned

    def watched(*args: Any) -> Any:
        seen.add((torch.cuda.current_stream().cuda_stream, threading.get_ident()))
        return update(*args)

    group.update_planned = watched
    ids, mine, stop = torch.arange(64).view(64, 1).cuda(), torch.cuda.Stream(), threading.Event()

    def burn() -> None:
        while not stop.is_set():
            torch.rand(64, 64) @ torch.rand(64, 64)

    others = [threading.Thread(target=burn) for _ in range(4)]
    for each in others:
        each.start()
    try:
        mine.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(mine):
            for _ in range(300):
                embedding(ids).values().sum().backward()
    finally:
        stop.set()
        for each in others:
            each.join()
    torch.cuda.synchronize()
    assert {stream for stream, _ in seen} == {mine.cuda_stream}
