"""What `--ranks` of `hotrow simulate` and `hotrow size` predicts, as documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hotrow.report.page import (
    NONE,
    Bullets,
    Document,
    Part,
    Section,
    Text,
    number,
    table_by_columns,
)
from hotrow.support.messages import many
from hotrow.support.records import RankAdvice
from hotrow.support.units import show_bytes

_Column = Callable[[Mapping[str, Any]], str]


def _shown(key: str) -> _Column:
    return lambda x: show_bytes(x[key]) if key in x else NONE


_SENT: dict[str, _Column] = {
    "ranks": lambda x: f"{x['ranks']:,}",
    "ids": _shown("id_bytes"),
    "marks": _shown("mark_bytes"),
    "early rows": _shown("early_row_bytes"),
    "late rows": _shown("late_row_bytes"),
    "gradients": _shown("grad_bytes"),
    "all of these": _shown("sent_bytes"),
    "headers": _shown("header_bytes"),
    "balance": lambda x: f"{x['balance']:.3f}",
}
_REPLICATED: dict[str, _Column] = {
    "replicated rows": lambda x: f"{x['replicated_rows']:,}",
    "sent with them": _shown("sent_bytes_replicated"),
    "balance with them": lambda x: f"{x['balance_replicated']:.3f}",
}
_HELD: dict[str, _Column] = {
    "ranks": lambda x: f"{x['ranks']:,}",
    "strategy": lambda x: x["strategy"],
    "slots": lambda x: f"{x['slots']:,}",
    "of its rows": lambda x: f"{x['slots'] / x['rows_owned']:.1%}",
    "host link": _shown("link_bytes"),
    "budget": _shown("budget_bytes"),
    "vectors": _shown("vector_bytes"),
    "host memory": _shown("host_bytes"),
    "chunked": lambda x: "yes" if x["chunked_batches"] else "no",
}
_TIMED: dict[str, _Column] = {
    "ms/step": lambda x: number(x.get("step_ms", math.nan), ".3g"),
    "speed": lambda x: number(x.get("of_all_fast", math.nan), ".0%"),
    "GPU": lambda x: number(x.get("training_ms", math.nan), ".3g"),
    "late rows, gradients": lambda x: number(
        x.get("late_ms", math.nan) + x.get("grads_ms", math.nan), ".3g"
    ),
    "host": lambda x: number(x.get("host_ms", math.nan), ".3g"),
    "samples/s": lambda x: number(x.get("samples_per_second", math.nan), ",.0f"),
    "waits for": lambda x: x.get("limit", NONE),
}
_ADVISED: dict[str, _Column] = {
    "ranks": lambda x: f"{x['ranks']:,}",
    "budget": _shown("budget_bytes"),
    "of its rows": lambda x: f"{x['slots'] / x['rows_owned']:.1%}",
    "vectors": _shown("vector_bytes"),
    "host memory": _shown("host_bytes"),
    "fits": lambda x: "yes" if x["fits_host"] else "no",
    "sent": _shown("sent_bytes"),
}
_WORDS = ("strategy", "waits for", "chunked", "fits")


def ranks_document(
    facts: Sequence[Mapping[str, Any]],
    assumptions: Sequence[str],
    *,
    name: str,
    conditions: str,
) -> Document:
    """`conditions`: what was simulated, in a sentence."""
    is_timed = any("step_ms" in x for x in facts)
    first = {(x["ranks"], x["late_row_bytes"]): x for x in reversed(facts)}  # not for all slots
    sent = _SENT | (_REPLICATED if any("replicated_rows" in x for x in facts) else {})
    held = _HELD | (_TIMED if is_timed else {})
    parts: list[Part] = [
        Text(conditions, "faint"),
        Section(
            "Sent by a rank to all others in a step",
            [table_by_columns(sent, list(first.values())[::-1], words=_WORDS)],
        ),
        Section(
            "Predicted for a rank and step" if is_timed else "For a rank and step",
            [table_by_columns(held, facts, words=_WORDS)],
        ),
        Section("Assumed", [Bullets(assumptions)]),
    ]
    if is_timed and any(x["chunked_batches"] for x in facts):
        parts.append(
            Text("No step is predicted where batches are chunked: give more --slots for them")
        )
    return Document(f"hotrow simulate: {name}", parts, [*facts, {"assumptions": list(assumptions)}])


def rank_advice_document(advice: RankAdvice) -> Document:
    """Show how many ranks to take, with which budget."""
    best, chosen = advice.best, advice.chosen
    if chosen is None:
        told = "None of these numbers of ranks can hold the rows."
    else:
        x = best[chosen]
        goal = "the smallest budget with" if x["reaches"] else "the nearest to"
        told = (
            f"Take {many(x['ranks'], 'rank')} with a budget of {show_bytes(x['budget_bytes'])}"
            f"{' each' * (x['ranks'] > 1)}, {goal} {advice.reach:.0%} of all-fast's speed at this "
            "number of ranks: "
            f"{x['samples_per_second']:,.0f} samples/s, predicted."
        )
    marked = [] if chosen is None else [chosen]
    table = table_by_columns(_ADVISED | _TIMED, best, words=_WORDS, marked=marked)
    facts = asdict(advice) | {"chosen": None if chosen is None else best[chosen]}
    parts: list[Part] = [
        Text(told, "advice"),
        Text(f"{show_bytes(advice.rows_bytes)} of rows with their state", "faint"),
        Bullets(advice.notes),
        Section("The best budget for each number of ranks, predicted", [table]),
        Section("Assumed", [Bullets(advice.assumptions)]),
    ]
    return Document(f"hotrow size: {advice.name}", parts, [facts])
