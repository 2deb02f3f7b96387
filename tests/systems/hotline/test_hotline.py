"""Hotline: popular samples first, the rest's rows meanwhile, and the results of whole batches.

The same sums in another order: after some steps rows and weights are within TOLERANCE of those of
all-fast training on the same batches, for which two updates where there should be one are far too
many (`test_the_tolerance_would_show_two_updates`).
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
import hotrow.embedding.step
import hotrow.training.captured
from builders import RULES, no_synchronisation
from compiling import note_compiled
from hotrow.engine.capture import NoBoundary
from hotrow.engine.mover import CopyMover
from hotrow.engine.split_batch import Split
from hotrow.inputs import samples
from hotrow.kernels import reference
from hotrow.support.streams import Lanes, lanes_of
from hotrow.systems.hotline.hotline import Hotline
from hotrow.systems.hotline.popularity import SrripLog
from hotrow.systems.slipstream.skip import Skip, SkipRecord
from hotrow.training.captured import GraphSettings
from hotrow.training.graphed import GraphedStep
from hotrow.training.trainer import Trainer

Table = hotrow.EmbeddingBagConfig
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
SIZE = 16
Item = dict[str, Any]
TABLES = {
    "one-width": [Table("a", 200, 4, ["f"]), Table("b", 40, 4, ["g", "h"])],
    "two-widths": [Table("a", 200, 4, ["f"]), Table("b", 40, 6, ["g", "h"])],
    "mean": [
        Table("a", 200, 4, ["f"], pooling="mean", padding_idx=0),
        Table("b", 40, 4, ["g", "h"]),
    ],
}
ROWS = {"f": 200, "g": 40, "h": 40}


def budget_of(tables: str, slots: tuple[int, ...] = ()) -> hotrow.Budget:
    """Room for a batch and some popular rows; all of them would not fit."""
    slots = slots or ((60, 34) if tables == "two-widths" else (90,))
    shares = [hotrow.Share(each, buffer_rows=64, dense_map=True) for each in slots]
    return hotrow.Budget(tuple(shares), window_bytes=1 << 20)


def skewed(rows: int, shape: tuple[int, ...], generator: torch.Generator, shift: int) -> Tensor:
    """A few rows have most lookups, and duplicates are in every batch; `shift` moves them."""
    ids = (torch.rand(shape, generator=generator) ** 4 * rows).long()
    return (ids + shift) % rows


def batches_of(
    count: int = 12, *, size: int = SIZE, seed: int = 0, shift: int = 0, last: int | None = None
) -> list[Item]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [size if last is None else last]
    return [
        item_of(
            torch.stack([skewed(n, (mine,), generator, shift) for n in ROWS.values()], dim=1),
            mine,
            generator,
        )
        for mine in sizes
    ]


def item_of(ids: Any, size: int, generator: torch.Generator) -> Item:
    dense = torch.rand(size, 3, generator=generator)
    label = torch.randint(0, 2, (size,), generator=generator).float()
    return {"ids": ids, "dense": dense, "label": label}


def jagged_batches(
    count: int = 10, *, least: int = 0, most: int = 3, weighted: bool = False
) -> list[Item]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        lengths = torch.randint(least, most + 1, (3, SIZE), generator=generator)
        values = torch.cat(
            [
                skewed(rows, (int(each.sum()),), generator, 0)
                for rows, each in zip(ROWS.values(), lengths, strict=True)
            ]
        )
        weights = torch.rand(len(values), generator=generator) if weighted else None
        ids = hotrow.KeyedJaggedTensor(
            list(ROWS), values, lengths=lengths.flatten(), weights=weights
        )
        found.append(item_of(ids, SIZE, generator))
    return found


class Model(nn.Module):
    def __init__(
        self,
        strategy: str,
        tables: str = "one-width",
        rule: str = "adagrad",
        budget: hotrow.Budget | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = hotrow.EmbeddingBagCollection(
            TABLES[tables],
            RULES[rule],
            budget or budget_of(tables),
            strategy=strategy,
            device=device,
            seed=3,
        )
        width = sum(t.embedding_dim * len(t.feature_names) for t in self.embedding.tables)
        self.top = nn.Sequential(nn.Linear(width + 3, 8), nn.Tanh(), nn.LayerNorm(8))
        self.out = nn.Linear(8, 1)
        self.seen: list[Tensor] = []  # first dense column of trained samples
        self.events: list[Any] = []  # sizes of batches, and what else a test notes
        self.to(device)

    def forward(self, batch: Item) -> Tensor:
        self.events.append(len(batch["label"]))
        if self.training:
            self.seen.append(batch["dense"][:, 0].clone())
        vectors = self.embedding(batch["ids"]).values()
        logits: Tensor = self.out(self.top(torch.cat([batch["dense"], vectors], 1))).squeeze(1)
        return logits

    def numbers(self) -> list[Tensor]:
        """All that training changes: rows with their state, dense weights."""
        rows = [
            torch.cat([chunk for _, chunk in self.embedding.rows(table.name)])
            for table in self.embedding.tables
        ]
        dense = [each.detach().cpu() for each in self.parameters() if each.numel()]
        return rows + dense


def per_sample(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return per_sample(logits, labels) * (1 + 4 * labels)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.binary_cross_entropy_with_logits,
    "per-sample": per_sample,
    "weighted": weighted,
}


def trainer_of(model: Any, system: Any = None, loss: str = "mean", **options: Any) -> Trainer[Item]:
    options.setdefault("device", "cpu")
    return Trainer(
        model,
        LOSSES[loss],
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch["ids"],
        labels=lambda batch: batch["label"],
        system=system,
        **options,
    )


def hotline(**options: Any) -> Hotline:
    """Learns from one batch of twelve, and looks at few samples."""
    return Hotline(**{"window": 64, "relearn": 2, "floor": 0.5, **options})


def plain(batches: list[Item], loss: str = "mean", **options: Any) -> tuple[list[Tensor], Any]:
    """All-fast training of whole batches."""
    model = Model("all-fast", **options)
    records = list(trainer_of(model, loss=loss).run(batches))
    return model.numbers(), records


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, **TOLERANCE)


def trained(
    batches: list[Item], system: Hotline, loss: str = "mean", *, slots: int = 90, **options: Any
) -> Model:
    """Trained in parts, with the results of whole batches; `slots` are for one width."""
    model = Model("static", budget=budget_of("one-width", (slots,)), **options)
    list(trainer_of(model, system, loss).run(batches))
    assert_alike(model.numbers(), plain(batches, loss, **options)[0])
    return model


# -- like whole batches --------------------------------------------------------------------


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rule", RULES)
def test_results_are_those_of_whole_batches(engine: str, rule: str) -> None:
    batches = batches_of(7 if engine == "device-rows" else 12, last=7)
    model, system = Model("static", "two-widths", rule), hotline()
    records = list(trainer_of(model, system).run(batches))
    expected, plainly = plain(batches, tables="two-widths", rule=rule)
    assert system.record.split_batches > 3
    assert len(system.record.parts) > 1
    assert 0.1 < system.record.popular_share < 0.9
    assert_alike(model.numbers(), expected)
    for mine, other in zip(records, plainly, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-4)
        assert mine.samples == other.samples


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_each_sample_and_their_mean_come_out_alike(loss: str) -> None:
    trained(batches_of(), system := hotline(), loss)
    assert system.record.split_batches > 6


def test_the_tolerance_would_show_two_updates() -> None:
    """Popular rows are also read by samples that are not popular: one update from both sums."""
    model = Model("static")
    model.embedding._step.accumulate = nullcontext  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"accumulate\(\)"):
        list(trainer_of(model, hotline()).run(batches_of()))
    with pytest.raises(AssertionError):
        assert_alike(model.numbers(), plain(batches_of())[0])


def test_the_tolerance_would_show_means_of_parts() -> None:
    trainer = trainer_of(model := Model("static"), hotline())
    real = trainer._step._train_part

    def alone(batch: Any, split: Any, low: int, high: int) -> Tensor:
        # Each part counts half, whatever its size.
        return real(batch, replace(split, size=2 * (high - low)), low, high)

    trainer._step._train_part = alone  # type: ignore[method-assign]
    list(trainer.run(batches_of()))
    with pytest.raises(AssertionError):
        assert_alike(model.numbers(), plain(batches_of())[0])


@pytest.mark.thinned(3)  # weighted ones on a device, and means
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_jagged_ids_give_the_results_of_whole_batches(engine: str, weighted: bool) -> None:
    tables = "one-width" if weighted else "mean"
    batches = jagged_batches(6 if engine == "device-rows" else 10, weighted=weighted)
    trained(batches, system := hotline(), tables=tables, slots=150)
    assert system.record.split_batches > 2


@pytest.mark.thinned(2)
def test_every_sample_may_be_popular(engine: str) -> None:
    """Then nothing is left for the second part but the update."""
    batches = batches_of(6)
    model, system = Model("static", budget=budget_of("one-width", (320,))), hotline()
    trainer = trainer_of(model, system)
    list(trainer.run(batches))
    before = system.record.parts.get(SIZE, 0)
    list(trainer.run(batches))
    assert system.record.parts[SIZE] > before
    assert_alike(model.numbers(), plain(batches + batches)[0])


def test_parts_of_a_smaller_batch_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in any size, as the batches do that a skip makes of what it leaves."""
    compiled = note_compiled(
        monkeypatch, lambda each: len(each["label"]) if isinstance(each, dict) else None
    )
    batches = batches_of(6, last=SIZE - 7)
    model, system = Model("static", budget=budget_of("one-width", (200,))), hotline()
    list(trainer_of(model, system, compile=True).run(batches))
    assert sum(compiled) == 5 * SIZE
    assert len(compiled) > 5
    assert_alike(model.numbers(), plain(batches)[0])


@pytest.mark.thinned(2)
def test_settings_that_look_at_gradients_are_minded(engine: str) -> None:
    batches = batches_of(6)
    results = []
    for strategy, system in (("static", hotline()), ("all-fast", None)):
        model = Model(strategy)
        model.embedding._step._on_nonfinite = "skip"  # as EmbeddingBagCollection(on_nonfinite=)
        list(trainer_of(model, system, clip_norm=0.05).run(batches))
        results.append(model.numbers())
    assert_alike(*results)


def test_several_collections_are_split_together() -> None:
    class Two(nn.Module):
        def __init__(self, *strategies: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right, self.all = (
                hotrow.EmbeddingBagCollection(
                    TABLES["one-width"],
                    RULES["adam"],
                    budget_of("one-width"),
                    strategy=strategy,
                    seed=seed,
                )
                for seed, strategy in enumerate(strategies)
            )
            self.out = nn.Linear(36, 1)

        def forward(self, batch: Item) -> Tensor:
            mine = (self.left, self.right, self.all)
            found = [each(batch["ids"]).values() for each in mine]
            logits: Tensor = self.out(torch.cat(found, 1)).squeeze(1)
            return logits

    batches, system, results = batches_of(), hotline(), []
    for strategies, mine in ((("static", "static", "all-fast"), system), (("all-fast",) * 3, None)):
        model: Any = Two(*strategies)
        list(trainer_of(model, mine, device="cpu").run(batches))
        embeddings = (model.left, model.right, model.all)
        rows = [torch.cat([c for _, c in e.rows(t)]) for e in embeddings for t in "ab"]
        results.append([*rows, model.out.weight.detach()])
    assert system.record.split_batches > 6
    assert_alike(*results)


# -- rows that arrive late -----------------------------------------------------------------


class LateRows:
    """Rows move when training waits for them and not a moment before, as late as on any GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], None]] = []
        self.events: list[Any] = []
        late = self

        class Mark:
            def __init__(self, jobs: list[Callable[[], None]]) -> None:
                self.jobs = jobs

            def wait(self) -> None: ...

            def passed(self) -> bool:
                return True

            def since(self, earlier: Any) -> float:
                return 0.0

        def mark(self: Lanes, name: str) -> Mark:
            return Mark(list(late.queue) if name == "rows" else [])

        def after(self: Lanes, name: str, mark: Any) -> None:
            if name == "train" and isinstance(mark, Mark) and mark.jobs:
                late.arrive(mark.jobs)

        def fill(self: CopyMover, work: Any) -> None:
            moves, memory = work.plan.moves, self._memory
            late.queue.append(lambda: reference.fill(memory.slots, memory.store.rows, moves))
            self._flight.collect(work, inserted=True)

        monkeypatch.setattr(Lanes, "mark", mark)
        monkeypatch.setattr(Lanes, "after", after)
        monkeypatch.setattr(Lanes, "join", lambda self: late.arrive(list(late.queue)))
        monkeypatch.setattr(CopyMover, "fill", fill)

    def arrive(self, jobs: list[Callable[[], None]]) -> None:
        for job in jobs:
            if job in self.queue:
                self.queue.remove(job)
                job()
                self.events.append("rows")


def late_model(late: LateRows) -> Model:
    model = Model("static")
    model.events = late.events
    return model


def test_the_rest_waits_for_its_rows_and_popular_samples_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = plain(batches_of())
    late = LateRows(monkeypatch)
    model, system = late_model(late), hotline()
    list(trainer_of(model, system).run(batches_of()))
    assert_alike(model.numbers(), expected)
    parts = [n for size, n in system.record.parts.items() if 0 < size < SIZE]
    assert sum(parts) > 5
    firsts = [i for i, each in enumerate(late.events) if each != "rows" and each < SIZE]
    in_turn = [late.events[i : i + 3] for i in firsts[::2]]
    for first, rows, rest in in_turn:
        assert (rows, first + rest) == ("rows", SIZE)
    assert len(in_turn) == sum(parts)


def test_without_the_wait_the_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = plain(batches_of())
    late = LateRows(monkeypatch)
    monkeypatch.setattr("hotrow.embedding.reader.Split", NoWait)
    model = late_model(late)
    list(trainer_of(model, hotline()).run(batches_of()))
    with pytest.raises(AssertionError):
        assert_alike(model.numbers(), expected)


class NoWait(Split):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.wait = lambda: None


def test_pins_that_give_way_to_a_large_batch_let_no_sample_read_a_missing_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = batches_of(14)
    generator = torch.Generator().manual_seed(5)
    large = batches_of(1, size=48)[0]
    large["ids"][:, 0] = torch.randperm(200, generator=generator)[:48]
    large["ids"][:, 1:] = torch.randint(0, 40, (48, 2), generator=generator)
    batches.insert(7, large)
    expected, _ = plain(batches)
    late = LateRows(monkeypatch)
    model, system = late_model(late), hotline()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the large batch passes in chunks, which is said
        list(trainer_of(model, system).run(batches))
    assert system.record.pinnings > 1
    assert system.record.split_batches > 5
    assert_alike(model.numbers(), expected)


# -- learning --------------------------------------------------------------------------------


@pytest.mark.parametrize("relearn", [0, 2, None])
def test_when_popularity_drifts_rows_are_learned_again_and_no_sample_is_lost(
    relearn: int | None,
) -> None:
    batches = batches_of(20) + batches_of(30, seed=1, shift=20)
    model = trained(batches, system := hotline(relearn=relearn, floor=0.8))
    given = torch.cat([batch["dense"][:, 0] for batch in batches])
    assert sorted(torch.cat(model.seen).tolist()) == sorted(given.tolist())
    record = system.record
    assert record.learned[0].why == "learned"
    assert record.relearnings >= 1
    assert record.pinnings >= 2
    drifted = next(each for each in record.learned if each.why != "learned")
    assert 20 < drifted.batch < 40
    assert record.batches == 50
    hot = system._members[0].hot
    assert hot is not None
    assert {20, 21} <= set(hot.rows("a").tolist())  # most lookups are of these now


@pytest.mark.parametrize(
    ("options", "count", "given", "learned"),
    [
        ({"learned": 0.2}, 10, list, [2, 12]),  # each run is an epoch
        ({"learned": 0.25, "batches_per_epoch": 8}, 12, iter, [2, 10, 18]),
    ],
)
def test_each_epoch_begins_with_learning(
    options: Any, count: int, given: Any, learned: list[int]
) -> None:
    system = hotline(**options)
    trainer = trainer_of(Model("static"), system)
    for _ in range(2):
        list(trainer.run(given(batches_of(count))))
    assert [choice.batch for choice in system.record.learned] == learned
    assert system.record.batches == 2 * count


def test_an_epoch_of_unknown_length_is_refused() -> None:
    trainer = trainer_of(Model("static"), Hotline())
    with pytest.raises(ValueError, match="batches_per_epoch="):
        list(trainer.run(iter(batches_of(2))))


def test_the_published_logger_can_be_asked_for() -> None:
    trained(batches_of(), system := hotline(log="srrip"))
    assert isinstance(system._members[0].learning.log, SrripLog)
    assert system.record.split_batches > 3


def test_most_used_rows_are_pinned_first() -> None:
    batches, system = batches_of(12), hotline(learned=0.9)
    list(trainer_of(Model("static"), system).run(batches))
    (member,) = system._members
    assert member.hot is not None
    log: Any = member.learning.log
    for name in "ab":
        uses, hot = log.of(name), member.hot.mask(name)
        if not bool(hot.all()):
            assert uses[hot].min() >= uses[~hot].max()
    counts = [log.of(name)[member.hot.mask(name)].min() for name in "ab"]
    assert abs(counts[0] - counts[1]) <= 2  # one measure for all tables of a width


NONE_POPULAR = "samples is popular: each looks up some row"
# Where no sample is popular, also in a run shorter than the window; too few of them to split a
# batch, of which a grain of 1 leaves all or none; or where nothing can be pinned.
WHOLE = [
    (8, 150, {"window": 64}, NONE_POPULAR, 0),
    (8, 150, {"window": 10_000}, NONE_POPULAR, 0),
    (2, 150, {"grain": 1}, r"no more than \d+ of \d+ samples is popular: each of the", 1),
    (8, 100, {}, "no row is pinned, since the budget has no room", 0),
]


@pytest.mark.filterwarnings("ignore:.*passes through in chunks")
@pytest.mark.parametrize(("least", "slots", "options", "said", "popular"), WHOLE)
def test_where_batches_cannot_be_split_they_are_trained_whole_and_it_is_said_once(
    least: int, slots: int, options: Any, said: str, popular: int
) -> None:
    batches, system = (
        jagged_batches(14, least=least, most=9 if least == 8 else 4),
        hotline(**options),
    )
    with pytest.warns(UserWarning, match=said) as told:
        trained(batches, system, slots=slots)
    assert sum(bool(re.search(said, str(each.message))) for each in told) == 1
    assert system.record.split_batches == 0
    assert min(system.record.popular, 1) == popular


class DropSome(Skip):
    """A skip that leaves out the last samples of each batch, once it knows hot rows."""

    closed, given = False, None

    def bound(self, embedding: Any, hot: Any, num_batches: int, *, ids: Any) -> DropSome:
        self.given = (embedding, hot.num_rows, num_batches)
        return self

    def segments(self, batches: Any) -> Iterator[Any]:
        stream = iter(batches)
        for first in stream:  # two batches each
            kept = [{k: v[:10] for k, v in b.items()} for b in (first, *islice(stream, 1))]
            yield kept

    def close(self) -> None:
        self.closed = True


def test_what_a_skip_lets_through_is_split() -> None:
    batches, skip = batches_of(), DropSome()
    model, system = Model("static"), hotline(skip=skip)
    records = list(trainer_of(model, system).run(batches))
    assert [each.samples for each in records] == [16] + [10] * 11
    assert skip.given is not None
    assert skip.given[::2] == (model.embedding, 11)
    assert skip.given[1] > 0
    assert skip.closed
    kept = [batches[0], *({k: v[:10] for k, v in b.items()} for b in batches[1:])]
    assert_alike(model.numbers(), plain(kept)[0])


def slipstream(**changes: Any) -> hotrow.Slipstream:
    settings = {"target": 0.4, "tolerance": 0.35, "validate_every": 0, "recheck_every": 0}
    settings |= {"watched": 0.1, "sample_rate": 0.2}
    return hotrow.Slipstream(**{**settings, **changes})


def test_slipstream_evaluates_on_its_own_samples_and_stops_when_the_loss_rises() -> None:
    skip = slipstream(test=batches_of(2, seed=9), validate_every=4)
    trainer, steps = trainer_of(Model("static"), hotline(skip=skip)), list[int]()

    def rising(batches: Any, *, whole: bool) -> float:
        assert whole
        assert batches == skip.test
        steps.append(trainer.step)
        return 0.1 * len(steps) ** 2

    trainer.mean_loss = rising  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="validation loss rose"):
        list(trainer.run(batches_of(40)))
    assert steps == list(range(4, trainer.step + 1, 4))
    assert skip.record.dropped > 0
    assert skip.record.stopped


def test_popular_samples_that_are_left_out_are_no_drift() -> None:
    skip = slipstream(target=0.9, tolerance=0.2)
    system = hotline(skip=skip, floor=0.9, window=160, relearn=None)
    list(trainer_of(Model("static"), system).run(batches_of(80)))
    assert skip.record.share > 0.2
    assert [each.why for each in system.record.learned] == ["learned"]


def test_what_a_skip_has_left_out_before_is_no_popularity() -> None:
    class Used(DropSome):
        record = SkipRecord("samples", offered=9000, dropped=5000)

    system = hotline(skip=Used(), window=1 << 20)
    list(trainer_of(Model("static"), system).run(batches_of()))
    assert 0 < system.record.samples == system._members[0].learning._told


def test_slipstream_goes_by_the_rows_that_are_pinned_now() -> None:
    skip = slipstream()
    system = hotline(skip=skip, floor=0.8, learned=0.1)
    trainer = trainer_of(Model("static"), system)
    dropped = [0]
    for shift in (0, 20):
        list(trainer.run(batches_of(40, shift=shift)))
        assert skip.record.hot_rows == system.record.pinned_rows
        dropped.append(skip.record.dropped)
    assert 0 < dropped[1] < dropped[2]
    drifting = batches_of(20) + batches_of(30, seed=1, shift=20)
    list(trainer.run(drifting))
    assert system.record.relearnings >= 1
    assert skip.record.hot_rows == system.record.pinned_rows


@pytest.mark.parametrize("mode", ["samples", "rows"])
def test_an_epoch_of_several_runs_is_skipped_from_to_its_end(mode: str) -> None:
    skip, batches = slipstream(mode=mode), batches_of(40)
    model = Model("static")
    trainer = trainer_of(model, hotline(skip=skip, batches_per_epoch=40))
    left_out, frozen = [0], []
    for low, high in ((0, 10), (10, 25), (25, 40)):
        for _ in trainer.run(batches[low:high]):
            bits = model.embedding.groups[0].store.frozen.bits
            frozen.append(bits is not None and bool(bits.any()))
        left_out.append(skip.record.dropped)
        assert model.embedding.groups[0].store.frozen.bits is None  # the epoch may not go on
    if mode == "samples":
        assert 0 < left_out[1] < left_out[2] < left_out[3]
    else:
        assert frozen == [False] * frozen.count(False) + [True] * frozen.count(True)
        assert frozen.count(True) > 30


def test_a_second_trainer_begins_anew_in_the_middle_of_an_epoch() -> None:
    system = hotline(batches_per_epoch=20)
    for _ in range(2):
        trained(batches_of(12), system)
        assert system.record.batches == 12
        assert system.record.split_batches > 0


def test_a_loader_that_fails_is_heard_after_its_last_good_batch() -> None:
    class Failing(list[Item]):
        def __iter__(self) -> Iterator[Item]:
            yield from self[:9]
            raise OSError("disk on fire")

    model, batches = Model("static"), Failing(batches_of(12))
    trainer = trainer_of(model, hotline())
    with pytest.raises(OSError, match="disk on fire"):
        list(trainer.run(batches))
    assert trainer.step == 9
    assert_alike(model.numbers(), plain(batches[:9])[0])


def test_two_that_train_one_model_in_turns_pin_as_many_rows_every_time() -> None:
    model, batches = Model("static"), batches_of(12)
    systems = [hotline(), hotline(log="srrip")]
    trainers = [trainer_of(model, system) for system in systems]
    pinned = []
    for _ in range(3):
        for trainer, system in zip(trainers, systems, strict=True):
            list(trainer.run(batches))
            pinned.append(sum(system.record.pinned_rows.values()))
    assert pinned == pinned[:2] * 3


# -- captured steps --------------------------------------------------------------------------


ROOMY = budget_of("two-widths", (150, 40))


class StandIn:
    """Repeats a step in two phases, with what the host knew of its batch when it was captured."""

    boundaries = (NoBoundary(), NoBoundary())  # of two widths

    def __init__(self, captured: Any, berth: Any, split: Split) -> None:
        self._captured, self._berth = captured, berth
        ((embedding, arrival),) = berth.planned
        works = [copy.copy(work) for work in arrival.works]
        for work in works:
            work.plan = replace(work.plan)
        known = replace(arrival, works=tuple(works))

        def arrivals(part: Item, first: int) -> list[Any]:
            return [(embedding, embedding.pipeline.part(known, part["ids"], first))]

        self._split = replace(split, arrivals=arrivals)
        self.updated = [(embedding, None)]

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        ((embedding, _),) = self.updated
        for group in embedding.groups:
            group.slots_hold = lambda work: True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hotrow.embedding.step, "capturing", lambda: True)
            yield
        for group in embedding.groups:
            del group.slots_hold

    def replay_first(self) -> None:
        self._phases = self._captured._phases_of(self._berth.batch, self._split)
        with self._as_captured():
            next(self._phases)

    def replay(self) -> None:
        with self._as_captured():
            self._captured._loss.copy_(next(self._phases))
            self._phases.close()
        self._berth.loss.copy_(self._captured._loss)


class Eager:
    """Stands in for the graph of a whole batch; tests/test_graphed.py is about those."""

    boundaries, updated = (NoBoundary(), NoBoundary()), ()

    def __init__(self, captured: Any, berth: Any) -> None:
        self._captured, self._berth = captured, berth

    def replay(self) -> None:
        self._captured._loss.copy_(self._captured._run_eagerly(self._berth.handed))
        self._berth.loss.copy_(self._captured._loss)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, its graphs are tested")
@pytest.mark.usefixtures("device_rows")
def test_a_captured_step_in_two_phases_gives_the_bits_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures: list[int] = []

    def capture(self: Any, berth: Any, split: Split | None = None) -> Any:
        if split is None:
            return Eager(self, berth)
        captures.append(split.first)
        return StandIn(self, berth, split)

    monkeypatch.setattr(hotrow.training.captured.CapturedStep, "_capture", capture)
    batches, results = batches_of(16), []
    for is_captured in (False, True):
        model = Model("static", "two-widths", "adam", budget=ROOMY)
        system = hotline(grain=16, learned=0.1)
        trainer = trainer_of(model, system)
        if is_captured:
            old = trainer._step
            trainer._step = GraphedStep(
                model,
                LOSSES["mean"],
                trainer.dense_optimizer,
                labels=old.labels,
                lanes=lanes_of(torch.device("cpu")),
                graphs=GraphSettings(eager_first=1, inputs=2),
            )
        losses = [record.loss for record in trainer.run(batches)]
        results.append([torch.tensor(losses), *model.numbers(), system.record.split_batches])
    *found, split = results[1]
    *expected, _ = results[0]
    assert all(map(torch.equal, found, expected))
    # Each size of a first part is tried eagerly once, then captured in each berth.
    assert len(set(captures)) > 1
    assert 2 <= len(captures) < split
    assert model.embedding.optimizer.steps == [16, 16]


def on_gpu(strategy: str, system: Any, batches: list[Item], **options: Any) -> tuple[Any, Any]:
    graphs = options.pop("graphs", True)
    model = Model(strategy, device="cuda", **options)
    trainer = trainer_of(model, system, device="cuda", graphs=graphs)
    records = list(trainer.run(batches))
    losses = torch.tensor([each.loss for each in records], dtype=torch.float64)
    model.embedding.check()
    return [losses, *model.numbers()], trainer


def graphs_in(trainer: Trainer[Item]) -> list[Any]:
    landing = trainer._step.landing
    assert landing is not None
    berths = [berth for shape in landing._shapes.values() for berth in shape.inputs]
    return [graph for berth in berths for graph in berth.graphs.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_graphs_of_two_phases_give_the_bits_of_eager_steps(rule: str) -> None:
    batches = [samples.pinned(each) for each in batches_of(80, last=7)]
    options: Any = {"tables": "two-widths", "rule": rule, "budget": ROOMY}
    system = hotline(grain=4, learned=0.3)
    found, trainer = on_gpu("static", system, batches, **options)
    eager, _ = on_gpu("static", hotline(grain=4, learned=0.3), batches, graphs=False, **options)
    assert system.record.split_batches > 40
    assert sum(each._first is not None for each in graphs_in(trainer)) > 5
    assert all(map(torch.equal, found, eager))
    expected, _ = on_gpu("all-fast", None, batches, **options)
    assert_alike(found[1:], expected[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("drifts", [False, True], ids=["jagged", "drifting"])
def test_batches_on_a_gpu_give_the_results_of_whole_ones(drifts: bool) -> None:
    batches, system = jagged_batches(30, weighted=True), hotline()
    if drifts:
        batches, system = batches_of(30) + batches_of(50, seed=1, shift=20), hotline(floor=0.8)
    found, _ = on_gpu("static", system, batches, budget=budget_of("", (90 if drifts else 150,)))
    assert system.record.split_batches > 10
    assert (system.record.relearnings >= 1) or not drifts
    assert_alike(found[1:], on_gpu("all-fast", None, batches)[0][1:])


def steady_batches(count: int) -> list[Item]:
    """Always as many samples of a few rows; the others read one of many rows each."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for batch in batches_of(count, size=64):
        cold = torch.rand(64, generator=generator).argsort() >= 40
        batch["ids"] = batch["ids"] % 5
        batch["ids"][cold, 0] = torch.randint(20, 200, (24,), generator=generator)
        found.append(samples.pinned(batch))
    return found


@pytest.mark.gpu
def test_the_host_never_waits_in_the_steady_state() -> None:
    model = Model("static", budget=budget_of("one-width", (60,)), device="cuda")
    system = hotline(grain=4, window=1 << 20)
    trainer = trainer_of(model, system, device="cuda")
    run = iter(trainer.run(steady_batches(120)))
    for _ in range(80):
        next(run)
    before = len(graphs_in(trainer))
    with no_synchronisation():
        for _ in range(30):
            next(run)
    assert len(list(run)) == 10
    assert len(graphs_in(trainer)) == before > 0
    assert system.record.split_batches > 100


# -- what it cannot train --------------------------------------------------------------------


def test_batch_statistics_are_refused_and_those_of_a_sample_are_not() -> None:
    model = Model("static")
    model.top.append(nn.BatchNorm1d(8))
    with pytest.raises(ValueError, match=r"top\.3 is a BatchNorm1d: the statistics of a part"):
        trainer_of(model, Hotline())
    model.top[3] = nn.GroupNorm(2, 8)
    trainer_of(model, Hotline())
    model.top.append(nn.Dropout(0.1))
    with pytest.warns(UserWarning, match="dropout"):
        trainer_of(model, Hotline())


def by_weight(predictions: Tensor, labels: Tensor) -> Tensor:
    weights = 1 + 4 * labels
    return (per_sample(predictions, labels) * weights).sum() / weights.sum()


def summed(predictions: Tensor, labels: Tensor) -> Tensor:
    return per_sample(predictions, labels).sum()


@pytest.mark.parametrize("loss", [by_weight, summed])
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss: Any) -> None:
    trainer = trainer_of(Model("static"), hotline())
    trainer.loss_fn = loss
    with pytest.raises(ValueError, match=r"no mean over samples: of 16 it gives .*'lookahead'"):
        list(trainer.run(batches_of()))


class Mixing(Model):
    """A model with a function between its hidden layer and its output."""

    def __init__(
        self, strategy: str, between: Callable[[Any, Tensor], Tensor], device: str = "cpu"
    ) -> None:
        super().__init__(strategy, device=device)
        self.between = between
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.calls = 0  # in training mode
        self.to(device)

    def forward(self, batch: Item) -> Tensor:
        self.calls += self.training
        vectors = self.embedding(batch["ids"]).values()
        hidden = self.between(self, self.top(torch.cat([batch["dense"], vectors], 1)))
        logits: Tensor = self.out(hidden).squeeze(1)
        return logits


def normalise_by_batch(model: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, model.mean, model.var, training=model.training)


def attend(model: Any, x: Tensor) -> Tensor:
    """Attention over the sequence of a sample."""
    steps = x.view(-1, 2, 4)
    found: Tensor = model.attention(steps, steps, steps)[0]
    return found.flatten(1)


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda _, x: x - x.mean(0),
    "functional batch norm": normalise_by_batch,  # which looks at the batch in training mode only
    "and dropout": lambda m, x: F.dropout(x - x.mean(0), 0.1, m.training),
    "neighbours": lambda _, x: x + x.roll(1, 0),
    "size": lambda _, x: 16 * x / len(x),
    "softmax over samples": lambda _, x: x.softmax(0),
    "largest": lambda _, x: x / x.abs().amax(0),
}
BY_SAMPLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax over features": lambda _, x: x.softmax(1),
    "dropout": lambda m, x: F.dropout(x, 0.5, m.training),
    "noise": lambda m, x: x + m.training * torch.randn_like(x),
    "attention": attend,
    "hard": lambda _, x: x * (x > 0),
    "constant": lambda _, x: 0 * x,
    "running mean": lambda m, x: x - m.mean,
}


REFUSED = r"Mixing does not treat each sample by itself: .*'lookahead'"


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_samples_is_refused(name: str) -> None:
    model = Mixing("static", MIXING[name])
    trainer = trainer_of(model, hotline())
    with pytest.raises(ValueError, match=REFUSED):
        list(trainer.run(batches_of()))
    assert model.calls == trainer.step > 0  # the first batches were trained whole


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_a_model_that_looks_at_each_sample_by_itself_is_split(name: str) -> None:
    system = hotline()
    trainer = trainer_of(Mixing("static", BY_SAMPLE[name]), system)
    list(trainer.run(batches_of()))
    assert system.record.split_batches > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MIXING, *BY_SAMPLE])
def test_models_on_a_gpu_are_tried(name: str) -> None:
    between = (MIXING | BY_SAMPLE)[name]
    model = Mixing("static", between, device="cuda")
    trainer = trainer_of(model, hotline(), device="cuda", graphs=False)
    with pytest.raises(ValueError, match=REFUSED) if name in MIXING else nullcontext():
        list(trainer.run(batches_of(30)))


class Untried(Hotline):
    def _try(self, batch: Any) -> None: ...


def test_to_try_a_model_changes_no_bit() -> None:
    def between(model: Any, x: Tensor) -> Tensor:
        if model.training:
            model.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return F.dropout(attend(model, x) - 0.01 * model.calls, 0.3, model.training) - model.mean

    found = []
    for system in (hotline(), Untried(window=64, relearn=2, floor=0.5)):
        torch.manual_seed(5)
        model = Mixing("static", between)
        list(trainer_of(model, system).run(batches_of()))
        found.append(
            [*model.numbers(), model.mean, torch.tensor(model.calls), torch.get_rng_state()]
        )
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_outputs_of_each_sample_for_all_others_are_refused() -> None:
    class Pairs(Model):
        def forward(self, batch: Item) -> Tensor:
            hidden = self.top(torch.cat([batch["dense"], self.embedding(batch["ids"]).values()], 1))
            scores: Tensor = hidden @ hidden.t()
            return scores

    trainer = trainer_of(Pairs("static"), hotline())
    trainer.loss_fn = lambda scores, labels: scores.square().mean()
    with pytest.raises(ValueError, match="outputs have another shape when a batch is split"):
        list(trainer.run(batches_of()))


def test_a_model_that_cannot_be_copied_is_tried_in_evaluation_mode() -> None:
    for between, refused in (
        (MIXING["centred"], pytest.raises(ValueError, match=REFUSED)),
        (BY_SAMPLE["dropout"], nullcontext()),
    ):
        model = Mixing("static", between)
        model.lock = threading.Lock()
        with refused:
            list(trainer_of(model, hotline()).run(batches_of()))


@pytest.mark.parametrize("strategy", ["lookahead", "lru", "hybrid", "all-fast"])
def test_another_strategy_is_refused(strategy: str) -> None:
    said = "all-fast" if strategy == "all-fast" else f"strategy='static'.*{strategy!r}"
    with pytest.raises(ValueError, match=said):
        trainer_of(Model(strategy), Hotline())


@pytest.mark.parametrize(
    "options",
    [
        {"log": "lru"}, {"learned": 0.0}, {"learned": "5%"}, {"floor": 2.0}, {"grain": 0},
        {"window": 0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Hotline(**options)
