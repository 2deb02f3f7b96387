"""Data prepared once, on disk, and read from there as it is: see `format` for what lies where."""

from hotrow.data.prepared.format import Feature, Manifest, Schema
from hotrow.data.prepared.reader import Jagged, Prepared, Shard

__all__ = ["Feature", "Jagged", "Manifest", "Prepared", "Schema", "Shard"]
