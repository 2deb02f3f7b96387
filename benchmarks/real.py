"""Every system on real clicks, side by side: hit rates, rows moved, AUC.

    python benchmarks/real.py --criteo train.txt --movielens ml-1m.zip

prepares what is given and runs `hotrow compare` on it: DLRM on a sample of Criteo's clicks, and on
MovieLens-1M, whose ratings of 4 and 5 stars count as clicks (user, film, its genres, gender, age,
occupation and zip code; split by time). The data are not ours to hand out.

Two controls come with it. `reordered-1` and `reordered-2` are all-fast with the samples of each
batch in another order, which changes nothing but the order of sums: how far they end from all-fast
is what rounding does, and what systems that are exact up to rounding are to be measured by. And
random-drop leaves out as many samples as Slipstream did, so it is compared afterwards.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, Results, results_for

from hotrow.cli import make_app
from hotrow.cli._process import INTERRUPTED, USER_ERROR
from hotrow.study.systems import SYSTEMS, register, reordered

CONFIGS = Path(__file__).parents[1] / "configs"
STRATEGIES = (
    "all-fast,reordered-1,reordered-2,hybrid,hybrid-plain,static-hybrid,static,lru,scratchpipe,"
    "lookahead,fae,fae-hybrid,hotline,lookahead+slipstream"
)
SKIPPING, CONTROL = "lookahead+slipstream", "lookahead+random-drop"
# Batches are so small that the budget holds the six that five stages have in flight. Of so small a
# sample of Criteo's clicks most hot rows are not visited while Slipstream watches: no more than a
# seventh of the hot samples could be stale.
RUNS = {
    "criteo": ["embedding.budget=10%", "system.target=0.1"],
    "movielens": [
        "embedding.budget=20%", "data.batch_size=64", "model.bottom=[]", "model.top=[64,32]",
        "training.steps=3000",
    ],
}  # fmt: skip
COLUMNS = """label = "liked"
dense = ["age"]
categories = ["user", "film", "genres", "gender", "occupation", "zip"]
"""
FACTS = (
    "contract", "outcome", "message", "hit_rate", "rows_per_sample", "bytes_per_sample",
    "fast_bytes", "samples", "auc", "log_loss", "equal", "equal_note",
)  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--criteo", type=Path, help="a log that `prepare criteo` reads")
    options.add_argument("--movielens", type=Path, help="ml-1m.zip as GroupLens publishes it")
    options.add_argument("--strategies", default=STRATEGIES)
    options.add_argument("--out", type=Path, help="folder for the pages of `hotrow compare`")
    options.add_argument("--set", action="append", default=[], help="a setting of all runs")
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder for real.jsonl")
    options.add_argument("--commit", help="of the code measured; else what git says")
    asked = options.parse_args()
    given = {kind: getattr(asked, kind) for kind in RUNS if getattr(asked, kind) is not None}
    if not given:
        options.error("give --criteo or --movielens")
    for seed in (1, 2):
        register_reordered(seed)
    results = results_for("real", asked)
    with tempfile.TemporaryDirectory() as scratch:
        for kind, path in given.items():
            folder = prepared(kind, path, Path(scratch))
            settings = [
                "data.kind=prepared", f"data.folder={folder}", f"run.name={kind}",
                f"run.threads={asked.threads}", *RUNS[kind], *asked.set,
            ]  # fmt: skip
            out = (asked.out or Path(scratch) / "compared") / kind
            compare_all(kind, asked.strategies, settings, out, results)


def compare_all(
    kind: str, strategies: str, settings: Sequence[str], out: Path, results: Results
) -> None:
    found = compare(strategies, settings, out)
    write(results, kind, found)
    samples = {each["strategy"]: each["samples"] for each in found["strategies"]}
    left_out = 1 - samples.get(SKIPPING, 0) / samples["all-fast"]
    if 0 < left_out < 1:
        as_many = [*settings, f"system.target={left_out}"]
        write(results, kind, compare(CONTROL, as_many, out / "control"), only=CONTROL)


def compare(strategies: str, settings: Sequence[str], out: Path) -> dict[str, Any]:
    run = CONFIGS / "rm2-kaggle.toml"
    code = hotrow(
        "compare", str(run), "--strategies", strategies, "--repeat", "1", "--out", str(out),
        *(f"--set={each}" for each in settings),
    )  # fmt: skip
    if code in (USER_ERROR, INTERRUPTED):
        raise SystemExit(code)  # whatever else is wrong is in the table
    return dict(json.loads((out / "compare.json").read_text(encoding="utf-8")))


def write(results: Results, kind: str, found: dict[str, Any], only: str | None = None) -> None:
    setting = {
        "batch": found["settings"]["data"]["batch_size"],
        "steps": found["steps"],
        "budget": found["settings"]["embedding"]["budget"],
        "budget_bytes": found["budget_bytes"],
        "rows_bytes": found["rows_bytes"],
        "optimizer": found["settings"]["embedding"]["optimizer"],
        "system": found["settings"]["system"],
        "tolerance": found["tolerance"],
    }
    for each in found["strategies"]:
        if only in (None, each["strategy"]):
            facts = {name: each[name] for name in FACTS}
            results.write(kind, each["strategy"], {"setting": setting, "facts": facts})


# -- samples in another order ------------------------------------------------------------


def register_reordered(seed: int) -> None:
    kind = reordered(seed)
    if kind.name not in SYSTEMS:
        register(kind)


# -- data --------------------------------------------------------------------------------


def prepared(kind: str, path: Path, scratch: Path) -> Path:
    folder = scratch / kind
    if kind == "criteo":
        must(hotrow("prepare", "criteo", str(path), "--out", str(folder)))
        return folder
    table, columns = scratch / "ratings.parquet", scratch / "columns.toml"
    write_ratings(path, table)
    columns.write_text(COLUMNS, encoding="utf-8")
    words = ["prepare", "parquet", str(table), "--columns", str(columns)]
    must(hotrow(*words, "--out", str(folder), "--split", "time"))
    return folder


def write_ratings(archive: Path, out: Path) -> None:
    """One row per rating, with what is known of its user and its film, in the order of time."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    users = {each[0]: each[1:] for each in read(archive, "users.dat")}
    genres = {each[0]: each[2].split("|") for each in read(archive, "movies.dat")}
    ratings = sorted(read(archive, "ratings.dat"), key=lambda each: int(each[3]))
    gender, age, occupation, code = zip(*(users[each[0]] for each in ratings), strict=True)
    table = pa.table(
        {
            "liked": pa.array([each[2] >= "4" for each in ratings]).cast(pa.int8()),
            "age": pc.divide(pa.array([int(each) for each in age]).cast(pa.float32()), 100.0),
            "user": [each[0] for each in ratings],
            "film": [each[1] for each in ratings],
            "genres": [genres[each[1]] for each in ratings],
            "gender": gender,
            "occupation": occupation,
            "zip": code,
        }
    )
    pq.write_table(table, out)


def read(archive: Path, name: str) -> list[list[str]]:
    with zipfile.ZipFile(archive) as found, found.open(f"ml-1m/{name}") as file:
        lines = io.TextIOWrapper(file, encoding="latin-1")
        return [line.rstrip("\n").split("::") for line in lines]


def hotrow(*words: str) -> int:
    """The command's exit code; in this process, where the controls are registered."""
    try:
        make_app()(list(words), prog_name="hotrow")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def must(code: int) -> None:
    if code:  # what is wrong has been said
        raise SystemExit(code)


if __name__ == "__main__":
    main()
