"""What holds on every engine, whatever its parts: loops of users give what all-fast gives.

tests/contracts.py has the engines, and tests/engine/test_equal_to_plain.py compares all-fast with
plain PyTorch.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import hotrow
import loops
from builders import CASES, Case, Outcome, outcome, readout, train
from contracts import (
    CPU,
    DEVICE,
    ENGINES,
    GPU,
    HOST,
    MULTI_HOT,
    Engine,
    GpuEngine,
    assert_like,
    engines,
    on_device,
)
from hotrow.engine.rules import Hold
from loops import of_collection

ONE_HOT, TWO_WIDTHS = CASES["one-hot"], CASES["two-widths"]
Collection = hotrow.EmbeddingBagCollection
Loop = Callable[[Collection, list[Any]], list[Tensor]]

# A device forgets the plans of batches that are trained long after they were pulled.
pytestmark = pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")


def look_up(embedding: Any, batch: Any, scale: float = 1.0) -> Tensor:
    return readout(embedding(batch), scale)


def learn(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


# -- loops -------------------------------------------------------------------------------


def two_passes_are_two_steps(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    losses = []
    for batch in hotrow.ahead(batches, embedding):
        loss = look_up(embedding, batch)
        loss.backward(retain_graph=True)
        losses.append(learn(loss))
    assert embedding.optimizer.steps[0] == 2 * len(batches)
    return losses


def gradients_come_late(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """Lookups and updates of batches that share rows, in every order."""
    first, second, third = batches[:3]
    one, two = look_up(embedding, first), look_up(embedding, second)
    one.backward(retain_graph=True)  # the second's rows have been read since
    two.backward()  # and have changed since
    again = look_up(embedding, first)
    with torch.no_grad():
        embedding(third)
    again.backward()
    late = look_up(embedding, third)
    table = embedding.tables[0]
    embedding.load_weights(table.name, 0, torch.ones(table.num_embeddings, table.embedding_dim))
    late.backward()
    one.backward()
    return [loss.detach() for loss in (one, two, again, late)]


def the_loop_is_left(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    losses, begin = [], 0
    for end in (2, 3, len(batches)):
        for batch in hotrow.ahead(batches[begin:], embedding):
            losses.append(learn(look_up(embedding, batch)))
            begin += 1
            if begin == end:
                break
        embedding.check()
    return losses


def some_batches_are_not_announced(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    count = len(batches) // 2
    parts = [hotrow.ahead(batches[:count], embedding), batches[: count - 1]]  # fetched again
    parts += [hotrow.ahead(batches[count:], embedding)]
    return [learn(look_up(embedding, batch)) for part in parts for batch in part]


def no_batch_is_known_ahead(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    stream = hotrow.ahead(batches, embedding, depth=0)
    return [learn(look_up(embedding, batch)) for batch in stream]


def evaluation_comes_between(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """It reads the newest rows; so do those who stream them."""
    losses = []
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        losses.append(learn(look_up(embedding, batch)))
        embedding.eval()
        with torch.no_grad():
            losses += [look_up(embedding, other) for other in (batches[0], batches[-1])]
        embedding.train()
        if place % 3 == 2:
            losses += [rows.clone() for _, rows in embedding.rows("a")]
    return losses


def weights_are_replaced(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """While batches are in flight, by ones that have been trained."""
    losses = []
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        losses.append(learn(look_up(embedding, batch)))
        if place == 2:
            state = {name: weight * -0.5 for name, weight in embedding.state_dict().items()}
            embedding.load_state_dict(state)
            embedding.optimizer.load_state_dict(embedding.optimizer.state_dict())
    return losses


def rows_are_frozen(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    frozen = {1: {"a": torch.arange(20), "b": torch.arange(5)}, 3: {"a": torch.arange(9)}, 5: None}
    losses = []
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        if place in frozen:
            weights = embedding.state_dict()["embedding_bags.a.weight"][:20].clone()
            assert place != 3 or torch.equal(weights, losses.pop(1))
            embedding.freeze_rows(frozen[place])
            losses += [weights] if place == 1 else []
        losses.append(learn(look_up(embedding, batch)))
    return losses


def tables_have_their_own_settings(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    embedding.optimizer.param_groups[1]["lr"] = 0.02
    schedule, losses = ExponentialLR(embedding.optimizer, 0.5), []
    for batch in hotrow.ahead(batches, embedding):
        losses.append(learn(look_up(embedding, batch)))
        schedule.step()
    return losses


def steps_are_not_finite(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """They are skipped: the sums are read between backward and update."""
    losses = []
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        loss = look_up(embedding, batch)
        (loss * float("nan") if place % 4 == 2 else loss).backward()
        losses.append(loss.detach())
    assert embedding.optimizer.steps[0] == sum(place % 4 != 2 for place in range(len(batches)))
    return losses


def losses_are_scaled(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    scaler = torch.amp.GradScaler(embedding.device.type, init_scale=2.0**10, growth_interval=10**6)
    embedding.grad_scale, losses = scaler, []
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        loss = look_up(embedding, batch)
        losses.append(loss.detach())
        scaler.scale(loss * float("inf") if place == 3 else loss).backward()
    assert embedding.optimizer.steps[0] == len(batches) - 1
    return losses


def ids_are_changed(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """They are looked up as they are now."""
    losses = []
    for batch in hotrow.ahead([each.clone() for each in batches], embedding):
        batch[:, 0] = (batch[:, 0] + 1) % 60
        losses.append(learn(look_up(embedding, batch)))
    return losses


def batches_are_odd(embedding: Collection, batches: list[Any]) -> list[Tensor]:
    """No lookups at first, empty bags, a row many times, ids that are not side by side."""
    none = torch.zeros(0, dtype=torch.int64)
    first = hotrow.KeyedJaggedTensor(["f", "g"], none, lengths=torch.zeros(4, dtype=torch.int64))
    often = torch.tensor([3] * 60 + [9, 3, 7])
    lengths = torch.tensor([0, 50, 0, 10, 3, 0])
    wide = torch.arange(24).view(6, 4)
    odd = [first, hotrow.KeyedJaggedTensor(["f", "g"], often, lengths=lengths)]
    odd += [torch.empty(0, 2, dtype=torch.int64), wide[:, 2:], wide.T[1:3].T]
    odd = on_device(odd, embedding.device)
    stream = itertools.chain(hotrow.ahead(odd, embedding), odd)
    return [learn(look_up(embedding, batch)) for batch in stream]


@dataclass(eq=False)
class Contract:
    loop: Loop
    case: Case = MULTI_HOT
    rule: str = "adagrad"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None


SKIP = {"on_nonfinite": "skip"}
CONTRACTS = [
    Contract(of_collection(loops.one_loss_of_two_batches)),
    Contract(of_collection(loops.batches_pulled_together)),
    Contract(of_collection(loops.accumulated)),
    Contract(of_collection(loops.product_of_two_batches)),
    Contract(two_passes_are_two_steps),
    Contract(of_collection(loops.some_without_backward)),
    Contract(of_collection(loops.checkpointed), steps=4),
    Contract(of_collection(loops.learned_weights), steps=4),
    Contract(gradients_come_late, rule="adam", steps=3),
    Contract(the_loop_is_left, ONE_HOT),
    Contract(some_batches_are_not_announced, ONE_HOT),
    Contract(no_batch_is_known_ahead, ONE_HOT, "sgd"),
    Contract(evaluation_comes_between, ONE_HOT),
    Contract(weights_are_replaced, ONE_HOT),
    Contract(rows_are_frozen, TWO_WIDTHS, "row-wise"),
    Contract(tables_have_their_own_settings, ONE_HOT, "adamw"),
    Contract(steps_are_not_finite, ONE_HOT, "adam", SKIP),
    Contract(losses_are_scaled, ONE_HOT, "adam"),
    Contract(ids_are_changed, ONE_HOT),
    Contract(batches_are_odd, CASES["mean"], "sgd"),
]
PAIRS = [
    pytest.param(contract, engine.values[0], id=f"{contract.loop.__name__}-{engine.id}",
                 marks=engine.marks)
    for contract in CONTRACTS
    for engine in engines()
]  # fmt: skip


@pytest.mark.parametrize(("contract", "engine"), PAIRS)
def test_a_loop_gives_what_all_fast_gives(contract: Contract, engine: Engine) -> None:
    count = min(contract.steps or engine.steps, engine.steps)
    by_gpu = isinstance(engine, GpuEngine)
    case, rule, options = contract.case, contract.rule, contract.options
    embedding = engine.tight(case, rule, batches=case.batches(count), **options)
    losses = contract.loop(embedding, on_device(case.batches(count), engine.device))
    engine.check(outcome(embedding, losses), by_all_fast(contract, count, by_gpu))
    if by_gpu:  # whose arithmetic is that of a CPU
        assert_like(by_all_fast(contract, count, True), by_all_fast(contract, count, False))


@cache
def by_all_fast(contract: Contract, count: int, by_gpu: bool) -> Outcome:
    """What a loop gives with every row in fast memory."""
    engine = ENGINES["zero-copy" if by_gpu else "cpu-fused-random"]
    embedding = engine.all_fast(contract.case, contract.rule, **contract.options)
    batches = on_device(contract.case.batches(count), engine.device)
    return outcome(embedding, contract.loop(embedding, batches))


# -- batches that fail -------------------------------------------------------------------


def spoiled(batch: Any, feature: int) -> Any:
    """The batch with an id that the feature's table does not have."""
    if isinstance(batch, Tensor):
        batch = batch.clone()
        batch[1, feature] = 77
        return batch
    size = (batch.offsets().numel() - 1) // len(batch.keys())
    values = batch.values().clone()
    values[batch.offsets()[feature * size]] = 77
    return hotrow.KeyedJaggedTensor(batch.keys(), values, offsets=batch.offsets())


BAD = [
    ("one-hot", 1, r"feature 'g', sample 1: id 77 is outside table 'b'.* 39 \(batch 4 of"),
    ("two-widths", 0, r"feature 'f', position \d+, sample \d+: id 77 is outside table 'a'"),
    ("two-widths", 1, r"feature 'g', position \d+, sample \d+: id 77 is outside table 'b'"),
]
BAD_ON_ENGINES = [
    pytest.param(*bad, engine.values[0], id=f"{bad[0]}-{bad[1]}-{engine.id}", marks=engine.marks)
    for bad in BAD
    for engine in engines()
]


@pytest.mark.parametrize(("name", "feature", "message", "engine"), BAD_ON_ENGINES)
def test_a_bad_id_is_reported_in_its_turn_and_training_goes_on(
    name: str, feature: int, message: str, engine: Engine
) -> None:
    case = CASES[name]
    good = case.batches(7)
    embedding, right = engine.tight(case, batches=good), engine.all_fast(case)
    losses: list[Tensor] = []

    def loop() -> None:
        for batch in hotrow.ahead([*good[:4], spoiled(good[4], feature), *good[5:]], embedding):
            losses.append(learn(look_up(embedding, batch)))

    with pytest.raises(ValueError, match=message):
        loop()
    assert len(losses) == 4
    engine.check(outcome(embedding, losses), train(right, good[:4]))
    engine.check(train(embedding, good[5:]), train(right, good[5:]))


@pytest.mark.parametrize("engine", engines())
def test_a_bad_id_that_was_not_announced_changes_no_row(engine: Engine) -> None:
    good = on_device(ONE_HOT.batches(3), engine.device)
    embedding, right = engine.tight(ONE_HOT), engine.all_fast(ONE_HOT)
    learn(look_up(embedding, good[0]))
    before = outcome(embedding, [])
    with pytest.raises(ValueError, match="feature 'f', sample 1: id 77"):
        embedding(spoiled(good[1], 0))
    assert outcome(embedding, []).same_bits(before)
    for each in (embedding, right):
        for batch in good[2:] if each is embedding else (good[0], good[2]):
            learn(look_up(each, batch))
    engine.check(outcome(embedding, []), outcome(right, []))


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("as planned")


@pytest.mark.parametrize("engine", engines())
def test_what_fails_in_a_loop_leaves_the_bits_of_the_steps_before(engine: Engine) -> None:
    """A backward pass, a step inside `accumulate`, and the user's own code."""
    batches = TWO_WIDTHS.batches(6)
    embedding, right = engine.tight(TWO_WIDTHS, batches=batches), engine.all_fast(TWO_WIDTHS)

    def loop() -> None:
        for place, batch in enumerate(hotrow.ahead(batches, embedding)):
            if place < 2:
                learn(look_up(embedding, batch))
            elif place == 2:
                out = embedding(batch)
                with pytest.raises(ZeroDivisionError):
                    # One feature's gradient arrives before the other one's fails.
                    (Fail.apply(out["f"]).sum() + out["g"].sum() * 2).backward()
            else:
                with embedding.accumulate():
                    learn(look_up(embedding, batch))
                    raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    expected = train(right, batches[:2])
    engine.check(outcome(embedding, expected.losses), expected)
    engine.check(train(embedding, batches[4:]), train(right, batches[4:]))


# -- batches that do not fit -------------------------------------------------------------


@pytest.mark.parametrize("engine", engines(*CPU, *GPU))
def test_a_batch_too_large_for_the_slots_among_others_that_fit(engine: Engine) -> None:
    """The batches behind it were planned already, and are planned again."""
    rows = torch.arange(50)
    small = [torch.stack([rows[i : i + 3], rows[i : i + 3] % 40], dim=1) for i in range(8)]
    large = torch.stack([rows[:40], rows[:40].flip(0) % 40], dim=1)
    batches = [*small[:4], large, *small[4:]]
    slots = 6 * engine.strategy.hold.batches + 4
    budget = hotrow.Budget((hotrow.Share(slots, 32, False),), window_bytes=1 << 14)
    embedding = engine.tight(ONE_HOT, budget=budget)
    with pytest.warns(UserWarning, match=f"a batch of 80 different rows does not fit the {slots} "):
        found = train(embedding, batches)
    engine.check(found, train(engine.all_fast(ONE_HOT), batches))
    assert embedding.traffic().chunked_batches == 1


@pytest.mark.parametrize("engine", engines(*CPU, *GPU))
def test_batches_that_grow_find_room(engine: Engine) -> None:
    """The window of known ids and the buffers of plans grow with them."""
    rows = torch.arange(40)
    batches = [
        torch.stack([rows[i : i + size], (rows[i : i + size] * 7) % 40], dim=1)
        for i, size in enumerate([2, 3, 2, 12, 3, 30, 2])
    ]
    embedding = engine.tight(ONE_HOT, "adam", batches=batches)
    depth = 4 if engine.strategy.overlapped else None
    engine.check(
        train(embedding, batches, depth=depth), train(engine.all_fast(ONE_HOT, "adam"), batches)
    )
    assert embedding.traffic().chunked_batches == 0


# -- a hold that is too short ------------------------------------------------------------

SHORTER = {
    "zero-copy": [(0, 0)],
    "staged": [(1, 0)],
    "five": [(2, 2), (3, 1)],
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it depends on who is faster")
@pytest.mark.parametrize("engine", engines(*SHORTER))
def test_a_hold_shorter_than_computed_gives_wrong_bits(engine: Engine) -> None:
    """Or these tests could not tell right from wrong; test_equal_to_plain.py has CPUs."""
    name = next(name for name, each in ENGINES.items() if each is engine)
    batches = ONE_HOT.batches(12 if name == "five" else 8)
    expected = train(engine.all_fast(ONE_HOT), batches)
    for hold in (None, *SHORTER[name]):
        embedding = engine.tight(ONE_HOT, batches=batches)
        (group,) = embedding.groups
        group.planner.hold = Hold(*hold) if hold else group.planner.hold
        found = train(embedding, batches, depth=5)
        assert found.same_bits(expected) is (hold is None)


# -- collections -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", engines())
def test_several_collections_train_side_by_side(engine: Engine) -> None:
    batches = list(zip(MULTI_HOT.batches(4), ONE_HOT.batches(4), strict=True))

    def run(left: Any, right: Any) -> list[Any]:
        model = nn.ModuleDict({"left": left, "right": right})
        for batch in hotrow.ahead(batches, model, ids=lambda b: {"left": b[0], "right": b[1]}):
            learn(look_up(left, batch[0]) + look_up(right, batch[1]))
        return [outcome(left, []), outcome(right, [])]

    found = run(engine.tight(), engine.tight(ONE_HOT))
    expected = run(engine.all_fast(), engine.all_fast(ONE_HOT))
    for mine, theirs in zip(found, expected, strict=True):
        engine.check(mine, theirs)


@pytest.mark.parametrize("engine", engines())
def test_flush_brings_the_store_up_to_date(engine: Engine) -> None:
    embedding = engine.tight(ONE_HOT)
    train(embedding, ONE_HOT.batches(4))
    store, dim = embedding.groups[0].store, ONE_HOT.tables[0].embedding_dim
    embedding.row_access.flush()
    newest = torch.cat([weight.cpu() for weight in embedding.state_dict().values()])
    assert torch.equal(store.rows[:, :dim].cpu(), newest)


@pytest.mark.parametrize("engine", engines())
def test_memory_is_given_back_with_the_last_reference(engine: Engine) -> None:
    embedding = engine.tight(ONE_HOT)
    batches = ONE_HOT.batches(4)
    train(embedding, batches[:3])
    for batch in hotrow.ahead(batches, embedding):  # rows are on their way, or an update is owed
        learn(look_up(embedding, batch))
        break
    (group,) = embedding.groups
    gone = [weakref.ref(each) for each in (embedding, group, group.store)]
    gc.collect()
    gc.disable()  # page-locked rows do not wait for a collection
    try:
        del embedding, group, batch
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", engines(*GPU, *HOST))
def test_vectors_in_half_precision_train_rows_in_full(engine: Engine) -> None:
    batches = ONE_HOT.batches(3)
    half = train(engine.tight(ONE_HOT, output_dtype=torch.bfloat16), batches)
    assert half.losses[0].dtype == torch.bfloat16
    if engine.has_slots:
        engine.check(half, train(engine.all_fast(ONE_HOT, output_dtype=torch.bfloat16), batches))
    whole = train(engine.all_fast(ONE_HOT), batches)
    torch.testing.assert_close(half.weights, whole.weights, rtol=0.1, atol=0.05)
    assert not torch.equal(*(x.weights["embedding_bags.a.weight"] for x in (half, whole)))


@pytest.mark.parametrize("engine", engines(*CPU, *GPU))
def test_a_loader_that_repeats_one_tensor_stays_on_the_planned_path(engine: Engine) -> None:
    batch = ONE_HOT.batches(1)[0].to(engine.device)
    embedding = engine.tight(ONE_HOT)
    for each in hotrow.ahead([batch] * 5, embedding):
        learn(look_up(embedding, each))
        assert embedding.groups[0].slots_hold(embedding.pipeline.planned[-1].works[0])
    assert embedding.traffic().chunked_batches == 0
