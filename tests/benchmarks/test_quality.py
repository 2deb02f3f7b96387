"""The measurement of quality, tried on invented lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from clicks import criteo_lines, taobao_lines, write
from hotrow.cli import make_app
from hotrow.run.job import build

SMALL = ["data.batch_size=32", "embedding.budget=60%", "model.bottom=[8]", "model.top=[8]"]


@pytest.fixture
def script(load: Any) -> Any:
    return load("quality")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write(tmp_path / "train.txt", criteo_lines(800))
    command = ["prepare", "criteo", str(path), "--out", str(tmp_path / "criteo")]
    assert CliRunner().invoke(make_app(), command).exit_code == 0
    return tmp_path / "criteo"


def test_the_plain_model_is_the_same_model(script: Any, folder: Path) -> None:
    job = build(script.config_of("rm2-kaggle", folder, SMALL, seed=1))
    plain = script.PlainDLRM(job)
    batch = next(job.samples.batches(1))
    job.model.eval()
    assert not torch.allclose(plain(batch), job.model(batch))
    plain.start_like(job)
    torch.testing.assert_close(plain(batch), job.model(batch))
    kinds = {key: tuple(each.shape) for key, each in job.model.named_parameters()}
    assert kinds == {k: tuple(e.shape) for k, e in plain.named_parameters() if "tables" not in k}


def test_from_one_start_both_learn_the_same(script: Any, folder: Path) -> None:
    config = script.config_of("rm2-kaggle", folder, SMALL, seed=0)
    ours, unlike = script.trained(config)
    plain = script.trained_plainly(config, same_start=True)
    assert unlike == []
    assert plain.auc == pytest.approx(ours.auc, abs=1e-3)
    assert plain.log_loss == pytest.approx(ours.log_loss, abs=1e-4)
    assert plain.chosen_by == pytest.approx(ours.chosen_by, abs=1e-3)


def test_what_is_not_as_promised_is_told(
    script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"ours": 0.7, "plain": 0.703}
    equal: list[str] = []

    def outcome(who: str) -> Any:
        return script.Outcome(outcomes[who], 0.5, 0.6, 1.0)

    monkeypatch.setattr(script, "trained", lambda config: (outcome("ours"), equal))
    monkeypatch.setattr(script, "trained_plainly", lambda config, same_start: outcome("plain"))
    assert script.measure("criteo", folder, seeds=2, settings=SMALL)
    assert "hotrow's AUC is -0.00300 of that" in capsys.readouterr().out
    outcomes["plain"] = 0.706
    assert not script.measure("criteo", folder, seeds=2, settings=SMALL)
    outcomes["plain"] = 0.7
    equal.append("losses")
    assert not script.measure("criteo", folder, seeds=2, settings=SMALL)
    assert "not equal to all-fast" in capsys.readouterr().out


def test_sequences_are_measured_by_their_own_run(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "UserBehavior.csv", taobao_lines(60), separator=",")
    folder = script.prepared("taobao", path, tmp_path)
    assert folder == script.prepared("taobao", tmp_path / "not needed", tmp_path)
    small = ["data.batch_size=32", "embedding.budget=90%", "model.num_steps=4"]
    assert script.measure("taobao", folder, seeds=1, settings=small)
    found = capsys.readouterr().out
    assert found.startswith("rm1-taobao on taobao")
    assert "seed 0, by validation AUC" in found
    assert "PyTorch" not in found
