"""Sources of batches. Imported by trainers and benchmarks, never by the core."""

from hotrow.data.sequences import SequenceBatch
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
    "SequenceBatch",
    "SyntheticClicks",
    "SyntheticConfig",
]
