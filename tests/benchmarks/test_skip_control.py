"""The Slipstream study: its data, its controls, its table, and a run in small."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def script(load: Any) -> Any:
    return load("skip_control")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["skip_control.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0


def test_the_study_in_small(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["--smoke", "--results", str(tmp_path), "--seeds", "0", "--bases", "lookahead"]
    run(script, monkeypatch, *words, "--ways", "none", "slipstream:watched=0.2")
    written = (tmp_path / "skip_control.jsonl").read_text().splitlines()
    lines = {line["system"]: line for line in map(json.loads, written)}
    suffix = ":watched=0.2"
    assert lines.keys() == {
        "none", "slipstream" + suffix, "random-drop" + suffix, "random-hot" + suffix,
    }  # fmt: skip
    (dropped,) = {line["dropped"] for name, line in lines.items() if name != "none"}
    assert dropped > 0
    assert all(0.4 < line["auc"] < 1 for line in lines.values())
    capsys.readouterr()
    run(script, monkeypatch, *words, "--ways", "none", "slipstream:watched=0.2")
    assert "0 of 2 tasks" in capsys.readouterr().out  # nothing is measured twice
    assert (tmp_path / "skip_control.jsonl").read_text().splitlines() == written


def test_auc_counts_pairs_and_halves_ties(script: Any) -> None:
    scores, labels = np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 0, 1, 1])
    assert script.auc_of(scores, labels) == 3.5 / 4


def test_differences_are_paired_by_seed(script: Any) -> None:
    def line(system: str, seed: int, auc: float) -> dict[str, Any]:
        return {
            "data": "d", "base": "hotline", "when": "now", "system": system, "seed": seed,
            "auc": auc, "dropped": 5, "samples": 100,
        }  # fmt: skip

    lines = [
        line("slipstream", 0, 0.7), line("slipstream", 1, 0.8), line("slipstream", 2, 0.9),
        line("random-drop", 0, 0.6), line("random-drop", 1, 0.9), line("none", 0, 0.75),
    ]  # fmt: skip
    ((*about, drop, hot, everything),) = script.table(lines)
    assert about == ["d", "hotline", "now", "slipstream", "3", "5.0%"]
    assert drop.startswith("+0.00000 ± 1.27")
    assert drop.endswith("(1/2)")
    assert hot == "-"
    assert everything == "-0.05000 ± nan (0/1)"


def test_criteo_and_movielens_are_converted(script: Any, tmp_path: Path) -> None:
    text = "".join(
        "\t".join([str(place % 2), *["3"] * 12, "", *[f"{place % 3:x}"] * 25, ""]) + "\n"
        for place in range(70)
    )
    (tmp_path / "train.txt").write_text(text)
    script.convert_criteo(tmp_path / "train.txt", tmp_path / "criteo.npz")
    with np.load(tmp_path / "criteo.npz") as found:
        assert found["ids"].shape == (70, 26)
        assert found["rows"].tolist() == [4] * 25 + [2]  # the first row is for rare values
        assert int(found["trained"]) == 60
        assert found["dense"][0, 0] == np.float32(np.log1p(3))
        assert found["dense"][0, 12] == 0
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.writestr("ml-1m/users.dat", "1::F::25::3::123\n2::M::50::4::456\n")
        archive.writestr("ml-1m/movies.dat", "7::A::Comedy\n9::B::Drama|War\n")
        archive.writestr("ml-1m/ratings.dat", "1::7::5::0\n2::9::3::0\n1::9::4::0\n" * 10)
    script.convert_movielens(tmp_path / "ml.zip", tmp_path / "movielens.npz")
    with np.load(tmp_path / "movielens.npz") as found:
        assert found["rows"].tolist() == [2, 2, 2, 2, 2, 2]
        assert found["label"].sum() == 20
        assert int(found["trained"]) == 27
