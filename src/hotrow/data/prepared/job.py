"""What the stages of a run share. Knows nothing of the stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotrow.data.prepared.disk import Disk
from hotrow.data.prepared.layouts import Samples, Source
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.settings import Settings, Watch
from hotrow.data.prepared.spool import Spool
from hotrow.data.prepared.text import Piece


@dataclass(frozen=True)
class Job:
    source: Source
    out: Path
    settings: Settings
    values_bytes: int  # of memory, for the values of all tables
    watch: Watch
    disk: Disk
    spool: Spool
    cores: Cores

    def parse(self, piece: Piece) -> Samples:
        """On a worker."""
        samples = self.source.parse(piece)
        if samples.bad.count and self.settings.bad_rows == "error":
            raise ValueError(
                f"{self.describe(piece, samples)[0]}. --bad-rows skip leaves such lines out and "
                "counts them"
            )
        return samples

    def describe(self, piece: Piece, samples: Samples) -> list[str]:
        path, before = self.source.paths[piece.place.file], piece.place.file_line
        return [
            f"{path}, line {before + each.line + 1:,}: {each.reason}" for each in samples.bad.first
        ]
