"""A run on data that was prepared before."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrow.cli import make_app
from hotrow.run.config import load
from hotrow.run.files import read_run, read_steps
from hotrow.run.source import open_samples


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table that two columns read, a list among them."""
    monkeypatch.chdir(tmp_path)
    lines = ["label,price,shop,item,last,other"]
    for i in range(400):
        lines.append(f"{i * 7 % 3 % 2},{i % 10},s{i % 5},i{i % 300},i{i * 3 % 300},o{i % 7}")
    (tmp_path / "clicks.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "columns.toml").write_text(
        'label = "label"\ndense = ["price"]\ncategories = ["item", "shop", "last", "other"]\n'
        '[tables]\nlast = "item"\n'
    )
    command = ["prepare", "csv", "clicks.csv", "--columns", "columns.toml", "--out", "out"]
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


def test_features_of_one_table_come_side_by_side(folder: Path) -> None:
    config = load(overrides=["data.kind=prepared", "data.folder=out", "data.batch_size=50"])
    samples = open_samples(config.data, pin_memory=False)
    assert [names for _, names in samples.tables.values()] == [
        ["item", "last"],
        ["shop"],
        ["other"],
    ]
    assert samples.num_dense == 1
    assert samples.lookups == {"item": 1, "last": 1, "shop": 1, "other": 1}
    batches = list(samples.batches(2 * samples.batches_per_epoch))
    assert len(batches) == 2 * samples.batches_per_epoch
    for batch in batches:
        item, last, shop, other = batch.sparse.T
        assert item.max() <= 300
        assert last.max() <= 300
        assert shop.max() <= 5
        assert other.max() <= 7
        assert shop.unique().numel() <= 5
    assert sum(len(each) for each in samples.validation) > 0
    assert sum(len(each) for each in samples.test) > 0


def test_a_run_on_prepared_data_equals_all_fast(folder: Path) -> None:
    settings = [
        "data.kind=prepared", "data.folder=out", "data.batch_size=32", "embedding.budget=60%",
        "training.epochs=3", "training.eval_every=5", "model.embedding_dim=4",
    ]  # fmt: skip
    command = ["train", *(part for each in settings for part in ("--set", each))]
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == 0, result.output
    run = read_run("runs/default")
    assert run.summary.equal_to_all_fast is True
    assert run.summary.steps == len(list(read_steps("runs/default"))) > 20
    assert run.evaluations[0].samples != 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.kind=prepared"], 'kind "prepared" and folder belong together'),
        (["data.folder=out"], 'kind "prepared" and folder belong together'),
        (["data.kind=prepared", "data.folder=nowhere"], "nowhere has no manifest.json"),
        (
            ["data.kind=prepared", "data.folder=out", "data.batch_size=4096"],
            "samples, which do not fill one batch of 4,096",
        ),
    ],
)
def test_data_that_is_not_there_is_one_sentence(
    folder: Path, settings: list[str], message: str
) -> None:
    command = ["train", *(part for each in settings for part in ("--set", each))]
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
