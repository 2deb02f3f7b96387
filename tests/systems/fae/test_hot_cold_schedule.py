"""FAE's order: every batch once an epoch, hot and cold in turn, mixed as the test loss asks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hotrow.systems.fae.hot_cold_schedule import HotColdOrder, Segment, Separated, ShuffleRate

# -- The rate ----------------------------------------------------------------------------


def rates(losses: list[float], rate: ShuffleRate | None = None) -> list[float]:
    rate = rate or ShuffleRate()
    return [rate.note(loss) for loss in losses]


def test_a_worse_loss_halves_the_rate_down_to_one() -> None:
    assert ShuffleRate().percent == 50
    worse = [0.1 * i for i in range(9)]  # the first has nothing to be compared with
    assert rates(worse) == [50, 25, 12.5, 6.25, 3.125, 1.5625, 1, 1, 1]


def test_four_running_that_are_not_worse_double_it_up_to_fifty() -> None:
    rate = ShuffleRate(12.5)
    # first, three not worse (one of them equal), a fourth: doubled; worse: halved; ...
    losses = [0.9, 0.8, 0.8, 0.7, 0.6, 0.65, 0.6, 0.5, 0.4, 0.45, 0.4, 0.3, 0.2, 0.1]
    expected = [12.5, 12.5, 12.5, 12.5, 25, 12.5, 12.5, 12.5, 12.5, 6.25, 6.25, 6.25, 6.25, 12.5]
    assert rates(losses, rate) == expected
    assert rates([0.1] * 4, rate)[-1] == 25  # each four count anew
    assert rates([0.1] * 8, rate)[-1] == 50
    assert rates([0.1] * 4, rate)[-1] == 50


@pytest.mark.parametrize(("missing", "what"), [(None, "there is no"), (math.nan, "is NaN")])
def test_without_a_loss_the_rate_stays_and_that_is_said_once(
    missing: float | None, what: str
) -> None:
    rate = ShuffleRate()
    rates([0.5, 0.6, 0.5, 0.4, 0.3], rate)  # 25, and three that are not worse
    with pytest.warns(UserWarning, match="test loss.*stays at 25 %") as told:
        assert rate.note(missing) == 25
    said = str(told[0].message)
    assert what in said
    assert ("test=" in said) == (missing is None)  # or else there are samples, and training is why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rate.note(missing) == 25
    assert rate.note(0.3) == 50  # the fourth, as if nothing had been in between


@pytest.mark.parametrize("percent", [0, 0.5, 51, math.nan])
def test_other_rates_are_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="must be 1 to 50 percent"):
        ShuffleRate(percent)


# -- The order ---------------------------------------------------------------------------


class Numbered:
    """A set whose batches say of which kind and epoch they are, and which of it."""

    def __init__(self, kind: str, count: int, *, epochs: int, given: int | None = None) -> None:
        self.samples = self.batches_per_epoch = count
        self._kind, self._all = kind, epochs * count if given is None else given
        self.opened = 0

    def batches(self) -> Iterator[tuple[str, int, int]]:
        self.opened += 1
        try:
            for number in range(self._all):
                yield self._kind, *divmod(number, self.batches_per_epoch)
        finally:
            self.opened -= 1


def sets(hot: int, cold: int, *, epochs: int = 1) -> Separated:
    return Separated(
        Numbered("hot", hot, epochs=epochs), Numbered("cold", cold, epochs=epochs), epochs
    )


def lengths(order: HotColdOrder) -> list[tuple[str, int]]:
    return [(segment.kind, len(list(segment))) for segment in order]


def test_an_epoch_at_fifty_percent_by_hand() -> None:
    assert lengths(HotColdOrder(sets(hot=5, cold=8))) == [
        ("cold", 4), ("hot", 3), ("cold", 4), ("hot", 2)
    ]  # fmt: skip


def test_both_sets_end_together_at_one_percent() -> None:
    found = lengths(HotColdOrder(sets(hot=1000, cold=250), rate=ShuffleRate(1)))
    assert len(found) == 200
    assert {length for kind, length in found if kind == "hot"} == {10}
    assert {length for kind, length in found if kind == "cold"} == {2, 3}


def test_a_small_set_is_spread_over_the_epoch() -> None:
    found = lengths(HotColdOrder(sets(hot=3, cold=300), rate=ShuffleRate(1)))
    assert found == [
        ("cold", 3), ("hot", 1), ("cold", 99), ("hot", 1), ("cold", 99), ("hot", 1), ("cold", 99)
    ]  # fmt: skip


def test_the_rate_changes_what_follows() -> None:
    order, found = HotColdOrder(sets(hot=100, cold=100), rate=ShuffleRate(25)), []
    for segment in order:
        found.append(len(list(segment)))
        assert segment.ends_pair == (segment.kind == "hot")
        if segment.ends_pair:
            order.rate.note([0.5, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7][len(found) // 2 - 1])
    # 25 25 | 12.5 6.25, 6.25, 6.25, 6.25 | 12.5: sums 25 50 62.5 68.75 75 81.25 87.5 100
    assert found[::2] == found[1::2] == [25, 25, 13, 6, 6, 7, 6, 12]


@pytest.mark.parametrize(("hot", "cold", "kind"), [(0, 7, "cold"), (7, 0, "hot")])
def test_with_one_kind_alone_nothing_switches(hot: int, cold: int, kind: str) -> None:
    order = HotColdOrder(sets(hot, cold, epochs=2))
    found = []
    for segment in order:
        assert not segment.ends_pair  # there is no mixing to judge
        found.append((segment.kind, list(segment)))
    assert found == [(kind, [(kind, epoch, i) for i in range(7)]) for epoch in range(2)]


@pytest.mark.parametrize(("hot", "cold", "kind"), [(0, 7, "cold"), (7, 0, "hot")])
def test_with_one_kind_alone_the_loss_is_asked_for_where_somebody_evaluates(
    hot: int, cold: int, kind: str
) -> None:
    order, found = HotColdOrder(sets(hot, cold, epochs=2), evaluates=True), []
    for segment in order:
        assert segment.ends_pair
        found.append((segment.kind, [batch[1:] for batch in segment]))
        order.rate.note(float(len(found)))  # ever worse: 50 %, 50 %, 25 %, 12.5 %, ...
    assert {each for each, _ in found} == {kind}
    assert [len(batches) for _, batches in found] == [4, 3, 2, 1, 1, 1, 1, 1]
    every = [batch for _, batches in found for batch in batches]
    assert every == [(epoch, i) for epoch in range(2) for i in range(7)]


def test_when_one_kind_has_ended_the_other_is_evaluated_on_all_the_same() -> None:
    few = sets(hot=300, cold=1)
    assert lengths(HotColdOrder(few, rate=ShuffleRate(25))) == [("cold", 1), ("hot", 300)]
    found = lengths(HotColdOrder(few, rate=ShuffleRate(25), evaluates=True))
    assert found == [("cold", 1), ("hot", 75), ("hot", 75), ("hot", 75), ("hot", 75)]


def test_no_samples_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="both sets are empty"):
        HotColdOrder(sets(0, 0))


counts = st.integers(0, 60)


@settings(max_examples=100, deadline=None)
@given(
    hot=counts,
    cold=counts,
    percent=st.sampled_from([1.0, 1.5625, 12.5, 50.0]),
    losses=st.lists(st.sampled_from([0.1, 0.2, 0.3, None]), max_size=40),
    evaluates=st.booleans(),
)
@example(hot=60, cold=1, percent=50.0, losses=[], evaluates=False)
@pytest.mark.filterwarnings("ignore:there is no test loss")
def test_every_batch_comes_once_an_epoch(
    hot: int, cold: int, percent: float, losses: list[float | None], evaluates: bool
) -> None:
    assume(hot + cold)
    order = HotColdOrder(sets(hot, cold, epochs=2), rate=ShuffleRate(percent), evaluates=evaluates)
    found, noted = [], iter(losses)
    for segment in order:
        found += list(segment)
        if segment.ends_pair:
            order.rate.note(next(noted, 0.5))
    size = hot + cold
    for epoch in range(2):
        wanted = {("hot", epoch, i) for i in range(hot)} | {("cold", epoch, i) for i in range(cold)}
        batches = found[epoch * size : (epoch + 1) * size]
        assert len(batches) == size
        assert set(batches) == wanted
    assert len(found) == 2 * size


@settings(max_examples=60, deadline=None)
@given(hot=st.integers(1, 60), cold=st.integers(1, 60), percent=st.sampled_from([1.0, 3.125, 50.0]))
def test_kinds_alternate_cold_first(hot: int, cold: int, percent: float) -> None:
    order = HotColdOrder(sets(hot, cold), rate=ShuffleRate(percent))
    found: list[Segment] = []
    for segment in order:
        assert len(list(segment)) == segment.last - segment.first > 0
        found.append(segment)
    assert found[0].kind == "cold"
    assert all(one.kind != other.kind for one, other in pairwise(found))
    assert found[-1].ends_pair


@pytest.mark.parametrize("count", [0, 1])
def test_a_segment_that_was_not_read_to_its_end_is_refused(count: int) -> None:
    def run(given: Separated, count: int | None) -> None:
        for segment in HotColdOrder(given):
            list(islice(segment, count))

    with pytest.raises(ValueError, match=f"{count} batches were read of a segment of 4 cold ones"):
        run(sets(hot=4, cold=8), count)
    short = Separated(Numbered("hot", 4, epochs=1, given=3), Numbered("cold", 8, epochs=1), 1)
    with pytest.raises(ValueError, match="1 batches were read of a segment of 2 hot ones in epoch"):
        run(short, None)


def test_readers_end_with_the_loop() -> None:
    given = sets(hot=4, cold=8)
    for segment in HotColdOrder(given):
        next(iter(segment))
        break
    assert isinstance(given.cold, Numbered)
    assert given.cold.opened == 0
