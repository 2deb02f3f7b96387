"""FAE: hot samples, whose rows are all pinned, and cold ones, trained in turns.

    fae = FAE(test=held_out)
    trainer = Trainer(model, loss_fn, ..., system=fae)      # a collection with strategy="static"
    for record in trainer.run(loader):                      # all epochs of the loader
        ...
    print(fae.described())

A run counts accesses in a sample of the loader, pins the most used rows, separates hot samples from
cold ones, and trains segments of one kind and the other (hot_cold_schedule.py). The order of
samples differs from the loader's; each sample comes once an epoch. Next to plain training in the
same order the rows are equal to the bit. This module decides when each step happens; the others
decide how.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.profile import Profile
from hotrow.engine.stages import LATE
from hotrow.inputs.batch import Batch, parse
from hotrow.inputs.hotset import HotSet, popular
from hotrow.inputs.samples import Join, Take, check_both
from hotrow.support.messages import warn
from hotrow.support.progress import no_progress
from hotrow.support.units import parse_bytes, show_bytes
from hotrow.systems.agreement import check_same, first_alone, is_first, of_first
from hotrow.systems.calibrate import (
    SAMPLED,
    SMALL_TABLE_BYTES,
    AccessCounts,
    Chosen,
    Estimate,
    RandEmBox,
    by_threshold,
    bytes_of_rows,
    exact_rows,
    most_used_first,
    room_for_pins,
    row_bytes,
    sampled,
    top_k,
)
from hotrow.systems.fae.hot_cold_schedule import HotColdOrder, Kind, Separated, ShuffleRate
from hotrow.systems.fae.separate import (
    NumberedSamples,
    SetOptions,
    check_evaluated_again,
    check_read_again,
    separate,
)
from hotrow.systems.slipstream.skip import Bindable, Skip, check_skip
from hotrow.training.trainer import Trainer

Choice = Literal["top-k", "threshold"]
Cold = Literal["fetched", "hybrid"]
Progress = Callable[[str, int], None]  # "counting" or "separating", and samples done

_ESTIMATES: dict[str, Estimate] = {"exact": exact_rows, "rand-em-box": RandEmBox()}
_PUBLISHED_BUDGET = "256MB"


@dataclass(frozen=True)
class FAERecord:
    """Decisions of a run, and their results so far."""

    hot_rows: Mapping[str, int] = field(default_factory=dict)  # pinned, by table
    hot_bytes: int = 0  # of hot rows, with their optimizer state
    covered: float = 0.0  # share of the counted accesses that read hot rows
    threshold: float | None = None  # share of its table's accesses that makes a row hot
    counted_samples: int = 0  # 0 with a profile
    counted_seconds: float = 0.0  # for counting, before the first step
    separated_seconds: float = 0.0  # for separating hot samples from cold ones
    hot_samples: int = 0
    cold_samples: int = 0
    hot_batches: int = 0  # per epoch
    cold_batches: int = 0
    reused: bool = False  # an earlier run separated the samples
    switches: int = 0  # from one kind of segment to the other
    synchronised_bytes: int = 0  # of hot rows, copied at switches
    rates: tuple[tuple[int, float], ...] = ()  # step, and percent of a set's batches in a segment
    test_losses: tuple[tuple[int, float], ...] = ()  # step, loss
    pins_gave_way: bool = False  # to batches with more rows than fit beside them
    notes: tuple[str, ...] = ()  # unusual facts, in sentences

    @property
    def num_hot_rows(self) -> int:
        return sum(self.hot_rows.values())

    @property
    def hot_share(self) -> float:
        """Share of hot samples among all."""
        total = self.hot_samples + self.cold_samples
        return self.hot_samples / total if total else 0.0


class FAE:
    """Trains hot samples, whose rows are all pinned, and cold ones in segments of their own.

    Hot rows are the most used rows in a sample of the loader (`sample_rate` of its samples), or by
    the counts of a `profile`: as many as fit `hot_budget` (bytes, "256MB", or "5%" of all rows; by
    default as many as the collection can pin). They are chosen by "top-k", or by a "threshold" on
    the share of accesses, whose rows are counted (`estimate="exact"`) or estimated ("rand-em-box",
    or any function).

    Rows of `cold` batches that are not pinned are "fetched" for each batch. With "hybrid", as
    published, the CPU reads and updates all rows of cold batches, and every switch brings hot rows
    up to date, with their optimizer state.

    `test` has batches to evaluate on after each pair of segments. By their loss the Shuffle
    Scheduler makes segments shorter or longer; `shuffle_rate` is its first rate, in percent. Where
    all samples are of one kind, every segment is followed by an evaluation.

    `skip` leaves out samples of hot segments (Slipstream, RandomDrop); its own `test` is used where
    none is given here. A run ends after `most_samples`, skipped ones included; the last batch is
    not cut.

    The loader must be one that can be read again. Its hot and cold samples are kept in memory or in
    a `folder`; of a `Loader` only their numbers, which the next run finds in the folder. `epochs`
    and `seed` are for other loaders, which are one epoch. `take` and `join`, both of them, are for
    batches that are not made of tensors alone; such batches are kept in memory. Changes results:
    the same samples form other batches.
    """

    keeps_batches = True

    def __init__(
        self,
        *,
        hot_budget: str | float | None = None,
        sample_rate: float = SAMPLED,
        profile: Profile | None = None,
        choose: Choice = "top-k",
        estimate: str | Estimate = "exact",
        small_table_bytes: int | None = None,
        cold: Cold = "fetched",
        test: Iterable[Any] | None = None,
        shuffle_rate: float = 50.0,
        folder: str | Path | None = None,
        epochs: int | None = None,
        seed: int = 0,
        take: Take | None = None,
        join: Join | None = None,
        skip: Bindable | None = None,
        most_samples: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`small_table_bytes`: tables up to that size are hot as a whole; by default 1 MiB with
        "threshold", as published, and none with "top-k"."""
        _refuse_other("choose", choose, ("top-k", "threshold"))
        _refuse_other("cold", cold, ("fetched", "hybrid"))
        if isinstance(estimate, str):
            _refuse_other("estimate", estimate, tuple(_ESTIMATES))
            estimate = _ESTIMATES[estimate]
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate must be more than 0 and at most 1, not {sample_rate!r}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1, not {epochs!r}")
        if most_samples is not None and most_samples < 1:
            raise ValueError(f"most_samples must be at least 1, not {most_samples!r}")
        check_both(take, join)
        check_skip(skip)
        if test is None:
            test = getattr(skip, "test", None)
        check_evaluated_again(test)
        self._most_samples, self._offered = most_samples, 0
        self.hot_budget, self.sample_rate, self.choose = hot_budget, sample_rate, choose
        self.estimate, self.cold, self._profile = estimate, cold, profile
        default = SMALL_TABLE_BYTES if choose == "threshold" else 0
        self.small_table_bytes = default if small_table_bytes is None else small_table_bytes
        self._test, self._rate, self._folder = test, ShuffleRate(shuffle_rate), folder
        self._first_rate = shuffle_rate
        self._epochs, self._seed, self.take, self._join = epochs, seed, take, join
        self.skip = skip
        self._skip: Skip | None = None  # bound to the hot rows
        self._progress = progress or no_progress
        self._separated: tuple[Iterable[Any], Separated] | None = None  # loader and its sets
        self._rows: dict[str, Tensor] = {}  # to pin, hottest first
        self._pins_version = 0
        self._room = 0  # bytes of rows that can be pinned
        self._began = self._ended = 0  # first step of the last run, and its finished epochs
        self.record = FAERecord()
        self.hot: HotSet | None = None  # what is pinned

    @classmethod
    def as_published(cls, **options: Any) -> Self:
        """Return the published settings: 256 MB of hot rows by top-k, cold batches on the CPU."""
        return cls(**{"hot_budget": _PUBLISHED_BUDGET, "cold": "hybrid", **options})

    def attach(self, trainer: Trainer[Any]) -> None:
        """Bind to a trainer; refuse a model without exactly one collection of strategy "static"."""
        embedding, self._ids = trainer.one_collection("FAE pins the hot rows")
        strategy = embedding.strategy
        if not (strategy.has_slots and strategy.pinned_part and strategy.refetch):
            raise ValueError(
                f"FAE needs a collection with strategy='static', whose pinned rows it chooses; "
                f"this one has {strategy.name!r}"
            )
        embedding.pipeline.move_in(LATE)
        self._trainer, self._embedding = trainer, embedding
        self._separated = self._skip = self.hot = None
        self._rate, self.record = ShuffleRate(self._first_rate), FAERecord()

    # -- what is trained when ----------------------------------------------------------

    def passes(self, batches: Iterable[Any]) -> Generator[Iterable[Any]]:
        """Yield segments; the trainer trains one before it asks for the next."""
        self._leave_host()
        sets = self._prepared(batches)
        order = HotColdOrder(sets, rate=self._rate, evaluates=self._test is not None)
        epoch, self._began, self._ended = -1, self._trainer.step, 0
        self._note_rate()
        before: Kind | None = None
        self._offered = 0
        try:
            with closing(iter(order)) as segments:
                for segment in segments:
                    if segment.epoch != epoch:
                        epoch = self._ended = segment.epoch
                        self._begin_to_skip(sets.hot.batches_per_epoch)
                    self._switch(before, segment.kind)
                    before = segment.kind
                    batches = self._up_to_most(segment)
                    if self._skip is not None and segment.kind == "hot":
                        yield from self._skip.segments(batches)
                    else:
                        yield batches
                    if self._is_enough:
                        break
                    if segment.ends_pair:
                        self._rate.note(self._evaluated())
                        self._note_rate()
            self._ended = epoch + 1
            self._leave_host()
        finally:
            if self._skip is not None:
                self._skip.close()
            if self._embedding.ranks is None:  # a rank that has failed must not wait for others
                self._leave_host()
            self._note(pins_gave_way=self._embedding.pins_version != self._pins_version)

    @property
    def epochs(self) -> int:
        """Finished epochs of the last run."""
        if self.skip is not None or self._separated is None:
            return self._ended
        # Every batch is a step, so an epoch has ended with its last step.
        steps = self._separated[1].batches_per_epoch
        return max(self._ended, (self._trainer.step - self._began) // steps)

    @property
    def _is_enough(self) -> bool:
        return self._most_samples is not None and self._offered >= self._most_samples

    def _up_to_most(self, batches: Iterable[Any]) -> Iterable[Any]:
        for batch in batches:
            if self._most_samples is not None:
                self._offered += self._parsed(batch).num_samples
            yield batch
            if self._is_enough:
                return

    @property
    def total_steps(self) -> int | None:
        """Steps of a run; None: unknown, because samples are not separated yet, some are skipped,
        or the run does not end with an epoch."""
        if self._separated is None or self.skip is not None:
            return None
        _, sets = self._separated
        if self._most_samples is not None and self._most_samples < sets.epochs * sets.samples:
            return None
        return sets.epochs * sets.batches_per_epoch

    def _note(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)

    def _switch(self, before: Kind | None, kind: Kind) -> None:
        if before is not None and before != kind:
            self._note(switches=self.record.switches + 1)
        if self.cold == "hybrid":
            by_host = kind == "cold"
            change = self._embedding.train_on_host if by_host else self._embedding.train_in_slots
            self._sync(change())

    def _leave_host(self) -> None:
        if self._embedding.pins.is_on_host:
            self._sync(self._embedding.train_in_slots())

    def _sync(self, moved: int) -> None:
        self._note(synchronised_bytes=self.record.synchronised_bytes + moved)

    def _begin_to_skip(self, hot_batches: int) -> None:
        """Begin an epoch of hot segments for the skip, if there is one."""
        if self.skip is None or not hot_batches:
            return
        if self._skip is None:
            assert self.hot is not None
            self._skip = self.skip.bound(self._embedding, self.hot, hot_batches, ids=self._ids)
        else:
            self._skip.begin(hot_batches)

    def _evaluated(self) -> float | None:
        """Return the mean test loss; None without test batches."""
        if self._test is None:
            return None
        loss = self._trainer.mean_loss(self._test, whole=True)
        self._note(test_losses=(*self.record.test_losses, (self._trainer.step, loss)))
        if self._skip is not None:
            self._skip.note(loss)
        return loss

    def _note_rate(self) -> None:
        rates, now = self.record.rates, self._rate.percent
        if not rates or rates[-1][1] != now:
            self._note(rates=(*rates, (self._trainer.step, now)))

    # -- hot rows and hot samples ------------------------------------------------------

    def _prepared(self, batches: Iterable[Any]) -> Separated:
        """Count, pin and separate, once for the same batches; return the sets."""
        if self._separated is not None and self._separated[0] is batches:
            if self._embedding.pins_version != self._pins_version:  # pins changed since
                self._pin()
            return self._separated[1]
        check_read_again(batches)
        if isinstance(batches, NumberedSamples) and self._epochs is not None:
            raise ValueError(
                f"a {type(batches).__name__} knows how many epochs it has; leave epochs= out"
            )
        self._separated = self._skip = None
        started = perf_counter()
        counts = self._counts(batches)
        chosen = self._chosen(counts)
        self._note(counted_seconds=perf_counter() - started)
        hot = chosen.hot
        check_same(self._embedding, "what FAE has counted", hot.is_hot, counts.num_samples)
        self._rows = most_used_first(self._embedding, hot, counts.of)
        self.hot = self._pin()
        self._describe(chosen, self.hot, counts)
        started = perf_counter()
        sets = self._separate(batches, self.hot)
        self._note(separated_seconds=perf_counter() - started)
        self._separated = (batches, sets)
        return sets

    def _chosen(self, counts: AccessCounts) -> Chosen:
        self._room = room_for_pins(self._embedding)
        budget = min(self._room, self._budget_bytes())
        sizes, small = row_bytes(self._embedding), self.small_table_bytes
        if self.choose == "top-k":
            return top_k(counts, sizes, budget, small_table_bytes=small)
        return by_threshold(counts, sizes, budget, estimate=self.estimate, small_table_bytes=small)

    def _counts(self, batches: Iterable[Any]) -> AccessCounts:
        tables = self._embedding.tables
        if self._profile is not None:
            for _ in self._counted(islice(batches, 1)):
                pass
            return AccessCounts.of_profile(tables, self._profile)
        counts = AccessCounts(tables)
        for batch in sampled(self._counted(batches), self.sample_rate, seed=self._seed):
            counts.add(batch.to("cpu"))
        return counts

    def _counted(self, batches: Iterable[Any]) -> Iterator[Batch]:
        """Yield the ids of an epoch; reserve memory for batches like the first."""
        # A loader of several epochs has this attribute.
        epoch, is_empty = islice(batches, getattr(batches, "batches_per_epoch", None)), True
        for batch in epoch:
            if is_empty:
                self._embedding.reserve_like(self._ids(self._trainer.whole.part_of(batch)))
                is_empty = False
            parsed = self._parsed(batch)
            yield parsed
            self._progress("counting", parsed.num_samples)
        if is_empty:
            raise ValueError("the loader gave no batch to find hot rows in")

    def _parsed(self, batch: Any) -> Batch:
        return parse(self._ids(batch), self._embedding.features, None)

    def _pin(self) -> HotSet:
        hot = self._embedding.pin_rows(self._rows)
        self._pins_version = self._embedding.pins_version
        return hot

    def _describe(self, chosen: Chosen, hot: HotSet, counts: AccessCounts) -> None:
        is_all = hot.num_rows == hot.places.num_rows
        asked = 0 if is_all else self._budget_bytes()
        notes = (*chosen.notes, *_notes_on_room(asked, self._room, hot.num_rows))
        for note in notes:
            warn(note)
        self._note(
            hot_rows=hot.counts(),
            hot_bytes=hot.num_bytes(row_bytes(self._embedding)),
            covered=counts.covered(hot),
            threshold=chosen.threshold,
            counted_samples=counts.num_samples,
            notes=notes,
        )

    def _separate(self, batches: Iterable[Any], hot: HotSet) -> Separated:
        work = partial(
            separate,
            batches,
            _hot_by(self._parsed, hot),
            SetOptions(
                epochs=self._epochs or 1,
                seed=self._seed,
                pin_memory=torch.cuda.is_available(),
                take=self.take,
                join=self._join,
            ),
            folder=self._folder,
            key=_key_of(hot),
            advance=lambda count: self._progress("separating", count),
            writes=is_first(self._embedding),
        )
        # Several ranks find in a folder what the first one has written there.
        waits = self._folder is not None and isinstance(batches, NumberedSamples)
        sets = _alike_on_ranks(self._embedding, work, waits=waits)
        self._note(
            hot_samples=sets.hot.samples,
            cold_samples=sets.cold.samples,
            hot_batches=sets.hot.batches_per_epoch,
            cold_batches=sets.cold.batches_per_epoch,
            reused=sets.reused,
        )
        return sets

    def _budget_bytes(self) -> int:
        """Return the hot budget; without one, all the room there is."""
        if self.hot_budget is None:
            return self._room
        return parse_bytes(self.hot_budget, total=bytes_of_rows(self._embedding))

    # ----------------------------------------------------------------------------------

    def described(self) -> str:
        """Describe the run in sentences."""
        if self._separated is None:
            return "nothing was trained yet"
        rows = sum(table.num_embeddings for table in self._embedding.tables)
        is_counted = self._profile is None
        said = _sentences(self.record, rows, is_counted=is_counted, cold=self.cold)
        return "; ".join([*said, *self.record.notes])


def _sentences(r: FAERecord, num_rows: int, *, is_counted: bool, cold: Cold) -> list[str]:
    """Describe what was chosen of so many rows, separated and trained."""
    where = f"in {r.counted_samples:,} counted samples" if is_counted else "by a profile"
    served = "none" if math.isnan(r.covered) else f"{r.covered:.1%}"
    unusual = []
    if is_counted and r.covered == 1 and r.num_hot_rows < num_rows:
        unusual.append("every row that was counted is hot: a larger sample may find more")
    if r.pins_gave_way:
        unusual.append("pinned rows gave way to batches larger than the first")
    return [
        f"{r.num_hot_rows:,} hot rows ({show_bytes(r.hot_bytes)}) serve {served} of the "
        f"accesses {where}",
        f"{r.hot_samples:,} of {r.hot_samples + r.cold_samples:,} samples are hot "
        f"({r.hot_share:.1%}): {r.hot_batches:,} hot batches and {r.cold_batches:,} cold ones an "
        "epoch" + (", as told apart before" if r.reused else ""),
        f"counting took {r.counted_seconds:,.1f} s and telling them apart "
        f"{r.separated_seconds:,.1f} s, before the first step",
        f"{r.switches:,} switches"
        + (
            f", at which {show_bytes(r.synchronised_bytes)} of hot rows were brought up to date"
            if cold == "hybrid"
            else "; cold rows were fetched"
        ),
        "rate " + ", ".join(f"{rate:g} % from step {step:,}" for step, rate in r.rates),
        *unusual,
    ]


def _notes_on_room(asked: int, room: int, hot_rows: int) -> Iterator[str]:
    """Describe a budget, in bytes, that does not fit the room for pinned rows."""
    if asked > room:
        yield (
            f"a hot budget of {show_bytes(asked, beside=room)} is more than there is room for "
            f"beside a batch: {show_bytes(room, beside=asked)}, in which {hot_rows:,} rows are hot"
        )
    if not room:
        yield (
            "the collection's budget has no room to pin rows beside a batch: a larger one has, or "
            "one for smaller batches"
        )


def _hot_by(parsed: Callable[[Any], Batch], hot: HotSet) -> Callable[[Any], Tensor]:
    """Return a function that says which samples of a batch are hot."""
    places = {torch.device("cpu"): hot}

    def is_hot(batch: Any) -> Tensor:
        ids = parsed(batch)
        device = ids.values.device
        if device not in places:
            places[device] = hot.to(device)
        return popular(ids, places[device])

    return is_hot


def _alike_on_ranks(
    embedding: EmbeddingBagCollection, work: Callable[[], Separated], *, waits: bool
) -> Separated:
    """Return the sets of samples, the same on all ranks. `waits`: the first one makes them before
    the others do."""
    sets = first_alone(embedding, work) if waits else work()
    sizes = [x for each in (sets.hot, sets.cold) for x in (each.samples, each.batches_per_epoch)]
    check_same(embedding, "the samples that FAE has told apart", *sizes)
    return replace(sets, reused=of_first(embedding, sets.reused))


def _key_of(hot: HotSet) -> str:
    """Return a checksum that names the hot rows."""
    digest = hashlib.sha256()
    for table in hot.places.tables:
        digest.update(f"{table.name} {table.num_embeddings}\n".encode())
        digest.update(np.packbits(hot.mask(table.name).cpu().numpy()).tobytes())
    return digest.hexdigest()


def _refuse_other(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")
