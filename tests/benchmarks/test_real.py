"""Systems on clicks that are invented, but look like the real ones: all is run, in small."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow")


def write(path: Path, ratings: int = 1500) -> None:
    """MovieLens in small, in its own form."""
    torch.manual_seed(0)
    users, films, stars = (torch.randint(1, n, (ratings,)).tolist() for n in (40, 60, 6))
    lines = {
        "users.dat": [f"{n}::{'FM'[n % 2]}::{18 + n % 3}::{n % 5}::{n % 7}" for n in range(1, 40)],
        "movies.dat": [f"{n}::Film {n}::{'Drama|War' if n % 2 else 'War'}" for n in range(1, 60)],
        "ratings.dat": [
            f"{user}::{film}::{star}::{time}"
            for time, (user, film, star) in enumerate(zip(users, films, stars, strict=True))
        ],
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in lines.items():
            archive.writestr(f"ml-1m/{name}", "\n".join(text) + "\n")


@pytest.mark.filterwarnings("ignore:validation loss rose")  # which ends skipping, late enough
@pytest.mark.filterwarnings("ignore:no threshold")  # some are left out all the same
def test_systems_are_compared_and_random_drop_leaves_out_as_many(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load("real")
    write(tmp_path / "ml-1m.zip")
    small = (
        "training.steps=60", "data.batch_size=16", "embedding.budget=95%", "model.top=[4]",
        "system.target=0.5",
    )  # fmt: skip
    words = ["real.py", "--movielens", str(tmp_path / "ml-1m.zip"), "--results", str(tmp_path)]
    words += ["--strategies", "all-fast,reordered-1,lookahead,lookahead+slipstream"]
    monkeypatch.setattr("sys.argv", [*words, *(f"--set={each}" for each in small)])
    threads = torch.get_num_threads()
    try:
        real.main()
    finally:
        torch.set_num_threads(threads)
    text = (tmp_path / "real.jsonl").read_text().splitlines()
    found = {each["system"]: each for each in map(json.loads, text)}
    facts = {name: each["facts"] for name, each in found.items()}
    assert facts["all-fast"]["samples"] == facts["reordered-1"]["samples"] == 960
    assert facts["lookahead"]["equal"] == "bits"
    assert facts["reordered-1"]["equal"] == "tolerance"
    assert found["all-fast"]["setting"]["batch"] == 16
    left = facts["lookahead+slipstream"]["samples"]
    assert 640 < left < 960
    assert facts["lookahead+random-drop"]["samples"] == pytest.approx(left, abs=16)
