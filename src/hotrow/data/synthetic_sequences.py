"""Generated sequences with known truth. Knows nothing about rows, slots or strategies.

Every step is drawn by itself, like a click's ids; only the tables that are constant have one id for
all steps of a sample. A history is from 1 to `steps` long, each length being as likely. Whether a
target follows depends on the target, and on what it has in common with the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.counted import Counted
from hotrow.data.planted import Columns, Dense, PlantedHistories, click_probability
from hotrow.data.sequences import SequenceBatch, places
from hotrow.data.synthetic import CALIBRATION_SAMPLES, Drawn, SyntheticConfig
from hotrow.support.messages import few


class SyntheticSequences(Drawn):
    """Batches of generated sequences, and the truth behind them.

    A row more than a table has, the number of its rows, stands where there is no history. Numbers
    are a step's place and `num_dense` more, which are 0 but for the target.
    """

    def __init__(
        self,
        config: SyntheticConfig,
        *,
        steps: int,
        constant: Sequence[str] = (),
        counts: Mapping[str, Counted] | None = None,
    ) -> None:
        """`constant`: the tables whose id is the same at all steps."""
        names = config.table_names
        for name in constant:
            if name not in names:
                raise ValueError(f"constant names {name!r}; the tables are {few(names)}")
        if set(names) <= set(constant):
            raise ValueError("all tables are constant, so that no step differs from another")
        if any(each != 1 for each in config.lookups_per_table):
            raise ValueError(
                f"lookups must be 1 where steps are generated, each with one id of a table; got "
                f"{config.lookups}"
            )
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        is_constant = [name in constant for name in names]
        lookups = tuple(1 if each else steps + 1 for each in is_constant)
        super().__init__(replace(config, lookups=lookups), counts=counts)
        self.steps = steps
        rng = np.random.default_rng((config.seed, 0))
        self._planted = PlantedHistories.from_seed(
            config.seed,
            num_tables=len(names),
            num_dense=config.num_dense,
            changing=tuple(int(table) for table in np.flatnonzero(~np.array(is_constant))),
        ).calibrated(
            *self._drawn(rng, size=CALIBRATION_SAMPLES, index=0),
            signal=config.signal,
            click_rate=config.click_rate,
        )

    def batch(self, index: int) -> SequenceBatch:
        """Batch number `index`, the same whenever and wherever it is made."""
        config, steps = self.config, self.steps
        rng = np.random.default_rng((config.seed, 1, index))
        dense, columns, lengths = self._drawn(rng, size=config.batch_size, index=index)
        logits = self._planted.logits(dense, columns, lengths)
        label = rng.random(config.batch_size) < click_probability(logits)
        is_padding = np.arange(steps + 1) < steps - lengths[:, None]
        numbers = np.zeros((config.batch_size, steps + 1, 1 + config.num_dense), np.float32)
        numbers[:, :, 0] = places(steps)
        numbers[:, steps, 1:] = dense
        named = zip(config.table_names, config.rows, columns, strict=True)
        return SequenceBatch.from_ids(
            torch.from_numpy(numbers),
            {name: torch.from_numpy(np.where(is_padding, rows, ids)) for name, rows, ids in named},
            torch.from_numpy(label.astype(np.float32)),
            torch.from_numpy(lengths),
        )

    __getitem__ = batch

    def batches(self, start: int, stop: int) -> Iterator[SequenceBatch]:
        """Batches start, start + 1 ... stop - 1."""
        return map(self.batch, range(start, stop))

    def logits(self, batch: SequenceBatch) -> Tensor:
        """What the planted truth says of a batch, [B] float64: no score can rank it better."""
        ids = batch.sparse.values().view(len(self.config.rows), len(batch), -1)
        dense = batch.dense[:, self.steps, 1:].numpy()
        return torch.from_numpy(
            self._planted.logits(dense, list(ids.numpy()), batch.lengths.numpy())
        )

    def best_auc(self, indices: Iterable[int]) -> float:
        """AUC of the planted truth on these batches, which no trained model can expect to beat."""
        batches = [self.batch(index) for index in indices]
        scores = torch.cat([self.logits(batch) for batch in batches])
        labels = torch.cat([batch.label for batch in batches])
        from torchmetrics.functional.classification import binary_auroc  # slow to import

        return float(binary_auroc(scores, labels.long()))

    def expected_counts(self, table: int, count: int) -> Tensor:
        """Steps in one batch, padding left out, at which the ids that `hottest` gives are read."""
        steps = self.config.batch_size * (1 + (1 + self.steps) / 2)
        return torch.from_numpy(steps * self._popularity[table].probabilities(count))

    def _drawn(
        self, rng: np.random.Generator, *, size: int, index: int
    ) -> tuple[Dense, Columns, NDArray[np.int64]]:
        dense, columns = self._features(rng, size=size, index=index)
        lengths = rng.integers(1, self.steps + 1, size)
        wide = (size, self.steps + 1)
        return dense, [np.broadcast_to(ids, wide) for ids in columns], lengths
