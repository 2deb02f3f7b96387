"""The systems that are compared, by name. Each is imported when it is built."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotrow.data import ClickBatch

if TYPE_CHECKING:
    from suite import Bench


class Unavailable(Exception):
    """This system cannot run here, and why."""


class System(Protocol):
    """One way of training a setting."""

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        """Train on the batches; yields once per step, when all its work has been launched."""
        ...

    def table_bytes(self) -> int:
        """Bytes of the GPU's memory that rows, state, maps and buffers take."""
        ...

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        """What else is worth knowing; may take more steps, for counting."""
        ...


@dataclass(frozen=True)
class Kind:
    """How to build a system, and how to time it."""

    build: Callable[[Bench], System]
    is_cached: bool = False  # fast only when its cache is full
    is_slow: bool = False  # so slow that few steps must do


def _ours(strategy: str) -> Callable[[Bench], System]:
    def build(bench: Bench) -> System:
        from systems.ours import Hotrow

        return Hotrow(bench, strategy)

    return build


def _hybrid(bench: Bench) -> System:
    from systems.hybrid import Hybrid

    return Hybrid(bench)


def _fbgemm(form: str) -> Callable[[Bench], System]:
    def build(bench: Bench) -> System:
        from systems.fbgemm import Fbgemm

        return Fbgemm(bench, form)

    return build


def _plain(bench: Bench) -> System:
    from systems.plain import PlainHybrid

    return PlainHybrid(bench)


SYSTEMS = {
    "hotrow-all-fast": Kind(_ours("all-fast")),
    "hotrow-lookahead": Kind(_ours("lookahead"), is_cached=True),
    "hotrow-lru": Kind(_ours("lru"), is_cached=True),
    "hotrow-scratchpipe": Kind(_ours("scratchpipe"), is_cached=True),
    "hotrow-uncached": Kind(_ours("uncached")),
    "hotrow-hybrid": Kind(_hybrid),
    "fbgemm-hbm": Kind(_fbgemm("hbm")),
    "fbgemm-cached": Kind(_fbgemm("cached"), is_cached=True),
    "fbgemm-prefetch": Kind(_fbgemm("prefetch"), is_cached=True),
    # As many of the rows in its cache as the budget is of the bytes: more bytes than the budget.
    "fbgemm-cached-rows": Kind(_fbgemm("cached-rows"), is_cached=True),
    "fbgemm-uvm": Kind(_fbgemm("uvm")),
    "torch-hybrid": Kind(_plain, is_slow=True),
}
