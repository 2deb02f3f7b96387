"""Sources of batches. Imported by trainers and benchmarks, never by the core."""

from hotrow.data.counted import Counted
from hotrow.data.loader import Loader
from hotrow.data.sequences import SequenceBatch
from hotrow.data.sources import ParquetSource, PreparedSource
from hotrow.data.synthetic import (
    KAGGLE_ROWS,
    TERABYTE_ROWS,
    ClickBatch,
    SyntheticClicks,
    SyntheticConfig,
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
    "SyntheticClicks",
    "SyntheticConfig",
]
