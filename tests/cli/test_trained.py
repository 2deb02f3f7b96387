"""`hotrow evaluate` and `hotrow predict` say of a saved model what the end of training said."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from commands import SMALL_SETTINGS, hotrow, refused, settings, succeeds
from hotrow.checkpoint import save_checkpoint
from hotrow.data.prepared import Prepared
from hotrow.run.config import CLICK_MODELS, SEQUENCE_MODELS
from hotrow.run.files import read_run
from hotrow.run.open_run import open_trained, write_scores

PREPARED = ("data.kind=prepared", "data.folder=prepared", "embedding.budget=4KB")


def train(name: str, *given: str) -> None:
    succeeds("train", "--json", *settings(*SMALL_SETTINGS, f"run.name={name}", *given))


def prepare(out: str, *words: str, count: int = 300, seed: int = 0, clicks: bool = True) -> None:
    """Prepare three columns, of which two read one table."""
    draw, lines = random.Random(seed), ["click,price,item,last,shop"]
    for _ in range(count):
        item, last, shop = (int(30 ** draw.random()) for _ in range(3))
        click = int(clicks and draw.random() < 0.2 + 0.5 * (item < 6))
        lines.append(f"{click},{draw.random():.3f},i{seed}-{item},i{seed}-{last},{shop}")
    Path(f"{out}.csv").write_text("\n".join(lines) + "\n")
    Path("columns.toml").write_text(
        'label = "click"\ndense = ["price"]\ncategories = ["item", "last", "shop"]\n'
        '[tables]\nlast = "item"\n'
    )
    succeeds("prepare", "csv", f"{out}.csv", "--columns", "columns.toml", "--out", out, *words)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind, and one on prepared data."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in CLICK_MODELS:
            train(kind, f"model.kind={kind}", "data.lookups=[2, 1, 3]")
        for kind in SEQUENCE_MODELS:
            train(kind, f"model.kind={kind}", "model.num_steps=3")
        prepare("prepared", "--hash", "--max-rows", "50")
        train("real", *PREPARED)
    return folder


@pytest.fixture(autouse=True)
def _there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)


def evaluated(run: str, *words: str | Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(succeeds("evaluate", run, "--json", *words).stdout)
    return facts


def with_record(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Copy the run `real`, with a changed record."""
    run = shutil.copytree("runs/real", Path("runs") / name)
    record = json.loads((run / "run.json").read_text())
    change(record)
    (run / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize("run", [*CLICK_MODELS, *SEQUENCE_MODELS, "real"])
def test_the_test_split_has_the_bits_of_the_end_of_training(run: str) -> None:
    last = asdict(read_run(f"runs/{run}").evaluations[-1])
    found = evaluated(run)
    assert {key: found[key] for key in last} == last
    assert found["samples"] == found["split_samples"] or run == "real"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_a_model_of_a_gpu_has_the_bits_of_the_end_of_training(strategy: str) -> None:
    given = ("run.device=cuda", "training.epochs=4", "run.tensorboard=true")
    train(f"gpu-{strategy}", *given, f"embedding.strategy={strategy}")
    last = asdict(read_run(f"runs/gpu-{strategy}").evaluations[-1])
    found = evaluated(f"gpu-{strategy}")
    assert {key: found[key] for key in last} == last


@pytest.mark.parametrize(("name", "budget"), [("adam", "25%"), ("sgd", "45%")])
def test_evaluation_needs_no_row_state(name: str, budget: str) -> None:
    # Of rows without Adam's state, 25 % would be too few bytes for any batch.
    train(name, f"embedding.optimizer.name={name}", f"embedding.budget={budget}")
    assert evaluated(name)["auc"] == read_run(f"runs/{name}").evaluations[-1].auc
    assert open_trained(name).embedding.bytes_total == 4 * 4 * 465


def test_people_see_a_table() -> None:
    record = read_run("runs/dlrm").evaluations[-1]
    text = succeeds("evaluate", "runs/dlrm").stdout
    for words in (f"{record.auc:.6f}", f"{record.log_loss:.6f}", "normalised entropy", "64"):
        assert words in text
    text = succeeds("evaluate", "real", "--set", "data.eval_batches=1").stdout
    assert f"16 of {Prepared('prepared').samples('test')} (data.eval_batches)" in text


def test_other_splits_are_other_samples() -> None:
    test, validation, whole = (
        evaluated("real", "--split", split) for split in ("test", "validation", "train")
    )
    data = Prepared("prepared")
    assert (test["samples"], test["split_samples"]) == (data.samples("test"),) * 2
    assert whole["samples"] == data.samples("train") == 258
    assert len({test["log_loss"], validation["log_loss"], whole["log_loss"]}) == 3
    assert evaluated("dlrm", "--split", "train")["samples"] == 160


def test_settings_can_be_changed() -> None:
    whole, small = evaluated("dlrm"), evaluated("dlrm", "--set", "embedding.strategy=all-fast")
    assert whole == small
    assert evaluated("real", "--set", "data.batch_size=8")["auc"] == pytest.approx(
        evaluated("real", "--set", "data.batch_size=64")["auc"], abs=1e-6
    )
    error = refused("evaluate", "dlrm", "--set", "run.devise=cpu")
    assert "unknown key 'devise' in [run]; did you mean 'device'?" in error
    error = refused("evaluate", "dlrm", "--set", "model.top=[7]")
    assert "is of another model: " in error
    assert "top.0.bias is saved as [64], and the model's is [7]" in error


def test_data_of_the_same_form_are_read() -> None:
    prepare("later", "--hash", "--max-rows", "50", seed=1)
    assert evaluated("real", "--data", "later")["log_loss"] != evaluated("real")["log_loss"]
    shutil.copytree("prepared", "copy")
    assert evaluated("real", "--data", "copy") == evaluated("real")
    # Too few to fill a batch of training, and all labels alike.
    prepare("few", "--hash", "--max-rows", "50", seed=2, count=12, clicks=False)
    facts = evaluated("real", "--data", "few", "--split", "train")
    assert facts["samples"] < 16
    assert facts["auc"] is None
    text = succeeds("evaluate", "real", "--data", "few", "--split", "train").stdout
    assert "none: all labels are alike" in text


def test_data_of_another_form_are_refused_with_what_differs() -> None:
    prepare("larger", "--hash", "--max-rows", "51")
    error = refused("evaluate", "real", "--data", "larger")
    assert "larger cannot be read by this model, which was trained on other data: " in error
    assert "table item has 51 rows instead of 50; table shop has 51 rows" in error
    error = refused("predict", "dlrm", "--data", "prepared", "--out", "none.parquet")
    assert "numbers: price instead of dense_0, dense_1" in error
    assert "table cat_0 is missing" in error
    assert "table item is new" in error
    assert "nowhere does not exist" in refused("evaluate", "real", "--data", "nowhere")
    with_record("renamed", lambda run: run["data"]["tables"]["item"].update(features=["item"]))
    assert "table item is read by item, last instead of item" in refused("evaluate", "renamed")


def test_rows_of_other_values_are_refused() -> None:
    """As many rows, but by another vocabulary: every id would be another value's."""
    prepare("words", "--max-rows", "9")
    train("words", "data.kind=prepared", "data.folder=words", "embedding.strategy=all-fast")
    prepare("others", "--max-rows", "9", seed=5)
    assert Prepared("words").table_rows == Prepared("others").table_rows
    error = refused("evaluate", "words", "--data", "others")
    assert "the rows of table item are of other values" in error


def test_data_that_moved_are_asked_for() -> None:
    with_record("moved", lambda run: run["settings"]["data"].update(folder="gone"))
    error = refused("evaluate", "moved")
    assert "gone does not exist" in error
    assert "If the data lie elsewhere now, say where: --data" in error
    assert evaluated("moved", "--data", "prepared")["auc"] == evaluated("real")["auc"]


def test_a_run_that_is_not_there_is_told() -> None:
    assert "there is no run dlmr; in runs there are " in refused("evaluate", "dlmr")
    assert "there is no run a; none has none either" in refused("evaluate", "a", "--runs", "none")
    Path("runs/open").mkdir()
    assert "it is not a run, or the run has not ended" in refused("evaluate", "runs/open")
    error = refused("evaluate", "dlrm", "--split", "tests")
    assert "there is no split 'tests'; there are train" in error


def test_a_run_that_was_killed_is_told_how_to_go_on() -> None:
    run = Path("runs/killed")
    run.mkdir()
    shutil.copy("runs/dlrm/steps.jsonl", run)
    error = refused("evaluate", "killed")
    assert "runs/killed has not ended: it is under way, or was killed, and has no check" in error
    saved = run / "checkpoints" / "00001-step-4"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").touch()
    for name in ("killed", "runs/killed"):
        error = refused("predict", name, "--out", "killed.parquet")
        assert "killed; `hotrow train runs/killed --resume` continues it" in error
    assert "killed" in refused("evaluate", "dlmr")
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data", "all", "run.json is damaged: data: expected a table, got text"),
        ("data", {"dense": []}, "the record of run dlrm is damaged: data: it lacks tables"),
        ("settings", [], "run.json is damaged: settings: expected a table, got a list"),
    ],
)
def test_a_damaged_record_is_told(tmp_path: Path, name: str, value: object, message: str) -> None:
    run = shutil.copytree("runs/dlrm", tmp_path / "damaged")
    found = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(found | {name: value}))
    assert message in refused("evaluate", run)


def test_a_model_that_is_not_there_or_damaged_is_told() -> None:
    run = shutil.copytree("runs/dlrm", Path("runs/broken"))
    (run / "model" / "rows" / "000-00000.safetensors").unlink()
    assert "000-00000.safetensors is missing" in refused("evaluate", "broken")
    (run / "model" / "manifest.json").unlink()
    assert "runs/broken/model holds no model" in refused("evaluate", "broken")
    shutil.rmtree(run / "model")
    assert "runs/broken has no model" in refused("evaluate", "broken")
    save_checkpoint(run / "checkpoints", torch.nn.Linear(1, 1), step=3)
    assert "Train it again" in refused("evaluate", "broken")  # finished, and not saved
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"outcome": "failed"}))
    assert "`hotrow train runs/broken --resume` continues" in refused("evaluate", "broken")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("run", [*CLICK_MODELS, *SEQUENCE_MODELS, "real"])
@pytest.mark.parametrize("split", ["test", "train"])
def test_scores_are_those_that_were_evaluated(run: str, split: str) -> None:
    result = succeeds("predict", run, "--split", split, "--out", "scores.parquet", "--force")
    table, found = pq.read_table("scores.parquet"), evaluated(run, "--split", split)
    assert [(each.name, str(each.type)) for each in table.schema] == [
        ("row", "int64"), ("score", "double"), ("label", "int8"),
    ]  # fmt: skip
    row, label = (torch.tensor(table[name].to_pylist()) for name in ("row", "label"))
    score = torch.tensor(table["score"].to_pylist(), dtype=torch.float64)
    assert torch.equal(row, torch.arange(found["samples"]))
    assert float(binary_auroc(score, label.long())) == found["auc"]
    log_loss = torch.nn.functional.binary_cross_entropy(score, label.double())
    assert float(log_loss) == pytest.approx(found["log_loss"], rel=1e-12)
    assert f"{len(row):,} scores written to scores.parquet" in result.stdout


def test_all_of_a_split_is_scored_in_its_order() -> None:
    words = ("--set", "data.eval_batches=1", "--json")
    facts = json.loads(succeeds("predict", "real", "--out", "all.parquet", *words).stdout)
    assert facts["samples"] == Prepared("prepared").samples("test") > 16
    assert facts["out"] == "all.parquet"
    labels = [label for shard in Prepared("prepared").shards("test") for label in shard.label]
    assert pq.read_table("all.parquet")["label"].to_pylist() == labels


def test_scores_are_written_in_groups_and_a_failure_leaves_no_file(tmp_path: Path) -> None:
    job, out = open_trained("dlrm"), tmp_path / "scores.parquet"
    batches = list(job.samples.split("test").batches)

    def failing() -> Iterator[Any]:
        yield from batches[:3]
        raise OSError("the disk is full of water")

    with pytest.raises(OSError, match="full of water"):
        write_scores(job, failing(), out, group_samples=32)
    assert list(tmp_path.iterdir()) == []
    assert write_scores(job, batches, out, group_samples=32) == 64
    file = pq.ParquetFile(out)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [32, 32]
    assert file.read()["row"].to_pylist() == list(range(64))


def test_a_file_is_replaced_only_when_told_to() -> None:
    Path("kept.parquet").write_text("mine")
    error = refused("predict", "dlrm", "--out", "kept.parquet")
    assert "kept.parquet exists; --force replaces it" in error
    assert Path("kept.parquet").read_text() == "mine"
    assert hotrow("predict", "dlrm", "--out", "kept.parquet", "--force").exit_code == 0
    assert pq.read_table("kept.parquet").num_rows == 64
    assert "is a folder" in refused("predict", "dlrm", "--out", "runs", "--force")
    error = refused("predict", "dlrm", "--out", "scores.csv")
    assert "written as Parquet, and --out scores.csv ends in .csv; give scores.parquet" in error
    assert not Path("scores.csv").exists()
    assert "no is no folder" in refused("predict", "dlrm", "--out", "no/a.parquet")
    os.mkfifo("pipe")  # as /dev/null is no file, either
    error = refused("predict", "dlrm", "--out", "pipe", "--force")
    assert "pipe is no file that could be replaced" in error
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("words", [("evaluate",), ("predict", "--out", "bar.parquet", "--force")])
def test_a_bar_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    command, *options = words
    assert hotrow(command, "dlrm", *options).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal is
    assert "64/64" in hotrow(command, "dlrm", *options).stderr


def test_predicting_changes_no_mode_and_no_random_number() -> None:
    job = open_trained("dlrm")
    batch, before = next(iter(job.samples.split("test").batches)), torch.get_rng_state()
    job.model.train()
    scores = job.trainer.predict(batch)
    assert not scores.requires_grad
    assert job.model.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
