"""What only a GPU can show: kernels that really run beside each other, and captured steps.

HOTROW_STRESS_STEPS and HOTROW_CHURN_STEPS make the two long tests longer. tests/test_device_*.py
run the same engine without a GPU; with one, they run on it.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import builders
import hotrow
from builders import (
    CASES,
    COMBINATIONS,
    RULES,
    Outcome,
    Samples,
    check_chunks,
    collection_of,
    is_left_out_of_forks,
    outcome,
    readout,
    skewed,
    tight_budget,
    train,
    variant,
)
from hotrow.data import ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.planner import Planner
from hotrow.engine.rules import Hold
from hotrow.engine.scratchpad import Scratchpad
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.kernels import reference
from hotrow.kernels.triton import maps
from hotrow.models.dlrm import DLRM
from hotrow.training.trainer import Trainer
from map_kernels import replace_rows

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
STEPS = 40
STRESS_STEPS = int(os.environ.get("HOTROW_STRESS_STEPS", "300"))
CHURN_STEPS = int(os.environ.get("HOTROW_CHURN_STEPS", "2000"))


build = partial(builders.build, device=DEVICE)


# -- what the CPU has, too -----------------------------------------------------------------


def test_the_reference_kernels_agree_on_both_devices() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (500,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = skewed(generator, 300, int(offsets[-1]))
    weights = torch.rand(ids.numel(), generator=generator)
    vectors = torch.randn(300, 33, generator=generator)
    grads = torch.randn(500, 33, generator=generator)
    bag_of = torch.repeat_interleave(torch.arange(500), lengths)

    def run(device: str) -> list[torch.Tensor]:
        on = [x.to(device) for x in (ids, offsets, weights, vectors, grads, bag_of)]
        ids_, offsets_, weights_, vectors_, grads_, bag_of_ = on
        order = reference.sort_ids(ids_, 300)
        pooled = reference.pool(vectors_, ids_, offsets_, weights_, None)
        summed = reference.sum_by_row(grads_, bag_of_, weights_, order)
        return [x.cpu() for x in (order.ids, order.order, order.inverse, pooled, summed)]

    torch.testing.assert_close(run(DEVICE), run("cpu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense_map", [True, False], ids=["dense", "hash"])
@pytest.mark.parametrize("order", EVICTIONS)
def test_the_planner_stays_consistent_on_a_gpu(order: str, dense_map: bool) -> None:
    device = torch.device(DEVICE)
    pad = Scratchpad(400, 0, 5000, device, dense_map=dense_map)
    planner = Planner(pad, hold=Hold(1, 0), eviction=EVICTIONS[order])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = reference.sort_ids(skewed(generator, 5000, 200).to(device), 5000)
        plan = planner.plan(ids)
        assert plan is not None
        assert torch.equal(pad.row_of_slot[plan.row_slots[:-1]], ids.ids)
        planner.check()


# -- strategies ----------------------------------------------------------------------------


@cache
def all_fast(case: str, rule: str) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(STEPS))


@pytest.mark.parametrize(
    "choice", [c for c in COMBINATIONS if c["rule"] in RULES], ids=lambda c: "-".join(c.values())
)
def test_a_strategy_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    batches = CASES[choice["case"]].batches(STEPS)
    embedding = collection_of(choice, batches, device=DEVICE)
    found = train(embedding, batches, depth=6 if embedding.strategy.overlapped else None)
    assert found.same_bits(all_fast(choice["case"], choice["rule"]))
    check_chunks(choice, embedding)


@pytest.mark.parametrize("case", CASES)
def test_all_fast_trains_like_the_cpu(case: str) -> None:
    for rule in RULES:
        found = all_fast(case, rule)
        expected = train(build(CASES[case], rule, device="cpu"), CASES[case].batches(STEPS))
        assert found.weights.keys() == expected.weights.keys()
        for mine, theirs in ((found.weights, expected.weights), (found.state, expected.state)):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_fills_take_more_of_the_gpu_where_training_waits_for_them(busy: bool) -> None:
    rows, lookups = 4_000_000, 200_000
    table = hotrow.EmbeddingBagConfig("items", rows, 128, ["item"])
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(lr=0.1), budget="450MB", device=DEVICE
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(rows, (lookups, 1), generator=generator) for _ in range(60)]
    weight = torch.ones(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for batch in hotrow.ahead(batches, embedding, depth=3):
        for _ in range(20 if busy else 0):  # two milliseconds each: longer than any fill
            weight = weight @ weight
        embedding(batch).values().sum().backward()
    assert embedding.traffic().chunked_batches == 0
    assert embedding.traffic().evicted_rows > 3_000_000
    assert busy or embedding.groups[0].mover.effort.number > 0


def test_leaving_rows_that_go_by_the_copy_engine_arrive() -> None:
    case = CASES["one-hot"]
    batches = case.batches(200)
    strategy = variant("lookahead")
    embedding = build(
        case, "adam", strategy, budget=tight_budget(case, batches, strategy.hold), fill="bulk"
    )
    assert embedding.fills()[4].form == "bulk"
    found = train(embedding, batches, depth=6)
    assert found.same_bits(train(build(case, "adam"), batches))
    assert embedding.traffic().evicted_rows > 100


# -- captured steps ------------------------------------------------------------------------

CLICKS = SyntheticClicks(SyntheticConfig(rows=(5000, 600, 40), batch_size=64, num_dense=5))


@cache
def clicks(count: int) -> tuple[ClickBatch, ...]:
    return tuple(CLICKS.batches(0, count))


def cut(batch: ClickBatch, size: int) -> ClickBatch:
    assert isinstance(batch.sparse, Tensor)
    return ClickBatch(batch.dense[:size], batch.sparse[:size], batch.label[:size])


def rows_of(batch: ClickBatch) -> set[tuple[int, int]]:
    assert isinstance(batch.sparse, Tensor)
    return {(table, row) for sample in batch.sparse.tolist() for table, row in enumerate(sample)}


class Run:
    """A DLRM and its trainer."""

    def __init__(
        self,
        strategy: str | Strategy = "lookahead",
        *,
        slots: int = 400,
        rule: Any = None,
        tensor_lr: bool = False,
        embedding_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        config = CLICKS.config
        tables = [
            hotrow.EmbeddingBagConfig(name, rows, 8, [name])
            for name, rows in zip(config.table_names, config.rows, strict=True)
        ]
        budget = hotrow.Budget((hotrow.Share(slots, 256, False),), window_bytes=1 << 18)
        self.embedding = hotrow.EmbeddingBagCollection(
            tables,
            rule or hotrow.Adagrad(lr=0.05),
            budget=budget,
            strategy=strategy,
            device=DEVICE,
            **{"seed": 0, **(embedding_options or {})},
        )
        self.model = DLRM(self.embedding, config.num_dense, bottom=(16, 8), top=(16, 1))
        self.model.to(DEVICE)
        lr: Any = torch.tensor(0.1, device=DEVICE) if tensor_lr else 0.1
        self.dense = torch.optim.SGD(
            self.model.parameters(), lr=lr, fused=tensor_lr and DEVICE == "cuda"
        )
        options.setdefault("loss_fn", functional.binary_cross_entropy_with_logits)
        self.trainer: Trainer[ClickBatch] = Trainer(
            self.model,
            dense_optimizer=self.dense,
            ids=lambda batch: batch.sparse,
            device=DEVICE,
            **options,
        )
        self.losses: list[float] = []

    def train(self, batches: Sequence[ClickBatch]) -> Run:
        """Losses are read when all is done, as they may be."""
        records = []
        try:
            for record in self.trainer.run(batches):
                records.append(record)
        finally:
            self.losses += [record.loss for record in records]
        return self

    def bits(self) -> dict[str, Tensor]:
        self.embedding.check()
        rows = {
            table.name: torch.cat([chunk for _, chunk in self.embedding.rows(table.name)])
            for table in self.embedding.tables
        }
        dense = {name: value.cpu() for name, value in self.model.state_dict().items()}
        return {**dense, **rows, "losses": torch.tensor(self.losses, dtype=torch.float64)}

    def same_bits(self, other: Run) -> bool:
        mine, theirs = self.bits(), other.bits()
        assert mine.keys() == theirs.keys()
        return all(torch.equal(mine[name], theirs[name]) for name in mine)

    @property
    def graphs(self) -> int:
        captured = self.trainer._captured
        return 0 if captured is None else captured.num_graphs


def test_captured_steps_give_the_bits_of_eager_ones_and_of_all_fast() -> None:
    batches = [*clicks(60), cut(clicks(60)[0], 23)]  # a short one comes last
    captured = Run().train(batches)
    assert captured.graphs > 0
    assert captured.same_bits(Run(graphs=False).train(batches))
    assert captured.same_bits(Run("all-fast").train(batches))
    assert captured.same_bits(Run("all-fast", graphs=False).train(batches))
    assert captured.embedding.traffic().evicted_rows > 0
    assert captured.losses[-1] != captured.losses[0]


@pytest.mark.parametrize("victims", ["random", "most-recent"])
def test_captured_steps_hold_the_rows_of_batches_in_flight(victims: str) -> None:
    """With as many slots as two batches need at most."""
    batches = clicks(150)
    slots = max(len(rows_of(a) | rows_of(b)) for a, b in itertools.pairwise(batches))
    strategy = replace(variant("lookahead", "fused-shuffled", victims), pinned_part=0.0)
    tight = Run(strategy, slots=slots).train(batches)
    assert tight.graphs > 0
    assert tight.embedding.traffic().chunked_batches == 0
    assert tight.same_bits(Run("all-fast", graphs=False).train(batches))


def test_captured_steps_follow_learning_rates() -> None:
    def run(strategy: str, *, graphs: bool, schedule: bool = True) -> Run:
        made = Run(strategy, tensor_lr=True, graphs=graphs, rule=hotrow.Adam(lr=0.02))
        schedules = [ExponentialLR(made.embedding.optimizer, 0.9), ExponentialLR(made.dense, 0.95)]
        for record in made.trainer.run(clicks(40)):
            made.losses.append(record.loss)
            for each in schedules if schedule else []:
                each.step()
        return made

    captured = run("lookahead", graphs=True)
    assert captured.graphs > 0
    assert captured.same_bits(run("lookahead", graphs=False))
    assert captured.same_bits(run("all-fast", graphs=False))
    assert not captured.same_bits(run("all-fast", graphs=False, schedule=False))


def test_a_setting_that_is_no_tensor_is_captured_anew() -> None:
    def run(*, graphs: bool) -> Run:
        made = Run(graphs=graphs)
        made.train(clicks(20))
        made.dense.param_groups[0]["lr"] = 0.01
        return made.train(clicks(20))

    captured = run(graphs=True)
    assert captured.graphs > 0
    assert captured.same_bits(run(graphs=False))


def test_tables_with_settings_of_their_own_are_captured() -> None:
    def run(*, graphs: bool) -> Run:
        made = Run(graphs=graphs)
        made.embedding.optimizer.param_groups[1]["lr"] = 0.5
        return made.train(clicks(30))

    captured = run(graphs=True)
    assert captured.graphs > 0
    assert captured.same_bits(run(graphs=False))
    assert not captured.same_bits(Run().train(clicks(30)))


def test_a_bad_id_at_step_100_leaves_exactly_the_bits_of_step_99() -> None:
    batches = list(clicks(130))
    bad = batches[100].sparse.clone()
    bad[7, 1] = 600
    batches[100] = replace(batches[100], sparse=bad)
    captured = Run()
    with pytest.raises(ValueError, match=r"feature 'cat_1', sample 7: id 600 is outside table"):
        captured.train(batches)
    assert captured.graphs > 0
    assert len(captured.losses) == 100
    expected = Run("all-fast", graphs=False).train(batches[:100])
    assert captured.same_bits(expected)
    # And it goes on.
    assert captured.train(batches[101:]).same_bits(expected.train(batches[101:]))


def test_a_batch_too_large_for_the_slots_in_the_middle_of_captured_ones() -> None:
    batches = [
        replace(batch, sparse=batch.sparse % torch.tensor([30, 20, 10])) for batch in clicks(60)
    ]
    wide = torch.stack([torch.arange(64) * 70, torch.arange(64) * 9, torch.arange(64) % 10], 1)
    for place in (25, 26, 40):
        batches[place] = replace(batches[place], sparse=wide)
    captured = Run(replace(STRATEGIES["lookahead"], pinned_part=0.0), slots=100)
    with pytest.warns(UserWarning, match="a batch of 138 different rows does not fit the 100 slot"):
        captured.train(batches)
    assert captured.graphs > 0
    assert captured.embedding.traffic().chunked_batches == 3
    assert captured.same_bits(Run("all-fast", graphs=False).train(batches))


def test_evaluating_between_captured_steps_changes_no_bit() -> None:
    quiet = Run().train(clicks(30))
    seen, scores = Run(), []
    for record in seen.trainer.run(clicks(30)):
        seen.losses.append(record.loss)
        if record.step % 7 == 0:
            scores.append(seen.trainer.evaluate(clicks(4)))
    assert seen.graphs > 0
    assert seen.same_bits(quiet)
    assert len({score.log_loss for score in scores}) == len(scores) > 2


def test_leaving_a_captured_run_and_coming_back_changes_no_bit() -> None:
    whole, parts = Run().train(clicks(40)), Run()
    for record in parts.trainer.run(clicks(40)):
        parts.losses.append(record.loss)
        if record.step == 17:
            break
    parts.train(clicks(40)[17:])
    assert parts.graphs > 0
    assert parts.same_bits(whole)


def test_the_same_run_twice_gives_the_same_bits_whoever_leaves() -> None:
    runs = []
    for seed in (1, 2):
        made = Run(variant("lookahead", victims="random"))
        torch.manual_seed(seed)
        runs.append(made.train(clicks(60)))
    assert runs[0].same_bits(runs[1])
    fetched = [run.embedding.traffic().fetched_rows for run in runs]
    assert fetched[0] != fetched[1]  # other rows left


def test_a_step_that_reads_values_back_goes_on_without_graphs() -> None:
    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return losses * 2 if losses.mean().item() > 100 else losses

    made = Run(loss_fn=loss_fn)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        made.train(clicks(20))
    assert made.graphs == 0
    assert made.same_bits(Run(loss_fn=loss_fn, graphs=False).train(clicks(20)))


@pytest.mark.filterwarnings("ignore:this training step cannot be captured:UserWarning")
def test_sums_that_are_looked_at_before_the_update_give_the_same_bits_with_graphs() -> None:
    """on_nonfinite='skip' reads values back between backward and update."""
    options = {"on_nonfinite": "skip"}
    captured = Run(embedding_options=options).train(clicks(20))
    assert captured.same_bits(Run(embedding_options=options, graphs=False).train(clicks(20)))


def test_jagged_batches_are_not_captured_one_by_one() -> None:
    """All of one length, which looks as if a capture could be used again."""
    case = CASES["multi-hot"]
    generator = torch.Generator().manual_seed(0)
    batches = [
        hotrow.KeyedJaggedTensor(
            ["f", "g"],
            torch.cat([skewed(generator, 80, 12), skewed(generator, 30, 12)]),
            lengths=torch.full((8,), 3),
        )
        for _ in range(60)
    ]
    embedding = build(case, "sgd", "lookahead", budget=hotrow.Budget(
        (hotrow.Share(64, 64, True),), window_bytes=1 << 16
    ))  # fmt: skip
    found = train(embedding, batches)
    assert found.same_bits(train(build(case, "sgd"), batches))
    kinds = [key[0] for key in embedding.groups[0].planner.recorder._graphs]
    assert kinds.count("expect") <= 8


def test_ids_at_one_place_in_two_layouts_are_told_apart() -> None:
    """Features by samples and samples by features, of one shape, in the same memory."""
    case = CASES["one-hot"]
    ids = torch.randint(40, (2, 8), device=DEVICE)
    layouts = ids.view(8, 2), ids.T
    assert layouts[0].data_ptr() == layouts[1].data_ptr()
    batches = [layouts[place % 2] for place in range(16)]
    expected = train(build(case, "adagrad"), [batch.cpu().contiguous() for batch in batches])
    assert train(build(case, "adagrad"), batches).same_bits(expected)


# -- long runs -----------------------------------------------------------------------------


def test_a_long_run_stays_right() -> None:
    """Random victims, few slots, evaluation in between, and a proof of the maps now and then."""
    made = Run(variant("lookahead", victims="random"), slots=300)
    twin = Run("all-fast")
    held_out = clicks(3)
    batches = [clicks(211)[step % 211] for step in range(STRESS_STEPS)]
    for run in (made, twin):
        records = []
        for record in run.trainer.run(batches):
            records.append(record)
            if record.step % 50 == 0:
                run.embedding.check()
            if record.step % 97 == 0:
                run.trainer.evaluate(held_out)
        run.losses = [record.loss for record in records]
    assert made.graphs > 0
    assert made.same_bits(twin)
    assert made.embedding.traffic().evicted_rows > STRESS_STEPS


def search_length(table: Tensor) -> Tensor:
    """Buckets that a search for an absent row looks at, on average."""
    has_empty = (table.view(-1, maps.PLACES.value) == -1).any(dim=1)
    count, ends = has_empty.numel(), has_empty.nonzero().squeeze(1)
    assert ends.numel(), "no place is empty: a search would never end"
    ends = torch.cat([ends, ends[:1] + count])
    bucket = torch.arange(count, device=table.device)
    return (ends[torch.searchsorted(ends, bucket)] - bucket + 1).float().mean()


def churn(steps: int, *, slots: int, batch: int, rebuilds: bool = True) -> tuple[float, float]:
    """How long searches are early in a long life of a map, and late in it."""
    device = torch.device(DEVICE)
    row_of_slot = torch.arange(slots, dtype=torch.int32, device=device)
    found = maps.DeviceMap(row_of_slot, 1 << 30, dense=False)
    found.rebuild()
    next_row, lengths = slots, []
    generator = torch.Generator(device).manual_seed(0)
    for step in range(steps):
        if step % 4 == 0 and rebuilds:  # as the planner does
            tombstones = int((found.table == maps.TOMBSTONE.value).sum())
            if tombstones > found.size // 10:
                found.rebuild()
        chosen = torch.randperm(slots, generator=generator, device=device)[:batch].int()
        # Each row comes once: the whole range of ids is used.
        rows = torch.arange(next_row, next_row + batch, device=device).int() * 7919 & 0x3FFFFFFF
        next_row += batch
        replace_rows(found, chosen, rows)
        if step % max(1, steps // 200) == 0:
            lengths.append(search_length(found.table))
    assert torch.equal(found.lookup(row_of_slot), torch.arange(slots, device=device).int())
    assert found.count() == slots
    measured = torch.stack(lengths).tolist()
    quarter = len(measured) // 4
    return sum(measured[:quarter]) / quarter, sum(measured[-quarter:]) / quarter


def test_searches_stay_short_however_often_rows_change() -> None:
    early, late = churn(CHURN_STEPS, slots=4096, batch=256)
    assert late < 1.1 * early
    assert late < 4


def test_searches_grow_where_no_map_is_rebuilt() -> None:
    """Or the test above could not tell."""
    early, late = churn(60, slots=4096, batch=256, rebuilds=False)
    assert late > 1.1 * early


# -- the user's own loop -------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.top = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.top(self.embedding(ids).values())
        return scores.square().mean()


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_trains_in_the_users_loop() -> None:
    case = CASES["one-hot"]
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.stack([skewed(generator, 60, 16), skewed(generator, 40, 16)], 1) for _ in range(30)
    ]
    strategy = variant("lookahead", victims="random")
    budget = tight_budget(case, batches, strategy.hold)

    def run(strategy: Any, *, compiled: bool) -> tuple[Outcome, list[Tensor]]:
        torch.manual_seed(0)
        embedding = build(case, "adagrad", strategy, budget=budget)
        model = Small(embedding).to(DEVICE)
        used: Any = torch.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in hotrow.ahead(batches, used):
            loss = used(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return outcome(embedding, losses), [w.detach() for w in model.parameters()]

    found, weights = run(strategy, compiled=True)
    expected, wanted = run("all-fast", compiled=True)
    assert found.same_bits(expected)
    assert all(map(torch.equal, weights, wanted))
    eager, _ = run("all-fast", compiled=False)
    torch.testing.assert_close(found.weights, eager.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
# Python warns of forks beside threads; a loader that forks is what this is about.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_data_loader_gives_the_same_bits(pin_memory: bool) -> None:
    def run(embedding: Any, **options: Any) -> Outcome:
        losses = []
        loader = DataLoader(Samples(), batch_size=8, **options)
        for ids, label in hotrow.ahead(loader, embedding, ids=lambda batch: batch[0]):
            assert ids.device.type == label.device.type == DEVICE
            loss = readout(embedding(ids)) * label.mean()
            loss.backward()
            losses.append(loss.detach())
        return outcome(embedding, losses)

    case = CASES["one-hot"]
    forked = {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": pin_memory}
    found = run(build(case, "adagrad", "lookahead", budget=4000), **forked)
    assert found.same_bits(run(build(case, "adagrad")))


def test_forked_workers_do_not_see_the_store() -> None:
    embedding = build(CASES["one-hot"], strategy="lookahead", budget=4000)
    assert is_left_out_of_forks(embedding.groups[0].store.rows.data_ptr())


# -- memory --------------------------------------------------------------------------------


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.parametrize("strategy", ["all-fast", "lookahead"])
def test_memory_is_what_torch_says_it_is(strategy: str) -> None:
    tables = [hotrow.EmbeddingBagConfig("t", 400_000, 60, ["f"])]
    generator = torch.Generator().manual_seed(0)
    batches = [skewed(generator, 400_000, 2048)[:, None] for _ in range(12)]
    settle()
    before = torch.cuda.memory_allocated()
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.RowWiseAdagrad(), budget="50%", strategy=strategy, device=DEVICE
    )
    for batch in hotrow.ahead(batches, embedding, depth=4):
        embedding(batch).values().square().sum().backward()
    del batch
    settle()
    used = torch.cuda.memory_allocated() - before
    told = sum(embedding.memory().values())
    assert told == pytest.approx(used, rel=0.05)
    if strategy == "lookahead":
        assert told <= 1.02 * 0.5 * embedding.bytes_total


def test_memory_is_given_back() -> None:
    def once() -> None:
        Run(slots=4000).train(clicks(12))

    once()  # what libraries keep for themselves
    settle()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        once()
    settle()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_a_budget_above_free_memory_is_refused_with_a_number_that_works() -> None:
    free, _ = torch.cuda.mem_get_info()
    case = CASES["one-hot"]
    message = r"do not fit cuda:\d+: .* are free\. Give a smaller budget, such as budget='(\d+MiB)'"
    with pytest.raises(ValueError, match=message) as caught:
        build(case, strategy="lookahead", budget=2 * free)
    found = re.search(message, str(caught.value))
    assert found is not None
    assert build(case, strategy="lookahead", budget=found[1]).num_slots > 0
