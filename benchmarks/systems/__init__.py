"""The systems that are compared, by name. Each is imported when it is built."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from harness import Unavailable

from hotrow.data import ClickBatch

__all__ = ["SYSTEMS", "Kind", "System", "Unavailable"]

if TYPE_CHECKING:
    from suite import Bench


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
    target_ms: float  # about: of a step of terabyte.py's target, to guess how long runs take
    is_cached: bool = False  # fast only when its cache is full
    is_slow: bool = False  # so slow that few steps must do
    has_store: bool = True  # rows in host memory


def _ours(strategy: str, *, written: bool = False) -> Callable[[Bench], System]:
    def build(bench: Bench) -> System:
        from systems.ours import Hotrow

        return Hotrow(bench, strategy, written=written)

    return build


def _loop(bench: Bench) -> System:
    from systems.ours import HotrowLoop

    return HotrowLoop(bench, "lookahead", written=True)


def _dense_alone(bench: Bench) -> System:
    from systems.plain import DenseAlone

    return DenseAlone(bench)


def _static_hybrid(bench: Bench) -> System:
    from systems.ours import Hotrow, true_profile

    return Hotrow(bench, "static-hybrid", profile=true_profile(bench))


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
    "hotrow-all-fast": Kind(_ours("all-fast"), 0.6, has_store=False),
    "hotrow-lookahead": Kind(_ours("lookahead"), 0.8, is_cached=True),
    # As if every row had been trained and written before: none is made in its slot, all are read.
    "hotrow-lookahead-written": Kind(_ours("lookahead", written=True), 0.9, is_cached=True),
    # The same in a loop that a user writes, without a trainer.
    "hotrow-loop-written": Kind(_loop, 4, is_cached=True),
    "hotrow-lru": Kind(_ours("lru"), 3, is_cached=True),
    "hotrow-scratchpipe": Kind(_ours("scratchpipe"), 3, is_cached=True),
    "hotrow-uncached": Kind(_ours("uncached"), 6),
    "hotrow-hybrid": Kind(_hybrid, 6),
    # Told which rows are the hottest, as the published one was.
    "hotrow-static-hybrid": Kind(_static_hybrid, 4),
    "fbgemm-hbm": Kind(_fbgemm("hbm"), 0.75, has_store=False),
    "fbgemm-cached": Kind(_fbgemm("cached"), 1.8, is_cached=True),
    "fbgemm-prefetch": Kind(_fbgemm("prefetch"), 1.9, is_cached=True),
    # As many of the rows in its cache as the budget is of the bytes: more bytes than the budget.
    "fbgemm-cached-rows": Kind(_fbgemm("cached-rows"), 1.8, is_cached=True),
    "fbgemm-uvm": Kind(_fbgemm("uvm"), 3),
    "torch-hybrid": Kind(_plain, 100, is_slow=True),
    "dense-alone": Kind(_dense_alone, 3, has_store=False),
}
