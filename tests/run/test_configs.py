"""The run files of configs/: each trains, in small, and has the sizes that were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import settings, succeeds
from hotrow.run.config import load
from hotrow.run.files import read_run

FOLDER = Path(__file__).parents[2] / "configs"
ROWS = {
    "rm1-taobao": 5_159_457,
    "rm2-kaggle": 33_762_577,
    "rm3-terabyte": 204_184_588,
    "rm4-avazu": 9_449_226,
    "mlperf-dlrm": 204_184_588,
    "mlperf-dlrm-dcnv2": 204_184_588,
    "traffic-study": 33_762_577,
}


@pytest.mark.parametrize("name", ROWS)
def test_tables_have_as_many_rows_as_were_published(name: str) -> None:
    assert sum(load(FOLDER / f"{name}.toml").data.rows) == ROWS[name]


def test_multi_hot_samples_have_214_lookups() -> None:
    assert sum(load(FOLDER / "mlperf-dlrm-dcnv2.toml").data.clicks.lookups_per_table) == 214


def test_every_file_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == ROWS.keys()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ROWS)
def test_it_trains_in_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "data.scale=0.0002", "training.steps=60", "embedding.budget=60%", "data.eval_batches=8",
        "run.threads=1", f"data.batch_size={16 if name.endswith('dcnv2') else 64}",
    ]  # fmt: skip
    if name == "traffic-study":  # which is no run: nothing says its name
        given += [f"run.name={name}"]
    if name.startswith("mlperf"):  # whose dense layers would take all the time
        given += ["model.top=[64, 32]", "model.bottom=[32]"]
    if name.endswith("dcnv2"):
        given += ["model.cross_rank=16"]
    if name == "mlperf-dlrm":  # whose rate is for batches of 2,048
        given += ["embedding.optimizer.lr=0.03", "training.optimizer.lr=0.03"]
    succeeds("train", FOLDER / f"{name}.toml", *settings(*given))
    run = read_run(f"runs/{name}")
    assert run.outcome == "finished"
    assert run.summary.steps == 60
    assert run.summary.auc > 0.5
