"""What Slipstream lets through is trained as ever, with any strategy; its control leaves out as
many; and a run that is left early leaves no row frozen."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from click_models import ClickModel, same_bits, trainer_of
from hotrow.data import ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.inputs.hotset import HotSet
from hotrow.kernels.reference import in_bits
from hotrow.systems.calibrate import AccessCounts
from hotrow.systems.slipstream.skip import SkipRecord, SkipSettings
from hotrow.systems.slipstream.stale import SkipStale
from hotrow.training.trainer import Trainer

SIZE, COUNT = 16, 40
CLICKS = SyntheticClicks(SyntheticConfig(rows=(60, 20), batch_size=SIZE, num_dense=3, skew=1.2))
BATCHES = list(CLICKS.batches(0, COUNT))
HELD_OUT = list(CLICKS.batches(100, 103))
STRATEGIES = ["lookahead", "static", "all-fast"]


class Model(ClickModel):
    def __init__(self, strategy: str = "all-fast", device: str = "cpu") -> None:
        embedding = hotrow.EmbeddingBagCollection(
            [
                hotrow.EmbeddingBagConfig("a", 60, 4, ["a"]),
                hotrow.EmbeddingBagConfig("b", 20, 4, ["b"]),
            ],
            hotrow.SGD(lr=0.5),
            budget=hotrow.Budget((hotrow.Share(60, 64, dense_map=True),), window_bytes=1 << 20),
            strategy=strategy,
            device=device,
            seed=0,
        )
        super().__init__(embedding, num_dense=3)

    def rows(self) -> list[Tensor]:
        return self.bits()[2:]


def make_trainer(
    system: Any = None, strategy: str = "all-fast", device: str = "cpu", **options: Any
) -> Trainer[ClickBatch]:
    return trainer_of(Model(strategy, device), system, **options)


def slipstream(
    kind: type[hotrow.Slipstream] = hotrow.Slipstream, **changes: Any
) -> hotrow.Slipstream:
    settings = {"target": 0.4, "tolerance": 0.2, "watched": 0.1, "sample_rate": 0.2}
    settings |= {"hot_budget": "80%", "validate_every": 0, "recheck_every": 10, **changes}
    return kind(**settings)


class Noted:
    """A system, and what it hands out."""

    def __init__(self, system: Any) -> None:
        self.system, self.given, self.passed = system, list[ClickBatch](), 0

    def attach(self, trainer: Trainer[ClickBatch]) -> None:
        self.system.attach(trainer)

    def passes(self, batches: Iterable[ClickBatch]) -> Generator[Iterable[ClickBatch]]:
        for each in self.system.passes(batches):
            self.passed += 1
            yield self._note(each)

    def _note(self, batches: Iterable[ClickBatch]) -> Iterator[ClickBatch]:
        for batch in batches:
            self.given.append(batch)
            yield batch


def run(trainer: Trainer[ClickBatch], batches: Iterable[ClickBatch] = BATCHES) -> list[float]:
    return [record.loss for record in trainer.run(batches)]


def model_of(trainer: Trainer[ClickBatch]) -> Model:
    assert isinstance(trainer.model, Model)
    return trainer.model


def frozen(trainer: Trainer[ClickBatch]) -> bool:
    return any(group.store.frozen.bits is not None for group in model_of(trainer).embedding.groups)


def same(left: Trainer[ClickBatch], right: Trainer[ClickBatch]) -> bool:
    return same_bits(model_of(left), model_of(right))


# -- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["samples", "rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_target_of_zero_is_training_without_it(strategy: str, mode: str) -> None:
    system = Noted(slipstream(target=0.0, mode=mode, tolerance=0.0))
    plain, skipping = make_trainer(None, strategy), make_trainer(system, strategy)
    assert run(skipping) == run(plain)
    assert same(skipping, plain)
    assert system.passed == 1  # one pass, without waiting in between
    assert all(a is b for a, b in zip(system.given, BATCHES, strict=True))


def check_samples(strategy: str, device: str, count: int, **changes: Any) -> SkipRecord:
    """All-fast, on what was let through, has the same bits."""
    given = slipstream(**changes)
    system = Noted(given)
    trainer, plain = make_trainer(system, strategy, device), make_trainer(None, "all-fast", device)
    losses = run(trainer, BATCHES[:count])
    assert losses == run(plain, system.given)
    assert same(trainer, plain)
    r = given.record
    assert r.dropped > 0
    assert sum(map(len, system.given)) == count * SIZE - r.dropped
    assert r.offered == (count - r.first_batch) * SIZE
    assert not frozen(trainer)
    return r


def check_rows(strategy: str, device: str, count: int, **changes: Any) -> None:
    """No sample is left out, and any strategy has all-fast's bits."""
    given = slipstream(mode="rows", **changes)
    system = Noted(given)
    trainer = make_trainer(system, strategy, device)
    other = make_trainer(slipstream(mode="rows", **changes), "all-fast", device)
    plain = make_trainer(None, "all-fast", device)
    assert run(trainer, BATCHES[:count]) == run(other, BATCHES[:count])
    assert same(trainer, other)
    assert all(a is b for a, b in zip(system.given, BATCHES[:count], strict=True))
    assert given.record.dropped == 0
    assert sum(given.record.stale_rows.values()) > 0
    run(plain, BATCHES[:count])
    assert not same(trainer, plain)
    assert not frozen(trainer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_let_through_is_trained_as_by_all_fast(strategy: str) -> None:
    r = check_samples(strategy, "cpu", COUNT)
    assert r.first_batch == 2 + 5  # counted, and between the snapshots
    assert r.rechecks > 0


@pytest.mark.parametrize("strategy", ["lookahead", "static", "hybrid"])
def test_rows_that_rest(strategy: str) -> None:
    if strategy == "hybrid":  # exact up to rounding
        trainer = make_trainer(slipstream(mode="rows"), strategy)
        assert len(run(trainer)) == COUNT
        assert not frozen(trainer)
    else:
        check_rows(strategy, "cpu", COUNT)


FEW = {"watched": 0.2, "sample_rate": 0.3, "recheck_every": 3, "least_visits": 0}


@pytest.mark.parametrize(
    ("strategy", "check"), [("lookahead", check_samples), ("static", check_rows)]
)
@pytest.mark.thinned(2)
@pytest.mark.usefixtures("device_rows")
def test_on_the_engine_of_a_device(strategy: str, check: Callable[..., object]) -> None:
    check(strategy, "cpu", 8, **FEW)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_gpu(strategy: str) -> None:
    check_samples(strategy, "cuda", COUNT)
    if strategy != "all-fast":
        check_rows(strategy, "cuda", COUNT)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["page-locked", "on the device"])
def test_batches_from_anywhere(kind: str) -> None:
    """What is left of batches was told apart on the device, and is joined there."""
    move = ClickBatch.pin_memory if kind == "page-locked" else lambda b: b.to("cuda")
    system = Noted(slipstream())
    trainer, plain = make_trainer(system, "lookahead", "cuda"), make_trainer(None, device="cuda")
    losses = run(trainer, [move(batch) for batch in BATCHES])
    assert losses == run(plain, system.given)
    assert same(trainer, plain)
    first = system.system.record.first_batch
    assert any(batch.sparse.is_cuda for batch in system.given[first:])
    if kind == "page-locked":
        assert all(batch.sparse.is_pinned() for batch in system.given[:first])


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["lookahead", "all-fast"])
def test_a_gpu_leaves_out_the_samples_that_the_host_would(strategy: str) -> None:
    class HostSifts(hotrow.Slipstream):
        def bound(self, *args: Any, **options: Any) -> SkipStale:
            skip = super().bound(*args, **options)
            skip._sifter = None
            return skip

    there, here = Noted(slipstream()), Noted(slipstream(HostSifts))
    trainer = make_trainer(there, strategy, "cuda")
    losses = run(trainer, BATCHES)
    other = make_trainer(here, strategy, "cuda")
    assert losses == run(other, BATCHES)
    assert same(trainer, other)
    assert there.system.record == here.system.record


def test_rows_are_left_alone_from_the_decision_on_and_the_dense_part_is_not() -> None:
    trainer = make_trainer(slipstream(mode="rows", recheck_every=0))
    model = model_of(trainer)
    (group,) = model.embedding.groups
    then: tuple[Tensor, Tensor, Tensor] | None = None
    for _ in trainer.run(BATCHES):
        if then is None and group.store.frozen.bits is not None:
            resting = in_bits(group.store.frozen.bits, torch.arange(80))
            then = resting, torch.cat(model.rows()), model.top.weight.detach().clone()
        if then is not None:
            assert torch.equal(torch.cat(model.rows())[then[0]], then[1][then[0]])
    assert then is not None
    resting, rows, dense = then
    assert 0 < int(resting.sum()) < 80
    assert not torch.equal(torch.cat(model.rows())[~resting], rows[~resting])
    assert not torch.equal(model.top.weight, dense)


# -- epochs ------------------------------------------------------------------------------------


class Epochs(list[ClickBatch]):
    """A loader that says how long its epochs are."""

    batches_per_epoch = COUNT


def test_each_run_is_an_epoch_and_so_are_parts_of_a_long_one() -> None:
    apart = slipstream()
    first = make_trainer(apart)
    losses = run(first) + run(first)
    for together, loader in (
        (slipstream(batches_per_epoch=COUNT), BATCHES + BATCHES),
        (slipstream(), Epochs(BATCHES + BATCHES)),
    ):
        second = make_trainer(together)
        assert run(second, loader) == losses
        assert same(first, second)
        assert apart.record == together.record
    r = apart.record
    assert r.offered == 2 * (COUNT - r.first_batch) * SIZE  # hot rows are counted once


def test_an_epoch_of_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"how many batches an epoch has.*give batches_per_epoch="):
        run(make_trainer(slipstream()), iter(BATCHES))
    assert run(make_trainer(slipstream(batches_per_epoch=COUNT)), iter(BATCHES))
    with pytest.raises(ValueError, match=r"second snapshot comes after 7 batches .* there are 7"):
        run(make_trainer(slipstream(watched=0.7)), BATCHES[:7])


@pytest.mark.parametrize("mode", ["samples", "rows"])
@pytest.mark.parametrize("left_at", [1, 5, 20])  # counting; between the snapshots; skipping
def test_who_leaves_in_the_middle_finds_no_row_frozen(mode: str, left_at: int) -> None:
    system = slipstream(mode=mode, recheck_every=0)
    trainer = make_trainer(system, "lookahead")
    for record in trainer.run(BATCHES):
        if record.step == left_at:
            assert frozen(trainer) == (mode == "rows" and left_at == 20)
            break
    assert not frozen(trainer)
    model_of(trainer).embedding.check()
    step = trainer.step
    assert len(run(trainer)) > 0  # and goes on, with an epoch
    assert trainer.step > step
    assert sum(system.record.stale_rows.values()) > 0


# -- hot rows ----------------------------------------------------------------------------------


def test_hot_rows_are_the_most_used_of_the_first_batches() -> None:
    system = slipstream(counted=0.25, hot_budget="40%")
    trainer = make_trainer(system)
    run(trainer)
    counts = AccessCounts(model_of(trainer).embedding.tables)
    for batch in BATCHES[:10]:
        counts.add(hotrow.inputs.batch.parse(batch.sparse, ("a", "b"), None))
    right = counts.flat.sort(descending=True, stable=True).indices[:32]  # of 80
    rows = system.record.hot_rows
    assert rows == {"a": int((right < 60).sum()), "b": int((right >= 60).sum())}


def test_hot_rows_may_be_given_or_profiled() -> None:
    rows = {"a": torch.arange(30), "b": torch.arange(20)}
    tables = model_of(make_trainer()).embedding.tables
    flags = torch.zeros(60, dtype=torch.int64)
    flags[:30] = 1
    profile = {"a": flags, "b": (torch.arange(20), torch.ones(20))}
    settings = {"least_visits": 0}
    given, profiled = slipstream(hot=rows, **settings), slipstream(profile=profile, **settings)
    trainers = [make_trainer(given), make_trainer(profiled)]
    assert run(trainers[0]) == run(trainers[1])
    assert given.record == profiled.record
    assert given.record.first_batch == 5  # nothing was counted
    assert given.record.hot_rows == {"a": 30, "b": 20}
    embedding = model_of(trainers[0]).embedding
    options = {"num_batches": COUNT, "ids": lambda batch: batch.sparse}
    bound = slipstream().bound(embedding, HotSet.of(tables, rows), **options)
    assert bound.record.hot_rows == given.record.hot_rows
    with pytest.raises(ValueError, match="the profile names table 'c'"):
        run(make_trainer(slipstream(profile={"c": flags})))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"least_visits": 1000}, r"none of the sampled hot inputs \([\d,]+\) can be stale.* 40.0%"),
        ({"hot_budget": 4}, r"none of 128 sampled inputs looks up hot rows alone"),
    ],
)
def test_a_target_that_cannot_be_reached_is_told_and_all_is_trained(
    changes: Any, said: str
) -> None:
    system = slipstream(**changes)
    trainer, plain = make_trainer(system, "lookahead"), make_trainer()
    with pytest.warns(UserWarning, match=said):
        losses = run(trainer)
    assert losses == run(plain)
    assert same(trainer, plain)
    assert system.record.dropped == 0


# -- the guard ---------------------------------------------------------------------------------


def test_without_a_test_set_nobody_looks_and_that_is_said_once() -> None:
    system = slipstream(validate_every=None)
    trainer = make_trainer(system)
    with pytest.warns(UserWarning, match=r"no test= batches.*validate_every=0") as told:
        run(trainer)
    run(trainer)
    assert len(told) == 1
    assert not system.record.stopped


def test_evaluating_on_the_way_changes_no_bit_and_a_rising_loss_ends_skipping() -> None:
    blind, patient = slipstream(), slipstream(test=HELD_OUT, validate_every=3, patience=1000)
    trainers = [make_trainer(blind, "lookahead"), make_trainer(patient, "lookahead")]
    assert run(trainers[0]) == run(trainers[1])
    assert same(*trainers)
    wrong = [ClickBatch(each.dense, each.sparse, 1 - each.label) for each in HELD_OUT]
    system = Noted(slipstream(test=wrong, validate_every=2))
    trainer, plain = make_trainer(system, "lookahead"), make_trainer()
    with pytest.warns(UserWarning, match=r"validation loss rose to .* all are trained"):
        losses = run(trainer)
    assert losses == run(plain, system.given)
    record = system.system.record
    assert record.stopped
    assert 0 < record.dropped < blind.record.dropped
    assert run(trainer) == run(plain)  # for good


# -- the control -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["lookahead", "static"])
def test_random_drop_leaves_out_exactly_as_many(strategy: str) -> None:
    system = slipstream()
    run(make_trainer(system, strategy))
    wanted, given = system.record, []
    for seed in (1, 1, 2):
        control = hotrow.RandomDrop(like=wanted, seed=seed)
        noted = Noted(control)
        trainer, plain = make_trainer(noted, strategy), make_trainer()
        losses = run(trainer)
        found, first = control.record, wanted.first_batch
        assert (found.dropped, found.offered) == (wanted.dropped, wanted.offered)
        assert found.first_batch == first
        assert all(a is b for a, b in zip(noted.given[:first], BATCHES, strict=False))
        assert {len(batch) for batch in noted.given[:-1]} == {SIZE}  # filled up
        assert sum(map(len, noted.given)) == COUNT * SIZE - wanted.dropped
        assert losses == run(plain, noted.given)
        assert same(trainer, plain)
        given.append(losses)
    assert given[0] == given[1] != given[2]


def test_random_drop_of_a_share_in_every_epoch() -> None:
    control = hotrow.RandomDrop(0.25, starting_batch=4, batches_per_epoch=10)
    noted = Noted(control)
    run(make_trainer(noted), BATCHES)
    assert control.record.offered == 4 * 6 * SIZE
    assert control.record.dropped == 6 * SIZE
    assert sum(map(len, noted.given)) == (COUNT - 6) * SIZE
    assert run(make_trainer(hotrow.RandomDrop(0.1)), iter(BATCHES[:10]))  # of any length
    nothing, plain = make_trainer(hotrow.RandomDrop(0.0)), make_trainer()
    assert run(nothing) == run(plain)


# -- what is refused ---------------------------------------------------------------------------


class TwoCollections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Model().embedding, Model().embedding


def test_a_model_needs_one_collection() -> None:
    for model, said in ((TwoCollections(), "has 2: 'left', 'right'"), (nn.Linear(1, 1), "has 0;")):
        for system in (slipstream(), hotrow.RandomDrop(0.1)):
            with pytest.raises(
                ValueError, match=f"the rows of one collection, and the model {said}"
            ):
                Trainer(
                    model, F.binary_cross_entropy_with_logits, dense_optimizer=None,
                    ids=lambda batch: batch.sparse, system=system,
                )  # fmt: skip


def test_ids_may_come_by_the_collections_name() -> None:
    named = make_trainer(slipstream(), ids=lambda batch: {"embedding": batch.sparse})
    assert run(named) == run(make_trainer(slipstream()))


Kind = hotrow.Slipstream
Drop = hotrow.RandomDrop
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Kind, {"mode": "both"}, "mode must be one of samples, rows"),
    (Kind, {"counted": 0}, "counted must be a share above 0 and below 1, not 0"),
    (Kind, {"batches_per_epoch": 0}, "batches_per_epoch must be a whole number of at least 1, not"),
    (Kind, {"validate_every": -1}, "validate_every must be a whole number of at least 0, not -1"),
    (Kind, {"test": iter(HELD_OUT)}, "an iterator gives its batches once"),
    (Kind, {"hot": {}, "profile": {}}, "hot names the hot rows, and profile would choose them"),
    (Kind, {"traget": 0.1}, r"no 'traget' \(did you mean 'target'\?\); its settings are target, t"),
    (partial(Kind, 0.2), {}, r"by their names, such as target=0.3; got 0.2"),
    (Drop, {}, "a share of the samples, or like="),
    (Drop, {"share": 0.1, "like": SkipRecord("samples")}, "a share of the samples, or"),
    (Drop, {"share": "10%"}, "share must be at least 0 and below 1, not '10%'"),
    (Drop, {"share": 1.0}, "share must be at least 0 and below 1, not 1.0"),
    (Drop, {"like": SkipRecord(""), "starting_batch": 2}, "leave starting_batch out"),
    (Drop, {"like": hotrow.Slipstream()}, r"slipstream.record, not <.*Slipstream"),
]


@pytest.mark.parametrize(("make", "options", "said"), REFUSED)
def test_settings_that_make_no_sense(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make(**options)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (SkipRecord("rows", offered=0), "'rows' leaves out updates and no sample"),
        (SkipRecord("samples", offered=4000), "of 4,000 samples none was left out"),
    ],
)
def test_a_control_that_leaves_out_nothing_is_told_of(record: SkipRecord, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        hotrow.RandomDrop(like=record)


def test_as_published() -> None:
    system = hotrow.Slipstream.as_published(target=0.5, validate_every=0)
    assert system.settings == SkipSettings.as_published(target=0.5)
    assert system.record == SkipRecord("samples")
