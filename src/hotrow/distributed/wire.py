"""Ids of several widths in one message, and the bytes that leave a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotrow.distributed.owners import Route
from hotrow.distributed.ranks import Channel, Ranks
from hotrow.distributed.shared_rows import SharedRows, SharedWork
from hotrow.kernels import reference
from hotrow.kernels.reference import sort_ids

_MOST_INT32 = 2**31 - 1


@dataclass
class BatchCounts:
    """What this rank has looked up in batches for training, and what ranks asked of it."""

    lookups: int = 0
    unique_rows: int = 0  # of owners, itself among them, each once per batch; not of replicas
    served_rows: int = 0  # that ranks, itself among them, asked of this one
    by_table: Counter[str] = field(default_factory=Counter)  # of `lookups`

    def note(self, work: SharedWork) -> None:
        """Count a batch, unless it was counted before: rows that change are sent again."""
        if work.is_counted:
            return
        work.is_counted = True
        x, layout = work.lookups, work.group.layout
        sizes = [high - low for low, high in x.spans] or x.bags_per_feature
        for feature, size in zip(layout.features, sizes, strict=True):
            self.by_table[layout.tables[feature.table].name] += size
        self.lookups += sum(sizes)
        self.unique_rows += sum(work.route.counts)
        self.served_rows += sum(work.received)


class Wire:
    """Sends ids to the owners of their rows, and counts what is sent."""

    def __init__(self, ranks: Ranks, groups: Sequence[SharedRows]) -> None:
        self.ranks, self.groups = ranks, tuple(groups)
        self.sent: Counter[str] = Counter()  # bytes, by kind
        self.batches = BatchCounts()
        most_rows = max(group.layout.num_rows for group in groups)
        self._kind = torch.int32 if most_rows <= _MOST_INT32 else torch.int64

    def send_numbers(
        self,
        places: Sequence[int],
        routes: dict[int, Route],
        theirs: Sequence[Sequence[int]],
        channel: Channel | None = None,
        *,
        kind: str | None = "ids",
    ) -> dict[int, Tensor]:
        """Send the ids of some groups to the owners of their rows; return those that all ranks ask
        of this one, by group, in the order of ranks.

        `places`: of the groups that some rank has ids of; `routes`: of those that this one has;
        `theirs`: how many ids of each group a rank asks for, by rank; `kind`: as what they are
        counted, None: not at all.
        """
        ranks, channel = self.ranks, channel or self.ranks.training
        parts = {place: x.numbers.split(x.counts) for place, x in routes.items()}
        sent = [parts[place][rank] for rank in range(ranks.size) for place in parts]
        counts = [sum(x.counts[rank] for x in routes.values()) for rank in range(ranks.size)]
        values = torch.cat(sent).to(self._kind) if sent else torch.empty(0, dtype=self._kind)
        if kind is not None:
            self.count(kind, values, counts)
        received = [[by_group[place] for place in places] for by_group in theirs]
        came = ranks.exchange(values, counts, list(map(sum, received)), channel).long()
        pieces = came.split([count for counts in received for count in counts])
        return {place: torch.cat(pieces[k :: len(places)]) for k, place in enumerate(places)}

    def to_all(self, numbers: Tensor, received: Sequence[int]) -> Tensor:
        """Send the ids of gradients to every rank; return those of all ranks, in their order."""
        sent = [len(numbers)] * self.ranks.size
        values = numbers.to(self._kind).repeat(self.ranks.size)
        self.count("grads", values, sent)
        return self.ranks.exchange(values, sent, list(received), self.ranks.training).long()

    def count(self, kind: str, values: Tensor, counts: Sequence[int]) -> None:
        """Count the bytes that leave this rank; `counts`: the items for each rank."""
        if len(values):
            others = sum(counts) - counts[self.ranks.rank]
            self.sent[kind] += others * (values.nbytes // len(values))


def swap_copied(
    wire: Wire, group: SharedRows, route: Route | None, sums: Tensor | None, copied: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the ids and gradients of replicated rows, of which every rank gets those of all.

    `sums`: those of this rank's rows; `copied`: of how many replicated rows each rank has some."""
    ids, size, ranks = torch.empty(0, dtype=torch.int64), wire.ranks.size, wire.ranks
    own = torch.empty(0, group.dim, device=group.device)
    if sums is not None and route is not None and route.here is not None:
        assert route.replicas is not None
        ids, own = route.replicas, sums[route.here.to(group.device)] / size
    sent = [len(ids)] * size
    wire.count("grads", own, sent)
    theirs = ranks.exchange(own.repeat(size, 1), sent, copied, ranks.training)
    numbers = wire.to_all(ids, copied).to(group.device)
    rows = sort_ids(numbers, group.replicas.layout.num_rows)
    return rows.ids, reference.sum_pairs(theirs, rows)
