"""Links between ranks, and the time that ranks need to exchange bytes over them.

An exchange sends a message to every other rank. It takes a fixed time, some time for each message,
and the bytes' time at the link's bandwidth. Ranks of one machine use another link than ranks of
different machines; both work at the same time, so that the slower one decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hotrow.support.messages import did_you_mean

_MS = 1e3
_ABOVE_ZERO = ("gb", "per_machine", "ram_gib", "memory_gib", "link_gb", "hbm_gb", "rows_part")


@dataclass(frozen=True)
class Link:
    """What connects a rank to others."""

    gb: float  # GB/s that a rank sends, while it gets as many
    us: float  # of an exchange, however small it is
    message_us: float  # of each message of an exchange
    source: str  # where these figures come from

    def ms(self, messages: int, sent: float) -> float:
        """Return the time of so many messages, which have `sent` bytes together."""
        if messages <= 0:
            return 0.0
        return 1e-3 * (self.us + messages * self.message_us) + sent / (self.gb * 1e9) * _MS


@dataclass(frozen=True)
class Between:
    """How ranks of a machine, and of many such machines, meet; one rank has one GPU."""

    per_machine: int  # ranks
    ram_gib: float  # of a rank, for its rows
    inside: str  # the name of the link between ranks of one machine
    outside: str  # and of different machines
    messages: str  # of ids and headers, which cross from host to host
    # What the host of a rank does on one thread, by benchmarks/rank_host.py.
    prepare_ns: float  # for each lookup: parse, sort, find owners
    exchange_ms: float  # around the messages of a step
    rank_ms: float  # likewise, for each rank
    links: Mapping[str, Link]

    def exchange_ms_of(self, ranks: int, sent: float) -> float:
        """Return the time in which a rank sends so many bytes, in equal parts to all others."""
        near, far = self.neighbours(ranks)
        each = sent / max(1, ranks - 1)
        inside = self.links[self.inside].ms(near, near * each)
        return max(inside, self.links[self.outside].ms(far, far * each))

    def messages_ms_of(self, ranks: int, sent: float) -> float:
        """Return the time of one exchange between hosts."""
        return self.links[self.messages].ms(ranks - 1, sent)

    def neighbours(self, ranks: int) -> tuple[int, int]:
        """Return how many other ranks a rank has in its machine, and in other machines."""
        near = min(ranks, self.per_machine) - 1
        return near, ranks - 1 - near


def read_link(figures: Mapping[str, Any], name: str, *, where: str) -> Link:
    return Link(**checked(figures, Link, where=f"{where}: [links.{name}]"))


def read_between(figures: Mapping[str, Any], links: Mapping[str, Link], *, where: str) -> Between:
    """Return the links of a machine; each has to be among `links`."""
    found = Between(**checked(figures, Between, where=where, without=("links",)), links=links)
    for key in ("inside", "outside", "messages"):
        find_link(getattr(found, key), links, where=f"{where}: {key}")
    return found


def find_link(name: str, links: Mapping[str, Link], *, where: str) -> Link:
    if name not in links:
        hint = did_you_mean(name, links)
        raise ValueError(f"{where}: there is no link {name!r}{hint}; known are {', '.join(links)}")
    return links[name]


def checked(
    figures: Mapping[str, Any], kind: type, *, where: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return figures for a dataclass, or raise if one is missing or unknown, or is not above 0."""
    known = [field for field in fields(kind) if field.name not in without]
    needed = {field.name: field for field in known}
    for key, value in figures.items():
        if key not in needed:
            hint = did_you_mean(key, needed)
            raise ValueError(f"{where} has no key {key!r}{hint}; its keys are {', '.join(needed)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if needed[key].type in ("float", "int") and not (is_number and value >= 0):
            raise ValueError(f"{where}: {key} must be a number of at least 0, not {value!r}")
        if key in _ABOVE_ZERO and not value:
            raise ValueError(f"{where}: {key} must be above 0")
        if needed[key].type == "str" and not isinstance(value, str):
            raise ValueError(f"{where}: {key} must be a text, not {value!r}")
        curves = {"Points": [value], "Mapping[str, Points]": _values(value)}
        for points in curves.get(str(needed[key].type), []):
            _check_points(points, f"{where}: {key}")
    if missing := [key for key in needed if key not in figures]:
        raise ValueError(f"{where} lacks {', '.join(missing)}; see hotrow/sizing/machines.toml")
    return dict(figures)


def _values(value: Any) -> list[Any]:
    """Return the curves of a table; a value that is no table is a curve that is refused."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _check_points(points: Any, where: str) -> None:
    """Refuse a curve that does not have at least one point with two numbers above zero."""
    is_curve = isinstance(points, list) and len(points) > 0
    for point in points if is_curve else []:
        is_pair = isinstance(point, list) and len(point) == 2
        is_curve &= is_pair and all(isinstance(x, int | float) and x > 0 for x in point)
    if not is_curve:
        raise ValueError(
            f"{where} must be points of two numbers above 0, such as [[4.0, 42.6], [16.0, 28.9]]; "
            f"got {points!r}"
        )
