"""What several ranks wrote is read by commands on one process: runs, models and checkpoints."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hotrow
from commands import SMALL_SETTINGS, refused, settings, spoil, succeeds
from hotrow.run.files import read_run, read_steps
from hotrow.run.open_run import open_trained
from rank_processes import run
from shared_runs import train_shared, weights_in

KINDS = {
    "clicks": ("embedding.replicate=2KB", "data.lookups=[2, 1, 3]", "checkpoint.every_steps=4"),
    "sequences": ("model.kind=tbsm", "model.num_steps=3", "embedding.optimizer.name=adam"),
}
DIM = 4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of each kind, trained by two ranks, and what these ended with."""
    folder, found = tmp_path_factory.mktemp("shared"), {}
    for kind, given in KINDS.items():
        words = (*SMALL_SETTINGS, f"run.name={kind}", *given)
        found[kind], other = run(2, train_shared, folder / "runs", *words)
        assert all(torch.equal(found[kind]["rows"][x], other["rows"][x]) for x in other["rows"])
    words = ("run.name=alone", *KINDS["clicks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeeds("train", "--quiet", *settings(*SMALL_SETTINGS, *words))
    return folder, found


@pytest.fixture(autouse=True)
def _there(here: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here[0])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trained(here: tuple[Path, dict[str, Any]], kind: str) -> dict[str, Any]:
    """What the ranks ended with."""
    found: dict[str, Any] = here[1][kind]
    return found


def test_a_model_of_ranks_has_their_bits(kind: str, trained: dict[str, Any]) -> None:
    job = open_trained(kind)
    weights = weights_in(job.model)
    assert weights.keys() == trained["rows"].keys()
    for name, rows in trained["rows"].items():
        assert torch.equal(weights[name], rows[:, :DIM])
    for name, weight in job.model.named_parameters():
        assert torch.equal(weight, trained["dense"][name])


def test_evaluate_says_what_the_end_of_training_said(kind: str) -> None:
    last = asdict(read_run(f"runs/{kind}").evaluations[-1])
    facts = json.loads(succeeds("evaluate", kind, "--json").stdout)
    # Ranks predict parts of the batches that one process predicts as a whole.
    assert {key: facts[key] for key in last} == pytest.approx(last, rel=1e-6)
    assert facts["samples"] == 64


def test_predict_writes_what_the_library_predicts(kind: str, tmp_path: Path) -> None:
    succeeds("predict", kind, "--out", str(tmp_path / "scores.parquet"))
    found = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    job = open_trained(kind)
    hotrow.load_model(f"runs/{kind}/model", job.model)
    batches = list(job.samples.split("test").batches)
    scores = torch.cat([job.trainer.predict(batch).double().sigmoid() for batch in batches])
    assert found["score"] == scores.tolist()
    assert found["label"] == torch.cat([batch.label for batch in batches]).int().tolist()


def exported(folder: Path) -> dict[str, Tensor]:
    files = [x for x in folder.glob("*.safetensors") if x.name != "dense.safetensors"]
    return {name: x for path in files for name, x in load_file(path).items()}


def test_export_writes_all_rows(kind: str, trained: dict[str, Any], tmp_path: Path) -> None:
    succeeds("export", kind, "--to", "safetensors", "--out", str(tmp_path / "tables"))
    tables = exported(tmp_path / "tables")
    for name, rows in trained["rows"].items():
        (found,) = (table for key, table in tables.items() if name in key)
        assert torch.equal(found, rows[:, :DIM])
    assert "as written" in succeeds("verify", str(tmp_path / "tables")).stdout


def test_a_checkpoint_of_ranks_is_exported_as_well(
    here: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    last = Path("runs/clicks/checkpoints")
    last = last / (last / "latest").read_text().strip()
    succeeds("export", str(last), "--to", "safetensors", "--out", str(tmp_path / "tables"))
    tables = exported(tmp_path / "tables")
    for name, rows in here[1]["clicks"]["rows"].items():
        (found,) = (table for key, table in tables.items() if name in key)
        assert torch.equal(found, rows[:, :DIM])


def test_a_served_model_predicts_the_same(kind: str, tmp_path: Path) -> None:
    served = tmp_path / "served"
    succeeds("export", kind, "--serve", str(served))
    assert "as written" in succeeds("verify", str(served)).stdout
    spec = importlib.util.spec_from_file_location(f"served_{kind}", served / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    serve: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    job = open_trained(kind)
    batch: Any = next(iter(job.samples.batches(1)))
    sparse = batch.sparse
    if not isinstance(sparse, torch.Tensor):
        sparse = (sparse.values(), sparse.offsets())
    scores = serve.load()(serve.Batch(batch.dense, sparse, getattr(batch, "lengths", None)))
    torch.testing.assert_close(scores, job.trainer.predict(batch), rtol=1e-6, atol=1e-6)


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    lines = [
        json.loads(line) for line in succeeds("verify", "clicks", "--json").stdout.splitlines()
    ]
    assert [x["kind"] for x in lines].count("checkpoint") >= 2
    assert [x["kind"] for x in lines].count("model") == 1
    model = shutil.copytree("runs/clicks/model", tmp_path / "model")
    shard = max(model.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    spoil(shard)
    assert shard.name in refused("verify", str(model))
    folder = shutil.copytree("runs/clicks", tmp_path / "run")
    shard = max((folder / "checkpoints").rglob("*.safetensors"), key=lambda x: x.stat().st_size)
    spoil(shard)
    assert shard.name in refused("verify", str(folder))


def test_a_report_shows_ranks_beside_a_run_of_one() -> None:
    text = succeeds("report", "clicks", "alone", "--text").stdout
    assert "Ranks of clicks" in text
    assert "Balance of 2 ranks" in text
    assert "Ranks of alone" not in text
    shared, alone = (read_run(f"runs/{name}") for name in ("clicks", "alone"))
    assert [x.rank for x in shared.ranks] == [0, 1]
    assert alone.ranks == ()
    assert shared.summary.lookups == alone.summary.lookups
    assert shared.summary.bytes_sent == sum(x.bytes_sent for x in shared.ranks) > 0
    steps = list(read_steps("runs/clicks"))
    assert sum(step.lookups for step in steps) == shared.ranks[0].lookups
    assert sum(x.lookups for x in shared.ranks) == shared.summary.lookups
    for name, table in shared.tables.items():
        assert table.lookups == alone.tables[name].lookups
    assert sum(x.fetched_rows for x in shared.tables.values()) == sum(
        x.fetched_rows for x in shared.ranks
    )
