"""Rows that go by way of the copy engine and the CPU: the bits of all-fast, however late they are.

Where there is no GPU, the device engine runs on the CPU with Triton's interpreter; the thread that
moves rows is a real one there, too.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
import hotrow.embedding.collection
import hotrow.engine.gpu.memory
import hotrow.engine.gpu.mover_choice
import hotrow.engine.gpu.staged
from builders import (
    CASES,
    RULES,
    Case,
    Late,
    Outcome,
    outcome,
    pairwise,
    readout,
    shuffled,
    tight_budget,
    train,
    variant,
)
from hotrow.embedding.ahead import to_device
from hotrow.engine.gpu.fill_forms import CLEARLY, NEARLY, FillChoice, by_rates
from hotrow.engine.gpu.mover_choice import choose, measure
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.stages import FIVE, FUSED, SPLIT, hold_of
from hotrow.engine.strategy import Strategy, as_listed
from hotrow.kernels.triton import fill as kernels
from hotrow.store.ram import Store
from hotrow.support.streams import lanes_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 7
ONE_HOT, MULTI_HOT = CASES["one-hot"], CASES["multi-hot"]
FORMS = ("zero-copy", "staged")


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: gpu_rows)


def build(
    case: Case, rule: str = "sgd", strategy: str | Strategy = "all-fast", **options: Any
) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        case.tables, RULES[rule], strategy=strategy, seed=3, device=DEVICE, **options
    )


def stages_for(strategy: Strategy, form: str) -> Strategy:
    """As the strategy will be: rows that are staged need more time."""
    is_split = form == "staged" and strategy.stages is FUSED
    return replace(strategy, stages=SPLIT) if is_split else strategy


def tight(
    case: Case = ONE_HOT,
    rule: str = "adagrad",
    name: str = "lookahead",
    victims: str = "most-recent",
    *,
    fill: str = "staged",
    steps: int = STEPS,
    part: float = 1.0,
    order: Any = as_listed,
    dense_map: bool = True,
    **options: Any,
) -> hotrow.EmbeddingBagCollection:
    """As few slots as the batches in flight need, and victims that show every mistake."""
    strategy = replace(variant(name, victims=victims), order=order)
    hold = stages_for(strategy, fill).hold
    budget = tight_budget(case, case.batches(steps), hold, part=part, dense_map=dense_map)
    return build(case, rule, strategy, budget=budget, fill=fill, **options)


@cache
def all_fast(case: str, rule: str, steps: int = STEPS) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(steps))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    worker = Late()
    monkeypatch.setattr(hotrow.engine.gpu.staged, "shared_worker", lambda: worker)
    return worker


# -- the same bits -------------------------------------------------------------------------

CHOICES = [
    {**choice, "case": case, "rule": rule, "map": layout}
    for choice, case, rule, layout in zip(
        pairwise(
            {
                "strategy": ["lookahead", "scratchpipe", "lru", "uncached"],
                "fill": list(FORMS),
                "victims": ["own", "random", "most-recent"],
                "budget": ["tight", "chunked"],
            }
        ),
        itertools.cycle(CASES),
        itertools.cycle(RULES),
        itertools.cycle(["dense", "hash", "dense"]),
        strict=False,
    )
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice.values()))
def test_every_form_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    case = CASES[choice["case"]]
    embedding = tight(
        case, choice["rule"], choice["strategy"], choice["victims"], fill=choice["fill"],
        part=0.6 if choice["budget"] == "chunked" else 1.0, dense_map=choice["map"] == "dense",
    )  # fmt: skip
    found = train(embedding, case.batches(STEPS))
    assert found.same_bits(all_fast(choice["case"], choice["rule"]))
    if choice["budget"] == "chunked":
        assert embedding.traffic().chunked_batches > 0
    else:
        assert embedding.traffic().evicted_rows > 0


def test_the_choices_have_everything_once() -> None:
    for axis, values in (("case", CASES), ("rule", RULES), ("map", ("dense", "hash"))):
        assert {choice[axis] for choice in CHOICES} == set(values)


@pytest.mark.parametrize(
    ("name", "victims"),
    [
        ("lookahead", "random"),
        ("lookahead", "most-recent"),
        ("scratchpipe", "random"),
        ("scratchpipe", "most-recent"),
    ],
)
@pytest.mark.parametrize("depth", [4, 0])
def test_rows_that_come_late_are_waited_for(
    name: str, victims: str, depth: int, late: Late
) -> None:
    steps = 12
    strategy = stages_for(variant(name, victims=victims), "staged")
    # Pins would keep rows from leaving.
    strategy = replace(strategy, pinned_part=0.0)
    budget = tight_budget(ONE_HOT, ONE_HOT.batches(steps), strategy.hold)
    embedding = build(ONE_HOT, "adam", strategy, budget=budget, fill="staged")
    found = train(embedding, ONE_HOT.batches(steps), depth=depth)
    assert found.same_bits(all_fast("one-hot", "adam", steps))
    assert set(late.done) == {"write_rows", "_gather"}


@pytest.mark.thinned(4)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it depends on who is faster")
@pytest.mark.parametrize(
    ("name", "past", "future"), [("lookahead", 1, 0), ("scratchpipe", 2, 2), ("scratchpipe", 3, 1)]
)
def test_a_hold_shorter_than_computed_gives_wrong_bits(
    name: str, past: int, future: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or this file could not tell right from wrong."""
    steps = 14
    expected = all_fast("one-hot", "adagrad", steps)
    for hold, is_right in ((None, True), (hotrow.engine.planner.Hold(past, future), False)):
        embedding = tight(ONE_HOT, name=name, steps=steps)
        embedding.groups[0].planner.hold = hold or embedding.groups[0].planner.hold
        found = train(embedding, ONE_HOT.batches(steps), depth=5)
        assert found.same_bits(expected) is is_right


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there a mark is an event")
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_rows_gathered_before_they_are_written_give_wrong_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads instead of one: a write waits until the next batch's rows have been gathered."""
    steps = 14
    done: set[int] = set()
    real_gather, real_write = hotrow.engine.gpu.staged._gather, hotrow.engine.gpu.staged.write_rows

    def gather(number: int, *args: Any) -> None:
        real_gather(*args)
        done.add(number)

    def write(number: int, *args: Any) -> None:
        for _ in range(100):  # the last batches have no next one
            if number not in done:
                time.sleep(0.01)
        real_write(*args)

    class Disordered(hotrow.engine.gpu.staged._Worker):
        asked = 0

        def ask(self, job: Any, *args: Any) -> Any:
            if job is real_write:
                return others.submit(write, self.asked, *args)
            self.asked += 1
            return self.submit(gather, self.asked - 1, *args)

    monkeypatch.setattr(hotrow.engine.gpu.staged, "shared_worker", Disordered)
    with ThreadPoolExecutor(4) as others:
        embedding = tight(ONE_HOT, name=name, steps=steps)
        found = train(embedding, ONE_HOT.batches(steps), depth=5)
    assert not found.same_bits(all_fast("one-hot", "adagrad", steps))


def test_the_order_of_stages_in_a_cycle_does_not_matter() -> None:
    for name in ("lookahead", "scratchpipe"):
        embedding = tight(ONE_HOT, name=name, order=shuffled)
        found = train(embedding, ONE_HOT.batches(STEPS), depth=4)
        assert found.same_bits(all_fast("one-hot", "adagrad"))


def test_a_batch_that_moves_more_than_a_packet_holds_moves_at_once(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotrow.engine.gpu.memory, "MOST_PACKED", 5)
    whole: list[int] = []
    real = gpu_rows.fill

    def counted(self: gpu_rows, work: Any) -> None:
        whole.append(work.plan.num_moves)
        real(self, work)

    monkeypatch.setattr(gpu_rows, "fill", counted)
    for name in ("lookahead", "scratchpipe"):
        whole.clear(), late.done.clear()
        embedding = tight(ONE_HOT, name=name, steps=12)
        found = train(embedding, ONE_HOT.batches(12), depth=4)
        assert found.same_bits(all_fast("one-hot", "adagrad", 12))
        assert whole, "no batch was too large"
        assert min(whole) > 5
        assert late.done, "no batch was small enough"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/test_gpu_staged.py has it there")
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe", "lru", "uncached"])
@pytest.mark.parametrize("most", [5, 1 << 16])
def test_a_store_that_is_not_page_locked_is_moved_by_the_host(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device must not touch the store at all."""
    monkeypatch.setattr(gpu_rows, "zero_copy", False)
    monkeypatch.setattr(hotrow.engine.gpu.memory, "MOST_PACKED", most)
    monkeypatch.delattr(kernels, "fill")
    embedding = tight(ONE_HOT, name=name)
    store = embedding.groups[0].store.rows.data_ptr()
    for kernel in ("gather", "scatter"):  # slots they may touch
        monkeypatch.setattr(kernels, kernel, _not_of(store, getattr(kernels, kernel)))
    assert embedding.fills()[4].form == "staged"
    assert train(embedding, ONE_HOT.batches(STEPS)).same_bits(all_fast("one-hot", "adagrad"))
    assert embedding.traffic().evicted_rows > 0


def _not_of(store: int, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(rows: Tensor, *args: Any) -> None:
        assert rows.data_ptr() != store
        kernel(rows, *args)

    return run


@pytest.mark.slow  # by the interpreter
def test_a_batch_too_large_for_the_slots_among_others_that_fit(late: Late) -> None:
    """The batches behind it were planned already, and are planned again, unannounced."""
    rows = torch.arange(50)
    small = [torch.stack([rows[i : i + 4], rows[i : i + 4] % 40], dim=1) for i in range(10)]
    large = torch.stack([rows[:40], rows[:40].flip(0) % 40], dim=1)
    batches = [*small[:4], large, *small[4:]]
    expected = train(build(ONE_HOT, "adagrad"), batches)
    for name, slots in (("lookahead", 24), ("scratchpipe", 40)):
        budget = hotrow.Budget((hotrow.Share(slots, 32, False),), window_bytes=1 << 14)
        strategy = variant(name, victims="most-recent")
        embedding = build(ONE_HOT, "adagrad", strategy, budget=budget, fill="staged")
        with pytest.warns(UserWarning, match="a batch of 80 different rows does not fit"):
            found = train(embedding, batches)
        assert found.same_bits(expected)
        assert embedding.traffic().chunked_batches == 1


def test_batches_planned_again_do_not_count_on_being_held(late: Late) -> None:
    """A row that one of them makes leave may be fetched by the next one.

    Plans are made a cycle earlier here than in FIVE, so that two batches are planned again.
    """
    stages = tuple(replace(each, cycle=each.cycle + (each.cycle > 0)) for each in FIVE)
    strategy = replace(variant("scratchpipe", victims="most-recent"), stages=stages)

    def batch(first: int, size: int = 4) -> Tensor:
        return torch.stack([torch.arange(first, first + size), torch.zeros(size).long()], dim=1)

    large, last, new = batch(0, 40), batch(28), batch(40)
    batches = [*(batch(4 * place) for place in range(8)), large, new, last, batch(44), last]
    expected = train(build(ONE_HOT, "sgd"), batches)
    budget = hotrow.Budget((hotrow.Share(28, 64, True),), window_bytes=1 << 14)
    embedding = build(ONE_HOT, "sgd", strategy, budget=budget)
    with pytest.warns(UserWarning, match="a batch of 41 different rows does not fit the 28 slots"):
        found = train(embedding, batches)
    assert found.same_bits(expected)
    assert embedding.traffic().chunked_batches <= 2


# -- the stream ----------------------------------------------------------------------------


def look_up(embedding: Any, batch: Any) -> Tensor:
    return readout(embedding(batch))


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_evaluation_and_reading_rows_find_the_newest_in_flight(name: str, late: Late) -> None:
    held_out = [to_device(each, DEVICE) for each in ONE_HOT.batches(2, seed=9)]

    def run(embedding: Any) -> tuple[Outcome, list[Tensor], list[Outcome]]:
        losses, scores, between = [], [], []
        for place, batch in enumerate(hotrow.ahead(ONE_HOT.batches(STEPS), embedding)):
            loss = look_up(embedding, batch)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                scores += [look_up(embedding, each) for each in held_out]
            if place % 3 == 2:
                between.append(outcome(embedding, []))
        return outcome(embedding, losses), scores, between

    found, scores, between = run(tight(ONE_HOT, name=name))
    expected, wanted, then = run(build(ONE_HOT, "adagrad"))
    assert found.same_bits(expected)
    assert all(map(torch.equal, scores, wanted))
    assert len(between) > 1
    assert all(mine.same_bits(theirs) for mine, theirs in zip(between, then, strict=True))


@pytest.mark.filterwarnings("ignore:weights were loaded .* but not the Adagrad state:UserWarning")
def test_rows_replaced_while_batches_are_in_flight_are_fetched_as_they_are(late: Late) -> None:
    source = build(ONE_HOT, "adagrad")
    train(source, ONE_HOT.batches(3, seed=5))
    for name in ("lookahead", "scratchpipe"):
        embedding, reference = tight(ONE_HOT, name=name), build(ONE_HOT, "adagrad")
        for each in (embedding, reference):
            stream = hotrow.ahead(ONE_HOT.batches(STEPS), each)
            for batch in itertools.islice(stream, 3):
                look_up(each, batch).backward()
            each.load_state_dict(source.state_dict())
            for batch in stream:
                look_up(each, batch).backward()
        assert outcome(embedding, []).same_bits(outcome(reference, []))


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_leaving_a_loop_early_keeps_what_was_trained(name: str, late: Late) -> None:
    batches = ONE_HOT.batches(9)
    embedding = tight(ONE_HOT, name=name, steps=9)
    for begin, end in ((0, 3), (3, 4), (4, 6), (6, 9)):
        for place, batch in enumerate(hotrow.ahead(batches[begin:], embedding)):
            look_up(embedding, batch).backward()
            if begin + place + 1 == end:
                break
        embedding.check()
    expected = all_fast("one-hot", "adagrad", 9)
    assert outcome(embedding, expected.losses).same_bits(expected)


def test_an_exception_in_the_loop_leaves_the_bits_of_the_steps_before() -> None:
    batches = ONE_HOT.batches(STEPS)
    embedding = tight(ONE_HOT)

    def loop() -> None:
        for place, batch in enumerate(hotrow.ahead(batches, embedding)):
            if place == 3:
                raise KeyError("the user's own")
            look_up(embedding, batch).backward()

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    expected = train(build(ONE_HOT, "adagrad"), batches[:3])
    assert outcome(embedding, expected.losses).same_bits(expected)
    reference = build(ONE_HOT, "adagrad")
    train(reference, batches[:3])
    assert train(embedding, batches[3:]).same_bits(train(reference, batches[3:]))


@pytest.mark.slow  # by the interpreter
def test_batches_that_nobody_announced_mix_with_those_that_were(late: Late) -> None:
    batches = [to_device(each, DEVICE) for each in ONE_HOT.batches(11)]
    for name in ("lookahead", "scratchpipe"):
        found = []
        for embedding in (tight(ONE_HOT, name=name), build(ONE_HOT, "adagrad")):
            for batch in hotrow.ahead(batches[:7], embedding):
                look_up(embedding, batch).backward()
            for batch in batches[1:4]:  # what has just left is fetched again
                look_up(embedding, batch).backward()
            for batch in hotrow.ahead(batches[8:], embedding):
                look_up(embedding, batch).backward()
            found.append(outcome(embedding, []))
        assert found[0].same_bits(found[1])


@pytest.mark.slow  # by the interpreter
def test_collections_with_other_forms_train_side_by_side() -> None:
    """Rows that move at once go along with the stages of those that do not."""

    def run(left: Any, right: Any) -> list[Outcome]:
        model = nn.ModuleDict({"left": left, "right": right})
        for batch in hotrow.ahead(
            list(zip(MULTI_HOT.batches(STEPS), ONE_HOT.batches(STEPS), strict=True)),
            model,
            ids=lambda b: {"left": b[0], "right": b[1]},
        ):
            (look_up(left, batch[0]) + look_up(right, batch[1])).backward()
        return [outcome(left, []), outcome(right, [])]

    expected = run(build(MULTI_HOT, "adagrad"), build(ONE_HOT, "adagrad"))
    for forms in (("zero-copy", "staged"), ("bulk", "zero-copy"), ("staged", "bulk")):
        pair = [
            tight(each, victims="own", fill=form)
            for each, form in zip((MULTI_HOT, ONE_HOT), forms, strict=True)
        ]
        found = run(*pair)
        assert tuple(x.form for each in pair for x in each.fills().values()) == forms
        assert all(mine.same_bits(theirs) for mine, theirs in zip(found, expected, strict=True))


# -- the thread ----------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["_gather", "write_rows"])
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_an_error_in_the_background_is_told_in_the_loop(
    name: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    real: Callable[..., None] = getattr(hotrow.engine.gpu.staged, job)

    def failing(*args: Any) -> None:
        if next(calls) == 2:
            raise OSError("no such page")
        real(*args)

    monkeypatch.setattr(hotrow.engine.gpu.staged, job, failing)
    embedding = tight(ONE_HOT, name=name)
    with pytest.raises(RuntimeError, match=r"in the background \(OSError: no such page\)"):
        train(embedding, ONE_HOT.batches(20))
    with pytest.raises(RuntimeError, match="no such page"):  # and never forgotten
        embedding.row_access.flush()


def test_memory_is_given_back_and_the_thread_ends_with_the_last_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        hotrow.engine.gpu.staged, "_known_worker", None
    )  # one that no other test holds
    gc.collect()
    embedding = tight(ONE_HOT)
    train(embedding, ONE_HOT.batches(3))
    group = embedding.groups[0]
    thread = next(iter(group.mover.staged._worker._threads))
    gone = [weakref.ref(group), weakref.ref(group.store), weakref.ref(group.mover.staged)]
    assert thread.is_alive()
    del embedding, group
    assert [each() for each in gone] == [None] * 3
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotrow.engine.gpu.staged, "why_not", lambda: "there is no C compiler")
    monkeypatch.setattr(hotrow.engine.gpu.staged, "_known_worker", None)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_where_there_is_no_compiler_threads_of_python_move_rows(name: str) -> None:
    embedding = tight(ONE_HOT, name=name)
    assert embedding.groups[0].mover.staged._worker._writer is None
    found = train(embedding, ONE_HOT.batches(STEPS))
    assert found.same_bits(all_fast("one-hot", "adagrad"))


@pytest.mark.usefixtures("_no_compiler")
def test_several_widths_share_one_thread_and_its_number_of_cores() -> None:
    threads = torch.get_num_threads()
    embedding = tight(CASES["two-widths"])
    workers = [group.mover.staged._worker for group in embedding.groups]
    assert workers[0] is workers[1]
    assert workers[0]._count == max(1, min(2, threads // 2))
    for each in (workers[0], workers[0]._others)[: workers[0]._count]:
        assert each.submit(torch.get_num_threads).result() == 1
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [torch.get_num_threads(), *found] == [threads, threads]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's")
def test_a_program_ends_though_rows_are_on_their_way() -> None:
    script = """
        import time, torch, hotrow, hotrow.embedding.collection, hotrow.engine.gpu.staged
        from hotrow.engine.gpu.rows import gpu_rows
        hotrow.embedding.collection._engine = lambda device: gpu_rows
        real = hotrow.engine.gpu.staged.write_rows
        def late(*args):
            time.sleep(0.3)
            real(*args)
        hotrow.engine.gpu.staged.write_rows = late
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        budget = hotrow.Budget((hotrow.Share(8, 32, True),), window_bytes=4096)
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(), budget=budget, strategy="scratchpipe"
        )
        batches = [torch.tensor([[3 * i % 100], [(3 * i + 1) % 100]]) for i in range(9)]
        for place, batch in enumerate(hotrow.ahead(batches, embedding)):
            embedding(batch).values().sum().backward()
            if place == 3:
                break
        print("the end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("the end\n", "")


def test_what_is_asked_for_when_threads_have_ended_is_done_at_once() -> None:
    worker, found = hotrow.engine.gpu.staged._Worker(), []
    worker.shutdown()
    worker.ask(lambda *asked: found.append(asked), 1, 2, 3, ()).result()
    assert found == [(1, 2, 3, ())]


# -- the choice ----------------------------------------------------------------------------


def test_bulk_has_to_be_nearly_as_fast_as_zero_copy_and_staged_clearly_faster() -> None:
    clearly, nearly = CLEARLY * 10e6, NEARLY * 10e6
    rates = {"zero-copy": 10e6, "bulk": nearly - 1, "staged": clearly - 1}
    assert by_rates(rates).form == "zero-copy"
    assert by_rates({**rates, "bulk": nearly}).form == "bulk"
    assert by_rates({**rates, "bulk": nearly, "staged": clearly}).form == "bulk"
    chosen = by_rates({**rates, "staged": clearly})
    assert chosen.form == "staged"
    assert str(chosen) == (
        "staged (2.5 times as fast, or more; million moves per second: zero-copy 10.0, bulk 8.5, "
        "staged 25.0)"
    )
    assert by_rates(rates).why == "bulk is slower, staged is not 2.5 times as fast"
    assert by_rates({"zero-copy": 10e6, "bulk": 8e6}).why == "bulk is slower"


@pytest.mark.parametrize(
    ("cores", "bulk", "forms"),
    [
        (3, True, None),
        (4, True, ["zero-copy", "bulk"]),
        (7, False, None),
        (8, False, ["zero-copy", "staged"]),
        (8, True, ["zero-copy", "bulk", "staged"]),
    ],
)
def test_forms_are_measured_where_there_are_cores_for_them(
    cores: int, bulk: bool, forms: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def measured(store: Any, device: Any, lanes: Any, moves: int, forms: Any) -> dict[str, float]:
        tried.extend(forms)
        return dict.fromkeys(forms, float(moves))

    monkeypatch.setattr(hotrow.engine.gpu.mover_choice, "measure", measured)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    store = Store(torch.empty(1, 4).expand(100_000, 4))
    chosen = choose(store, DEVICE, lanes_of(DEVICE), bulk=bulk)
    assert tried == (forms or [])
    if forms is None:
        assert chosen == FillChoice("zero-copy", f"{cores} cores have enough to do")
        return
    assert chosen.form == ("bulk" if bulk else "zero-copy")
    few = choose(Store(store.rows[:20_000]), DEVICE, lanes_of(DEVICE), bulk=bulk)
    assert few == FillChoice("zero-copy", "20,000 rows are too few to measure")


@pytest.mark.parametrize(
    ("strategy", "bulk"),
    [
        (variant("lookahead"), True),
        (variant("lookahead", victims="random"), False),
        (replace(variant("lookahead"), refetch=True), False),
    ],
)
def test_bulk_is_tried_where_a_strategy_can_use_it(
    strategy: Strategy, bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def chosen(*_: Any, bulk: bool) -> FillChoice:
        asked.append(bulk)
        return FillChoice("zero-copy", "a test")

    monkeypatch.setattr(hotrow.engine.gpu.memory, "choose", chosen)
    group = build(ONE_HOT, "sgd", strategy, budget=4_000, fill="zero-copy").groups[0]
    group.fill_form, group.device = "auto", torch.device("cuda")
    group._choose_fill()
    assert asked == [bulk]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/test_gpu_staged.py measures there")
def test_measuring_tries_every_form_and_leaves_the_store_as_it_was() -> None:
    rows, state = torch.zeros(1400, 4), torch.random.get_rng_state()
    forms = ("zero-copy", "bulk", "staged")
    found = measure(Store(rows), DEVICE, lanes_of(DEVICE), 16, forms)
    assert tuple(found) == forms
    assert all(rate > 0 for rate in found.values())
    assert not rows.any()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_was_chosen_is_told() -> None:
    for name, fill, form in (
        ("lookahead", "staged", "staged"),
        ("scratchpipe", "auto", "staged"),
        ("scratchpipe", "zero-copy", "zero-copy"),
        ("lru", "auto", "zero-copy"),
        ("uncached", "bulk", "zero-copy"),
    ):
        embedding = tight(ONE_HOT, name=name, fill=fill)
        choice = embedding.fills()[4]
        assert isinstance(choice, FillChoice)
        assert choice.form == form
        assert (embedding.memory()["rows on their way"] > 0) is (form != "zero-copy")
    assert build(ONE_HOT).fills() == {}


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="fill must be one of auto, zero-copy, bulk, staged, not"):
        build(ONE_HOT, fill="stagd")


def test_packets_take_their_bytes_from_the_slots() -> None:
    tables = [hotrow.EmbeddingBagConfig("t", 40_000, 16, ["f"])]
    memory, slots = {}, {}
    for fill in ("zero-copy", "staged"):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), "10%", strategy="lookahead", device=DEVICE, fill=fill
        )
        memory[fill], slots[fill] = sum(embedding.memory().values()), embedding.num_slots
        packets = embedding.memory()["rows on their way"]
    assert 0 < packets < 0.12 * memory["zero-copy"]
    assert slots["staged"] < slots["zero-copy"]
    # A slot's state takes less than it is counted for.
    assert memory["staged"] <= 1.02 * memory["zero-copy"] < 0.1 * embedding.bytes_total


def test_rows_go_back_to_the_slots_they_were_packed_for() -> None:
    """Except those that leave and enter the same slot, whose newest bytes are there."""
    slots = torch.arange(60.0, device=DEVICE).view(12, 5).clone()
    ids = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([7, 2, 9], [5, -1, 8])]
    move_slots, leaving = ids
    entering = torch.tensor([5, 6, 4], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    rows = torch.full((4, 5), -1.0, device=DEVICE)
    kernels.unpack(slots, move_slots, leaving, entering, count, rows)
    expected = torch.arange(60.0).view(12, 5)
    expected[[2, 9]] = -1
    assert torch.equal(slots.cpu(), expected)
    kernels.pack(slots, move_slots, torch.full_like(count, 2), rows)
    assert torch.equal(rows.cpu()[:2], expected[[7, 2]])
    assert bool((rows[2:] == -1).all())


def test_the_stages_of_rows_that_are_staged_hold_one_batch_more() -> None:
    assert hold_of(SPLIT) == hotrow.engine.planner.Hold(past=2, future=0)
    embedding = tight(ONE_HOT)
    assert embedding.strategy.stages is SPLIT
    assert embedding.strategy.name == "lookahead"
