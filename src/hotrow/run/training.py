"""Systems of a run: what they train on, and what became of them. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from hotrow.engine.profile import Profile
from hotrow.run.config import RunConfig
from hotrow.run.source import AnyBatch, Samples
from hotrow.run.strategy_names import find_named
from hotrow.support.messages import many, warn
from hotrow.systems.fae.fae import FAE
from hotrow.systems.hotline.hotline import Hotline
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream
from hotrow.training.trainer import System


def make_system(
    config: RunConfig, samples: Samples, profile: Profile | None, total_steps: Callable[[], int]
) -> System[AnyBatch] | None:
    """What the run's strategy names beside where rows are; None: batches come as they are."""
    named, budget = find_named(config.embedding.strategy), config.system.hot_budget
    if named.system is None and named.skip is None:
        return None  # evaluation alone need not have a whole batch to train on
    # At least one: a run may have been trained to its end before its record was written.
    steps, test = max(1, total_steps()), _held_back(samples)
    epoch = min(steps, samples.batches_per_epoch)
    if named.system is None:
        assert named.skip is not None
        return _skip(named.skip, config, epoch, test, profile)
    skip = None if named.skip is None else _skip(named.skip, config, epoch, test)
    if named.system == "hotline":
        return Hotline(batches_per_epoch=epoch, skip=skip)
    return FAE(
        hot_budget=budget,
        profile=profile,
        cold="hybrid" if named.system == "fae-hybrid" else "fetched",
        test=test,
        epochs=None if _knows_numbers(samples, steps) else -(-steps // epoch),
        seed=config.data.seed,
        skip=skip,
        # Whole epochs end by themselves.
        most_samples=steps * config.data.batch_size if steps % epoch else None,
    )


def _held_back(samples: Samples) -> Iterable[AnyBatch] | None:
    """Return what is evaluated while samples are chosen; None, with a warning: there is nothing."""
    try:
        samples.split("validation")
    except ValueError as error:
        warn(str(error))
        return None
    return Again(lambda: iter(samples.validation))


def _skip(
    name: str,
    config: RunConfig,
    epoch: int,
    test: Iterable[AnyBatch] | None = None,
    profile: Profile | None = None,
) -> RandomDrop | Slipstream:
    section = config.system
    if name == "random-drop":
        return RandomDrop(section.target, batches_per_epoch=epoch)
    hot = config.embedding.budget if section.hot_budget is None else section.hot_budget
    return Slipstream(
        section.skipping(), hot_budget=hot, profile=profile, test=test, batches_per_epoch=epoch
    )


def skip_of(system: System[AnyBatch] | None) -> RandomDrop | Slipstream | None:
    """What leaves samples out of a run, if anything does."""
    skip = getattr(system, "skip", system)
    return skip if isinstance(skip, RandomDrop | Slipstream) else None


def training_batches(samples: Samples, steps: int, system: System[AnyBatch]) -> Iterable[AnyBatch]:
    """Return the batches to train on. FAE sorts the samples of one epoch, and repeats them."""
    epoch = min(steps, samples.batches_per_epoch)
    if isinstance(system, FAE):
        if _knows_numbers(samples, steps):
            found: Iterable[AnyBatch] = samples.loader(-(-steps // epoch))  # type: ignore[attr-defined]
            return found
        steps = epoch
    return Again(lambda: samples.batches(steps), steps, epoch)


def _knows_numbers(samples: Samples, steps: int) -> bool:
    """Whether samples are told apart by their numbers. Of less than an epoch they are copied: a run
    without FAE has just those."""
    return hasattr(samples, "loader") and steps >= samples.batches_per_epoch


def epochs_of(system: System[AnyBatch] | None) -> int:
    """Of the last run that have ended, where a system counts them."""
    found: int = getattr(system, "epochs", 0)
    return found


def known_steps(system: System[AnyBatch] | None, steps: int) -> int | None:
    """How many steps a run of so many batches has; None: not known, or not yet."""
    if skip_of(system) is not None:
        return None
    return system.total_steps if isinstance(system, FAE) else steps


class Again:
    """Batches that are read from the beginning each time."""

    def __init__(
        self,
        batches: Callable[[], Iterator[AnyBatch]],
        count: int | None = None,
        batches_per_epoch: int | None = None,
    ) -> None:
        self._batches, self._count, self.batches_per_epoch = batches, count, batches_per_epoch

    def __iter__(self) -> Iterator[AnyBatch]:
        return self._batches()

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("how many batches there are is not known")
        return self._count


def record_of(system: System[AnyBatch] | None) -> dict[str, Any]:
    """Its own record, and that of what leaves samples out; empty: there is no system."""
    found: dict[str, Any] = {}
    if isinstance(system, FAE | Hotline):
        found["hotline" if isinstance(system, Hotline) else "fae"] = asdict(system.record)
    skip = skip_of(system)
    if skip is not None:
        found["skip"] = asdict(skip.record)
    return found


def told_of(system: System[AnyBatch] | None) -> dict[str, str]:
    """The same for people, by a word or two."""
    found = {}
    if isinstance(system, FAE):
        found["hot and cold"] = system.described()
    if isinstance(system, Hotline):
        r = system.record
        pinned, times = sum(r.pinned_rows.values()), len(r.learned)
        found["popular samples"] = (
            f"{r.popular_share:.1%} of {r.samples:,}; {r.split_batches:,} of {r.batches:,} batches "
            f"trained in two parts; {pinned:,} rows pinned, chosen {many(times, 'time')}"
            if r.samples
            else f"none was looked for: all {r.batches:,} batches went by while rows were learned"
        )
    skip = skip_of(system)
    if skip is not None:
        s = skip.record
        stale, hot = sum(s.stale_rows.values()), sum(s.hot_rows.values())
        rows = f"; {stale:,} of {hot:,} hot rows are stale" if hot else ""
        stopped = f"; {s.stopped}" if s.stopped else ""
        found["left out"] = f"{s.dropped:,} of {s.offered:,} samples offered{rows}{stopped}"
    return found
