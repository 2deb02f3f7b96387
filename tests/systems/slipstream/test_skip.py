"""What is skipped is what the rows' movement says, each sample is offered once, and nothing is
skipped where nothing should be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.systems.slipstream.sifting import Sifter
from hotrow.systems.slipstream.skip import Skip, SkipSettings
from hotrow.systems.slipstream.stale import LossGuard, SkipStale, noise_of
from hotrow.systems.sorting import Sorter

SIZE, BATCHES = 10, 24
SIFTED = 1 << 20  # bytes of batches that are sifted together
Table = hotrow.EmbeddingBagConfig


@dataclass(frozen=True)
class Clicks:
    sparse: Any
    label: Tensor  # the number of each sample


def ids_of(batch: Clicks) -> Any:
    return batch.sparse


class Moving:
    """Rows that move as they are told, whenever a sample looks them up."""

    def __init__(self, steps: Tensor, init: Any = None) -> None:
        self.steps = steps  # [rows of "a"]; those of "b" rest
        tables = [Table("a", len(steps), 2, ["f"], init=init), Table("b", 4, 3, ["g"])]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), strategy="all-fast", seed=1
        )
        self.hot = {"a": torch.arange(len(steps)), "b": torch.arange(4)}

    def batches(self, count: int = BATCHES, seed: int = 0) -> list[Clicks]:
        draw = torch.Generator().manual_seed(seed)
        found = []
        for batch in range(count):
            rows = torch.randint(len(self.steps), (SIZE,), generator=draw)
            rest = torch.randint(4, (SIZE,), generator=draw)
            label = torch.arange(SIZE) + batch * SIZE
            found.append(Clicks(torch.stack([rows, rest], 1), label))
        return found

    def train(self, batch: Clicks) -> None:
        weights = self.embedding.state_dict()[self.embedding.key_of("a")]
        frozen = self.embedding.groups[0].store.frozen.bits
        rows = batch.sparse[:, 0].unique()
        if frozen is not None:
            rows = torch.tensor([r for r in rows.tolist() if not (int(frozen[0]) >> r) & 1]).long()
        weights[rows] += self.steps[rows, None]
        self.embedding.load_weights("a", 0, weights)

    def run(self, skip: Skip, batches: Iterable[Clicks]) -> list[Clicks]:
        trained = []
        for segment in skip.segments(batches):
            for batch in segment:
                self.train(batch)
                trained.append(batch)
        return trained

    def slipstream(self, num_batches: int = BATCHES, **changes: Any) -> SkipStale:
        settings = {"starting_batch": 2, "watched": 0.25, "sample_rate": 0.1, "recheck_every": 0}
        # Of lookups, half are of "b", whose rows rest.
        target = 0.65 if changes.get("mode") == "rows" else 0.3
        settings |= {"tolerance": 0.1, "target": target, **changes}
        hot, sifted = settings.pop("hot", self.hot), settings.pop("sifted_bytes", 0)
        return SkipStale(
            self.embedding, hot, num_batches, SkipSettings(**settings), ids=ids_of,
            sifted_bytes=sifted,
        )  # fmt: skip


def samples_in(batches: Iterable[Clicks]) -> Counter[int]:
    return Counter(sample for batch in batches for sample in batch.label.tolist())


STEPS = torch.tensor([0.001, 0.001, 0.001] + [0.5] * 7)  # rows 0 to 2 hardly move


# -- samples ---------------------------------------------------------------------------------


def test_samples_of_stale_rows_are_left_out_and_each_other_is_trained_once() -> None:
    moving = Moving(STEPS)
    skip, batches = moving.slipstream(), moving.batches()
    trained = moving.run(skip, batches)
    first = 2 + 7  # batch E, 2 + round(0.25 * 24), is trained and not offered again
    left_out = [
        b for batch in batches[first:] for b in batch.label[batch.sparse[:, 0] < 3].tolist()
    ]
    every = samples_in(batches)
    assert samples_in(trained) == every - Counter(left_out)
    assert all(a is b for a, b in zip(trained, batches[:first], strict=False))
    assert {len(each.label) for each in trained[:-1]} == {SIZE}  # filled up
    r = skip.record
    assert r.mode == "samples"
    assert (r.first_batch, r.offered, r.dropped) == (first, (BATCHES - first) * SIZE, len(left_out))
    assert r.hot_rows == {"a": 10, "b": 4}
    assert r.stale_rows == {"a": 3, "b": 4}
    assert r.snapshot_bytes == 4 * (2 * 10 + 3 * 4)
    assert r.threshold is not None
    assert r.threshold.converged
    assert abs(r.threshold.share - 0.3) <= 0.1
    assert 0.001 < r.threshold.tau < 0.5 * 7


@pytest.mark.parametrize("sizes", ["alike", "all kinds", "in turns"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"recheck_every": 6}, {"stale_lookups": 2}, {"stale_lookups": 1, "each_table": True}],
    ids=lambda changes: "-".join(changes) or "all",
)
def test_samples_that_are_sifted_beside_training_are_those_of_the_host(
    changes: dict[str, Any], sizes: str
) -> None:
    found = []
    for sifted_bytes in (0, SIFTED):
        moving = Moving(STEPS)
        skip, batches = moving.slipstream(sifted_bytes=sifted_bytes, **changes), moving.batches()
        if sizes == "all kinds":  # few that can be sifted together, and one of which none is left
            for place, size in ((11, 20), (14, 1), (15, 1), (19, 33), (23, 5)):
                batches[place] = Clicks(batches[place].sparse[:size], batches[place].label[:size])
            batches[13].sparse[:] = 0
        if sizes == "in turns":  # each is sifted alone, and as many wait as where they look alike
            batches[1::2] = [Clicks(batch.sparse[:7], batch.label[:7]) for batch in batches[1::2]]
        trained = moving.run(skip, batches)
        found.append((trained, skip.record))
    (here, expected), (there, record) = found
    assert record == expected
    assert record.dropped > 0
    assert [batch.label.tolist() for batch in there] == [batch.label.tolist() for batch in here]
    assert all(torch.equal(a.sparse, b.sparse) for a, b in zip(there, here, strict=True))


class CountingSorter(Sorter):
    """Notes how many batches are sorted together."""

    def __init__(self, lanes: Any) -> None:
        super().__init__(lanes, numbers=8)
        self.counts: list[int] = []

    def sort(self, batches: Any, rule: Any) -> Any:
        self.counts.append(len(batches))
        return super().sort(batches, rule)


@pytest.mark.parametrize("together", [1, 3, 8])
def test_as_many_batches_are_sifted_together_as_fit(together: int) -> None:
    moving = Moving(STEPS)
    batches, lanes = moving.batches(15), moving.embedding.lanes
    num_bytes = batches[0].sparse.nbytes + batches[0].label.nbytes
    sifter = Sifter(lanes, ids_of, lambda ids: ids[:, 0] > 2, most_bytes=together * num_bytes)
    sifter._sorter = sorter = CountingSorter(lanes)
    for batch in batches:
        sifter.add(batch)
    kept = [sifter.next().kept for _ in batches]
    assert kept == [int((batch.sparse[:, 0] > 2).sum()) for batch in batches]
    assert not sifter.waiting
    assert sorter.counts == [together] * (15 // together) + [15 % together] * (15 % together > 0)


@pytest.mark.parametrize("sifted_bytes", [0, SIFTED])
def test_a_batch_without_samples_leaves_nothing_to_train(sifted_bytes: int) -> None:
    moving = Moving(STEPS)
    skip, batches = moving.slipstream(sifted_bytes=sifted_bytes), moving.batches()
    for place in (9, 10, 15):  # the first of them is the first that samples may be left out of
        batches[place] = Clicks(batches[place].sparse[:0], batches[place].label[:0])
    trained = moving.run(skip, batches)
    assert skip.record.dropped
    assert samples_in(trained).total() + skip.record.dropped == (BATCHES - 3) * SIZE


@pytest.mark.parametrize("sifted_bytes", [0, SIFTED])
def test_a_loader_that_fails_is_heard_after_its_last_good_sample(sifted_bytes: int) -> None:
    moving, trained, good = Moving(STEPS), Counter[int](), 21

    def loader() -> Iterator[Clicks]:
        yield from moving.batches()[:good]
        raise OSError("disk on fire")

    def run() -> None:
        for segment in skip.segments(loader()):
            for batch in segment:
                moving.train(batch)
                trained.update(batch.label.tolist())

    skip = moving.slipstream(sifted_bytes=sifted_bytes)
    with pytest.raises(OSError, match="disk on fire"):
        run()
    r = skip.record
    assert r.offered == (good - r.first_batch) * SIZE
    assert trained.total() + r.dropped == good * SIZE


def test_rows_are_compared_between_the_snapshots_and_at_no_other_time() -> None:
    """Every batch moves another row; seven of them lie between the snapshots."""
    moving = Moving(torch.ones(10))
    labels = torch.arange(SIZE)
    watch = [Clicks(torch.tensor([[row, 0]] * SIZE), labels) for row in range(9)]
    later = moving.batches(15)
    # As published, unvisited rows are stale: rows 0 and 1 before, 9 after.
    skip = moving.slipstream(least_visits=0, sample_rate=0.6)
    moving.run(skip, [*watch, *later])
    assert skip.record.stale_rows["a"] == 3
    assert skip.record.seldom_rows == {}
    again = moving.slipstream(least_visits=0, sample_rate=0.6)
    trained = moving.run(again, [*watch, *later])
    assert {int(row) for each in trained[9:] for row in each.sparse[:, 0]} == set(range(2, 9))


def test_rows_that_nobody_visited_are_not_stale() -> None:
    moving = Moving(torch.cat([torch.zeros(5), torch.ones(5)]))
    batches = moving.batches()
    for batch in batches[2:9]:  # rows 0 and 1 do not come between the snapshots
        batch.sparse[:, 0] = torch.where(batch.sparse[:, 0] < 2, 9, batch.sparse[:, 0])
    skip = moving.slipstream()
    trained = moving.run(skip, batches)
    assert skip.record.stale_rows["a"] == 3
    assert skip.record.seldom_rows == {"a": 2}
    assert {0, 1} < {int(row) for each in trained[9:] for row in each.sparse[:, 0]}
    published = moving.slipstream(least_visits=0, target=0.5)
    moving.run(published, batches)
    assert published.record.stale_rows["a"] == 5


def test_only_samples_of_hot_rows_are_left_out() -> None:
    """Two features; either being stale is enough, but of both only hot rows."""
    moving = Moving(STEPS)
    hot = {"a": torch.arange(10), "b": torch.tensor([0, 1])}
    skip = moving.slipstream(hot=hot, stale_lookups=1, target=0.9, least_visits=0)
    batches = moving.batches()
    trained = moving.run(skip, batches)
    assert skip.record.threshold is not None
    assert skip.record.threshold.converged  # of inputs that are hot, all may be stale
    rows = torch.cat([batch.sparse for batch in trained[9:]])
    assert (rows[:, 1] >= 2).all()
    assert len(rows) == sum(int((b.sparse[:, 1] >= 2).sum()) for b in batches[9:])


def test_a_target_of_zero_hands_out_what_it_was_given() -> None:
    moving = Moving(STEPS)
    for skip in (moving.slipstream(target=0), random_drop(0.0)):
        batches = moving.batches()
        (segment,) = skip.segments(batches)
        assert segment is batches
        assert skip.record.dropped == 0


# -- rows ------------------------------------------------------------------------------------


def test_frozen_rows_are_updated_again_in_a_new_epoch_until_it_has_decided() -> None:
    moving = Moving(STEPS)
    skip = moving.slipstream(mode="rows")
    moving.run(skip, moving.batches())
    assert any(bool(group.store.frozen.bits.any()) for group in moving.embedding.groups)
    skip.begin(BATCHES)
    assert not any(bool(group.store.frozen.bits.any()) for group in moving.embedding.groups)
    moving.run(skip, moving.batches())
    assert skip.record.stale_rows["a"] == 3


# -- second thoughts -------------------------------------------------------------------------


def rechecked(
    moving: Moving, batches: list[Clicks], change: Callable[[], None], **changes: Any
) -> SkipStale:
    """Train until a re-check has been done; `change` is called when the first decision was made."""
    skip = moving.slipstream(40, recheck_every=5, sample_rate=0.5, **changes)
    for count, segment in enumerate(skip.segments(batches)):
        if count == 2:
            change()
        for batch in segment:
            moving.train(batch)
        if skip.record.rechecks:
            break
    return skip


def stale_in(skip: SkipStale) -> list[int]:
    """The stale rows of table "a"."""
    assert skip._stale is not None
    return skip._rule.by_table(skip._stale).get("a", torch.empty(0)).tolist()


@pytest.mark.parametrize(
    ("mode", "factor"), [("samples", 1.0), ("samples", 1e-3), ("rows", 1.0)]
)  # as before, and at a smaller learning rate
def test_a_recheck_finds_rows_that_rest_now(mode: str, factor: float) -> None:
    moving = Moving(STEPS)

    def change() -> None:
        steps = moving.steps.clone()
        steps[2], steps[5] = 0.5, 0.001  # one moves again, another has come to rest
        moving.steps = factor * steps

    skip = rechecked(moving, moving.batches(40), change, mode=mode)
    assert stale_in(skip) == [0, 1, 5]
    assert (skip.record.rechecks, skip.record.moving_again) == (1, 1)


@pytest.mark.parametrize("visits", [0, 1])
def test_a_row_without_visits_in_a_recheck_is_stale_only_as_published(visits: int) -> None:
    moving = Moving(STEPS)
    batches = moving.batches(40)
    for batch in batches[18:]:  # the first decision comes after 13
        batch.sparse[batch.sparse[:, 0] == 1, 0] = 7
    skip = rechecked(moving, batches, lambda: None, least_visits=visits)
    assert (1 in stale_in(skip)) is (visits == 0)


def noted(skip: SkipStale, *losses: float) -> None:
    for loss in losses:
        skip.note(loss)


@pytest.mark.parametrize("mode", ["samples", "rows"])
def test_a_validation_loss_that_rises_ends_skipping(mode: str) -> None:
    moving = Moving(STEPS)
    skip = moving.slipstream(mode=mode, patience=1, slack=0.0)
    batches, trained = moving.batches(), []
    noted(skip, 0.4, 0.7)  # nothing is skipped yet
    for segment in skip.segments(batches):
        for batch in segment:
            moving.train(batch)
            trained.append(batch)
            if len(trained) == 14:
                noted(skip, 0.7, 0.6)
                with pytest.warns(UserWarning, match="validation loss rose to 0.65 from 0.6 "):
                    skip.note(0.65)
                left = skip._position
    assert skip.record.stopped.startswith("validation loss rose to 0.65 from 0.6 while stale")
    assert skip.record.stale_rows == {}
    assert samples_in(trained[14:]) >= samples_in(batches[left:])
    assert all(group.store.frozen.bits is None for group in moving.embedding.groups)
    skip.begin(BATCHES)  # and for good
    again = moving.batches()
    assert all(a is b for a, b in zip(moving.run(skip, again), again, strict=True))


def test_the_guard_may_be_patient() -> None:
    guard = LossGuard(patience=2, slack=0.01)
    for loss in (0.5, 0.509, 0.6, 0.5, 0.6):
        assert guard.note(loss, is_skipping=True) is None
    assert guard.note(math.nan, is_skipping=True) == 0.5


def guarded(losses: Iterable[float]) -> int | None:
    """After how many losses, from when skipping began, a guard with its defaults ends it."""
    guard = LossGuard(SkipSettings().patience, SkipSettings().slack)
    risen = (guard.note(loss, is_skipping=True) is not None for loss in losses)
    return next((count for count, has_risen in enumerate(risen) if has_risen), None)


def test_the_guard_does_not_take_noise_for_harm() -> None:
    draw = torch.Generator().manual_seed(0)
    falling = 0.5 + 0.01 / (1 + torch.arange(30) / 3)
    ended = 0
    for _ in range(20):
        noise = 0.001 * torch.randn(30, generator=draw)
        assert guarded((falling + noise).tolist()) is None
        ended += guarded((0.5 + noise).tolist()) is not None
    assert ended <= 2  # as losses that vary and never fall may, seldom


@pytest.mark.filterwarnings("ignore:validation loss rose")
def test_the_guard_notices_harm() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        before, after = 0.5 + 0.001 * torch.randn(2, 20, generator=draw)
        jumped = guarded([*before[:6].tolist(), *(0.012 + after).tolist()])
        assert jumped is not None
        assert 6 <= jumped <= 6 + 9
        slowly = guarded([*before[:6].tolist(), *(after + 0.001 * torch.arange(20)).tolist()])
        assert slowly is not None
        assert slowly > 6 + 2
    assert guarded([0.5, 0.49, math.nan, math.nan, math.nan]) == 4
    assert guarded([0.5, 0.51, 0.52, 0.53]) == 3  # little is known of their noise


@pytest.mark.parametrize(
    ("losses", "noise"),
    [
        ([1.0, 2.0], 0),
        ([1.0, 2.0, 3.0, 4.0], 0),
        ([1.0, 1.0, 5.0, 5.0, 5.0, 5.0], 1),  # (2, 2, 0, 0) in the middle
        ([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0], 0),
        ([1.0, 2.0, 1.0, 2.0, 1.0], 1),
    ],
)
def test_what_losses_vary_by_is_neither_trend_nor_step(losses: list[float], noise: float) -> None:
    assert noise_of(losses) == noise


# -- searches that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["samples", "rows"])
def test_a_search_that_does_not_converge_is_reported_and_takes_less(mode: str) -> None:
    moving = Moving(torch.ones(10) * 0.5, hotrow.Constant(0.0))
    batches = moving.batches()
    for batch in batches:  # rows 0 to 7 are visited in every batch, and so move alike
        batch.sparse[:8, 0] = torch.arange(8)
        batch.sparse[8:, 0] = 3
    skip = moving.slipstream(mode=mode)
    said = "30.0% ± 10.0% of the sampled hot inputs"
    if mode == "rows":
        said = "65.0% ± 10.0% of the sampled lookups of hot rows"
    with pytest.warns(UserWarning, match=f"no threshold in 25 iterations makes {said}"):
        trained = moving.run(skip, batches)
    assert all(a is b for a, b in zip(trained, batches, strict=True))
    r = skip.record
    assert r.threshold is not None
    assert (r.threshold.converged, r.threshold.iterations) == (False, 25)
    assert r.dropped == 0
    if mode == "rows":  # those of "b" rest, and are half of the lookups
        assert "makes 50.0%" in r.threshold.said
        assert r.stale_rows == {"b": 4}
    else:
        assert "makes 0.0%" in r.threshold.said
        assert "Nothing is skipped; a target of 1 would" in r.threshold.said
        assert r.stale_rows == {}
        assert all(group.store.frozen.bits is None for group in moving.embedding.groups)


def test_rows_are_watched_longer_where_too_few_were_visited() -> None:
    """One row more in each batch: after 3 too few are known to choose from, after 6 enough are."""
    moving = Moving(STEPS)
    batches = moving.batches(40)
    for number, batch in enumerate(batches[2:12]):
        batch.sparse[:, 0] = number
    short = {"watched": 0.05, "target": 0.2, "sample_rate": 0.5}
    skip = moving.slipstream(40, **short)
    moving.run(skip, batches)
    assert skip.record.first_batch == 2 + 6
    assert skip.record.seldom_rows == {"a": 4}
    assert skip.record.offered == (40 - 8) * SIZE
    skip.begin(40)  # and from the beginning in the next epoch
    assert skip.record.first_batch == 2 + 6
    published = moving.slipstream(40, **short, least_visits=0)
    with pytest.warns(UserWarning, match="a target of 0.81 would"):  # all unvisited rows at once
        moving.run(published, batches)
    assert published.record.first_batch == 2 + 3


def test_an_epoch_that_ends_before_the_second_snapshot_trains_everything() -> None:
    moving = Moving(STEPS)
    skip, batches = moving.slipstream(), moving.batches()[:5]
    assert len(moving.run(skip, batches)) == 5
    assert skip.record.threshold is None


# -- several calls, other batches ------------------------------------------------------------


def test_an_epoch_may_come_in_parts() -> None:
    """As when hot and cold batches take turns: the parts are one stream."""
    moving, again = Moving(STEPS), Moving(STEPS)
    whole, parts = moving.slipstream(), again.slipstream()
    batches = moving.batches()
    right = samples_in(moving.run(whole, batches))
    found: Counter[int] = Counter()
    for low, high in ((0, 1), (1, 8), (8, 15), (15, BATCHES)):
        found += samples_in(again.run(parts, batches[low:high]))
    assert found == right
    assert parts.record == whole.record


def test_batches_that_cannot_be_cut_are_refused_and_a_function_helps() -> None:
    moving = Moving(STEPS)

    class Odd:  # TorchRec's own tensors, for instance
        def __init__(self, values: Tensor, labels: Tensor) -> None:
            self.ids, self.label = values, labels

        @property
        def sparse(self) -> Tensor:
            return self.ids

    batches = [Odd(each.sparse, each.label) for each in moving.batches()]
    with pytest.raises(TypeError, match="give take=, a function"):
        moving.run(moving.slipstream(), batches)  # type: ignore[arg-type]
    skip = SkipStale(
        moving.embedding, moving.hot, BATCHES, moving.slipstream().settings, ids=ids_of,
        take=lambda batch, places: Odd(batch.ids[places], batch.label[places]),
        join=lambda parts: Odd(*(torch.cat([vars(p)[n] for p in parts]) for n in ("ids", "label"))),
    )  # fmt: skip
    trained = moving.run(skip, batches)  # type: ignore[arg-type]
    assert skip.record.dropped > 0
    assert sum(samples_in(trained).values()) == BATCHES * SIZE - skip.record.dropped


# -- at random -------------------------------------------------------------------------------


def random_drop(share: float | None = None, **options: Any) -> hotrow.RandomDrop:
    return hotrow.RandomDrop(share, **options).bound(Moving(STEPS).embedding, {}, 0, ids=ids_of)


def test_what_is_dropped_at_random_is_spread_evenly() -> None:
    (segment,) = random_drop(0.25).segments(Moving(STEPS).batches(400))
    kept = samples_in(segment)
    by_place = Counter(sample % SIZE for sample in kept)
    assert sum(kept.values()) == 400 * SIZE * 3 // 4
    assert all(250 < count < 350 for count in by_place.values())  # 300 each; the deviation is 9


@pytest.mark.parametrize("kind", ["stale", "random"])
@pytest.mark.parametrize("is_new_epoch", [True, False])
def test_samples_that_wait_in_a_run_that_was_left_are_not_trained_in_the_next(
    kind: str, is_new_epoch: bool
) -> None:
    moving = Moving(STEPS)
    skip: Skip = moving.slipstream() if kind == "stale" else random_drop(0.3)
    old, trained = moving.batches(), 0
    for segment in skip.segments(old):
        for batch in segment:
            moving.train(batch)
            trained += 1
            if skip.record.dropped and trained > 12:
                break
        else:
            continue
        break
    assert skip.record.dropped % SIZE  # some were waiting
    if is_new_epoch:
        skip.begin(BATCHES)
    new = [Clicks(each.sparse[:5], each.label[:5] + 1000) for each in moving.batches(seed=1)]
    again = moving.run(skip, new)
    assert min(samples_in(again)) >= 1000
    assert max(len(each.label) for each in again) == 5  # nor is their size that of the old ones


# -- settings --------------------------------------------------------------------------------


def test_the_defaults_are_those_that_were_published() -> None:
    s = SkipSettings()
    assert (s.target, s.allowed, s.starting_batch, s.watched) == (0.3, 0.08, 0, 0.015)
    assert SkipSettings(target=0.05).allowed == 0.025
    assert (s.sample_rate, s.search, s.iterations, s.stale_lookups) == (0.01, (0, 0.1), 25, "all")
    published = SkipSettings.as_published(target=0.4)
    assert (published.target, published.least_visits, published.recheck_every) == (0.4, 0, 0)
    assert SkipSettings(search=[0, 1]).search == (0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": 1.5}, "target must be a share between 0 and 1, not 1.5"),
        ({"target": "30%"}, "target must be a share between 0 and 1, not '30%'"),
        ({"tolerance": 0.3}, "tolerance must be below the target of 0.3, not 0.3"),
        ({"watched": -0.1}, "watched must be a share"),
        ({"starting_batch": -1}, "starting_batch must be a whole number of at least 0, not -1"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1"),
        ({"search": (0.1, 0.1)}, "search must be two thresholds"),
        ({"search": (0.1,)}, "search must be two thresholds"),
        ({"stale_lookups": 0}, "stale_lookups must be a whole number of at least 1, or 'all'"),
        ({"stale_lookups": "some"}, "or 'all', not 'some'"),
        ({"mode": "both"}, "mode must be one of samples, rows, not 'both'"),
        ({"slack": math.nan}, "slack must be a number of at least 0"),
        ({"patience": True}, "patience must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SkipSettings(**changes)


def test_of_too_few_batches_all_are_trained() -> None:
    moving = Moving(STEPS)
    settings, batches = SkipSettings(starting_batch=5, watched=0.3), moving.batches(9)
    with pytest.warns(UserWarning, match=r"after 9 batches .* but there are 9: none would be left"):
        skip = SkipStale(moving.embedding, moving.hot, 9, settings, ids=ids_of)
    assert all(a is b for a, b in zip(moving.run(skip, batches), batches, strict=True))
    assert (skip.record.offered, skip.record.dropped) == (0, 0)
