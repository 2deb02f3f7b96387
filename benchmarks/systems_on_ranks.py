"""Do the published systems train on several ranks what they train on one? On real clicks.

    python benchmarks/systems_on_ranks.py --criteo train.txt.zst --movielens ml-1m.zip
    python benchmarks/systems_on_ranks.py --only movielens --ranks 1 2 3 --batches 200

converts the data sets to arrays in `--data`, as skip_control.py does, and trains one small DLRM per
data set, system and number of ranks for `--batches` whole batches; ranks are processes that talk
over gloo. `random-drop` drops as many samples as Slipstream did. The test samples are evaluated at
the end, by all ranks together.

Each line says what a batch makes all ranks together send: ids, rows (those that travel beside
training included) and gradients of rows; for FAE, hot batches and cold ones apart. Beside one rank
it says whether the steps, their samples and the system's decisions are the same, how far the losses
of the first steps are apart, and the difference in AUC.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import socket
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing
from skip_control import CONVERTERS, SETTINGS, Data, read
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from hotrow.data import ClickBatch
from hotrow.engine.split_batch import Parted
from hotrow.inputs.batch import parse
from hotrow.inputs.hotset import popular
from hotrow.inputs.rank_part import HeldBatches
from hotrow.models import DLRM
from hotrow.support.units import parse_bytes
from hotrow.systems.calibrate import row_bytes

SUITE = "systems_on_ranks"
DATA = ("criteo", "movielens")
SYSTEMS = ("fae", "hotline", "scratchpipe", "slipstream", "random-drop")
KINDS = ("ids", "rows", "early rows", "grads")  # early rows are some of the rows
HOT = "15%"  # of the bytes of all rows: what FAE and Hotline pin, on every rank
FIRST = 50  # steps whose losses are compared: later rounding has grown
HEAD = (
    "data", "system", "ranks", "batches", "kind", "KB of ids", "KB of rows", "KB of gradients",
    "samples", "AUC", "AUC - one rank", "like one rank", "losses apart",
)  # fmt: skip


# -- one process ---------------------------------------------------------------------------


class Watched:
    """Notes, batch by batch, whether FAE trains hot samples."""

    def __init__(self, system: Any) -> None:
        self.kinds: list[str] = []
        self._system, self._passes = system, system.passes
        system.passes = self._noted_passes

    def _noted_passes(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        for segment in self._passes(batches):
            yield map(self._noted, segment)

    def _noted(self, batch: Any) -> Any:
        kind = "all"
        if isinstance(self._system, hotrow.FAE):
            embedding: Any = self._system._embedding
            parsed = parse(batch.sparse, embedding.features, None)
            is_hot = self._system.hot is not None and bool(popular(parsed, self._system.hot).all())
            kind = "hot" if is_hot else "cold"
        elif isinstance(batch, Parted) and batch.first:
            kind = "in two parts"
        self.kinds.append(kind)
        return batch


def rule_of(data: Data) -> hotrow.RowWiseAdagrad:
    return hotrow.RowWiseAdagrad(lr=data.setting.row_lr)


def pinned_bytes(data: Data) -> int:
    """Return the bytes of rows that FAE and Hotline pin."""
    width = data.setting.dim + rule_of(data).state_width(data.setting.dim)
    return parse_bytes(HOT, total=4 * width * sum(data.rows))


def model_of(data: Data, strategy: str) -> DLRM:
    setting = data.setting
    tables = [
        hotrow.EmbeddingBagConfig(f"cat_{k}", rows, setting.dim, [f"cat_{k}"])
        for k, rows in enumerate(data.rows)
    ]
    pinned = pinned_bytes(data) if strategy == "static" else 0
    embedding = hotrow.EmbeddingBagCollection(
        tables, rule_of(data), setting.budget, strategy=strategy, seed=data.seed, replicate=pinned
    )
    return DLRM(
        embedding, data.train[0].dense.shape[1], bottom=(*setting.bottom, setting.dim),
        top=(*setting.top, 1), generator=torch.Generator().manual_seed(data.seed),
    )  # fmt: skip


def system_of(name: str, data: Data, like: Any) -> Any:
    test = HeldBatches(data.validation)
    if name == "fae":
        return hotrow.FAE(test=test, seed=data.seed, hot_budget=HOT)
    if name == "hotline":
        return hotrow.Hotline()
    if name == "slipstream":
        return hotrow.Slipstream(hot_budget="40%", test=test, watched=0.05, target=0.2)
    return hotrow.RandomDrop(like=like) if name == "random-drop" else None


def measured(name: str, data: Data, like: Any) -> dict[str, Any]:
    """Train and test by one system; all ranks call it together."""
    model = model_of(data, "static" if name in ("fae", "hotline") else strategy_of(name))
    embedding: Any = model.embedding
    if name == "hotline" and embedding.ranks is None:  # pin as many rows as several ranks
        (table, *_), pins = embedding.tables, embedding.pins
        room = pinned_bytes(data) // row_bytes(embedding)[table.name]
        pins.room_for_pins = lambda: {table.embedding_dim: room}
    system = system_of(name, data, like)
    trainer = hotrow.Trainer(
        model,
        binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.Adagrad(model.parameters(), lr=data.setting.dense_lr),
        ids=lambda batch: batch.sparse,
        system=system,
    )
    watched = None if system is None else Watched(system)
    # Without a system each rank gives its parts of batches; with one, whole batches.
    batches: Any = data.train if system is not None else list(HeldBatches(data.train))
    losses, samples, sent = [], [], []
    before, started = embedding.sent_bytes(), time.perf_counter()
    for record in trainer.run(batches):
        now = embedding.sent_bytes()
        losses.append(record.loss)
        samples.append(record.samples)
        sent.append({kind: now[kind] - before[kind] for kind in KINDS})
        before = now
    seconds = time.perf_counter() - started
    tested = trainer.evaluate(HeldBatches(data.test))
    kinds = ["all"] * len(losses) if watched is None else watched.kinds[: len(losses)]
    return {
        "losses": losses,
        "samples": samples,
        "sent": by_kind(kinds, sent),
        "auc": tested.auc,
        "log_loss": tested.log_loss,
        "seconds": seconds,
        "decisions": decisions_of(system),
        "record": None if system is None else system.record,
    }


def strategy_of(name: str) -> str:
    return name if name == "scratchpipe" else "lookahead"


def by_kind(kinds: Sequence[str], sent: Sequence[dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return batches and bytes of each kind of batch."""
    sums: dict[str, Counter[str]] = {}
    for kind, of_step in zip(kinds, sent, strict=True):
        sums.setdefault(kind, Counter()).update({"batches": 1, **of_step})
    return {kind: dict(counts) for kind, counts in sums.items()}


def decisions_of(system: Any) -> str:
    """Return a text that is the same where a system has decided the same."""
    if isinstance(system, hotrow.FAE):
        r, hot = system.record, system.hot
        rows = b"" if hot is None else hot.is_hot.numpy().tobytes()
        facts: Any = [r.hot_samples, r.cold_samples, r.switches, r.rates]
        return f"{facts} {hashlib.sha256(rows).hexdigest()}"
    if isinstance(system, hotrow.Hotline):
        r = system.record
        return str([(x.batch, x.why, x.rows_in) for x in r.learned] + [r.popular, r.parts])
    if isinstance(system, hotrow.Slipstream | hotrow.RandomDrop):
        r = system.record
        return str([r.offered, r.dropped, r.first_batch, sorted(r.stale_rows.items())])
    return ""


def work(
    rank: int, ranks: int, port: int, name: str, systems: Sequence[str], share: float,
    folder: Path, out: Path,
) -> None:  # fmt: skip
    """Measure systems one after the other, and write what this rank has found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = read(name, 0, folder, share)  # alone, as generated batches would come in parts
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
    like = None
    for system in systems:
        found = measured(system, data, like)
        record = found.pop("record")
        like = record if system == "slipstream" else like
        with (out / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"system": system, **found}) + "\n")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


# -- all processes -------------------------------------------------------------------------


def measure(
    ranks: int, name: str, systems: Sequence[str], share: float, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank has found, by system."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        arguments = (ranks, port, name, systems, share, folder, out)
        torch.multiprocessing.spawn(work, arguments, nprocs=ranks)
        for rank in range(ranks):
            for text in (out / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                found.setdefault(line.pop("system"), []).append(line)
    return found


def joined(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one line of what ranks found; raise if they did not train and decide the same."""
    first = by_rank[0]
    for other in by_rank[1:]:
        for key in ("losses", "samples", "decisions", "auc", "log_loss"):
            if other[key] != first[key]:
                raise RuntimeError(f"ranks differ in their {key}")
    sent = {}
    for kind, counts in first["sent"].items():
        batches = counts["batches"]
        total = {k: sum(x["sent"][kind][k] for x in by_rank) for k in KINDS}
        sent[kind] = {"batches": batches} | {k: total[k] / batches for k in KINDS}
    return first | {"sent": sent, "steps": len(first["losses"]), "total": sum(first["samples"])}


def beside(found: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    """Return how a run is like the one of a single rank."""
    if alone is None or found is alone:
        return {"same": None, "apart": None, "auc_apart": None}
    pairs = list(zip(found["losses"][:FIRST], alone["losses"][:FIRST], strict=False))
    return {
        "same": all(found[key] == alone[key] for key in ("samples", "decisions")),
        "apart": max(abs(one - other) for one, other in pairs),
        "auc_apart": found["auc"] - alone["auc"],
    }


def table(lines: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the page's table: of one rank a row, of several a row for each kind of
    batch."""
    rows = []
    for line in lines:
        about = line["data"], line["name"], f"{line['ranks']}"
        quality = f"{line['total']:,}", f"{line['auc']:.5f}"
        if line["ranks"] == 1:
            rows.append((*about, f"{line['steps']:,}", *["-"] * 4, *quality, *["-"] * 3))
            continue
        same = "yes" if line["same"] else "no"
        beside_one = f"{line['auc_apart']:+.5f}", same, f"{line['apart']:.0e}"
        for kind, sent in sorted(line["sent"].items()):
            kilobytes = (f"{sent[x] / 1e3:.1f}" for x in ("ids", "rows", "grads"))
            rows.append((*about, f"{sent['batches']:,}", kind, *kilobytes, *quality, *beside_one))
    return rows


def convert(asked: argparse.Namespace) -> None:
    for name, converter in CONVERTERS.items():
        out = asked.data / f"{name}.npz"
        path = getattr(asked, name)
        if name in asked.only and path is not None and not out.exists():
            converter(path, out)
        if name in asked.only and not out.exists():
            raise SystemExit(f"there is no {out}: give --{name}")


def main() -> None:
    options = harness.parser(__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, default=Path("build/skip"), help="for arrays")
    options.add_argument("--criteo", type=Path, help="a log of Criteo's challenge")
    options.add_argument("--movielens", type=Path, help="ml-1m.zip as GroupLens publishes it")
    options.add_argument("--only", nargs="+", default=DATA, choices=(*DATA, "generated"))
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    options.add_argument("--batches", type=int, default=300, help="of a run")
    asked = options.parse_args()
    if asked.smoke:
        asked.only, asked.batches, asked.ranks = ["generated"], 24, [1, 2]
    convert(asked)
    results, deadline = harness.results_for(SUITE, asked), harness.Deadline(asked.minutes)
    lines = []
    for name in asked.only:
        alone: dict[str, dict[str, Any]] = {}
        share = asked.batches / batches_of(name, asked.data)
        for ranks in asked.ranks:
            deadline.check()
            by_system = measure(ranks, name, asked.systems, min(1.0, share), asked.data)
            for system, by_rank in by_system.items():
                found = joined(by_rank)
                if ranks == 1:
                    alone[system] = found
                setting = dataclasses.asdict(SETTINGS[name])
                line = {"data": name, "name": system, "ranks": ranks, "setting": setting}
                line |= {k: found[k] for k in ("sent", "steps", "total", "auc", "log_loss")}
                line |= {"seconds": found["seconds"], **beside(found, alone.get(system))}
                if harness.keeps_results(asked):
                    results.write(f"{name}, {ranks} ranks", system, line)
                lines.append(line)
                for cells in table([line]):
                    harness.say("  ".join(cells))
    harness.say("  ".join(HEAD))


def batches_of(name: str, folder: Path) -> int:
    """Return how many training batches a data set has."""
    if name == "generated":
        return 1200
    whole: list[ClickBatch] = read(name, 0, folder, 1.0).train
    return len(whole)


if __name__ == "__main__":
    main()
