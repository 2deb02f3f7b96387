"""A run that was stopped, killed or out of room goes on, and ends in the same bits."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from commands import SMALL, hotrow
from commands import settings as options
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.tables import export_tables
from hotrow.cli import make_app
from hotrow.data import SyntheticClicks
from hotrow.run.files import RunWriter, read_run, read_steps
from hotrow.run.job import Job, same_bits
from hotrow.run.open_run import open_trained
from hotrow.support.files import Disk
from hotrow.support.records import StepRecord

RUN_TOML = (
    SMALL.replace("160", "112")
    + """
[training]
epochs = 2
eval_every = 4
[training.schedule]
warmup_steps = 4
decay_start = 6
decay_steps = 10
[checkpoint]
every_steps = 3
"""
)
STEPS = 14  # two epochs of seven batches
pytestmark = pytest.mark.usefixtures("folder")


def train(*arguments: str, settings: tuple[str, ...] = ()) -> Result:
    return hotrow("train", *arguments, *options(*settings))


class Killed(BaseException):
    """As SIGKILL: nobody tidies up."""


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, how: Any = Killed) -> None:
    write = RunWriter.step

    def note(self: RunWriter, record: StepRecord) -> None:
        write(self, record)
        if record.step == step:
            if isinstance(how, signal.Signals):
                signal.raise_signal(how)
            else:
                raise how("now")

    monkeypatch.setattr(RunWriter, "step", note)


def killed(monkeypatch: pytest.MonkeyPatch, *arguments: str, after: int, **options: Any) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, after)
        patch.setattr(RunWriter, "finish", lambda self, record: None)
        with pytest.raises(Killed):
            print(train(*arguments, **options).output)


def model_of(run: str) -> dict[str, torch.Tensor]:
    return {key: each.clone() for key, each in open_trained(run).model.state_dict().items()}


def same_end(left: str, right: str) -> bool:
    one, other = model_of(left), model_of(right)
    steps = [
        [(each.step, each.loss, each.samples) for each in read_steps(f"runs/{name}")]
        for name in (left, right)
    ]
    evaluations = [
        [asdict(each) for each in read_run(f"runs/{n}").evaluations] for n in (left, right)
    ]
    return (
        all(same_bits(one[key], other[key]) for key in one)
        and steps[0] == steps[1]
        and evaluations[0] == evaluations[1]
    )


def row_state(run: str) -> dict[str, torch.Tensor]:
    found = Checkpoint(saved_in(Path("runs") / run / "checkpoints")[-1])
    return {t.key: torch.cat([rows for _, rows in found.rows(t.key)]) for t in found.tables}


# All others are stopped and go on in tests/checkpoint/test_checkpoints.py.
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    ("cpu", "lookahead", "adam", "adamw"),
    ("cpu", "hybrid", "row-wise-adagrad", "adagrad"),
    *[
        pytest.param("cuda", strategy, rows, dense, marks=on_gpu)
        for strategy, rows, dense in (
            ("lookahead", "adam", "adamw"),
            ("all-fast", "adagrad", "sgd"),
            ("scratchpipe", "row-wise-adagrad", "adam"),
        )
    ],
]


@pytest.mark.parametrize(("device", "strategy", "rows", "dense"), CASES)
def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(
    device: str, strategy: str, rows: str, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        f"run.device={device}",
        f"embedding.strategy={strategy}",
        f"embedding.optimizer.name={rows}",
        f"training.optimizer.name={dense}",
        "checkpoint.full_every=2",
    )
    assert train("run.toml", settings=("run.name=whole", *settings)).exit_code == 0
    for after in (5, 11):
        resume = ("--resume",) if after > 5 else ()
        killed(monkeypatch, "run.toml", *resume, after=after, settings=settings)
    assert [each.step for each in read_steps("runs/small")] == list(range(1, 12))
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert "goes on after step 9" in result.stdout
    assert read_run("runs/small").resumed_after == (3, 9)
    assert same_end("small", "whole")
    one, other = row_state("small"), row_state("whole")
    assert all(same_bits(one[key], other[key]) for key in one)


def test_a_run_that_was_killed_behind_its_last_step_ends() -> None:
    for name in ("small", "whole"):
        assert train("run.toml", settings=(f"run.name={name}",)).exit_code == 0
    Path("runs/small/run.json").unlink()
    shutil.rmtree("runs/small/model")
    result = train("run.toml", "--resume")
    assert result.exit_code == 0, result.output
    assert f"goes on after step {STEPS}" in result.stdout
    assert same_end("small", "whole")


@pytest.mark.parametrize("where", ["save_model", "Session._evaluate"])
def test_a_run_that_was_killed_behind_its_first_record_ends(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written before the model, which may fill the disk."""
    train("run.toml", settings=("run.name=whole", "training.eval_every=99"))
    finish, was_killed = RunWriter.finish, False

    def kill(*_: Any, **__: Any) -> None:
        nonlocal was_killed
        was_killed = True
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"hotrow.run.session.{where}", kill)
        patch.setattr(
            RunWriter, "finish", lambda self, record: None if was_killed else finish(self, record)
        )
        with pytest.raises(Killed):
            train("run.toml", settings=("training.eval_every=99",))
    assert read_run("runs/small").outcome == "interrupted"
    result = train("run.toml", "--resume", settings=("training.eval_every=99",))
    assert result.exit_code == 0, result.output
    assert same_end("small", "whole")
    assert len(read_run("runs/small").evaluations) == 1


def test_a_run_that_has_left_samples_out_stays_as_it_is() -> None:
    settings = ("embedding.strategy=lookahead+random-drop", "checkpoint.resume=auto")
    for _ in range(2):
        assert train("run.toml", settings=settings).exit_code == 0
    found = read_run("runs/small")
    assert found.summary.steps < STEPS
    assert found.resumed_after == ()


def test_a_run_that_has_settled_stays_as_it_is() -> None:
    settings = ("training.patience=1", "training.eval_every=2", "training.optimizer.lr=0")
    settings += ("embedding.optimizer.lr=0",)
    assert train("run.toml", settings=settings).exit_code == 0
    before = read_run("runs/small")
    assert before.summary.steps == 4
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert "nothing to go on" in result.stderr
    assert read_run("runs/small").summary.steps == 4
    result = train("run.toml", "--resume", settings=(*settings, "training.patience=2"))
    assert result.exit_code == 0, result.output
    assert read_run("runs/small").summary.steps == 6


def test_it_goes_on_with_another_budget_and_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run.toml", settings=("run.name=whole",))
    killed(monkeypatch, "run.toml", after=4)
    changes = ("embedding.strategy=lru", "embedding.budget=80%", "embedding.depth=2")
    result = train("runs/small", "--resume", settings=(*changes, "training.check_equality=true"))
    assert result.exit_code == 0, result.output
    assert "yes, to the bit" in result.stdout  # all losses, also those from before
    assert same_end("small", "whole")


@pytest.mark.filterwarnings("ignore:no threshold in")  # on so few samples
@pytest.mark.parametrize("strategy", ["hotline", "fae", "lookahead+slipstream"])
def test_a_system_goes_on_and_says_what_it_has_not_kept(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=320")
    killed(monkeypatch, "run.toml", after=7, settings=settings)
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert "anew" in result.stderr
    steps = [each.step for each in read_steps("runs/small")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 30


@pytest.mark.parametrize(
    ("strategy", "epochs"), [("fae", 1.5), ("all-fast+random-drop", 1.4)], ids=["fae", "dropped"]
)
def test_the_epoch_begins_anew_in_which_samples_were_chosen(
    strategy: str, epochs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has other steps than batches, and where it has begun anew before."""
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=160")
    settings += ("system.target=0.5", "checkpoint.every_steps=1")
    train("run.toml", settings=("run.name=whole", *settings))
    whole = read_run("runs/whole").summary.steps
    epoch = whole // 2
    assert strategy == "fae" or epoch < 10  # batches
    first = int(epochs * epoch)
    second = first + epoch * 3 // 4
    killed(monkeypatch, "run.toml", after=first, settings=settings)
    killed(monkeypatch, "run.toml", "--resume", after=second, settings=settings)
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert read_run("runs/small").summary.steps == second - 1 + epoch  # all of the second epoch


@pytest.mark.parametrize("strategy", ["hotline", "fae", "all-fast+random-drop"])
def test_a_system_that_was_killed_when_all_was_trained_has_nothing_left(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=160")

    def finish(self: RunWriter, record: Any) -> None:
        raise Killed("now")

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "finish", finish)
        with pytest.raises(Killed):
            train("run.toml", settings=settings)
    last = Checkpoint(saved_in(Path("runs/small/checkpoints"))[-1]).step
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert "cannot be used" not in result.stderr
    assert read_run("runs/small").summary.steps == last


@pytest.mark.parametrize("strategy", ["static+random-drop", "hotline+random-drop", "fae"])
def test_a_system_goes_on_with_the_epoch_that_it_was_in(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=320",
        "system.target=0.5", "training.epochs=3", "checkpoint.every_steps=1",
    )  # fmt: skip
    train("run.toml", settings=(*settings, "run.name=whole"))
    epoch = read_run("runs/whole").summary.steps // 3  # not 20: samples are left out, or apart
    assert epoch != 20
    # In the last epoch, and when that has begun anew twice: by their number alone these steps are
    # of the second epoch, or of none.
    stops = (2 * epoch + 5, 3 * epoch + 4, 4 * epoch + 2)
    for number, stop in enumerate(stops):
        words = ("--resume",) if number else ()
        killed(monkeypatch, "run.toml", *words, after=stop, settings=settings)
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    saved = tuple(each - 1 for each in stops)  # before it was killed
    assert read_run("runs/small").resumed_after == saved
    left = read_run("runs/small").summary.steps - saved[-1]
    assert epoch <= left <= epoch + 1  # hotline leaves out none while it learns
    longer = train("run.toml", "--resume", settings=(*settings, "training.epochs=4"))
    assert longer.exit_code == 0, longer.output
    left = read_run("runs/small").summary.steps - saved[-1]
    assert 2 * epoch <= left <= 2 * epoch + 2


def test_prepared_data_go_on_in_the_middle_of_an_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "columns.toml").write_text('label = "y"\ndense = ["a"]\ncategories = ["u", "v"]\n')
    lines = [f"{i % 3 % 2},{i % 7},{i * 7 % 50},{i % 11}" for i in range(300)]
    (folder / "log.csv").write_text("y,a,u,v\n" + "\n".join(lines) + "\n")
    words = ["prepare", "csv", "log.csv", "--columns", "columns.toml", "--out", "prepared"]
    assert hotrow(*words, "--split", "random").exit_code == 0
    settings = ("data.kind=prepared", "data.folder=prepared", "embedding.strategy=all-fast")
    train("run.toml", settings=("run.name=whole", *settings))
    killed(monkeypatch, "run.toml", after=20, settings=settings)
    assert Checkpoint(saved_in(Path("runs/small/checkpoints"))[-1]).step == 18
    monkeypatch.setattr("hotrow.data.loader._MOST_WORKERS", 1)
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert same_end("small", "whole")
    (folder / "log.csv").write_text("y,a,u,v\n" + "\n".join(reversed(lines)) + "\n")
    words[-1] = "other"
    assert hotrow(*words, "--split", "random").exit_code == 0
    settings = (*settings, "data.folder=other", "training.epochs=3")  # with the same values
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 2
    assert "data.folder holds other samples than it held" in result.stderr
    result = train("run.toml", "--resume", settings=(*settings, "checkpoint.strict=false"))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_saves_and_says_how_to_go_on(
    name: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("checkpoint.every_steps=100",)
    train("run.toml", settings=("run.name=whole", *settings))
    with monkeypatch.context() as patch:
        stop_after(patch, 5, name)
        result = train("run.toml", settings=settings)
    assert result.exit_code == code, result.output
    told = "checkpoint of step 5 in runs/small/checkpoints/00001-step-5; "
    assert told + "hotrow train runs/small --resume goes on from it" in result.stdout
    assert read_run("runs/small").outcome == "interrupted"
    result = train("run.toml", "--resume", settings=settings)
    assert result.exit_code == 0, result.output
    assert same_end("small", "whole")
    again = train("run.toml", "--resume", settings=settings)
    assert again.exit_code == 0
    assert "small has ended, and there is nothing to go on with" in again.stderr
    longer = train("run.toml", "--resume", settings=(*settings, "training.epochs=3"))
    assert longer.exit_code == 0, longer.output
    assert read_run("runs/small").summary.steps == 21


def test_a_second_ctrl_c_while_saving_keeps_the_checkpoint_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Disk):
        def open(self, path: Path) -> Any:
            if "step-5" in str(path) and "rows" in str(path):
                signal.raise_signal(signal.SIGINT)  # in a thread: the main one takes it
            return super().open(path)

    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Slow)
    stop_after(monkeypatch, 5, signal.SIGINT)
    result = train("run.toml")
    assert result.exit_code == 130
    assert "interrupted; the checkpoint of step 3 is whole, in runs/small/" in result.stderr
    assert sorted(path.name for path in Path("runs/small/checkpoints").iterdir()) == [
        "00001-step-3",
        "latest",
    ]
    Checkpoint("runs/small/checkpoints/00001-step-3").verify()


class Full(Disk):
    def open(self, path: Path) -> Any:
        if "step-6" in str(path) and "001-00000" in path.name:
            return Path("/dev/full").open("wb", buffering=0)
        return super().open(path)


class FullAtTheEnd(Disk):
    def open(self, path: Path) -> Any:
        if ("step-14" in str(path) or "model" in str(path)) and "001-00000" in path.name:
            return Path("/dev/full").open("wb", buffering=0)
        return super().open(path)


def test_a_full_disk_costs_a_checkpoint_and_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Full)
    result = train("run.toml")
    assert result.exit_code == 0, result.output
    told = "the checkpoint of step 6 was not saved: the disk is full"
    assert told in result.stderr
    assert "runs/small/checkpoints/00001-step-3 stays. Training goes on" in result.stderr
    names = [path.name for path in saved_in(Path("runs/small/checkpoints"))]
    assert names == ["00003-step-12", "00004-step-14"]


def test_a_disk_that_is_full_at_the_end_costs_both_and_both_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", FullAtTheEnd)
    monkeypatch.setattr("hotrow.checkpoint.model.Disk", FullAtTheEnd)
    result = train("run.toml")
    assert result.exit_code == 2
    told = result.stderr[result.stderr.index("error: the last checkpoint was not saved") :]
    assert "; the model was not saved: the disk is full: runs/small/model" in told


def test_a_full_disk_stops_a_run_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Full)
    result = train("run.toml", settings=("checkpoint.on_error=stop",))
    assert result.exit_code == 2
    assert "the checkpoint of step 6 was not saved" in result.stderr
    assert "`hotrow train runs/small --resume` goes on from it" in result.stderr
    monkeypatch.undo()


def test_a_failure_says_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 4, torch.OutOfMemoryError)
    result = train("run.toml")
    assert isinstance(result.exception, torch.OutOfMemoryError)
    told = (
        "the checkpoint of step 3 is whole, in runs/small/checkpoints/00001-step-3; `hotrow train"
    )
    assert told in result.stderr
    assert "smaller embedding.budget" in result.stderr


def test_a_reader_of_data_that_dies_says_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyntheticClicks.batch

    def batch(self: Any, index: int) -> Any:
        if index == 5:
            raise OSError("the disk with the data is gone")
        return real(self, index)

    monkeypatch.setattr(SyntheticClicks, "batch", batch)
    result = train("run.toml", settings=("embedding.depth=0",))
    assert result.exit_code == 2
    assert "the disk with the data is gone" in result.stderr
    assert "the checkpoint of step 3 is whole" in result.stderr


def test_a_loss_that_is_no_number_replaces_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.train

    def train_badly(self: Job) -> Iterator[StepRecord]:
        for record in real(self):
            yield record
            if record.step == 4 and self.done == 0:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(torch.nan)

    monkeypatch.setattr(Job, "train", train_badly)
    result = train("run.toml")
    assert result.exit_code == 3
    assert [path.name for path in saved_in(Path("runs/small/checkpoints"))] == ["00001-step-3"]
    told = "`hotrow train runs/small --resume --set checkpoint.strict=false` with such settings"
    assert told in result.stderr
    settings = ("checkpoint.strict=false", "training.optimizer.lr=0.001")
    result = train("runs/small", "--resume", settings=settings)
    assert result.exit_code == 0, result.output


def test_weights_that_are_no_numbers_replace_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a step is that of the weights before it."""
    real = Job.train

    def train_badly(self: Job) -> Iterator[StepRecord]:
        for record in real(self):
            if record.step == 6 and self.done == 0:
                with torch.no_grad():
                    next(self.model.parameters())[0] = torch.inf
            yield record

    monkeypatch.setattr(Job, "train", train_badly)
    result = train("run.toml")
    assert result.exit_code == 3
    assert [path.name for path in saved_in(Path("runs/small/checkpoints"))] == ["00001-step-3"]
    assert "the checkpoint of step 6 was not saved: bottom" in result.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("data.batch_size=8", "data.batch_size is 8, and was 16"),
        ("data.seed=1", "data.seed is 1, and was 0"),
        ("run.seed=3", "run.seed is 3, and was 0"),
        ("model.top=[9]", r"model.top is \[9\], and was \[8\]"),
        ("embedding.optimizer.lr=0.1", "embedding.optimizer.lr is 0.1, and was 0.05"),
        ("training.clip_norm=1.0", "training.clip_norm is 1.0, and was left out"),
        ("data.rows=[400, 60, 6]", "other data: table cat_2 has 6 rows instead of 5"),
    ],
)
def test_settings_that_decide_about_bits_are_refused(
    setting: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(monkeypatch, "run.toml", after=4)
    result = train("run.toml", "--resume", settings=(setting,))
    assert result.exit_code == 2
    assert re.search(told, result.stderr), result.stderr


@pytest.mark.parametrize("key", ["training.optimizer.name", "embedding.optimizer.name"])
def test_another_optimizer_is_refused_also_by_who_is_not_strict(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(monkeypatch, "run.toml", after=4)
    for strict in ("true", "false"):
        settings = (f"{key}=adam", f"checkpoint.strict={strict}")
        result = train("run.toml", "--resume", settings=settings)
        assert result.exit_code == 2
        told = rf"step-3 was saved with {key} = '[a-z-]+', and 'adam' cannot go on with that"
        assert re.search(told, result.stderr), result.stderr


@pytest.mark.parametrize("what", ["is gone", "has no checkpoint.json"])
def test_a_latest_that_is_no_more_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, "run.toml", after=7)
    last = Path("runs/small/checkpoints/00002-step-6")
    if what == "is gone":
        shutil.rmtree(last)
    else:
        (last / "checkpoint.json").unlink()
    told = f"{last}, which 'latest' names, {what}: the newest of the others is taken"
    with pytest.warns(UserWarning, match=re.escape(told)):
        export_tables("runs/small", "tables", to="npz")
    verified = CliRunner().invoke(make_app(), ["verify", "small"])
    assert verified.exit_code == 2
    assert f"{last} is no checkpoint: it has no checkpoint.json" in verified.stderr
    result = train("run.toml", "--resume")
    assert result.exit_code == 0, result.output
    assert result.stderr.count(told) == 1
    assert "goes on after step 3, from" in result.stdout
    assert not train("run.toml", "--resume").stderr.count(told)  # another is the latest


def test_auto_begins_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("checkpoint.resume=auto",)
    killed(monkeypatch, "run.toml", after=2, settings=settings)  # before its first checkpoint
    killed(monkeypatch, "run.toml", after=4, settings=settings)
    assert {path.name for path in Path("runs").iterdir()} == {"small", "small-2"}
    result = train("run.toml", settings=settings)
    assert result.exit_code == 0
    assert "goes on after step 3, from runs/small-2/checkpoints/00001-step-3" in result.stdout
    events = [
        json.loads(line)
        for line in train("run.toml", "--json", settings=settings).stdout.splitlines()
    ]
    assert [each["event"] for each in events] == ["warning"]


def test_without_a_checkpoint_there_is_nothing_to_go_on_with() -> None:
    result = train("run.toml", "--resume")
    assert result.exit_code == 2
    assert "there is no checkpoint of a run 'small' in runs to go on from" in result.stderr
    train("run.toml", settings=("checkpoint.every_steps=100", "run.save=false"))
    for place in ("runs/small/checkpoints", "runs/small/checkpoints/00001-step-14"):
        assert f"{place} is no run: give the folder" in train(place, "--resume").stderr
    Path("runs/other").mkdir()
    result = train("other", "--resume")
    assert "runs/other has no checkpoint to go on from" in result.stderr
    result = train("runs/other")
    assert "runs/other is the folder of a run; with --resume it goes on" in result.stderr
    Path("data/shards").mkdir(parents=True)
    for words in (("data",), ("data", "--resume")):
        result = train(*words)
        assert result.exit_code == 2
        assert "--set data.kind=prepared --set data.folder=data does without one" in result.stderr


def test_a_damaged_checkpoint_gives_way_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run.toml", settings=("run.name=whole",))
    killed(monkeypatch, "run.toml", after=8)
    (shard,) = Path("runs/small/checkpoints/00002-step-6/rows").glob("000-*")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    result = train("run.toml", "--resume")
    assert result.exit_code == 0, result.output
    assert "00002-step-6 cannot be used" in result.stderr
    assert "load another" not in result.stderr
    assert "goes on after step 3" in result.stdout
    assert same_end("small", "whole")


def test_settings_come_from_the_newest_checkpoint_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed(monkeypatch, "run.toml", after=8)
    state = Path("runs/small/checkpoints/00002-step-6/state.json")
    state.write_text(state.read_text().replace("16", "17", 1))
    result = train("runs/small", "--resume")
    assert result.exit_code == 0, result.output
    assert "00002-step-6 cannot be used" in result.stderr
    assert "goes on after step 3" in result.stdout
    for each in Path("runs/small/checkpoints").glob("*/state.json"):
        each.write_text("{}")
    result = train("runs/small", "--resume")
    assert result.exit_code == 2
    assert "no checkpoint in runs/small/checkpoints can be used" in result.stderr


def test_checkpoints_come_by_the_clock_too() -> None:
    settings = ("checkpoint.every_seconds=1e-9", "checkpoint.keep=100")
    settings += ("checkpoint.background=false",)  # else the time counts from the end of one
    text = Path("run.toml").read_text().replace("every_steps = 3", "")
    Path("run.toml").write_text(text)
    assert train("run.toml", settings=settings).exit_code == 0
    assert len(saved_in(Path("runs/small/checkpoints"))) == STEPS


def test_tensorboard_is_told_from_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed(monkeypatch, "run.toml", after=5, settings=("run.tensorboard=true",))
    assert train("run.toml", "--resume", settings=("run.tensorboard=true",)).exit_code == 0
    found = accumulator.EventAccumulator("runs/small")
    found.Reload()
    assert [each.step for each in found.Scalars("training/loss")] == list(range(1, STEPS + 1))


def test_two_processes_do_not_train_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, "run.toml", after=4)
    monkeypatch.setattr("hotrow.run.session.resume", pytest.fail)  # nor does a second one fill RAM
    with RunWriter.going_on(Path("runs/small"), after=3):
        result = train("run.toml", "--resume")
    assert result.exit_code == 2
    assert "another process is training the run in runs/small" in result.stderr


def test_a_checkpoint_goes_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("checkpoint.folder=elsewhere",)
    killed(monkeypatch, "run.toml", after=4, settings=settings)
    assert Path("elsewhere/small/latest").is_file()
    assert train("run.toml", "--resume", settings=settings).exit_code == 0


def test_a_run_knows_its_checkpoints_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("checkpoint.folder=elsewhere",)
    killed(monkeypatch, "run.toml", after=4, settings=settings)
    result = train("runs/small", "--resume", settings=("checkpoint.folder=third",))
    assert "has checkpoints in runs/small/checkpoints, and none in third/small" in result.stderr
    result = train("runs/small", "--resume")
    assert "goes on after step 3, from elsewhere/small/00001-step-3" in result.stdout
    verified = CliRunner().invoke(make_app(), ["verify", "small"])
    assert "runs/small/checkpoints/00005-step-14: checkpoint" in verified.stdout


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_place_that_takes_no_checkpoints_is_told_before_training(on_error: str) -> None:
    Path("file").touch()
    settings = ("checkpoint.folder=file", f"checkpoint.on_error={on_error}")
    result = train("run.toml", settings=settings)
    assert result.exit_code == 2
    assert "checkpoints cannot be written to file/small: " in result.stderr
    trained = STEPS if on_error == "continue" else 0
    assert len(list(read_steps("runs/small"))) == trained


def test_a_run_that_goes_on_leaves_a_checkpoint_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is exported of it is what it has ended with, also where that found no room."""
    Path("run.toml").write_text(RUN_TOML.replace("every_steps = 3", ""))
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert train("run.toml").exit_code == 0
    assert train("runs/small", "--resume").exit_code == 0
    saved = saved_in(Path("runs/small/checkpoints"))
    assert [path.name for path in saved] == ["00001-step-4", "00002-step-14"]
    shutil.rmtree(saved[-1])
    export = ["export", "small", "--to", "safetensors", "--out", "tables"]
    assert CliRunner().invoke(make_app(), export).exit_code == 0
    export_tables("runs/small", "by-python")
    key = "embedding.embedding_bags.cat_0.weight"
    for folder in ("tables", "by-python"):
        exported = load_file(f"{folder}/000-{key}.safetensors")[key]
        assert same_bits(exported, model_of("small")[key])


def test_a_run_that_goes_on_to_no_numbers_keeps_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert train("run.toml").exit_code == 0
    before = model_of("small")
    settings = ("checkpoint.strict=false", "embedding.optimizer.lr=1e25")
    result = train("runs/small", "--resume", settings=settings)
    assert result.exit_code == 3, result.output
    assert "runs/small/model stays as it was before" in result.stderr
    with pytest.warns(UserWarning, match="is of before the run went on after step 4, and not of"):
        after = model_of("small")
    assert all(same_bits(before[key], after[key]) for key in before)


@pytest.mark.filterwarnings("always:.*is of before the run went on:UserWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_goes_on_and_saves_no_model_says_whose_is_there(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert train("run.toml").exit_code == 0
    if fails:
        with monkeypatch.context() as patch:
            stop_after(patch, 6, OSError)
            assert train("runs/small", "--resume").exit_code == 2
        why = "it failed, was stopped at once, or could not save it"
    else:
        result = train("runs/small", "--resume", settings=("run.save=false",))
        assert result.exit_code == 0, result.output
        assert "runs/small/model stays as it was before" in result.stderr
        why = "run.save was false then"
    told = CliRunner().invoke(make_app(), ["evaluate", "small"])
    assert told.exit_code == 0, told.output
    assert "model is of before the run went on after step 4, and not of its end" in told.stderr
    assert why in told.stderr
    longer = ("training.epochs=3", "run.save=true")
    assert train("runs/small", "--resume", settings=longer).exit_code == 0
    told = CliRunner().invoke(make_app(), ["evaluate", "small"])
    assert "is of before" not in told.stderr


def test_a_quiet_run_that_is_stopped_says_where_it_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_after(monkeypatch, 4, signal.SIGTERM)
    result = train("run.toml", "--quiet")
    assert result.exit_code == 0, result.output
    assert "checkpoint of step 4 in runs/small/checkpoints/00002-step-4; " in result.stderr
    assert "checkpoint of" not in result.stdout


def test_records_of_steps_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, "run.toml", after=4)
    lines = Path("runs/small/steps.jsonl").read_text().splitlines(keepends=True)
    Path("runs/small/steps.jsonl").write_text("".join(lines[:2]) + '{"step": 3, "lo')
    result = train("run.toml", "--resume")
    assert result.exit_code == 0, result.output
    assert "has records of 2 steps, and goes on after step 3" in result.stderr
    assert [each.step for each in read_steps("runs/small")] == [1, 2, *range(4, 15)]
