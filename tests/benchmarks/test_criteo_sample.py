"""The comparison on Criteo-format files, tried on a few invented lines."""

import math
from pathlib import Path

import pytest
import torch


@pytest.fixture
def script(load):
    return load("criteo_sample")


def write(path: Path, samples: list[tuple[int, list[str], list[str]]]) -> Path:
    lines = ["\t".join([str(label), *numbers, *words]) for label, numbers, words in samples]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_numbers_become_logarithms_and_categories_numbers(script, tmp_path):
    samples = [
        (0, ["", "-2", "7"] + ["1"] * 10, ["5bd1", "aa"] + ["x"] * 24),
        (1, ["3", "0", ""] + ["1"] * 10, ["0fe3", "aa"] + ["x"] * 23 + [""]),
        (0, ["0", "1", "2"] + ["1"] * 10, ["5bd1", ""] + ["x"] * 24),
    ]
    clicks = script.read_clicks(write(tmp_path / "train.txt", samples))
    assert clicks.label.tolist() == [0, 1, 0]
    assert clicks.dense[:, 0].tolist() == pytest.approx([0, math.log(4), 0])
    assert clicks.dense[:, 1].tolist() == pytest.approx([0, 0, math.log(2)])
    assert clicks.dense.shape == (3, 13)
    assert clicks.sparse[:, 0].tolist() == [0, 1, 0]
    assert clicks.sparse[:, 1].tolist() == [0, 0, 1]
    assert clicks.sparse[:, 25].tolist() == [0, 1, 0]
    assert script.rows_of(clicks) == [2, 2] + [1] * 23 + [2]


def test_both_ways_of_training_end_equal(script, tmp_path):
    random = torch.randint(40, (900, 40), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [
        (row[0] % 2, [str(value) for value in row[1:14]], [f"{value:08x}" for value in row[14:]])
        for row in random
    ]
    clicks = script.read_clicks(write(tmp_path / "train.txt", samples))
    fast = script.train(clicks, strategy="all-fast", budget=None)
    cached = script.train(clicks, strategy="lookahead", budget="50%")
    assert script.differences(fast, cached) == []
    assert sum("embedding_bags" in name for name in fast.weights) == 26
    assert fast.log_loss > 0
    other = script.Outcome(**{**vars(fast), "losses": fast.losses + 1, "auc": 0.0})
    assert script.differences(fast, other) == ["losses", "auc"]


def test_other_files_are_refused_in_words(script, tmp_path):
    path = tmp_path / "two_columns.txt"
    path.write_text("a\tb\n")
    with pytest.raises(SystemExit, match="does not have 40 columns"):
        script.read_clicks(path)
    with pytest.raises(SystemExit, match="there is no file"):
        script.read_clicks(tmp_path / "missing.txt")
