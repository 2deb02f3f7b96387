"""How long a step takes on several ranks, predicted from links and from what ranks exchange.

A rank trains its own batch, and serves the rows that it owns to all ranks. Three things go on at
the same time, and the longest decides: the GPU's work together with the vectors and gradients that
it waits for, the host's work with its messages, and early vectors on their way.

No machine with several GPUs was at hand: nothing of this was compared with a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotrow.engine.strategy import Strategy
from hotrow.sizing.cost import Work, rows_ms, step_time
from hotrow.sizing.links import Between
from hotrow.sizing.machines import Machine

HEADERS = 3  # of a step: before ids, vectors and gradients
HEADER_BYTES = 512  # to each other rank
_MS = 1e3

ASSUMPTIONS = (
    "Each rank has one GPU and a batch of its own; samples/s are those of all ranks.",
    "Ranks begin their steps together. The owner that is asked for most rows decides.",
    "Vectors and gradients cross by NCCL, ids and headers from host to host by gloo; messages to "
    "all ranks are on their way at once.",
    "The host's thread prepares a batch, exchanges its ids and launches a step one after the "
    "other, while the GPU trains the batch before. Launching takes as long as captured steps.",
    "Gradients of the dense part are not counted; DistributedDataParallel sends them beside the "
    "backward pass.",
    "No step on several GPUs was measured: this is a prediction without an interval of error.",
)


@dataclass(frozen=True)
class RankWork:
    """What an average rank does in a step. Bytes are those that it sends to all others."""

    ranks: int
    lookups: float
    unique_rows: float
    vector_bytes: int
    asked_rows: float  # of an owner, by all ranks; a row counts once for each
    owned: Work  # those as lookups, each different one once, and the rows that it moves
    balance: float  # rows asked of the most loaded owner, over the mean
    id_bytes: float
    mark_bytes: float
    early_bytes: float
    late_bytes: float
    grad_bytes: float

    @property
    def header_bytes(self) -> float:
        return HEADERS * HEADER_BYTES * (self.ranks - 1)


@dataclass(frozen=True)
class RankStep:
    """Milliseconds of a step on several ranks, and of its parts, some of which overlap."""

    ms: float
    all_fast_ms: float  # the same with all rows in fast memory
    training_ms: float  # of the GPU, without waiting for other ranks
    late_ms: float
    grads_ms: float
    early_ms: float
    host_ms: float
    limit: str  # what decides the time: dense part, planning, link, host, network


def ranked_step(
    machine: Machine, between: Between, strategy: Strategy, work: RankWork, *, dense_ms: float
) -> RankStep:
    """Predict a step; a single rank exchanges nothing, and its GPU prepares ids."""
    gpu = dense_ms + _rows_ms(machine, work)
    late, grads, early = (
        between.exchange_ms_of(work.ranks, sent * work.balance) if work.ranks > 1 else 0.0
        for sent in (work.late_bytes, work.grad_bytes, work.early_bytes)
    )
    host = host_ms(machine, between, work)
    owned = replace(
        work.owned,
        lookups=work.owned.lookups * work.balance,
        unique_rows=work.owned.unique_rows * work.balance,
        fetched_rows=work.owned.fetched_rows * work.balance,
        evicted_rows=work.owned.evicted_rows * work.balance,
    )
    waiting = gpu + late + grads
    fast = max(waiting, host, early)
    step = step_time(machine, strategy, owned, all_fast_ms=waiting)
    ms = max(step.ms, host, early)
    limit = step.limit
    if ms > step.ms:
        limit = "host" if host >= early else "network"
    elif limit == "dense part" and late + grads > gpu:
        limit = "network"
    return RankStep(ms, fast, gpu, late, grads, early, host, limit)


def _rows_ms(machine: Machine, work: RankWork) -> float:
    """Return the GPU's time for the rank's own lookups, and as an owner with the largest load."""
    own = Work(
        lookups=work.lookups,
        unique_rows=work.unique_rows,
        # A rank pools and sums vectors; alone, it updates rows with their state as well.
        row_bytes=work.vector_bytes if work.ranks > 1 else work.owned.row_bytes,
        table_bytes=0.0,
        vector_bytes=work.vector_bytes,
    )
    found = rows_ms(machine, own)
    sorting = machine.sort_ns * work.lookups
    if work.ranks > 1:
        # Vectors are gathered to be sent, and gradients that come are added by row.
        owned = replace(work.owned, vector_bytes=2 * work.vector_bytes)
        found += work.balance * rows_ms(machine, owned)
        sorting = machine.sort_ns * work.asked_rows * work.balance
    drag = machine.plan_drag if machine.is_gpu else 1.0
    return found + drag * sorting * 1e-6


def host_ms(machine: Machine, between: Between, work: RankWork) -> float:
    """Return what a rank's host does in a step, one thing after the other."""
    if work.ranks < 2:
        return machine.host_ms
    preparing = between.prepare_ns * work.lookups * 1e-6
    around = between.exchange_ms + between.rank_ms * work.ranks
    header = between.messages_ms_of(work.ranks, work.header_bytes / HEADERS)
    ids = between.messages_ms_of(work.ranks, work.id_bytes)
    marks = between.messages_ms_of(work.ranks, work.mark_bytes) if work.mark_bytes else 0.0
    return machine.host_ms + preparing + around + HEADERS * header + ids + marks
