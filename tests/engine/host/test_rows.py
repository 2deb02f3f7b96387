"""Rows that stay in host memory train like rows in fast memory, whatever crosses the link.

Between the CPU and a GPU that is so up to rounding: sums are the same, in another order. On a CPU
it is so to the bit; there, rows "cross" by way of the GPU's kernels in Triton's interpreter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import hotrow.engine.hybrid
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import hotrow
import test_seam
from builders import CASES, RULES, Outcome, build, outcome, readout, train
from hotrow.data import ClickBatch
from hotrow.engine.host.link import RowColumns
from hotrow.engine.host.rows import HostRows
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tree import to_device
from hotrow.models import DLRM
from hotrow.support.streams import lanes_of
from hotrow.training.graphed import GraphedStep

# Of weights of about 0.1 to 1 and losses of about 1 to 10, after up to 40 steps.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
MULTI_HOT = CASES["multi-hot"]
FORMS = ["rows", "bags"]
STEPS = 5  # Triton's interpreter is slow


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    cross(monkeypatch, request.param)
    return str(request.param)


def cross(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(HostRows, "rows_cross", lambda *_: form == "rows")


def assert_like(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found.losses, expected.losses, **TOLERANCE)
    torch.testing.assert_close(found.weights, expected.weights, **TOLERANCE)
    torch.testing.assert_close(found.state, expected.state, **TOLERANCE)


@cache
def all_fast(case: str, rule: str, steps: int, device: str = "cpu") -> Outcome:
    """Every weight of every table, all state and all losses, on the host."""
    return train(build(CASES[case], rule, device=device), CASES[case].batches(steps))


# -- against every row in fast memory ------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", ["hybrid", "cpu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_on_a_cpu_every_bit_is_that_of_all_fast(case: str, rule: str, strategy: str) -> None:
    found = train(build(CASES[case], rule, strategy), CASES[case].batches(40))
    assert found.same_bits(all_fast(case, rule, 40))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_cross_train_like_all_fast(
    case: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, "rows")
    found = train(build(CASES[case], rule, "hybrid"), CASES[case].batches(STEPS))
    assert_like(found, all_fast(case, rule, STEPS))


def test_another_update_is_further_away_than_the_tolerance() -> None:
    found = train(build(MULTI_HOT, "adagrad", "hybrid"), MULTI_HOT.batches(STEPS)[:-1])
    found.losses.append(torch.zeros(()))
    with pytest.raises(AssertionError):
        assert_like(found, all_fast("multi-hot", "adagrad", STEPS))


def compare(loop: test_seam.Loop, plain_loop: Any) -> None:
    """As test_seam's, against all-fast; and with updates as late as a GPU's."""
    batches = MULTI_HOT.batches(test_seam.STEPS)
    reference = build(MULTI_HOT, "adagrad")
    expected = outcome(reference, loop(reference, batches))
    for late in (False, True):
        embedding = build(MULTI_HOT, "adagrad", "hybrid")
        make_late(embedding, late)
        assert_like(outcome(embedding, loop(embedding, batches)), expected)


def make_late(embedding: hotrow.EmbeddingBagCollection, late: bool = True) -> None:
    """As on a GPU: what crosses is copied, and updates wait until somebody reads rows."""
    for group in embedding.groups:
        assert isinstance(group, HostRows)
        group.link.exists = late


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "name",
    [
        "losses_summed_over_several_batches_are_one_step",
        "accumulate_joins_several_backward_passes_into_one_step",
        "two_calls_in_one_forward_are_one_step",
        "two_backward_passes_over_one_graph_are_two_steps",
        "forward_without_backward_changes_nothing_and_holds_nothing",
        "batches_pulled_together_and_trained_later_still_find_their_rows",
    ],
)
def test_users_loops_give_what_all_fast_gives(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_seam, "compare", compare)
    monkeypatch.setattr(test_seam, "STEPS", 10 if form == "rows" else 30)
    getattr(test_seam, f"test_{name}")()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("activation_checkpointing_recomputes_the_same_vectors", {"reentrant": False}),
        ("activation_checkpointing_recomputes_the_same_vectors", {"reentrant": True}),
        ("per_sample_weights_get_their_gradient_from_rows_before_the_update", {}),
        ("an_exception_inside_accumulate_changes_no_row", {}),
        ("a_grad_scaler_is_served_and_its_skipped_steps_are_skipped", {}),
        ("leaving_a_loop_early_keeps_what_was_trained_and_starts_anew", {}),
        ("skipped_batches_are_not_trained_and_disturb_nothing", {}),
        ("a_backward_pass_that_fails_changes_no_row", {}),
        ("a_bad_id_at_step_100_leaves_exactly_the_bits_of_step_99", {}),
        ("a_loader_that_fails_is_heard_after_its_last_good_batch", {}),
        ("state_dict_has_torchrecs_keys_and_the_newest_rows", {}),
        ("loading_a_state_dict_in_mid_flight_replaces_every_weight", {}),
        ("flush_brings_the_store_up_to_date", {}),
        ("a_gradient_that_is_not_finite_can_be_skipped", {}),
        ("a_gradient_that_is_not_finite_is_an_error_that_names_table_and_step", {}),
    ],
)
def test_what_holds_for_slots_holds_here(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of test_seam, to the bit, in a collection without slots."""

    def without_slots(*_: str, rule: str = "adagrad", **settings: Any) -> Any:
        embedding = build(MULTI_HOT, rule, "hybrid", **settings)
        make_late(embedding)
        return embedding

    cross(monkeypatch, "bags")  # pooled and summed by the CPU, as all-fast's are
    monkeypatch.setattr(test_seam, "tight", without_slots)
    getattr(test_seam, f"test_{name}")(**options)


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


# -- batches of all kinds ------------------------------------------------------------------


def one_table(strategy: str, **options: Any) -> hotrow.EmbeddingBagCollection:
    table = hotrow.EmbeddingBagConfig("t", 50, 4, ["f"], padding_idx=7, **options)
    return hotrow.EmbeddingBagCollection([table], hotrow.SGD(lr=0.1), strategy=strategy, seed=1)


def jagged(ids: list[int], lengths: list[int]) -> hotrow.KeyedJaggedTensor:
    values = torch.tensor(ids, dtype=torch.int64)
    return hotrow.KeyedJaggedTensor(["f"], values, lengths=torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize(
    "batch",
    [
        jagged([], [0, 0, 0]),
        jagged([7, 7], [2, 0]),
        jagged([], []),
        jagged([3] * 200 + [7, 9, 3], [150, 0, 50, 3]),
        torch.tensor([[7], [3], [3], [7], [9]]),
        torch.empty(0, 1, dtype=torch.int64),
    ],
    ids=["empty bags", "padding alone", "no bags", "a row 201 times", "one each", "no samples"],
)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_odd_batches_train_like_all_fast(batch: Any, pooling: str, form: str) -> None:
    results = []
    for strategy in ("all-fast", "hybrid"):
        embedding = one_table(strategy, pooling=pooling)
        results.append(train(embedding, [batch] * 3))
    assert_like(results[1], results[0])


def test_a_bad_id_is_named_before_any_row_changes() -> None:
    embedding = one_table("hybrid")
    before = embedding.state_dict()
    with pytest.raises(
        ValueError, match=r"feature 'f', position 1, sample .: id 50 is outside table 't'"
    ):
        embedding(jagged([3, 50], [2]))
    with pytest.raises(ValueError, match=r"feature 'f', sample 1: id -1 is outside table 't'"):
        embedding(torch.tensor([[3], [-1]]))
    assert all(torch.equal(before[key], value) for key, value in embedding.state_dict().items())


def test_vectors_are_as_wide_as_asked_for(form: str) -> None:
    batches = MULTI_HOT.batches(3)
    wide, narrow = (
        build(MULTI_HOT),
        build(MULTI_HOT, strategy="hybrid", output_dtype=torch.bfloat16),
    )
    for batch in batches:
        expected, found = wide(batch), narrow(batch)
        names = expected.keys()
        for name in names:
            assert found[name].dtype == torch.bfloat16
            torch.testing.assert_close(found[name].float(), expected[name], rtol=1e-2, atol=1e-2)
        gradient = {name: torch.randn_like(found[name]) for name in names}
        for out in (expected, found):
            grads = [gradient[name].to(out[name].dtype) for name in names]
            torch.autograd.backward([out[name] for name in names], grads)
    torch.testing.assert_close(narrow.state_dict(), wide.state_dict(), rtol=1e-2, atol=1e-2)


# -- rows that change between lookup and update --------------------------------------------


def interleaved(embedding: hotrow.EmbeddingBagCollection) -> Outcome:
    """Lookups and updates of batches that share rows, in every order."""
    first, second, third = MULTI_HOT.batches(3)
    one, two = readout(embedding(first)), readout(embedding(second))
    one.backward(retain_graph=True)  # the second's rows have been read since
    two.backward()  # and have changed since
    again = readout(embedding(first))
    with torch.no_grad():
        embedding(third)
    again.backward()
    late = readout(embedding(third))
    embedding.load_weights("a", 0, torch.ones(80, 5))
    late.backward()
    one.backward()
    return outcome(embedding, [each.detach() for each in (one, two, again, late)])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("late", [False, True])
def test_updates_start_from_the_newest_rows(rule: str, late: bool, form: str) -> None:
    embedding = build(MULTI_HOT, rule, "hybrid")
    make_late(embedding, late)
    assert_like(interleaved(embedding), interleaved(build(MULTI_HOT, rule)))


def test_rows_are_read_once_for_lookup_and_update(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = _Columns.read

    def count(self: _Columns, ids: Tensor, out: Tensor) -> None:
        reads.append(ids.numel())
        read(self, ids, out)

    monkeypatch.setattr(_Columns, "read", count)
    embedding = build(CASES["one-hot"], strategy="hybrid")
    train(embedding, CASES["one-hot"].batches(8))
    assert sum(reads) == embedding.traffic().unique_rows > 0


def weight_grads(strategy: str, device: str = "cpu") -> list[Tensor]:
    embedding = build(MULTI_HOT, "sgd", strategy, device=device)
    batch, other = (to_device(each, torch.device(device)) for each in MULTI_HOT.batches(2))
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


def test_the_gradient_of_weights_is_that_of_the_newest_rows(form: str) -> None:
    torch.testing.assert_close(weight_grads("hybrid"), weight_grads("all-fast"), **TOLERANCE)


def test_an_update_that_is_owed_has_the_settings_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cross(monkeypatch, "bags")

    def run(strategy: str) -> Outcome:
        embedding = build(MULTI_HOT, "adamw", strategy)
        if strategy == "hybrid":
            make_late(embedding)
        schedule = ExponentialLR(embedding.optimizer, 0.5)
        embedding.optimizer.param_groups[0]["lr"] = 0.07  # tables may differ
        losses = []
        for batch in hotrow.ahead(MULTI_HOT.batches(10), embedding):
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())
            schedule.step()
        return outcome(embedding, losses)

    assert run("hybrid").same_bits(run("all-fast"))


@pytest.mark.parametrize(
    "look",
    [
        lambda embedding, _: embedding.state_dict()["embedding_bags.a.weight"],
        lambda embedding, _: next(iter(embedding.rows("a")))[1],
        lambda embedding, _: embedding.optimizer.state_dict()["state"]["a"]["sum"],
        lambda embedding, batch: embedding(batch)["f"],
        lambda embedding, _: embedding.row_access.flush() or embedding.groups[0].store.rows.clone(),
        lambda embedding, batch: embedding.eval()(batch)["f"],
    ],
    ids=["weights", "rows", "state", "lookup", "store", "evaluation"],
)
def test_whoever_looks_sees_what_backward_has_done(
    look: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, "bags")
    batch = MULTI_HOT.batches(1)[0]
    seen = []
    for late in (False, True):
        embedding = build(MULTI_HOT, "adagrad", "hybrid")
        make_late(embedding, late)
        before = look(embedding, batch).clone()
        embedding.train()
        readout(embedding(batch)).backward()
        seen.append(look(embedding, batch))
        assert not torch.equal(seen[-1], before)
    assert torch.equal(*seen)


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


def test_contracts_are_stated() -> None:
    for name in ("hybrid", "cpu"):
        assert STRATEGIES[name].contract == "exact up to rounding"
        assert not STRATEGIES[name].has_slots


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


def test_memory_is_given_back_with_the_last_reference() -> None:
    embedding = build(MULTI_HOT, strategy="hybrid")
    make_late(embedding)
    train(embedding, MULTI_HOT.batches(3))
    readout(embedding(MULTI_HOT.batches(1)[0])).backward()  # an update is owed
    gone = weakref.ref(embedding.groups[0])
    gc.collect()
    gc.disable()  # page-locked rows shall not wait for it
    try:
        del embedding
        assert gone() is None
    finally:
        gc.enable()


def test_evaluation_in_inference_mode_leaves_room_for_training(form: str) -> None:
    embedding = build(MULTI_HOT, strategy="hybrid")
    few, many = MULTI_HOT.batches(2)[1], MULTI_HOT.batches(1)[0]
    embedding.eval()
    with torch.inference_mode():
        embedding(many)
    embedding.train()
    readout(embedding(few)).backward()
    embedding.check()


def test_a_lookup_that_fails_midway_leaves_no_rows_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, expected = (build(MULTI_HOT, strategy="hybrid") for _ in range(2))
    batch, other = MULTI_HOT.batches(2)
    for embedding in (found, expected):
        vectors = readout(embedding(batch))
        if embedding is found:
            embedding.eval()
            with monkeypatch.context() as patch:

                def read_and_fail(self: _Columns, ids: Any, out: Any) -> None:
                    out.fill_(7)
                    raise MemoryError

                patch.setattr(_Columns, "read", read_and_fail)
                with pytest.raises(MemoryError):
                    embedding(other)
            embedding.train()
        vectors.backward()
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


def on_a_gpu(test: Callable[..., None]) -> Any:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(missing(test))


def on_gpu(batches: list[Any]) -> list[Any]:
    return [to_device(batch, torch.device("cuda")) for batch in batches]


def here(found: Outcome) -> Outcome:
    return Outcome([each.cpu() for each in found.losses], found.weights, found.state)


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["fewer bytes", *FORMS])
def test_on_a_gpu_both_forms_train_like_all_fast(
    case: str, rule: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what in FORMS:
        cross(monkeypatch, what)
    found = train(build(CASES[case], rule, "hybrid", device="cuda"), CASES[case].batches(40))
    assert_like(here(found), here(all_fast(case, rule, 40, "cuda")))


@on_a_gpu
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_updates_start_from_the_newest_rows(rule: str, form: str) -> None:
    def run(strategy: str) -> Outcome:
        embedding = build(MULTI_HOT, rule, strategy, device="cuda")
        first, second, third = on_gpu(MULTI_HOT.batches(3))
        one, two = readout(embedding(first)), readout(embedding(second))
        one.backward(retain_graph=True)
        two.backward()
        with embedding.accumulate():
            readout(embedding(third)).backward()
            readout(embedding(first)).backward()
        one.backward()
        return here(outcome(embedding, [one.detach(), two.detach()]))

    assert_like(run("hybrid"), run("all-fast"))


@on_a_gpu
def test_on_a_gpu_the_gradient_of_weights_is_that_of_the_newest_rows(form: str) -> None:
    found = [weight_grads(strategy, "cuda") for strategy in ("hybrid", "all-fast")]
    torch.testing.assert_close(*found, **TOLERANCE)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_batches_keep_their_rows_apart(dtype: torch.dtype, form: str) -> None:
    """So large that copies are still under way when the next thing is launched."""
    rows, size, features = 200_000, 8192, 8
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(size, features, generator=generator) for _ in range(12)]
    batches = [(draw**4 * rows).long().pin_memory() for draw in draws]
    tables = [hotrow.EmbeddingBagConfig(f"t{i}", rows, 64, [f"f{i}"]) for i in range(features)]
    results = []
    for strategy in ("all-fast", "hybrid"):
        embedding = hotrow.EmbeddingBagCollection(
            tables,
            hotrow.SGD(lr=0.05),
            strategy=strategy,
            device="cuda",
            output_dtype=dtype,
            seed=0,
        )
        for ids in hotrow.ahead(batches, embedding):
            vectors = embedding(ids).values()
            vectors.backward((vectors.detach().sin() + 0.01) / 256)
        embedding.check()
        results.append(embedding.state_dict())
    rough = {"rtol": 2e-2, "atol": 2e-4} if dtype == torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(*results, **rough)


@on_a_gpu
def test_on_a_gpu_a_bad_id_is_named_when_its_turn_comes() -> None:
    batches = CASES["one-hot"].batches(10)
    expected = train(build(CASES["one-hot"], strategy="hybrid", device="cuda"), batches[:6])
    batches[6][0, 1] = 40
    embedding = build(CASES["one-hot"], strategy="hybrid", device="cuda")
    with pytest.raises(ValueError, match=r"feature 'g', sample 0: id 40 is outside table 'b'"):
        train(embedding, batches)
    assert outcome(embedding, expected.losses).same_bits(expected)


@on_a_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_on_a_gpu_the_trainer_trains_it(compiled: bool) -> None:
    found, expected = (trained(each, compile=compiled) for each in ("hybrid", "all-fast"))
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)


@on_a_gpu
def test_on_a_gpu_two_runs_give_the_same_bits() -> None:
    first, second = trained("hybrid"), trained("hybrid")
    assert first[0] == second[0]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


ROWS = (5000, 300, 20000, 40)
Found = tuple[list[float], dict[str, Tensor]]


def clicks(steps: int = 30, size: int = 256) -> Iterator[ClickBatch]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = [(torch.rand(size, generator=generator) ** 4 * rows).long() for rows in ROWS]
        yield ClickBatch(
            dense=torch.rand(size, 13, generator=generator),
            sparse=torch.stack(ids, dim=1),
            label=torch.randint(0, 2, (size,), generator=generator).float(),
        )


def trained(strategy: str, *, compile: bool = False, device: str = "cuda") -> Found:
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig(f"t{i}", n, 16, [f"f{i}"]) for i, n in enumerate(ROWS)],
        hotrow.RowWiseAdagrad(lr=0.05),
        strategy=strategy,
        device=device,
        seed=0,
    )
    model = DLRM(embedding, 13, (64, 16), (64, 1), generator=torch.Generator().manual_seed(3))
    model.to(device)
    trainer: hotrow.Trainer[ClickBatch] = hotrow.Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch.sparse,
        device=device,
        compile=compile,
    )
    records = []
    for record in trainer.run(clicks()):
        records.append(record)
        if record.step % 10 == 0:
            trainer.evaluate(list(clicks(2)))
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
