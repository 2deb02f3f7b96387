"""Data prepared once, on disk, and read from there as it is; `format` says what lies where."""

from hotrow.data.prepared.format import Feature, Jagged, Manifest, Prepared, Schema, Shard

__all__ = ["Feature", "Jagged", "Manifest", "Prepared", "Schema", "Shard"]
