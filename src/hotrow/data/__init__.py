"""Sources of batches. Imported by trainers and benchmarks, never by the core."""

from hotrow.data.batches import ClickBatch, SequenceBatch
from hotrow.data.loader import Loader, SequenceLoader
from hotrow.data.popularity import Counted
from hotrow.data.sources import ParquetSource, PreparedSource
from hotrow.data.synthetic import (
    KAGGLE_ROWS,
    TERABYTE_ROWS,
    SyntheticClicks,
    SyntheticConfig,
    SyntheticSequences,
)

__all__ = [
    "KAGGLE_ROWS",
    "TERABYTE_ROWS",
    "ClickBatch",
    "Counted",
    "Loader",
    "ParquetSource",
    "PreparedSource",
    "SequenceBatch",
    "SequenceLoader",
    "SyntheticClicks",
    "SyntheticConfig",
    "SyntheticSequences",
]
