"""What a run would do on many ranks: bytes between them, memory, step times; and how many to take.

Up to so many lookups, the batches of all ranks are drawn; beyond that, expected values take their
place (`rank_popularity.py`). Either way planners run for a few owners only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.run.config import RunConfig
from hotrow.sizing.budgets import LEFT, budget_for, buffer_part_of, geometric, plan_bytes_of
from hotrow.sizing.cost import Work
from hotrow.sizing.links import Between, find_link
from hotrow.sizing.machines import Machine, between_of
from hotrow.sizing.rank_cost import ASSUMPTIONS, HEADER_BYTES, HEADERS, RankWork, ranked_step
from hotrow.sizing.simulator import Simulated
from hotrow.study.lookups import OfRun
from hotrow.study.rank_popularity import Popularities
from hotrow.study.rank_traffic import (
    Choices,
    Exchanged,
    RankTables,
    Traffic,
    check_ranks,
    draw_exchange,
)
from hotrow.study.sizing import guessed_dense_ms
from hotrow.support.messages import many
from hotrow.support.records import RankAdvice
from hotrow.support.units import show_bytes

_MOST_DRAWN = 1 << 27  # lookups of all ranks and steps together
_MOST_BATCHES = 1 << 12  # likewise: a batch takes some time, however small it is
_MOST_MARKED = 1 << 29  # rows, with a byte for each while batches are drawn
_KEPT = 9  # batches whose vectors a rank has: eight that came, and one whose early rows come
_TRIED = 6  # numbers of slots
_LEAST_BATCHES = 2.5  # that slots must hold, so that a batch can arrive while one trains

Facts = dict[str, Any]


@dataclass(frozen=True)
class Scaling:
    """A run on several ranks, with its batch size on each."""

    config: RunConfig
    trace: OfRun
    ranks: Sequence[int]
    batches: int
    warm_up: int
    owners: int = 2  # that are planned, for each number of ranks
    machine: Machine | None = None
    links: str = ""  # inside a machine and between machines, with a comma; "": the machine's
    dense_ms: float | None = None
    replicate: int = 0  # bytes of each rank
    on_batch: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        check_ranks(self.ranks)
        if self.machine is not None:
            self.between()  # raises if its links are not known

    def between(self) -> Between:
        assert self.machine is not None
        found = between_of(self.machine)
        if not self.links:
            return found
        names = [name.strip() for name in self.links.split(",")]
        if len(names) != 2:
            raise ValueError(
                f"--links {self.links}: name two, inside a machine and between machines, such as "
                "nvlink,ethernet"
            )
        for name in names:
            find_link(name, found.links, where="--links")
        return replace(found, inside=names[0], outside=names[1])

    def steps(self, ahead: int) -> int:
        """Return the steps of all owners that are planned, with so many batches known ahead."""
        owners = sum(min(self.owners, ranks) for ranks in self.ranks)
        return owners * (self.warm_up + self.batches + ahead)


class Predictor:
    """Predicts a run for one number of ranks after another."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling, self.tables = scaling, RankTables(scaling.config, scaling.trace)
        self._popularities: Popularities | None = None
        self._replicas = self.tables.replicas(scaling.replicate) if scaling.replicate else None
        self._dense_ms = scaling.dense_ms or 0.0
        if scaling.dense_ms is None and scaling.machine is not None:
            self._dense_ms = guessed_dense_ms(scaling.config, scaling.machine)

    @property
    def popularities(self) -> Popularities:
        """Built once: it takes a second for large tables."""
        if self._popularities is None:
            data = self.scaling.config.data
            if self.scaling.config.model.num_steps is not None:
                raise ValueError(
                    "so many ranks are predicted for models of clicks only, and this one reads "
                    "sequences; give fewer --ranks, or lower --batches and --warm-up"
                )
            if data.kind != "prepared" and (data.drift or data.correlated):
                raise ValueError(
                    "so many ranks are predicted from how popular rows are, without data.drift and "
                    "data.correlated; --set data.drift=0 --set data.correlated=0, or give fewer "
                    "--ranks"
                )
            count = 0 if self._replicas is None else len(self._replicas)
            self._popularities = Popularities(self.tables, seed=data.seed, replicas=count)
        return self._popularities

    def draws(self, ranks: int, ahead: int) -> bool:
        """Return whether the batches of all ranks are drawn."""
        given, trace = self.scaling, self.scaling.trace
        drawn = (given.warm_up + given.batches + ahead) * ranks
        lookups = drawn * trace.batch_size * len(trace.rows)
        is_small = self.tables.layout.num_rows <= _MOST_MARKED
        return is_small and lookups <= _MOST_DRAWN and drawn <= _MOST_BATCHES

    def exchange(self, ranks: int, choices: Choices, *, is_drawn: bool) -> Exchanged:
        given = self.scaling
        options: dict[str, Any] = {
            "batches": given.batches,
            "warm_up": given.warm_up,
            "choices": choices,
            "ahead": max((strategy.look_ahead or 0 for strategy, _ in choices), default=0),
            "planned": given.owners,
            "replicas": self._replicas,
            "on_batch": given.on_batch,
        }
        if is_drawn:
            return draw_exchange(self.tables, ranks, **options)
        return self.popularities.exchange(ranks, **options)

    def facts(
        self, exchanged: Exchanged, strategy: Strategy, planned: Sequence[Simulated]
    ) -> Facts:
        """Return what is predicted of a strategy with some slots, as plain values."""
        ranks, tables = exchanged.ranks, self.tables
        traffic = _of_strategy(exchanged.plain, strategy)
        owned = int(tables.owned_rows(tables.owners(ranks)).max())
        batches = sum(x.batches for x in planned)
        fetched, evicted, distinct = (
            sum(getattr(x, name) for x in planned) / batches
            for name in ("fetched_rows", "evicted_rows", "unique_rows")
        )
        header_bytes = HEADERS * HEADER_BYTES * (ranks - 1)
        facts: Facts = {
            "ranks": ranks,
            "strategy": strategy.name,
            "slots": planned[0].slots,
            "depth": planned[0].depth,
            "drawn": exchanged.is_drawn,
            "owners_planned": len(planned),
            "rows_owned": owned,
            "lookups": exchanged.lookups,
            "unique_rows": exchanged.unique_rows,
            "owner_rows": distinct,
            "balance": traffic.balance,
            "id_bytes": traffic.id_bytes,
            "mark_bytes": traffic.mark_bytes,
            "early_row_bytes": traffic.early_bytes,
            "late_row_bytes": traffic.late_bytes,
            "grad_bytes": traffic.grad_bytes,
            "sent_bytes": traffic.sent_bytes,
            "header_bytes": header_bytes,
            "fetched_rows": fetched,
            "evicted_rows": evicted,
            "link_bytes": (fetched + evicted) * tables.row_bytes,
            "chunked_batches": sum(x.chunked_batches for x in planned),
            **self._memory(exchanged, strategy, planned[0].slots, owned),
        }
        if exchanged.replicated is not None:
            other = _of_strategy(exchanged.replicated, strategy)
            facts["replicated_rows"] = other.replicated_rows
            facts["balance_replicated"] = other.balance
            facts["sent_bytes_replicated"] = other.sent_bytes
        if self.scaling.machine is not None and not facts["chunked_batches"]:
            work = self._work(exchanged, traffic, facts)
            facts |= self._times(self.scaling.machine, strategy, work)
        return facts

    def _memory(
        self, exchanged: Exchanged, strategy: Strategy, slots: int, owned: int
    ) -> dict[str, int]:
        """Return bytes of a rank: of fast memory, and of the host's."""
        tables = self.tables
        plans = plan_bytes_of(exchanged.asked_rows * exchanged.plain.balance)
        budget = budget_for(
            slots,
            row_bytes=tables.row_bytes,
            num_rows=owned,
            buffer_part=buffer_part_of(strategy, torch.device("cuda")),
            plan_bytes=plans,
        )
        vectors = _KEPT * exchanged.unique_rows * tables.vector_bytes if exchanged.ranks > 1 else 0
        marks = owned if strategy.overlapped and exchanged.ranks > 1 else 0  # a byte for each row
        return {
            "budget_bytes": budget,
            "vector_bytes": int(vectors),
            "host_bytes": owned * tables.row_bytes + marks,
        }

    def _work(self, exchanged: Exchanged, traffic: Traffic, facts: Facts) -> RankWork:
        tables = self.tables
        owned = Work(
            lookups=exchanged.asked_rows if exchanged.ranks > 1 else exchanged.lookups,
            unique_rows=facts["owner_rows"],
            row_bytes=tables.row_bytes,
            table_bytes=facts["rows_owned"] * tables.row_bytes,
            fetched_rows=facts["fetched_rows"],
            evicted_rows=facts["evicted_rows"],
            vector_bytes=tables.vector_bytes,
        )
        return RankWork(
            ranks=exchanged.ranks,
            lookups=exchanged.lookups,
            unique_rows=exchanged.unique_rows,
            vector_bytes=tables.vector_bytes,
            asked_rows=exchanged.asked_rows,
            owned=owned,
            balance=traffic.balance,
            id_bytes=traffic.id_bytes,
            mark_bytes=traffic.mark_bytes,
            early_bytes=traffic.early_bytes,
            late_bytes=traffic.late_bytes,
            grad_bytes=traffic.grad_bytes,
        )

    def _times(self, machine: Machine, strategy: Strategy, work: RankWork) -> Facts:
        between = self.scaling.between()
        step = ranked_step(machine, between, strategy, work, dense_ms=self._dense_ms)
        _, far = between.neighbours(work.ranks)
        sent = work.id_bytes + work.mark_bytes + work.early_bytes + work.late_bytes
        sent += work.grad_bytes
        return {
            "machine": machine.name,
            "links": f"{between.inside},{between.outside}",
            "between_machines_bytes": sent * far / max(1, work.ranks - 1),
            "is_prediction": True,
            "dense_ms": self._dense_ms,
            "step_ms": step.ms,
            "all_fast_ms": step.all_fast_ms,
            "of_all_fast": step.all_fast_ms / step.ms,
            "training_ms": step.training_ms,
            "late_ms": step.late_ms,
            "grads_ms": step.grads_ms,
            "early_ms": step.early_ms,
            "host_ms": step.host_ms,
            "samples_per_second": 1e3 * work.ranks * self.scaling.config.data.batch_size / step.ms,
            "limit": step.limit,
        }

    def assumptions(self) -> list[str]:
        """Return in sentences what predictions assume."""
        given = self.scaling
        lines = [
            f"Planners ran for {many(given.owners, 'owner')} of each number of ranks at the most; "
            "the others are taken to move as many rows. A row that the batches of a trace look up "
            "for the first time is fetched; more --warm-up makes these fewer.",
            "Where batches are computed and not drawn, lookups do not depend on one another.",
            f"Fast memory is the budget for these slots; vectors of {_KEPT} batches, the model and "
            "activations come beside it. Host memory is that of the rows.",
        ]
        if given.machine is None:
            return lines
        between = given.between()
        names = dict.fromkeys([between.inside, between.outside, between.messages])
        for name in names:
            link = between.links[name]
            lines.append(
                f"{name}: {link.gb:g} GB/s, {link.us:g} us for an exchange and {link.message_us:g} "
                f"us for each message ({link.source})."
            )
        how = "given" if given.dense_ms is not None else "guessed from the model's size"
        dense = f"The dense part takes {self._dense_ms:.3g} ms, {how}."
        return [dense, f"{between.per_machine} ranks share a machine.", *lines, *ASSUMPTIONS]


def _of_strategy(traffic: Traffic, strategy: Strategy) -> Traffic:
    """Return what crosses with a strategy: rows come early only where batches are read ahead."""
    if strategy.overlapped:
        return traffic
    late = traffic.early_bytes + traffic.late_bytes
    return replace(traffic, mark_bytes=0.0, early_bytes=0.0, late_bytes=late)


def simulate_ranks(
    scaling: Scaling,
    strategies: Sequence[Strategy],
    read_slots: Callable[[int], Sequence[int]],
) -> tuple[list[Facts], str, list[str]]:
    """Return the facts of each number of ranks, strategy and number of slots; in a sentence, what
    was simulated; and what the predictions assume. `read_slots` takes the rows of a rank."""
    predictor, facts = Predictor(scaling), []
    for ranks in scaling.ranks:
        rows = int(predictor.tables.owned_rows(predictor.tables.owners(ranks)).min())
        choices = [(strategy, slots) for slots in read_slots(rows) for strategy in strategies]
        ahead = max((strategy.look_ahead or 0 for strategy, _ in choices), default=0)
        exchanged = predictor.exchange(ranks, choices, is_drawn=predictor.draws(ranks, ahead))
        for (strategy, _), planned in zip(choices, exchanged.planned, strict=True):
            facts.append(predictor.facts(exchanged, strategy, planned))
    tables, trace = predictor.tables, scaling.trace
    conditions = (
        f"{tables.layout.num_rows:,} rows, {show_bytes(tables.layout.num_rows * tables.row_bytes)} "
        f"with their state; each rank trains {trace.batch_size:,} samples per step, with "
        f"{facts[0]['lookups']:,.0f} lookups of {facts[0]['unique_rows']:,.0f} different rows. "
        "data.batch_size is taken for each rank here; hotrow train --ranks divides it among ranks"
    )
    return facts, conditions, predictor.assumptions()


# -- how many ranks to take ----------------------------------------------------------------


def size_ranks(scaling: Scaling, *, reach: float, depth: int) -> RankAdvice:
    """Return the fewest ranks whose memory holds the rows, with the smallest budget that reaches a
    share of all-fast's speed at that number of ranks."""
    assert scaling.machine is not None
    predictor, between = Predictor(scaling), scaling.between()
    tables, ahead = predictor.tables, replace(STRATEGIES["lookahead"], look_ahead=depth)
    memory = scaling.machine.memory_gib * 2**30
    most = (1 - LEFT) * memory or math.inf  # it may be unknown
    best: list[Facts] = []
    notes: list[str] = []
    for ranks in scaling.ranks:
        tried = [
            facts
            for facts in _tried(predictor, ranks, ahead)
            if "step_ms" in facts and facts["budget_bytes"] + facts["vector_bytes"] <= most
        ]
        if not tried:
            notes.append(
                f"{many(ranks, 'rank')}: slots for two batches do not fit {1 - LEFT:.0%} of the "
                f"{show_bytes(memory)} of a GPU; lower data.batch_size"
            )
            continue
        enough = [x for x in tried if x["of_all_fast"] >= reach]
        chosen = enough[0] if enough else max(tried, key=lambda x: x["of_all_fast"])
        fits = chosen["host_bytes"] <= between.ram_gib * 2**30
        best.append(chosen | {"reaches": bool(enough), "fits_host": fits})
    place = next((k for k, x in enumerate(best) if x["fits_host"]), None)
    if best and place is None:
        notes.append(
            f"the rows do not fit {between.ram_gib:g} GiB of host memory of each rank at any of "
            "these numbers of ranks; give more --ranks"
        )
    if place is not None:
        rate = best[place]["samples_per_second"]
        slower = [x["ranks"] for x in best[place + 1 :] if x["samples_per_second"] < rate]
        if slower:
            notes.append(
                f"{' or '.join(map(str, slower))} ranks would train fewer samples per second than "
                f"{best[place]['ranks']}: see what their steps wait for"
            )
    return RankAdvice(
        name=scaling.config.run.name,
        reach=reach,
        rows_bytes=tables.layout.num_rows * tables.row_bytes,
        best=tuple(best),
        chosen=place,
        notes=tuple(notes),
        assumptions=tuple(predictor.assumptions()),
    )


def _tried(predictor: Predictor, ranks: int, strategy: Strategy) -> list[Facts]:
    """Return the facts of several numbers of slots, the fewest first; the last has all rows."""
    given, tables = predictor.scaling, predictor.tables
    rows = int(tables.owned_rows(tables.owners(ranks)).min())
    asked = predictor.popularities.owner_rows(ranks)
    least = min(rows, math.ceil(_LEAST_BATCHES * asked))
    # More slots than rows that are read before would not change what is fetched.
    most = least + given.warm_up * asked
    slots = [x for x in geometric(least, rows, _TRIED)[:-1] if x <= most] or [least]
    exchanged = predictor.exchange(ranks, [(strategy, x) for x in slots], is_drawn=False)
    tried = [predictor.facts(exchanged, strategy, planned) for planned in exchanged.planned]
    first = exchanged.planned[0][0]
    every = replace(first, slots=rows, fetched_rows=0, evicted_rows=0, chunked_batches=0)
    return [*tried, predictor.facts(exchanged, strategy, [every])]
