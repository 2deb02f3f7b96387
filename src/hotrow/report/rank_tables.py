"""What each rank of a run did, and how evenly: a table, charts and the balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotrow.report.charts import Chart, bars_by_name
from hotrow.report.page import Charts, Part, Table, Text, table_by_columns
from hotrow.support.messages import many
from hotrow.support.records import Figures, RankRecord
from hotrow.support.units import show_bytes

_SHOWN = 64  # ranks in a table
_DRAWN = 40  # in a chart


def _count(name: str) -> tuple[Callable[[RankRecord], float], Callable[[float], str]]:
    return lambda x: getattr(x, name), lambda value: f"{value:,.0f}"


def _bytes(name: str) -> tuple[Callable[[RankRecord], float], Callable[[float], str]]:
    return lambda x: getattr(x, name), show_bytes


# The heading, the value of a rank, and how it is written.
_WORK: dict[str, tuple[Callable[[RankRecord], float], Callable[[float], str]]] = {
    "samples": _count("samples"),
    "lookups": _count("lookups"),
    "rows asked for": _count("unique_rows"),
    "rows served": _count("served_rows"),
    "rows fetched": _count("fetched_rows"),
    "host link": _bytes("bytes_moved"),
    "sent": _bytes("bytes_sent"),
    "waited": (lambda x: x.wait_seconds, lambda value: f"{value:,.2f} s"),
    "of training": (lambda x: x.wait_share, lambda value: f"{value:.1%}"),
}
_PLACES: dict[str, Callable[[RankRecord], str]] = {
    "rank": lambda x: str(x.rank),
    "machine": lambda x: x.machine,
    "device": lambda x: x.device,
    "rows owned": lambda x: f"{x.owned_rows:,}",
    "slots": lambda x: f"{x.num_slots:,}",
    "fast memory": lambda x: show_bytes(x.fast_bytes),
    "process memory": lambda x: show_bytes(x.host_bytes),
}
_SENT = {
    "sent/sample": ("ids", "rows", "grads"),
    "ids": ("ids",),
    "rows": ("rows",),
    "gradients": ("grads",),
}
_IN_BALANCE = ("lookups", "rows served", "host link", "sent", "waited")
_EXPLAINED = (
    "Lookups are those of a rank's samples. It asks owners for each different row of a batch once, "
    "itself among them. Owners serve these rows, and fetch them over their host link where they "
    "are not in fast memory. Waited: in calls that wait for messages of other ranks, which "
    "includes sending them. The rank that waits least is the one that others wait for."
)


def rank_parts(ranks: Sequence[RankRecord]) -> list[Part]:
    """Return what ranks did, and how evenly; empty: there is one rank."""
    if not ranks:
        return []
    shown = ranks[:_SHOWN]
    left = len(ranks) - len(shown)
    more = f" {many(left, 'more rank')} left out; --json has all of them." if left else ""
    return [
        Text(
            f"Balance of {many(len(ranks), 'rank')}, the largest value over the mean: "
            f"{balance_in_words(ranks)}."
        ),
        Text(_EXPLAINED + more, "faint"),
        _work(shown, ranks),
        Charts(_charts(ranks)),
        table_by_columns(_PLACES, shown, words=("machine", "device")),
    ]


def comparison_parts(strategies: Sequence[Figures]) -> list[Part]:
    """Return what ranks sent each other, and how evenly they worked, for each strategy."""
    rows = [
        [
            figures.strategy,
            *(show_bytes(_sent(figures, kinds)) for kinds in _SENT.values()),
            f"{sum(x.wait_share for x in figures.ranks) / len(figures.ranks):.1%}",
            *(_balance(name, figures.ranks) for name in _IN_BALANCE),
        ]
        for figures in strategies
        if figures.ranks and figures.samples
    ]
    heads = [
        "strategy",
        *_SENT,
        "waited, of training",
        *(f"{x}: largest / mean" for x in _IN_BALANCE),
    ]
    note = (
        "Bytes per sample that all ranks together have sent to others, in the first repetition; "
        "the share of training in which ranks waited for others, on average; and the largest "
        "value of a rank over the mean. Fast memory by part is that of rank 0."
    )
    return [Text(note, "faint"), Table(heads, rows)]


def _sent(figures: Figures, kinds: Sequence[str]) -> float:
    sent = sum(getattr(rank, f"bytes_of_{kind}") for rank in figures.ranks for kind in kinds)
    return float(sent / figures.samples)


def balance_in_words(ranks: Sequence[RankRecord]) -> str:
    """Return the largest value over the mean, for what ranks should share evenly."""
    return ", ".join(f"{name} {_balance(name, ranks)}" for name in _IN_BALANCE)


def _balance(name: str, ranks: Sequence[RankRecord]) -> str:
    value, _ = _WORK[name]
    values = [value(rank) for rank in ranks]
    total = sum(values)
    return f"{max(values) * len(values) / total:.3f}" if total else "1.000"


def _work(shown: Sequence[RankRecord], every: Sequence[RankRecord]) -> Table:
    rows = [[str(x.rank), *(write(of(x)) for of, write in _WORK.values())] for x in shown]
    rows.append(["balance", *(_balance(name, every) for name in _WORK)])
    return Table(["rank", *_WORK], rows, marked=[len(shown)])


def _charts(ranks: Sequence[RankRecord]) -> list[Chart]:
    drawn = ranks[:_DRAWN]
    order = tuple(f"rank {x.rank}" for x in drawn)
    note = f"The first {len(drawn)} ranks." if len(drawn) < len(ranks) else ""
    times = {
        "training": [x.seconds - x.wait_seconds for x in drawn],
        "waiting for other ranks": [x.wait_seconds for x in drawn],
    }
    sent = {
        "ids": [x.bytes_of_ids / 2**20 for x in drawn],
        "rows": [x.bytes_of_rows / 2**20 for x in drawn],
        "gradients": [x.bytes_of_grads / 2**20 for x in drawn],
    }
    link = {
        "fetched": [x.bytes_fetched / 2**20 for x in drawn],
        "written back": [x.bytes_evicted / 2**20 for x in drawn],
    }
    named = (
        ("A rank's time", "seconds", times),
        ("Sent to other ranks", "MiB", sent),
        ("Moved over the host link", "MiB", link),
    )
    return [
        Chart(title, unit, "", bars_by_name(order, of), note, is_stacked=True, order=order)
        for title, unit, of in named
        if any(map(any, of.values()))
    ]
