"""FAE's input processor: every sample of a loader goes to the hot set or to the cold one, once.

Of a loader that reads samples by their number, as hotrow.data.Loader does, numbers alone are kept:
see sample_sets.py. Samples of any other are copied: see sample_copies.py.

Knows nothing of rows: which samples are hot is asked of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.samples import Take
from hotrow.support.messages import warn
from hotrow.systems.fae.hot_cold_schedule import Separated
from hotrow.systems.fae.sample_copies import MOST_BYTES, Advance, Copies, Join, SetOptions, nobody
from hotrow.systems.fae.sample_sets import NumberedSamples, separated

Popular = Callable[[Any], Tensor]  # a batch -> bool [B]: all lookups of a sample are hot


def separate(
    batches: Iterable[Any],
    popular: Popular,
    *,
    folder: str | Path | None = None,
    key: str | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    seed: int | None = 0,
    take: Take | None = None,
    join: Join | None = None,
    most_bytes: int = MOST_BYTES,
    pin_memory: bool | None = None,
    advance: Advance = nobody,
) -> Separated:
    """Tells hot samples from cold ones, in one pass over `batches`, which are one epoch.

    `folder` is for what should not be in memory. A `Loader` puts its sets there, and with a `key`,
    which names the hot rows, finds them again in the next run. Its batch size, epochs and seed are
    its own; what is said of them here is for other loaders. Their samples are kept as long as the
    process lives, in memory up to `most_bytes`, else in the folder. Batches are as large as the
    first one, or `batch_size`; `seed=None` leaves the order as it is.

    `take` and `join` are for batches whose tensors are not by samples: the samples at some places
    of a batch, and one batch of several. With both, batches may be of any class; those that are not
    made of tensors alone are kept in memory, however many. `advance` is called with numbers of
    samples done.
    """
    if isinstance(batches, NumberedSamples):
        found = separated(batches, popular, folder=folder, key=key, advance=advance)
    else:
        pins = torch.cuda.is_available() if pin_memory is None else pin_memory
        options = SetOptions(batch_size, epochs, seed, pins, take, join)
        found = Copies(options, folder=folder, most_bytes=most_bytes).of(batches, popular, advance)
    if not found.hot.samples:
        warn(
            f"none of the {found.samples:,} samples is hot: every one reads a row that is not, so "
            "all take the cold way. More hot rows, or fewer lookups in a sample, would help"
        )
    return found


def check_evaluated_again(test: Iterable[Any] | None) -> None:
    """Refuses test batches that can be read once, or are none."""
    if isinstance(test, Iterator):
        raise ValueError(
            "test is evaluated again and again, and an iterator gives its batches once; give a "
            "list or a loader"
        )
    if isinstance(test, list | tuple) and not test:
        raise ValueError("test has no batch to evaluate on; leave it out where there is none")


def check_read_again(batches: Iterable[Any]) -> None:
    """Refuses what can be read once, where it is read to find hot rows and again to train."""
    if iter(batches) is batches:
        raise ValueError(
            f"the batches are a {type(batches).__name__}, which can be read only once, and they "
            "are read to find hot rows before they are read for training: give a DataLoader, a "
            "list or anything else that starts from the beginning with each `for`"
        )
