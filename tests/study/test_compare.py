"""What `hotrow compare` is made of: distances, clocks, kept batches, names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import SMALL_SETTINGS
from hotrow.data import SyntheticClicks, SyntheticConfig
from hotrow.run.config import RunConfig, load
from hotrow.study.compare import Comparison, _Clock, choose
from hotrow.study.likeness import Apart, Distance, Reference, Tolerance, bits_of, unlike
from hotrow.study.systems import SYSTEMS, SystemKind, find_system, register, reordered_batches
from hotrow.support.records import EvalRecord
from hotrow.systems.slipstream.skip import SkipRecord
from step_records import STEP


def config(*overrides: str) -> RunConfig:
    return load(overrides=[*SMALL_SETTINGS, "training.steps=5", *overrides])


class Fixed:
    """A system that is there to be looked at, in chunks of a size of its own."""

    def __init__(self, weight: Tensor, tables: Mapping[str, Tensor], chunk: int) -> None:
        self._weight, self._tables, self._chunk = weight, tables, chunk

    def dense(self) -> Mapping[str, Tensor]:
        return {"top.weight": self._weight}

    def tables(self) -> Sequence[str]:
        return list(self._tables)

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        for place, part in enumerate(self._tables[table].split(self._chunk)):
            yield place * self._chunk, part


def fixed(*, chunk: int = 4, change: float = 0.0) -> Any:
    generator = torch.Generator().manual_seed(1)
    tables = {name: torch.rand(10, 3, generator=generator) for name in ("a", "b")}
    tables["b"][7, 1] += change
    return Fixed(torch.ones(2, 2), tables, chunk)


LOSSES = [0.5, 0.25, math.nan]


def test_bits_tell_what_differs_and_do_not_depend_on_chunks() -> None:
    bits = bits_of(fixed(), LOSSES)
    assert unlike(bits, bits_of(fixed(chunk=3), LOSSES)) == []
    assert unlike(bits, bits_of(fixed(change=1e-7), LOSSES)) == ["rows of table b"]
    assert unlike(bits, bits_of(fixed(), [0.5, 0.25])) == ["losses"]
    other = fixed()
    other._weight = torch.tensor([[1.0, 1.0], [1.0, -0.0]])
    assert unlike(bits, bits_of(other, LOSSES)) == ["top.weight"]


def test_distances_are_those_of_all_values(tmp_path: Path) -> None:
    reference = Reference(tmp_path, Tolerance())
    bits_of(fixed(), LOSSES, copy=reference)
    same = reference.distance(fixed(chunk=7), LOSSES)
    assert same is not None
    assert Tolerance().holds(same)
    assert (same.values.values, same.values.unlike, same.values.largest) == (4 + 60, 0, 0.0)
    far = reference.distance(fixed(chunk=3, change=0.5), [0.5, 0.26, math.nan])
    assert far is not None
    assert not Tolerance().holds(far)
    assert (far.values.unlike, far.values.beyond) == (1, 1)
    assert far.values.largest == pytest.approx(0.5)
    assert far.first_beyond == 2
    assert "(beyond it from step 2); 1 of 64 values by up to 5.0e-01, 1 of them" in str(far)
    assert reference.distance(fixed(), LOSSES[:2]) is None
    for value in (math.inf, math.nan):
        far = reference.distance(fixed(change=value), LOSSES)
        assert far is not None
        assert (far.values.beyond, far.values.largest) == (1, math.inf)
    reference.close()
    assert not list(tmp_path.iterdir())  # it never had a name


def test_a_clock_leaves_the_first_steps_out() -> None:
    clock = _Clock()
    for seconds in (9.0, 1.0, 2.0, 4.0):
        clock.add(replace(STEP, samples=8, seconds=seconds))
    # Of 52 samples offered the first 8 came before the clock, and 20 were left out on the way.
    assert clock.speeds(1, 52) == ([8.0, 4.0, 2.0], pytest.approx(44 / 7))


def test_a_clock_of_a_gpu_reads_marks() -> None:
    times = iter([0.0, 1.0, 3.0])
    waited = []

    def mark() -> Any:
        at = next(times)
        made = SimpleNamespace(at=at, wait=lambda: waited.append(at))
        made.since = lambda earlier: at - earlier.at
        return made

    clock = _Clock(mark)
    for _ in range(3):
        clock.add(replace(STEP, samples=8, seconds=1e-6))  # of the host, which runs ahead
    assert clock.speeds(0, 24) == ([8.0, 4.0], pytest.approx(16 / 3))
    assert waited == [3.0]  # once, when all is over


@pytest.mark.parametrize("most", [None, 0])
def test_batches_that_are_read_anew_train_the_same(tmp_path: Path, most: int | None) -> None:
    settings = config()
    entries = choose(settings, ["lru", "all-fast"], repeat=2)
    comparison = Comparison(settings, entries, most_kept=most)
    turns = list(comparison.run(tmp_path))
    assert sum(turn.stage == "reading" for turn in turns) == (5 if most is None else 0)
    turns = [turn for turn in turns if turn.strategy == "lru"]
    once = ["building", *["training"] * 5, "evaluating", "comparing", "finished"]
    assert [turn.stage for turn in turns if turn.repetition == 1] == once
    again = [each for each in once if each != "evaluating"]  # equal bits need no second one
    assert [turn.stage for turn in turns if turn.repetition == 2] == again
    found = comparison.record("finished")
    assert bool(found.notes) == (most == 0)
    assert [each.equal for each in found.strategies[1:]] == ["bits"]
    assert all(each.repeatable for each in found.strategies)


@pytest.mark.parametrize(("frozen", "expected"), [(0, ["freeze", "unfreeze"]), (7, [])])
def test_objects_that_the_program_has_frozen_stay_frozen(
    frozen: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    monkeypatch.setattr("gc.get_freeze_count", lambda: frozen)
    monkeypatch.setattr("gc.freeze", lambda: done.append("freeze"))
    monkeypatch.setattr("gc.unfreeze", lambda: done.append("unfreeze"))
    settings = config()
    for _ in Comparison(settings, choose(settings, ["lru"], repeat=1)).run(tmp_path):
        assert done == expected[:1]
    assert done == expected


def test_names_of_systems_are_unique_and_known() -> None:
    with pytest.raises(ValueError, match="there is a system 'lru' already"):
        register(replace(SYSTEMS["lru"]))
    with pytest.raises(ValueError, match=r"did you mean 'hybrid-plain'"):
        find_system("hybrid-plane")
    with pytest.raises(ValueError, match="contract must be one of"):
        SystemKind("mine", "", "exactly", build=SYSTEMS["lru"].build)


SKIPPED = (
    "data.rows=[200, 60]", "data.batch_size=32", "data.samples=1280", "training.steps=60",
    "embedding.budget=80%", "data.skew=1.3",
)  # fmt: skip


def test_random_drop_comes_behind_what_it_follows() -> None:
    names = ["lru+random-drop", "hotline", "lru+slipstream", "fae+random-drop"]
    found = [entry.kind.name for entry in choose(config(), names)]
    assert found == [
        "all-fast", "hotline", "lru+slipstream", "lru+random-drop", "fae+random-drop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "base",
    [
        "lru",
        pytest.param("hotline", marks=pytest.mark.slow),
        pytest.param("fae", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # so few samples are not what systems are made for
def test_as_many_samples_are_dropped_at_random(tmp_path: Path, base: str) -> None:
    settings = config(*SKIPPED)
    names = [f"{base}+random-drop", f"{base}+slipstream"]
    comparison = Comparison(settings, choose(settings, names, repeat=1))
    list(comparison.run(tmp_path))
    found = comparison.record("finished")
    _, skipped, control = found.strategies
    assert control.samples == skipped.samples < 60 * 32
    (note,) = (each for each in found.notes if "leaves out" in each)
    dropped = 60 * 32 - skipped.samples
    assert note.startswith(f"{control.strategy} leaves out as many samples as {skipped.strategy}: ")
    assert f": {dropped:,} of " in note


@pytest.mark.parametrize(
    ("aucs", "said"),
    [
        ((0.75, 0.752), "AUC 0.00200 below lru.random-drop.* more than seeds usually differ by"),
        ((0.7502, 0.75), "AUC 0.00020 above lru.random-drop.* no more than seeds differ by"),
        ((math.nan, 0.75), None),
    ],
)
def test_slipstream_is_judged_by_its_control(aucs: tuple[float, float], said: str | None) -> None:
    settings = config()
    comparison = Comparison(settings, choose(settings, ["lru+slipstream", "lru+random-drop"]))
    comparison._left_out["lru+slipstream"] = SkipRecord("samples", offered=100, dropped=9)
    for entry, auc in zip(comparison.entries[1:], aucs, strict=True):
        entry.quality = EvalRecord(step=1, samples=10, auc=auc, log_loss=0.5)
    found = [note for note in comparison.record("finished").notes if "AUC" in note]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])
    comparison._left_out["lru+slipstream"] = SkipRecord("samples", offered=100, dropped=0)
    assert not any("AUC" in note for note in comparison.record("finished").notes)


@pytest.mark.filterwarnings("ignore")
def test_random_drop_without_samples_to_follow_has_the_target(tmp_path: Path) -> None:
    settings = config(*SKIPPED, "system.mode=rows", "system.target=0.25", "training.steps=40")
    names = ["lru+slipstream", "lru+random-drop"]
    comparison = Comparison(settings, choose(settings, names, repeat=1))
    list(comparison.run(tmp_path))
    found = comparison.record("finished")
    assert [each.samples for each in found.strategies] == [1280, 1280, 960]
    said = "leaves out 25% of all samples, since lru+slipstream leaves out updates"
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize(("seconds", "is_noted"), [(3.0, True), (0.9, False)])
def test_what_is_evaluated_while_it_trains_is_noted(seconds: float, is_noted: bool) -> None:
    settings = config()
    comparison = Comparison(settings, choose(settings, ["lru+slipstream"]))
    system: Any = SimpleNamespace(on_the_way=(1280, seconds))
    comparison._note_evaluated(comparison.entries[1], system, 10.0)
    notes = comparison.record("finished").notes
    said = "lru+slipstream evaluated 1,280 samples while it trained, in 30% of the time"
    assert [said in note for note in notes] == [True] * is_noted


def apart(largest: float, beyond: int, first_beyond: int | None) -> Distance:
    losses = Apart(values=10, unlike=10, beyond=0 if first_beyond is None else 1, largest=largest)
    return Distance(losses, Apart(values=900, unlike=100, beyond=beyond, largest=1.0), first_beyond)


@pytest.mark.parametrize(
    ("found", "is_near"),
    [
        (apart(0.01, 20, 40), True),
        (apart(0.03, 20, 40), False),  # losses are further away than rounding brings them
        (apart(0.01, 70, 40), False),  # and so are values
        (apart(0.01, 20, 5), False),  # before rounding can have done it
    ],
)
def test_rounding_is_measured_by_rounding(found: Distance, is_near: bool) -> None:
    controls = [apart(0.001, 30, None), apart(0.01, 10, 30)]
    assert Tolerance().is_as_near(found, controls) is is_near


def test_a_reordered_batch_has_the_same_samples() -> None:
    clicks = SyntheticClicks(SyntheticConfig(rows=(50, 9), batch_size=32, num_dense=2))
    samples: Any = SimpleNamespace(batches=lambda steps: clicks.batches(0, steps))
    (before,), (after,) = clicks.batches(0, 1), reordered_batches(samples, 1)(1)
    assert not torch.equal(before.dense, after.dense)
    assert sorted(before.dense.tolist()) == sorted(after.dense.tolist())


def test_what_is_beyond_the_tolerance_stands_beside_rounding_alone(tmp_path: Path) -> None:
    tiny = Tolerance(0.0, 1e-9, times_as_far=100, early_steps=0)  # no rounding is within it
    settings = config("embedding.optimizer.name=sgd")
    entries = choose(settings, ["hybrid-plain", "lru"], repeat=1)
    comparison = Comparison(settings, entries, tolerance=tiny)
    turns = [turn.strategy for turn in comparison.run(tmp_path) if turn.stage == "finished"]
    assert turns == ["all-fast", "hybrid-plain", "lru", "reordered-1", "reordered-2"]
    found = {each.strategy: each for each in comparison.record("finished").strategies}
    assert set(found) == {"all-fast", "hybrid-plain", "lru"}
    assert found["hybrid-plain"].equal == "tolerance"
    assert found["hybrid-plain"].equal_note.count("Rounding alone, by another order") == 2
    assert found["lru"].equal == "bits"


def test_a_full_disk_leaves_distances_out(tmp_path: Path) -> None:
    settings = config("embedding.optimizer.name=sgd")
    entries = choose(settings, ["hybrid-plain", "hybrid"], repeat=1)
    comparison = Comparison(settings, entries, spare_bytes=1 << 62)
    list(comparison.run(tmp_path))
    found = {each.strategy: each for each in comparison.record("finished").strategies}
    assert found["hybrid"].equal == "bits"  # which need no room
    assert found["hybrid-plain"].equal == "not compared"
    assert f"must lie on the disk of {tmp_path}" in found["hybrid-plain"].equal_note


def test_the_runs_own_strategy_is_among_the_usual_ones() -> None:
    names = [entry.kind.name for entry in choose(config())]
    assert names == ["all-fast", "hybrid", "static", "lru", "scratchpipe", "lookahead"]
    assert "uncached" in [e.kind.name for e in choose(config("embedding.strategy=uncached"))]
