"""A run is resumed from its own checkpoint, or a ValueError says why it is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import changed, forged, fuzzed
from hotrow.checkpoint.folder import latest_in
from hotrow.run.config import RunConfig
from hotrow.run.files import RunWriter
from hotrow.run.job import build, open_data
from hotrow.run.resume import resume, settings_of
from hotrow.run.saving import Saving
from hotrow.run.tally import Tally
from hotrow.support import toml
from hotrow.support.records import EvalRecord

CONFIG = toml.build(
    RunConfig,
    {
        "run": {"name": "a", "threads": 1},
        "data": {"rows": [9, 4], "samples": 8, "batch_size": 4, "eval_batches": 1},
        "model": {"embedding_dim": 2, "bottom": [2], "top": [2]},
        "embedding": {"strategy": "all-fast"},
    },
    where="x",
    section="",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs, tally = tmp_path_factory.mktemp("runs"), Tally()
    tally.losses, tally.evaluations = [0.5], [EvalRecord(1, 4, 0.5, 0.7)]
    with RunWriter(runs, name="a") as writer:
        job = build(CONFIG, open_data(CONFIG))
        options = {"warn": lambda _: None, "tell": lambda *_, **__: None}
        saving = Saving(job, writer, tally, started="now", **options)
        saving.save(1)
    return writer.folder


@contextmanager
def other_extra(run: Path, change: Callable[[Any], Any]) -> Iterator[None]:
    """What the checkpoint says of its run is another, with checksums that fit."""
    folder = latest_in(run / "checkpoints")
    assert folder is not None
    tree = json.loads((folder / "state.json").read_text())
    extra = next(each for each in tree["table"] if each[0] == "extra")
    extra[1] = change(extra[1])
    with forged(folder, "state.json", json.dumps(tree).encode()):
        yield


@fuzzed
@given(data=st.data())
def test_runs_to_go_on_with(data: st.DataObject, run: Path) -> None:
    with other_extra(run, lambda extra: changed(extra, data)):
        with suppress(ValueError):
            settings_of(run, ())
        with suppress(ValueError):
            resume(CONFIG, run, open_data(CONFIG), lambda _: None)


@pytest.mark.parametrize("key", ["data", "evaluations", "extra"])
def test_what_a_checkpoint_lacks_is_told(key: str, run: Path) -> None:
    def emptied(extra: Any) -> Any:
        return {"table": [[k, {"table": [["x", 1]]} if k == key else v] for k, v in extra["table"]]}

    with (
        other_extra(run, (lambda extra: None) if key == "extra" else emptied),
        pytest.raises(ValueError, match=r"no checkpoint in .* can be used"),
    ):
        resume(CONFIG, run, open_data(CONFIG), lambda _: None)
