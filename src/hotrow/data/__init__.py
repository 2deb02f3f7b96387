"""Sources of batches. Imported by trainers and benchmarks, never by the core."""

from hotrow.data.counted import Counted
from hotrow.data.loader import Loader
from hotrow.data.parquet import ParquetSource
from hotrow.data.sequence_loader import SequenceLoader
from hotrow.data.sequences import SequenceBatch
from hotrow.data.sources import PreparedSource
from hotrow.data.synthetic import (
    KAGGLE_ROWS,
    TERABYTE_ROWS,
    ClickBatch,
    SyntheticClicks,
    SyntheticConfig,
)
from hotrow.data.synthetic_sequences import SyntheticSequences

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
