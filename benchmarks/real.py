"""Every system on real clicks, side by side: hit rates, rows moved, AUC.

    python benchmarks/real.py --criteo train.txt.zst --movielens ml-1m.zip --out compared

prepares what is given and runs `hotrow compare` on it: DLRM on a sample of Criteo's clicks, and on
MovieLens-1M, whose ratings of 4 and 5 stars count as clicks (user, film, its genres, gender, age,
occupation and zip code; in the order of time). The data are not ours to hand out.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
SYSTEMS = (
    "all-fast,hybrid,hybrid-plain,static-hybrid,static,lru,scratchpipe,fae,hotline,"
    "lookahead+slipstream,lookahead+random-drop,lookahead"
)
RUNS = {
    "criteo": ["embedding.budget=10%", "data.batch_size=1024", "training.epochs=1"],
    "movielens": [
        "embedding.budget=40%", "data.batch_size=1024", "model.bottom=[]", "model.top=[64,32]",
        "embedding.optimizer.lr=0.1", "training.optimizer.lr=0.1",
    ],
}  # fmt: skip
COLUMNS = """label = "liked"
dense = ["age"]
categories = ["user", "film", "genres", "gender", "occupation", "zip"]
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--criteo", type=Path, help="a log that `prepare criteo` reads")
    options.add_argument("--movielens", type=Path, help="ml-1m.zip as GroupLens publishes it")
    options.add_argument("--strategies", default=SYSTEMS)
    options.add_argument("--repeat", default="1")
    options.add_argument("--out", type=Path, default=Path("compared"))
    options.add_argument("--set", action="append", default=[], help="a setting of all runs")
    asked = options.parse_args()
    given = {kind: getattr(asked, kind) for kind in RUNS if getattr(asked, kind) is not None}
    if not given:
        options.error("give --criteo or --movielens")
    with tempfile.TemporaryDirectory() as scratch:
        for kind, path in given.items():
            folder = prepared(kind, path, Path(scratch))
            settings = [
                "data.kind=prepared", f"data.folder={folder}", f"run.name={kind}",
                *RUNS[kind], *asked.set,
            ]  # fmt: skip
            run = CONFIGS / "rm2-kaggle.toml"
            hotrow(
                "compare", str(run), "--strategies", asked.strategies, "--repeat", asked.repeat,
                "--out", str(asked.out / kind), *(f"--set={each}" for each in settings),
            )  # fmt: skip


def prepared(kind: str, path: Path, scratch: Path) -> Path:
    folder = scratch / kind
    if kind == "criteo":
        hotrow("prepare", "criteo", str(path), "--out", str(folder))
        return folder
    table, columns = scratch / "ratings.parquet", scratch / "columns.toml"
    write_ratings(path, table)
    columns.write_text(COLUMNS, encoding="utf-8")
    words = ["prepare", "parquet", str(table), "--columns", str(columns)]
    hotrow(*words, "--out", str(folder), "--split", "time")
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


def hotrow(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "hotrow", *words], check=False)
    if done.returncode:  # what is wrong has been said
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
