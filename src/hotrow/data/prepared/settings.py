"""What a run of `prepare` is asked for, and whom it tells how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hotrow.support.numbers import plain_fields


@dataclass(frozen=True)
class Settings:
    """What decides about the bytes that are written. A run is resumed with the same only."""

    min_frequency: int = 1
    max_rows: int | None = None
    hash: bool = False
    split: str = "time"
    seed: int = 0
    bad_rows: str = "error"
    memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.min_frequency < 1:
            raise ValueError(f"--min-frequency must be at least 1, not {self.min_frequency}")
        if self.max_rows is not None and self.max_rows < 2:
            raise ValueError(f"--max-rows must be at least 2, not {self.max_rows}")
        if self.hash and self.max_rows is None:
            raise ValueError(
                "--hash needs --max-rows: where values are not counted, the number of rows of "
                "each table must be given"
            )
        if self.hash and self.min_frequency > 1:
            raise ValueError("--hash counts no values, so it takes no --min-frequency")
        if self.split not in ("time", "random"):
            raise ValueError(f"--split must be time or random, not {self.split!r}")
        if self.bad_rows not in ("skip", "error"):
            raise ValueError(f"--bad-rows must be skip or error, not {self.bad_rows!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2**63, not {self.seed}")


class Watch(Protocol):
    """Whoever is told how the work goes."""

    def stage(self, title: str, total: int) -> None: ...
    def advance(self, done: int, samples: int) -> None: ...
    def say(self, text: str) -> None: ...


class NoWatch:
    """Nobody."""

    def stage(self, title: str, total: int) -> None: ...
    def advance(self, done: int, samples: int) -> None: ...
    def say(self, text: str) -> None: ...
