"""Rows that stay in host memory train like rows in fast memory, whatever crosses the link.

Between the CPU and a GPU that is so up to rounding: sums are the same, in another order. On a CPU
it is so to the bit; there, rows "cross" by way of the GPU's kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import ALL_RULES, CASES, RULES, Outcome, build, outcome, readout, train
from click_models import click_batches, trainer_of
from contracts import TOLERANCE, all_fast, as_on_gpu, assert_like, hot, learning, on_device
from hotrow.data import ClickBatch
from hotrow.engine.host.link import RowColumns
from hotrow.engine.host.rows import HostRows, host_rows_engine
from hotrow.engine.tuning import Tuning
from hotrow.models import DLRM
from hotrow.support.streams import lanes_of
from hotrow.training.graphed import GraphedStep

MULTI_HOT = CASES["multi-hot"]
FORMS = ["rows", "bags"]
STEPS = 5  # Triton's interpreter is slow
each_form = pytest.mark.parametrize("form", FORMS)


def crossing(
    form: str | None,
    case: Any = MULTI_HOT,
    rule: str = "sgd",
    *,
    late: bool = False,
    **options: Any,
) -> hotrow.EmbeddingBagCollection:
    """Rows on the host, of which rows or bags cross a link."""
    return as_on_gpu(build(case, rule, "hybrid", **options), form, late=late)


# -- against every row in fast memory ------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", ["hybrid", "cpu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", ALL_RULES)
def test_on_a_cpu_every_bit_is_that_of_all_fast(case: str, rule: str, strategy: str) -> None:
    found = train(build(CASES[case], rule, strategy), CASES[case].batches(40))
    assert found.same_bits(all_fast(case, rule, 40))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_cross_train_like_all_fast(case: str, rule: str) -> None:
    found = train(crossing("rows", CASES[case], rule), CASES[case].batches(STEPS))
    assert_like(found, all_fast(case, rule, STEPS))


def test_another_update_is_further_away_than_the_tolerance() -> None:
    found = train(build(MULTI_HOT, "adagrad", "hybrid"), MULTI_HOT.batches(STEPS)[:-1])
    found.losses.append(torch.zeros(()))
    with pytest.raises(AssertionError):
        assert_like(found, all_fast("multi-hot", "adagrad", STEPS))


# -- which form ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "bags", "lookups", "dtype", "crosses"),
    [
        (55_800, 212_992, 212_992, torch.float32, True),  # one id per bag, many alike
        (55_800, 212_992, 212_992, torch.bfloat16, True),
        (330_000, 104_857, 1_048_570, torch.float32, False),  # ten ids per bag
        (200_000, 212_992, 212_992, torch.bfloat16, False),  # hardly any alike, half as wide
        (1000, 1000, 1000, torch.float32, True),  # as many bytes, and nothing to pool
    ],
)
def test_what_is_fewer_bytes_crosses(
    rows: int, bags: int, lookups: int, dtype: torch.dtype, crosses: bool
) -> None:
    table = hotrow.EmbeddingBagConfig("t", 10, 64, ["f"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), strategy="hybrid")
    (group,) = embedding.groups
    assert isinstance(group, HostRows)
    group.output_dtype = dtype
    plan: Any = SimpleNamespace(num_rows=rows, num_lookups=lookups)
    assert not group.rows_cross(plan, bags)  # there is no link
    group.link.exists = True
    assert group.rows_cross(plan, bags) is crosses


# -- rows that change between lookup and update --------------------------------------------


def test_rows_are_read_once_for_lookup_and_update() -> None:
    embedding, reads = build(CASES["one-hot"], strategy="hybrid"), list[int]()
    for columns in embedding.groups[0].table._columns:
        columns.read = _noting(reads, columns.read)
    train(embedding, CASES["one-hot"].batches(8))
    assert sum(reads) == embedding.traffic().unique_rows > 0


def _noting(reads: list[int], read: Callable[..., None]) -> Callable[..., None]:
    def noted(ids: Tensor, out: Tensor) -> None:
        reads.append(ids.numel())
        read(ids, out)

    return noted


def weight_grads(embedding: hotrow.EmbeddingBagCollection) -> list[Tensor]:
    batch, other = on_device(MULTI_HOT.batches(2), embedding.device)
    weights = batch.weights_or_none().clone().requires_grad_()
    weighted = hotrow.KeyedJaggedTensor(
        batch.keys(), batch.values(), offsets=batch.offsets(), weights=weights
    )
    loss = readout(embedding(weighted))
    readout(embedding(other)).backward()
    loss.backward(retain_graph=True)
    first = weights.grad.clone()
    loss.backward()
    return [first, weights.grad]


@each_form
def test_the_gradient_of_weights_is_that_of_the_newest_rows(form: str) -> None:
    found, expected = weight_grads(crossing(form)), weight_grads(build(MULTI_HOT))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_run_goes_on_in_another_strategy_with_the_same_bits() -> None:
    batches = MULTI_HOT.batches(20)
    first = build(MULTI_HOT, "adam", "hybrid")
    train(first, batches[:10])
    second = build(MULTI_HOT, "adam")
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    third = build(MULTI_HOT, "adam", "cpu")
    train(second, batches[10:15])
    third.load_state_dict(second.state_dict())
    third.optimizer.load_state_dict(second.optimizer.state_dict())
    train(third, batches[15:])
    whole = build(MULTI_HOT, "adam")
    train(whole, batches)
    assert outcome(third, []).same_bits(outcome(whole, []))


# -- what it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "10%", 123])
def test_a_budget_is_not_needed_and_changes_nothing(budget: Any) -> None:
    embedding = build(MULTI_HOT, "adagrad", "hybrid", budget=budget)
    assert train(embedding, MULTI_HOT.batches(5)).same_bits(all_fast("multi-hot", "adagrad", 5))
    assert embedding.num_slots == 0
    assert set(embedding.memory()) == {"rows of a batch", "sorted ids"}


def test_every_row_of_a_batch_counts_as_moved_without_its_state() -> None:
    case = CASES["unpooled"]  # has padding
    embedding, twin = build(case, "adam", "hybrid"), build(case, "adam")
    for each in (embedding, twin):
        train(each, case.batches(6))
    found, expected = embedding.traffic(), twin.traffic()
    assert (found.lookups, found.unique_rows) == (expected.lookups, expected.unique_rows)
    assert found.fetched_rows == found.evicted_rows == found.unique_rows
    assert found.bytes_fetched == found.fetched_rows * 3 * 4
    for name, each in expected.per_table.items():
        assert found.per_table[name].lookups == each.lookups
        assert found.per_table[name].unique_rows == each.unique_rows
    totals = [
        sum(column) for column in zip(*(g.counters.moved for g in embedding.groups), strict=True)
    ]
    assert totals == [found.lookups, found.unique_rows, found.unique_rows, found.unique_rows]


def test_the_cpu_alone_is_refused_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hotrow.embedding.collection, "usable_device", lambda _: torch.device("cuda", 0)
    )
    with pytest.raises(ValueError, match=r"'cpu' trains on the CPU alone; .* take 'hybrid'"):
        build(MULTI_HOT, strategy="cpu", device="cuda")


def test_strategies_that_move_rows_do_not_mix_with_it() -> None:
    model = nn.ModuleDict(
        {"a": build(CASES["one-hot"], strategy="hybrid"), "b": build(CASES["one-hot"])}
    )
    batches = CASES["one-hot"].batches(4)
    for batch in hotrow.ahead(batches, model, ids=lambda b: {"a": b, "b": b}):
        (readout(model["a"](batch)) + readout(model["b"](batch))).backward()
    assert outcome(model["a"], []).same_bits(outcome(model["b"], []))
    model["b"] = build(CASES["one-hot"], strategy="lookahead", budget="4KiB")
    with pytest.raises(ValueError, match="one model cannot mix strategies 'hybrid'"):
        hotrow.ahead(batches, model)


@each_form
def test_evaluation_in_inference_mode_leaves_room_for_training(form: str) -> None:
    embedding = crossing(form)
    few, many = MULTI_HOT.batches(2)[1], MULTI_HOT.batches(1)[0]
    embedding.eval()
    with torch.inference_mode():
        embedding(many)
    embedding.train()
    readout(embedding(few)).backward()
    embedding.check()


def test_a_lookup_that_fails_midway_leaves_no_rows_behind() -> None:
    def read_and_fail(ids: Any, out: Any) -> None:
        out.fill_(7)
        raise MemoryError

    found, expected = (build(MULTI_HOT, strategy="hybrid") for _ in range(2))
    batch, other = MULTI_HOT.batches(2)
    for embedding in (found, expected):
        loss = readout(embedding(batch))
        if embedding is found:
            columns = embedding.groups[0].table._columns[0]
            embedding.eval()
            read, columns.read = columns.read, read_and_fail
            with pytest.raises(MemoryError):
                embedding(other)
            columns.read = read
            embedding.train()
        loss.backward()
    assert outcome(found, []).same_bits(outcome(expected, []))


@pytest.mark.parametrize(("width", "first", "last"), [(8, 0, 8), (8, 4, 8), (9, 0, 8), (7, 2, 7)])
def test_columns_keep_every_bit(width: int, first: int, last: int) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (30, width), dtype=torch.int32)  # NaNs of all kinds
    rows = torch.zeros(30, width)
    columns = RowColumns(rows[:, first:last])
    ids = torch.tensor([29, 3, 11, 0])
    columns.write(ids, bits[:4, first:last].contiguous().view(torch.float32))
    out = torch.empty(4, last - first)
    columns.read(ids, out=out)
    assert torch.equal(out.view(torch.int32), bits[:4, first:last])
    rows[ids, first:last] = 0
    assert not rows.any()


def test_torch_stays_deterministic_for_everybody_else() -> None:
    embedding = build(MULTI_HOT, strategy="hybrid")
    torch.set_deterministic_debug_mode("error")
    try:
        train(embedding, MULTI_HOT.batches(3))
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode("default")


# -- on a GPU ------------------------------------------------------------------------------


MAKE = {"hybrid": partial(build, strategy="hybrid", device="cuda"),
        "static-hybrid": partial(hot, device="cuda")}  # fmt: skip
each_strategy = pytest.mark.parametrize("strategy", MAKE)


@pytest.mark.gpu
@each_strategy
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["fewer bytes", *FORMS])
def test_on_a_gpu_both_forms_train_like_all_fast(
    case: str, rule: str, what: str, strategy: str
) -> None:
    embedding = as_on_gpu(MAKE[strategy](CASES[case], rule), what if what in FORMS else None)
    assert_like(train(embedding, CASES[case].batches(40)), all_fast(case, rule, 40, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_it_learns_and_changes_nothing_by_it(rule: str) -> None:
    embedding = learning(rule, 60, device="cuda")
    assert_like(train(embedding, MULTI_HOT.batches(40)), all_fast("multi-hot", rule, 40, "cuda"))
    assert embedding.groups[0].hot._version >= 3


@pytest.mark.gpu
@each_strategy
@each_form
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_updates_start_from_the_newest_rows(rule: str, form: str, strategy: str) -> None:
    def run(embedding: hotrow.EmbeddingBagCollection) -> Outcome:
        first, second, third = on_device(MULTI_HOT.batches(3))
        one, two = readout(embedding(first)), readout(embedding(second))
        one.backward(retain_graph=True)
        two.backward()
        with embedding.accumulate():
            readout(embedding(third)).backward()
            readout(embedding(first)).backward()
        one.backward()
        return outcome(embedding, [one.detach(), two.detach()])

    found = as_on_gpu(MAKE[strategy](MULTI_HOT, rule), form)
    assert_like(run(found), run(build(MULTI_HOT, rule, device="cuda")))


@pytest.mark.gpu
@each_form
def test_on_a_gpu_the_gradient_of_weights_is_that_of_the_newest_rows(form: str) -> None:
    both = (crossing(form, late=True, device="cuda"), build(MULTI_HOT, device="cuda"))
    found = [weight_grads(embedding) for embedding in both]
    torch.testing.assert_close(*found, **TOLERANCE)


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["hybrid", "profiled", "learning"])
def test_large_batches_keep_their_rows_apart(kind: str, dtype: torch.dtype, form: str) -> None:
    """So large that copies are still under way when the next thing is launched."""
    rows, size, features = 200_000, 8192, 8
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(size, features, generator=generator) for _ in range(12)]
    batches = [(draw**4 * rows).long().pin_memory() for draw in draws]
    tables = [hotrow.EmbeddingBagConfig(f"t{i}", rows, 64, [f"f{i}"]) for i in range(features)]
    counts = torch.arange(rows // 20), torch.arange(rows // 20, 0, -1).float()
    options: dict[str, Any] = {"strategy": "hybrid"}
    if kind != "hybrid":
        engine = partial(host_rows_engine, tuning=Tuning(learn_after=(3, 6, 9)))
        options = {"strategy": "static-hybrid", "budget": "5%", "engine": engine}
    if kind == "profiled":
        options["profile"] = {table.name: counts for table in tables}
    results = []
    for given in ({"strategy": "all-fast"}, options):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.RowWiseAdagrad(lr=0.05), device="cuda", output_dtype=dtype, seed=0,
            **given,
        )  # fmt: skip
        if given is options:
            as_on_gpu(embedding, form)
        for ids in hotrow.ahead(batches, embedding):
            vectors = embedding(ids).values()
            vectors.backward((vectors.detach().sin() + 0.01) / 256)
        embedding.check()
        results.append(embedding.state_dict())
    rough = {"rtol": 2e-2, "atol": 2e-4} if dtype == torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(*results, **rough)


@pytest.mark.gpu
def test_on_a_gpu_a_bad_id_is_named_when_its_turn_comes() -> None:
    batches = CASES["one-hot"].batches(10)
    expected = train(build(CASES["one-hot"], strategy="hybrid", device="cuda"), batches[:6])
    batches[6][0, 1] = 40
    embedding = build(CASES["one-hot"], strategy="hybrid", device="cuda")
    with pytest.raises(ValueError, match=r"feature 'g', sample 0: id 40 is outside table 'b'"):
        train(embedding, batches)
    assert outcome(embedding, expected.losses).same_bits(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["hybrid", "static-hybrid"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_on_a_gpu_the_trainer_trains_it(compiled: bool, strategy: str) -> None:
    found, expected = (trained(each, compile=compiled) for each in (strategy, "all-fast"))
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_two_runs_give_the_same_bits() -> None:
    first, second = trained("hybrid"), trained("hybrid")
    assert first[0] == second[0]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


ROWS = (5000, 300, 20000, 40)
Found = tuple[list[float], dict[str, Tensor]]


def clicks(steps: int = 30) -> list[ClickBatch]:
    return click_batches(steps, ROWS, size=256, num_dense=13)


def trained(strategy: str, *, compile: bool = False, device: str = "cuda") -> Found:
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig(f"t{i}", n, 16, [f"f{i}"]) for i, n in enumerate(ROWS)],
        hotrow.RowWiseAdagrad(lr=0.05),
        "10%",
        strategy=strategy,
        device=device,
        seed=0,
    )
    model = DLRM(embedding, 13, (64, 16), (64, 1), generator=torch.Generator().manual_seed(3))
    model.to(device)
    trainer = trainer_of(model, compile=compile)
    records = []
    for record in trainer.run(clicks()):
        records.append(record)
        if record.step % 10 == 0:
            trainer.evaluate(clicks(2))
    values = {key: value.cpu() for key, value in model.state_dict().items()}
    return [record.loss for record in records], values


def test_the_trainer_trains_it_on_a_cpu_to_the_bit() -> None:
    found, expected = trained("hybrid", device="cpu"), trained("all-fast", device="cpu")
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][key], expected[1][key]) for key in found[1])


def test_steps_with_rows_on_the_host_are_not_captured() -> None:
    """Also where batches are jagged, and where room for lookups is asked for."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = hotrow.EmbeddingBagConfig("a", 50, 4, ["a"])
            self.rows = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), strategy="hybrid")
            self.top = nn.Linear(4, 1)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            found: Tensor = self.top(self.rows(batch["ids"]).values())
            return found

    model = Model()
    step = GraphedStep(
        model,
        lambda found, wanted: (found - wanted) ** 2,
        torch.optim.SGD(model.parameters(), lr=0.1),
        labels=lambda batch: batch["wanted"],
        lanes=lanes_of(torch.device("cpu")),  # as if there were a GPU
        max_lookups=100,
    )
    ids = hotrow.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 1, 3]))
    batches = [{"ids": ids, "wanted": torch.zeros(2, 1)} for _ in range(8)]
    losses = [
        float(step(batch))
        for batch in hotrow.ahead(batches, model, ids=lambda b: b["ids"], step=step)
    ]
    assert len(losses) == len(batches)
    assert losses[-1] < losses[0]
