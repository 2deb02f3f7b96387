"""Is training with a tenth of the rows in fast memory the same, to the bit? On real clicks.

    python benchmarks/criteo_sample.py train.txt.zst

reads a file in the format of Criteo's display-advertising challenge (label, 13 numbers,
26 categories, separated by tabs), trains a DLRM on the first six sevenths for one epoch, once with
every row in fast memory and once with `lookahead`, and compares them on the last seventh.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

import hotrow
from hotrow.data import ClickBatch
from hotrow.models import DLRM

NUM_NUMBERS, NUM_CATEGORIES = 13, 26
# The settings of the DLRM reference for this data set.
DIM, BATCH_SIZE, LR = 16, 128, 0.1
BOTTOM, TOP = (512, 256, 64, DIM), (512, 256, 1)


@dataclass(frozen=True)
class Outcome:
    """What one way of training leaves behind."""

    strategy: str
    weights: dict[str, Tensor]  # rows and dense part
    losses: Tensor  # [steps]
    auc: float
    log_loss: float
    hit_rate: float
    seconds: float


def read_bytes(path: Path) -> bytes:
    """The file's text, decompressed where its name ends in .zst."""
    if not path.is_file():
        raise SystemExit(f"there is no file {path}")
    if path.suffix != ".zst":
        return path.read_bytes()
    if shutil.which("zstd"):
        return subprocess.run(["zstd", "-dc", path], stdout=subprocess.PIPE, check=True).stdout
    try:
        import zstandard
    except ImportError:
        raise SystemExit(
            f"{path} is compressed: install the zstd program or the zstandard package, "
            "or decompress it first"
        ) from None
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return bytes(stream.read())


def read_clicks(path: Path) -> ClickBatch:
    """All samples of the file as one batch, in its order."""
    text = read_bytes(path).rstrip(b"\n").replace(b"\r", b"")
    num_columns = 1 + NUM_NUMBERS + NUM_CATEGORIES
    cells = np.array(text.replace(b"\n", b"\t").split(b"\t"))
    if len(cells) % num_columns:
        raise SystemExit(f"{path} does not have {num_columns} columns separated by tabs")
    columns = cells.reshape(-1, num_columns).T
    numbers, categories = columns[: 1 + NUM_NUMBERS], columns[1 + NUM_NUMBERS :]
    numbers = np.where(numbers == b"", b"0", numbers).astype(np.float32)
    dense = np.log1p(np.maximum(numbers[1:], 0))
    ids = [by_first_appearance(column) for column in categories]
    return ClickBatch(
        dense=torch.from_numpy(dense).T.contiguous(),
        sparse=torch.from_numpy(np.stack(ids, axis=1)),
        label=torch.from_numpy(numbers[0]),
    )


def by_first_appearance(values: np.ndarray) -> np.ndarray:
    """Numbers 0, 1, 2 ... in the order in which the values first occur."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]


def rows_of(clicks: ClickBatch) -> list[int]:
    return (clicks.sparse.amax(dim=0) + 1).tolist()


def batches(clicks: ClickBatch, start: int, stop: int, size: int) -> Iterator[ClickBatch]:
    for low in range(start, stop, size):
        part = slice(low, min(low + size, stop))
        yield ClickBatch(clicks.dense[part], clicks.sparse[part], clicks.label[part])


def build(rows: list[int], *, strategy: str, budget: str | None) -> DLRM:
    tables = [
        hotrow.EmbeddingBagConfig(f"cat_{i}", num_rows, DIM, [f"cat_{i}"])
        for i, num_rows in enumerate(rows)
    ]
    embedding = hotrow.EmbeddingBagCollection(
        tables, optimizer=hotrow.SGD(lr=LR), budget=budget, strategy=strategy, device="cpu", seed=0
    )
    return DLRM(embedding, NUM_NUMBERS, BOTTOM, TOP)


def train(clicks: ClickBatch, *, strategy: str, budget: str | None) -> Outcome:
    """One epoch over the first six sevenths, and the quality on the last."""
    torch.manual_seed(0)
    split = len(clicks) * 6 // 7
    model = build(rows_of(clicks), strategy=strategy, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    started = time.perf_counter()
    loader = batches(clicks, 0, split, BATCH_SIZE)
    for batch in hotrow.ahead(loader, model, ids=lambda batch: batch.sparse):
        loss = binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - started
    hit_rate = model.embedding.traffic().hit_rate
    logits, labels = score(model, batches(clicks, split, len(clicks), 4096))
    return Outcome(
        strategy=strategy,
        weights=model.state_dict(),
        losses=torch.stack(losses),
        auc=float(binary_auroc(logits, labels.long())),
        log_loss=float(binary_cross_entropy_with_logits(logits, labels)),
        hit_rate=hit_rate,
        seconds=seconds,
    )


def score(model: DLRM, loader: Iterator[ClickBatch]) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        scored = [(model(batch), batch.label) for batch in loader]
    logits, labels = zip(*scored, strict=True)
    return torch.cat(logits), torch.cat(labels)


def differences(left: Outcome, right: Outcome) -> list[str]:
    """Names of everything that is not equal to the bit."""
    assert left.weights.keys() == right.weights.keys()
    found = [name for name, weight in left.weights.items() if not weight.equal(right.weights[name])]
    if not torch.equal(left.losses, right.losses):
        found.append("losses")
    return found + [
        name for name in ("auc", "log_loss") if getattr(left, name) != getattr(right, name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="Criteo-format file, plain or .zst")
    parser.add_argument("--budget", default="10%", help="fast memory for lookahead")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    clicks = read_clicks(arguments.path)
    print(f"{len(clicks):,} samples, {sum(rows_of(clicks)):,} rows in {NUM_CATEGORIES} tables")
    outcomes = [
        train(clicks, strategy="all-fast", budget=None),
        train(clicks, strategy="lookahead", budget=arguments.budget),
    ]
    for each in outcomes:
        print(
            f"{each.strategy:>10}: test AUC {each.auc:.6f}, log-loss {each.log_loss:.6f}, "
            f"hit rate {each.hit_rate:.2%}, {each.seconds:.1f} s for {len(each.losses):,} steps"
        )
    unequal = differences(*outcomes)
    print(f"not equal: {', '.join(unequal)}" if unequal else "every weight, loss and AUC is equal")
    raise SystemExit(bool(unequal))


if __name__ == "__main__":
    main()
