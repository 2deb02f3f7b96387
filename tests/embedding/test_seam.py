"""What users do between forward and backward, compared with plain PyTorch on whole tables.

That every engine gives the bits of all-fast is tested in tests/engine/test_contract.py.
"""

from __future__ import annotations

import itertools
import signal
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrow
import loops
from builders import (
    CASES,
    Case,
    Outcome,
    PlainRows,
    PlainTables,
    assert_close,
    build,
    outcome,
    readout,
    skewed,
    tight_budget,
    train,
    variant,
)
from hotrow.embedding.step import PendingStep

CASE = CASES["multi-hot"]
ONE = Case([hotrow.EmbeddingBagConfig("a", 200, 4, ["f"])], lambda g: skewed(g, 200, 16)[:, None])
STEPS = 30


def tight(
    schedule: str = "fused", victims: str = "random", rule: str = "adagrad", **options: Any
) -> Any:
    strategy = variant("lookahead", schedule, victims)
    budget = tight_budget(CASE, CASE.batches(STEPS), strategy.hold)
    return build(CASE, rule, strategy, budget=budget, **options)


# -- loops that train like torch ---------------------------------------------------------


# Each with the number of steps that it makes.
LOOPS: dict[Any, int] = {
    loops.one_loss_of_two_batches: STEPS // 2,
    loops.product_of_two_batches: STEPS // 2,
    loops.batches_pulled_together: STEPS,
    loops.accumulated: STEPS // 3,
    loops.some_without_backward: STEPS * 2 // 3,
    loops.checkpointed: STEPS,
    loops.learned_weights: STEPS,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_like_torch(loop: Any) -> None:
    """Other engines give the same bits: test_contract.py has these loops, too."""
    batches = CASE.batches(STEPS)
    embedding = build(CASE, "adagrad")
    plain = PlainTables(embedding)
    rows = PlainRows(plain, embedding.optimizer.rule)
    found = loops.of_collection(loop)(embedding, batches)
    assert embedding.optimizer.steps[0] == LOOPS[loop]
    expected = [loss.detach() for loss in loop(loops.Training(plain, iter(batches), rows.step))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert_close(embedding, plain)


def test_a_grad_scaler_is_served_and_its_skipped_steps_are_skipped() -> None:
    batches = CASE.batches(STEPS)
    expected = train(build(CASE, "adam"), [b for i, b in enumerate(batches) if i % 7 != 3])
    embedding = tight(rule="adam")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    embedding.grad_scale = scaler
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        loss = readout(embedding(batch))
        if place % 7 == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    found = outcome(embedding, expected.losses)
    assert found.same_bits(expected)


# -- the stream --------------------------------------------------------------------------


def test_a_loader_that_fails_is_heard_after_its_last_good_batch() -> None:
    def loader() -> Iterator[Any]:
        yield from CASE.batches(12)
        raise OSError("disk on fire")

    embedding, seen = tight(), 0

    def loop() -> None:
        nonlocal seen
        for batch in hotrow.ahead(loader(), embedding):
            readout(embedding(batch)).backward()
            seen += 1

    with pytest.raises(OSError, match="disk on fire"):
        loop()
    assert seen == 12


def test_two_iterators_at_once_on_one_collection_are_refused() -> None:
    embedding, batches = tight(), CASE.batches(6)
    said = r"another hotrow\.ahead iterator is running.*inside its loop call the model directly"
    for number, batch in enumerate(hotrow.ahead(batches[:4], embedding)):
        readout(embedding(batch)).backward()
        if number == 2:
            with pytest.raises(RuntimeError, match=said):
                next(hotrow.ahead(batches[4:], embedding))
            with torch.no_grad():  # as it says
                assert all(readout(embedding(batch)).isfinite() for batch in batches[4:])
    assert len(list(hotrow.ahead(batches, embedding))) == 6


def test_a_finished_iterator_stays_finished_and_can_start_over() -> None:
    stream = hotrow.ahead(CASE.batches(5), tight())
    assert len(stream) == 5
    assert len(list(stream)) == 5
    assert stream.position() == 5
    with pytest.raises(StopIteration):
        next(stream)
    assert len(list(stream)) == 5


def test_training_starts_when_two_batches_are_known() -> None:
    read = 0

    def loader() -> Iterator[Any]:
        nonlocal read
        for batch in CASE.batches(20):
            read += 1
            yield batch

    stream = hotrow.ahead(loader(), tight())
    next(stream)
    assert read == 2
    stream.close()


# -- evaluation --------------------------------------------------------------------------


def test_rows_are_frozen_in_eval_mode_also_where_gradients_are_on() -> None:
    embedding = tight()
    before, batch = embedding.state_dict(), CASE.batches(1)[0]
    embedding.eval()
    vectors = embedding(batch).values()
    assert not vectors.requires_grad
    dense = nn.Linear(vectors.shape[1], 1)
    dense(vectors).sum().backward()
    assert dense.weight.grad is not None
    assert all(torch.equal(before[key], value) for key, value in embedding.state_dict().items())


def test_evaluating_touches_no_map_hold_or_counter() -> None:
    embedding = tight()
    train(embedding, CASE.batches(10))
    planner = embedding.groups[0].planner
    before = [
        planner.number,
        planner.last_use.clone(),
        planner.uses.clone(),
        planner.pad.row_of_slot.clone(),
    ]
    traffic = embedding.traffic()
    embedding.eval()
    with torch.no_grad():
        for batch in hotrow.ahead(CASE.batches(5, seed=4), embedding):
            embedding(batch)
    after = [planner.number, planner.last_use, planner.uses, planner.pad.row_of_slot]
    assert before[0] == after[0]
    assert all(map(torch.equal, before[1:], after[1:]))
    assert embedding.traffic() == traffic


# -- module manners ----------------------------------------------------------------------


def test_moving_or_halving_a_model_leaves_its_rows_alone() -> None:
    embedding = tight()
    model = nn.Sequential(embedding, nn.Linear(2, 2))
    before = outcome(embedding, [])
    model.to("cpu").half().double().to(torch.bfloat16).float()
    assert outcome(embedding, []).same_bits(before)
    assert embedding(CASE.batches(1)[0]).values().dtype == torch.float32


def test_a_process_group_that_begins_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = tight()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="silently diverge"):
        next(hotrow.ahead(CASE.batches(3), embedding))


# Dynamo hides this warning when it prints, which is too late where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_the_same_rows() -> None:
    class Model(nn.Module):
        def __init__(self, embedding: Any) -> None:
            super().__init__()
            self.embedding, self.linear = embedding, nn.Linear(10, 1)

        def forward(self, batch: Any) -> Tensor:
            return self.linear(self.embedding(batch).values()).square().mean()

    def run(compiled: bool) -> Outcome:
        torch.manual_seed(0)
        embedding = tight()
        model = Model(embedding)
        # The backend that runs what was traced as it is: no compiler is needed to test the seam.
        used: Any = torch.compile(model, backend="eager") if compiled else model
        losses = []
        for batch in hotrow.ahead(CASE.batches(8), used):
            loss = used(batch)
            loss.backward()
            losses.append(loss.detach())
        return outcome(embedding, losses)

    assert run(compiled=True).same_bits(run(compiled=False))


def test_state_dict_has_torchrecs_keys_and_the_newest_rows() -> None:
    embedding = tight("five")
    stream = hotrow.ahead(CASE.batches(STEPS), embedding)
    for batch in itertools.islice(stream, 10):
        readout(embedding(batch)).backward()
    found = nn.ModuleDict({"sparse": embedding}).state_dict()  # batches are in flight here
    expected = train(build(CASE, "adagrad"), CASE.batches(STEPS)[:10])
    assert list(found) == ["sparse.embedding_bags.a.weight", "sparse.embedding_bags.b.weight"]
    assert torch.equal(
        found["sparse.embedding_bags.a.weight"], expected.weights["embedding_bags.a.weight"]
    )
    streamed = torch.cat([chunk for _, chunk in embedding.weights("a")])
    assert torch.equal(streamed, found["sparse.embedding_bags.a.weight"])
    stream.close()


# -- passes inside passes, and passes that fail --------------------------------------------


def ones(rows: int = 20) -> Any:
    """Rows of one weight that is 1, so that a step of SGD with lr 1 shows as a 0."""
    table = hotrow.EmbeddingBagConfig("t", rows, 1, ["f"], init=hotrow.Constant(1.0))
    return hotrow.EmbeddingBagCollection([table], hotrow.SGD(lr=1.0), strategy="all-fast")


def row(embedding: Any, number: int) -> float:
    return float(embedding.state_dict()["embedding_bags.t.weight"][number])


def look_up(embedding: Any, number: int) -> Tensor:
    found: Tensor = embedding(torch.tensor([number])).values().sum()
    return found


def test_a_checkpoint_inside_a_checkpoint_is_part_of_the_outer_step() -> None:
    embedding = ones()

    def inner(z: Tensor) -> Tensor:
        return look_up(embedding, 1) * z

    def outer(z: Tensor) -> Tensor:
        return look_up(embedding, 2) * z + checkpoint(inner, z, use_reentrant=True)

    z = torch.ones((), requires_grad=True)
    loss = checkpoint(outer, z, use_reentrant=True)
    assert isinstance(loss, Tensor)
    (loss + look_up(embedding, 3)).backward()
    assert [row(embedding, number) for number in (1, 2, 3)] == [0, 0, 0]
    assert embedding.optimizer.steps[0] == 1


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("as planned")


def fail_after_row_3(embedding: Any) -> None:
    z = torch.ones((), requires_grad=True)
    broken = Failing.apply(z * 1)  # made first, so its gradient comes last
    with pytest.raises(ZeroDivisionError):
        (look_up(embedding, 3) + broken).backward()


def test_what_a_failed_pass_left_behind_reaches_no_row() -> None:
    embedding = ones()
    fail_after_row_3(embedding)
    with embedding.accumulate():
        pass
    look_up(embedding, 4).backward()
    assert [row(embedding, 3), row(embedding, 4)] == [1, 0]


def test_a_pass_that_fails_inside_accumulate_leaves_the_others() -> None:
    embedding = ones()
    with embedding.accumulate():
        look_up(embedding, 1).backward()
        fail_after_row_3(embedding)
        look_up(embedding, 2).backward()
    assert [row(embedding, number) for number in (1, 2, 3)] == [0, 0, 1]


def test_an_inner_accumulate_that_fails_drops_its_own_gradients_only() -> None:
    embedding = ones()

    def fail() -> None:
        with embedding.accumulate():
            look_up(embedding, 2).backward()
            raise KeyError

    with embedding.accumulate():
        look_up(embedding, 1).backward()
        with pytest.raises(KeyError):
            fail()
    assert [row(embedding, 1), row(embedding, 2)] == [0, 1]


@pytest.mark.parametrize("joined", [False, True])
def test_ctrl_c_before_the_update_leaves_no_gradient_to_the_next_step(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding, finish = ones(), PendingStep.finish

    def interrupted(step: PendingStep) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(step)

    with monkeypatch.context() as patch:
        patch.setattr(PendingStep, "finish", interrupted)
        whole = embedding.accumulate() if joined else nullcontext()
        with pytest.raises(KeyboardInterrupt), whole:
            look_up(embedding, 3).backward()
    steps = embedding.optimizer.steps[0]
    assert row(embedding, 3) == 1 - steps  # the step is made as a whole, or not at all
    look_up(embedding, 4).backward()
    assert [row(embedding, 3), row(embedding, 4)] == [1 - steps, 0]


def test_asking_for_the_gradient_of_weights_alone_updates_no_row() -> None:
    embedding = ones()
    weights = torch.ones(2, requires_grad=True)
    out = embedding((torch.tensor([1, 2]), torch.tensor([0, 2]), weights)).values().sum()
    (grad,) = torch.autograd.grad(out, weights, retain_graph=True)
    assert torch.equal(grad, torch.ones(2))
    assert row(embedding, 1) == 1
    out.backward()
    assert row(embedding, 1) == 0


def test_weights_of_another_module_are_copied_and_not_tracked() -> None:
    plain = nn.Embedding(20, 1)
    table = hotrow.EmbeddingBagConfig("t", 20, 1, ["f"], init=lambda rows: plain.weight[rows])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget=4000)
    embedding.load_weights("t", 0, plain.weight)
    for number in range(5):
        look_up(embedding, number).backward()
    group = embedding.groups[0]
    assert not group.store.rows.requires_grad
    assert not group.slots.requires_grad


# -- what tells batches apart --------------------------------------------------------------


def test_the_same_ids_under_other_keys_are_other_ids() -> None:
    tables = [
        hotrow.EmbeddingBagConfig(name, 10, 1, [name], init=hotrow.Constant(value))
        for name, value in (("a", 1.0), ("b", 2.0))
    ]
    embedding = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(lr=0.0), budget=4000)
    values, offsets = torch.tensor([1, 1, 1]), torch.tensor([0, 1, 3])
    first = hotrow.KeyedJaggedTensor(["a", "b"], values, offsets=offsets)
    second = hotrow.KeyedJaggedTensor(["b", "a"], values, offsets=offsets)
    for batch in hotrow.ahead([first], embedding):
        assert embedding(batch).values().tolist() == [[1, 4]]
        with pytest.warns(UserWarning, match="not the ones"):
            assert embedding(second).values().tolist() == [[2, 2]]


def test_a_start_that_fails_does_not_block_the_collection() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no such file")

    embedding = tight()
    stream = hotrow.ahead(Broken(), embedding)
    with pytest.raises(OSError, match="no such file"):
        next(stream)
    assert len(list(hotrow.ahead(CASE.batches(3), embedding))) == 3


def test_a_collection_that_is_all_fast_does_not_shorten_the_others_view() -> None:
    model = nn.ModuleDict({"fast": build(CASE), "slow": tight()})
    stream = hotrow.ahead(CASE.batches(STEPS), model)
    for _ in range(10):
        next(stream)
    assert len(model["slow"].groups[0].planner.window) > 0
    stream.close()


def test_a_budget_without_bytes_for_ids_knows_no_batch_ahead() -> None:
    budget = hotrow.Budget((hotrow.Share(80, 32, True),), window_bytes=0)
    table = hotrow.EmbeddingBagConfig("t", 200, 2, ["f"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget)
    assert embedding.pipeline.useful_depth() == 0
    for batch in hotrow.ahead([torch.arange(4)[:, None]] * 5, embedding):
        embedding(batch).values().sum().backward()
        assert embedding.pipeline.useful_depth() == 0


def test_a_bag_larger_than_the_buffer_is_read_as_long_as_it_fits_the_slots() -> None:
    table = hotrow.EmbeddingBagConfig("t", 200, 2, ["f"])
    budget = hotrow.Budget((hotrow.Share(80, 32, True),), window_bytes=1000)
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget=budget)
    bag = (torch.arange(50), torch.tensor([0, 50]))
    trained = embedding(bag).values()
    with torch.no_grad():
        assert torch.equal(embedding(bag).values(), trained)
        assert (
            embedding((torch.zeros(150).long(), torch.tensor([0, 150]))).values().isfinite().all()
        )
        message = r"one sample looks up 100 different rows of table 't', but .* room for 80 rows"
        with pytest.raises(ValueError, match=message):
            embedding((torch.arange(100), torch.tensor([0, 100])))


def test_vectors_per_lookup_are_not_laid_side_by_side() -> None:
    case = CASES["unpooled"]
    out = build(case)(
        hotrow.KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 1]), lengths=torch.tensor([1, 0, 0, 1])
        )
    )
    with pytest.raises(ValueError, match="one vector per sample"):
        out.values()
    assert out.offsets("g").tolist() == [0, 0, 1]


# -- kindness ------------------------------------------------------------------------------


def test_a_warning_of_other_ids_comes_once_and_points_at_the_line_that_looked_them_up() -> None:
    embedding = build(CASES["one-hot"], strategy="lookahead", budget=4000)
    model = nn.Sequential(embedding)

    def change_and_look_up() -> None:
        for batch in hotrow.ahead([x.clone() for x in CASES["one-hot"].batches(4)], embedding):
            batch[:, 0] = (batch[:, 0] + 1) % 60
            model(batch)

    with pytest.warns(UserWarning, match="not the ones hotrow.ahead planned") as caught:
        change_and_look_up()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_batch_too_large_for_the_slots_is_told_once() -> None:
    embedding = build(
        CASE,
        strategy="lru",
        budget=tight_budget(CASE, CASE.batches(9), variant("lru").hold, part=0.5),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(embedding, CASE.batches(9))
    told = [str(each.message) for each in caught if "does not fit the" in str(each.message)]
    assert len(told) == 1
    assert "slots would hold it" in told[0]


def test_a_depth_of_auto_is_the_default() -> None:
    found = [train(tight(), CASE.batches(9), depth=depth) for depth in (None, "auto")]
    assert found[0].same_bits(found[1])


def test_a_list_of_ids_that_gets_another_tensor_is_looked_up_anew() -> None:
    embedding, twin = build(ONE, strategy="lookahead", budget=5_000), build(ONE)
    offsets = torch.tensor([0, 1, 2])
    batches = [[torch.tensor([i, i + 1]), offsets] for i in range(6)]

    def change_and_train() -> None:
        for batch in hotrow.ahead([list(batch) for batch in batches], embedding):
            batch[0] = batch[0] + 20
            readout(embedding(batch)).backward()

    with pytest.warns(UserWarning, match="not the ones hotrow.ahead planned"):
        change_and_train()
    for ids, offsets in batches:
        readout(twin([ids + 20, offsets])).backward()
    assert outcome(embedding, []).same_bits(outcome(twin, []))


# -- ids that the model builds itself ----------------------------------------------------


@pytest.mark.parametrize("pulled", [1, 2, 4])
def test_ids_built_anew_are_recognised_however_many_batches_were_pulled(pulled: int) -> None:
    batches, found = ONE.batches(8), []
    for ids in (lambda batch: batch, torch.clone):
        embedding = build(ONE, strategy="lookahead", budget=8_000)
        stream = hotrow.ahead(batches, embedding, ids=ids)
        for first in stream:
            for batch in (first, *itertools.islice(stream, pulled - 1)):
                readout(embedding(ids(batch))).backward()
        assert embedding.traffic().lookups == sum(map(len, batches))
        assert embedding.traffic().chunked_batches == 0
        found.append(outcome(embedding, []))
    assert found[0].same_bits(found[1])


# -- more rows than travel at once -------------------------------------------------------


def test_a_staged_batch_larger_than_the_buffer_fills_the_slots_all_the_same() -> None:
    batches = ONE.batches(30)
    budget = hotrow.Budget((hotrow.Share(140, 6, True),), window_bytes=1 << 14)
    embedding = build(ONE, "adam", "scratchpipe", budget=budget)
    assert train(embedding, batches).same_bits(train(build(ONE, "adam"), batches))
    assert len(batches[0].unique()) > 6
    assert embedding.traffic().chunked_batches == 0
    assert embedding.traffic().hit_rate > 0.5


def test_evaluation_in_a_loop_is_no_mistake() -> None:
    embedding = tight()
    for batch in hotrow.ahead(CASE.batches(8), embedding):
        embedding.eval()
        with torch.no_grad():
            embedding(batch)
        embedding(batch)  # with gradients on
        embedding.train()
        readout(embedding(batch)).backward()
    embedding.eval()
    with torch.no_grad():
        for batch in hotrow.ahead(CASE.batches(8), embedding):
            embedding(batch)
    embedding(batch)
