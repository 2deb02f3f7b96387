"""A run that was stopped or killed, or filled the disk, is resumed and ends in the same bits."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from commands import (
    SMALL,
    Faults,
    Killed,
    events,
    fail,
    full_disk,
    hotrow,
    inject_faults,
    refused,
    spoil,
    succeeds,
)
from commands import settings as options
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.tables import export_tables
from hotrow.run.files import RunWriter, read_run, read_steps
from hotrow.run.job import same_bits
from hotrow.run.open_run import open_trained
from saved_training import on_gpu

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
CHECKPOINTS = Path("runs/small/checkpoints")
pytestmark = pytest.mark.usefixtures("folder")


def train(*words: str, settings: tuple[str, ...] = ()) -> Result:
    return hotrow("train", *words, *options(*settings))


def resumed(*settings: str, run: str = "run.toml") -> Result:
    return succeeds("train", run, "--resume", *options(*settings))


def trained(*settings: str, name: str = "whole") -> None:
    succeeds("train", "run.toml", *options(f"run.name={name}", *settings))


def killed(faults: Faults, *words: str, after: int, settings: tuple[str, ...] = ()) -> None:
    """Kill a run after a step, before the step is saved."""
    faults.at_step[after] = faults.kill
    with pytest.raises(Killed):
        print(train("run.toml", *words, settings=settings).output)
    faults.revive()


def stopped(faults: Faults, *words: str, after: int, settings: tuple[str, ...] = ()) -> Result:
    """Stop a run by SIGTERM after a step."""
    faults.at_step[after] = lambda job: signal.raise_signal(signal.SIGTERM)
    return succeeds("train", "run.toml", *words, *options(*settings))


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `whole`, which has finished, and `small`, killed after 8 steps."""
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("run.toml").write_text(RUN_TOML)
        trained()
        killed(inject_faults(patch), after=8)
    return folder / "runs"


@pytest.fixture
def runs(templates: Path, folder: Path) -> Path:
    """A copy of the runs, with checkpoints of `small` after steps 3 and 6."""
    return Path(shutil.copytree(templates, folder / "runs", symlinks=True))


def model_of(run: str) -> dict[str, torch.Tensor]:
    return {key: weight.clone() for key, weight in open_trained(run).model.state_dict().items()}


def assert_same_end(run: str = "small", other: str = "whole") -> None:
    weights, others = model_of(run), model_of(other)
    assert all(same_bits(weights[key], others[key]) for key in weights)
    steps, other_steps = (
        [(record.step, record.loss, record.samples) for record in read_steps(f"runs/{name}")]
        for name in (run, other)
    )
    assert steps == other_steps
    assert read_run(f"runs/{run}").evaluations == read_run(f"runs/{other}").evaluations


def saved_names() -> list[str]:
    return [path.name for path in saved_in(CHECKPOINTS)]


def row_state(run: str) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(saved_in(Path("runs") / run / "checkpoints")[-1])
    keys = [table.key for table in checkpoint.tables]
    return {key: torch.cat([rows for _, rows in checkpoint.rows(key)]) for key in keys}


# All others are stopped and resumed in the tests of checkpoints.
CASES = [
    ("cpu", "lookahead", "adam", "adamw"),
    ("cpu", "hybrid", "row-wise-adagrad", "adagrad"),
    on_gpu("cuda", "lookahead", "adam", "adamw"),
    on_gpu("cuda", "all-fast", "adagrad", "sgd"),
    on_gpu("cuda", "scratchpipe", "row-wise-adagrad", "adam"),
]


@pytest.mark.parametrize(("device", "strategy", "rows", "dense"), CASES)
def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(
    device: str, strategy: str, rows: str, dense: str, faults: Faults
) -> None:
    settings = (
        f"run.device={device}",
        f"embedding.strategy={strategy}",
        f"embedding.optimizer.name={rows}",
        f"training.optimizer.name={dense}",
        "checkpoint.full_every=2",
    )
    trained(*settings)
    killed(faults, after=5, settings=settings)
    killed(faults, "--resume", after=11, settings=settings)
    assert [record.step for record in read_steps("runs/small")] == list(range(1, 12))
    assert "continues after step 9" in resumed(*settings).stdout
    assert read_run("runs/small").resumed_after == (3, 9)
    assert_same_end()
    states, others = row_state("small"), row_state("whole")
    assert all(same_bits(states[key], others[key]) for key in states)


def test_a_run_that_was_killed_after_its_last_step_ends(runs: Path) -> None:
    shutil.rmtree(runs / "small")
    shutil.copytree(runs / "whole", runs / "small")
    Path("runs/small/run.json").unlink()
    shutil.rmtree("runs/small/model")
    assert f"continues after step {STEPS}" in resumed().stdout
    assert_same_end()


@pytest.mark.parametrize(("file", "times"), [("model", 1), ("run.json", 2)])
def test_a_run_that_was_killed_after_its_first_record_ends(
    file: str, times: int, runs: Path, faults: Faults
) -> None:
    """The record is written before the model, which may fill the disk, and again at the end."""
    opened = []

    def count(path: Path) -> None:
        opened.extend([path] if file in str(path) else [])
        if len(opened) == times:
            faults.kill()

    shutil.rmtree(runs / "small")
    faults.at_open = count
    with pytest.raises(Killed):
        train("run.toml")
    faults.revive()
    assert read_run("runs/small").outcome == "interrupted"
    resumed()
    assert_same_end()


def test_a_run_that_has_skipped_samples_stays_as_it_is() -> None:
    settings = ("embedding.strategy=lookahead+random-drop", "checkpoint.resume=auto")
    for _ in range(2):
        assert train("run.toml", settings=settings).exit_code == 0
    run = read_run("runs/small")
    assert run.summary.steps < STEPS
    assert run.resumed_after == ()


def test_a_run_that_has_settled_stays_as_it_is() -> None:
    settings = (
        "training.patience=1", "training.eval_every=2", "training.optimizer.lr=0",
        "embedding.optimizer.lr=0",
    )  # fmt: skip
    trained(*settings, name="small")
    assert read_run("runs/small").summary.steps == 4
    assert "nothing to go on" in resumed(*settings).stderr
    assert read_run("runs/small").summary.steps == 4
    resumed(*settings, "training.patience=2")
    assert read_run("runs/small").summary.steps == 6


def test_it_is_resumed_with_another_budget_and_strategy(runs: Path) -> None:
    changes = ("embedding.strategy=lru", "embedding.budget=80%", "embedding.depth=2")
    result = resumed(*changes, "training.check_equality=true", run="runs/small")
    assert "yes, to the bit" in result.stdout  # all losses, also those from before
    assert_same_end()


@pytest.mark.filterwarnings("ignore:no threshold in")  # on so few samples
@pytest.mark.parametrize("strategy", ["hotline", "fae", "lookahead+slipstream"])
def test_a_system_is_resumed_and_says_what_it_has_not_kept(strategy: str, faults: Faults) -> None:
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=160")
    killed(faults, after=7, settings=settings)
    assert "anew" in resumed(*settings).stderr
    steps = [record.step for record in read_steps("runs/small")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 15


@pytest.mark.parametrize("strategy", ["hotline", "fae", "all-fast+random-drop"])
def test_a_system_that_was_killed_when_all_was_trained_has_nothing_left(
    strategy: str, faults: Faults
) -> None:
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%")

    def kill(path: Path) -> None:
        if path.name.startswith("run.json"):
            faults.kill()

    faults.at_open = kill
    with pytest.raises(Killed):
        train("run.toml", settings=settings)
    faults.revive()
    last = Checkpoint(saved_in(CHECKPOINTS)[-1]).step
    assert "cannot be used" not in resumed(*settings).stderr
    assert read_run("runs/small").summary.steps == last


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["static+random-drop", "hotline+random-drop", "fae"])
def test_a_system_is_resumed_with_the_epoch_that_it_was_in(strategy: str, faults: Faults) -> None:
    settings = (
        f"embedding.strategy={strategy}", "embedding.budget=90%", "data.samples=320",
        "system.target=0.5", "training.epochs=3", "checkpoint.every_steps=1",
    )  # fmt: skip
    trained(*settings)
    epoch = read_run("runs/whole").summary.steps // 3  # not 20: samples are skipped, or sorted
    assert epoch != 20
    # In the last epoch, and when that has begun again twice: by their number alone these steps are
    # of the second epoch, or of none.
    stops = (2 * epoch + 5, 3 * epoch + 4, 4 * epoch + 2)
    for number, stop in enumerate(stops):
        killed(faults, *(("--resume",) if number else ()), after=stop, settings=settings)
    resumed(*settings)
    saved = tuple(stop - 1 for stop in stops)  # before it was killed
    assert read_run("runs/small").resumed_after == saved
    left = read_run("runs/small").summary.steps - saved[-1]
    assert epoch <= left <= epoch + 1  # hotline skips no sample while it learns
    resumed(*settings, "training.epochs=4")
    left = read_run("runs/small").summary.steps - saved[-1]
    assert 2 * epoch <= left <= 2 * epoch + 2


def test_prepared_data_are_resumed_in_the_middle_of_an_epoch(
    folder: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "columns.toml").write_text('label = "y"\ndense = ["a"]\ncategories = ["u", "v"]\n')
    lines = [f"{i % 3 % 2},{i % 7},{i * 7 % 50},{i % 11}" for i in range(300)]

    def prepare(out: str, lines: list[str]) -> None:
        (folder / "log.csv").write_text("y,a,u,v\n" + "\n".join(lines) + "\n")
        words = ["prepare", "csv", "log.csv", "--columns", "columns.toml", "--out", out]
        succeeds(*words, "--split", "random")

    prepare("prepared", lines)
    settings = ("data.kind=prepared", "data.folder=prepared", "embedding.strategy=all-fast")
    settings += ("checkpoint.every_steps=9",)
    trained(*settings)
    killed(faults, after=20, settings=settings)
    assert Checkpoint(saved_in(CHECKPOINTS)[-1]).step == 18
    monkeypatch.setattr("hotrow.data.loader._MOST_WORKERS", 1)
    resumed(*settings)
    assert_same_end()
    prepare("other", lines[::-1])  # with the same values
    settings = (*settings, "data.folder=other", "training.epochs=3")
    error = refused("train", "run.toml", "--resume", *options(*settings))
    assert "data.folder holds other samples than it held" in error
    resumed(*settings, "checkpoint.strict=false")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_saves_and_says_how_to_resume(
    number: signal.Signals, code: int, runs: Path, faults: Faults
) -> None:
    shutil.rmtree(runs / "small")
    settings = ("checkpoint.every_steps=100",)
    faults.at_step[5] = lambda job: signal.raise_signal(number)
    result = train("run.toml", settings=settings)
    assert result.exit_code == code, result.output
    message = "checkpoint of step 5 in runs/small/checkpoints/00001-step-5; "
    assert message + "hotrow train runs/small --resume continues from it" in result.stdout
    assert read_run("runs/small").outcome == "interrupted"
    resumed(*settings)
    assert_same_end()
    assert "small has ended, and there is nothing to go on with" in resumed(*settings).stderr
    resumed(*settings, "training.epochs=3")
    assert read_run("runs/small").summary.steps == 21


def test_a_second_ctrl_c_while_saving_keeps_the_checkpoint_before(faults: Faults) -> None:
    pressed = threading.Event()  # only once: when the run has ended, pytest takes the signal

    def interrupt(path: Path) -> None:
        if "step-5" in str(path) and "rows" in str(path) and not pressed.is_set():
            pressed.set()
            signal.raise_signal(signal.SIGINT)  # in a thread: the main one takes it

    faults.at_open = interrupt
    faults.at_step[5] = lambda job: signal.raise_signal(signal.SIGINT)
    result = train("run.toml")
    assert result.exit_code == 130
    assert "interrupted; the checkpoint of step 3 is whole, in runs/small/" in result.stderr
    assert sorted(path.name for path in CHECKPOINTS.iterdir()) == ["00001-step-3", "latest"]
    Checkpoint(CHECKPOINTS / "00001-step-3").verify()


def test_a_full_disk_loses_a_checkpoint_and_stops_a_run_that_wants_it(faults: Faults) -> None:
    faults.at_open = full_disk("step-6", "001-00000")
    result = succeeds("train", "run.toml")
    message = "the checkpoint of step 6 was not saved: the disk is full"
    assert message in result.stderr
    assert "runs/small/checkpoints/00001-step-3 stays. Training goes on" in result.stderr
    assert saved_names() == ["00003-step-12", "00004-step-14"]
    error = refused("train", "run.toml", *options("checkpoint.on_error=stop"))
    assert message in error
    assert "`hotrow train runs/small-2 --resume` continues from it" in error


def test_a_disk_that_is_full_at_the_end_loses_both_and_says_so(faults: Faults) -> None:
    faults.at_open = full_disk("step-14|model", "001-00000")
    error = refused("train", "run.toml")
    error = error[error.index("error: the last checkpoint was not saved") :]
    assert "; the model was not saved: the disk is full: runs/small/model" in error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OSError])
def test_a_failure_says_what_is_saved(error: type[Exception], faults: Faults) -> None:
    faults.at_step[4] = fail(error, "it has failed")
    result = train("run.toml")
    assert isinstance(result.exception, SystemExit if error is OSError else error)
    message = "the checkpoint of step 3 is whole, in runs/small/checkpoints/00001-step-3; `hotrow"
    assert message in result.stderr
    assert ("smaller embedding.budget" in result.stderr) == (error is torch.OutOfMemoryError)
    assert ("error: it has failed" in result.stderr) == (error is OSError)


@pytest.mark.parametrize(("step", "value"), [(4, torch.nan), (6, torch.inf)])
def test_weights_that_are_not_finite_replace_no_checkpoint(
    step: int, value: float, faults: Faults
) -> None:
    """The loss of a step is that of the weights before it."""
    faults.at_step[step] = lambda job: next(job.model.parameters()).data.fill_(value)
    result = train("run.toml")
    assert result.exit_code == 3
    assert saved_names() == ["00001-step-3"]
    not_saved = "the checkpoint of step 6 was not saved: bottom" in result.stderr
    assert not_saved == (step == 6)
    message = "`hotrow train runs/small --resume --set checkpoint.strict=false` with such settings"
    assert message in result.stderr
    resumed("checkpoint.strict=false", "training.optimizer.lr=0.001", run="runs/small")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.batch_size=8", "data.batch_size is 8, and was 16"),
        ("data.seed=1", "data.seed is 1, and was 0"),
        ("run.seed=3", "run.seed is 3, and was 0"),
        ("model.top=[9]", "model.top is [9], and was [8]"),
        ("embedding.optimizer.lr=0.1", "embedding.optimizer.lr is 0.1, and was 0.05"),
        ("training.clip_norm=1.0", "training.clip_norm is 1.0, and was left out"),
        ("data.rows=[400, 60, 6]", "other data: table cat_2 has 6 rows instead of 5"),
    ],
)
def test_settings_that_decide_bits_are_refused(setting: str, message: str, runs: Path) -> None:
    assert message in refused("train", "run.toml", "--resume", "--set", setting)


@pytest.mark.parametrize("key", ["training.optimizer.name", "embedding.optimizer.name"])
@pytest.mark.parametrize("strict", ["true", "false"])
def test_another_optimizer_is_always_refused(key: str, strict: str, runs: Path) -> None:
    settings = options(f"{key}=adam", f"checkpoint.strict={strict}")
    pattern = rf"step-6 was saved with {key} = '[a-z-]+', and 'adam' cannot go on with that"
    assert re.search(pattern, refused("train", "run.toml", "--resume", *settings))


@pytest.mark.parametrize("what", ["is gone", "has no checkpoint.json"])
def test_a_missing_latest_is_warned_of(what: str, runs: Path) -> None:
    last = CHECKPOINTS / "00002-step-6"
    if what == "is gone":
        shutil.rmtree(last)
    else:
        (last / "checkpoint.json").unlink()
    message = f"{last}, which 'latest' names, {what}: the newest of the others is taken"
    with pytest.warns(UserWarning, match=re.escape(message)):
        export_tables("runs/small", "tables", to="npz")
    assert f"{last} is no checkpoint: it has no checkpoint.json" in refused("verify", "small")
    result = resumed()
    assert result.stderr.count(message) == 1
    assert "continues after step 3, from" in result.stdout
    assert not resumed().stderr.count(message)  # another is the latest


def test_auto_begins_or_resumes(faults: Faults) -> None:
    settings = ("checkpoint.resume=auto",)
    killed(faults, after=2, settings=settings)  # before its first checkpoint
    killed(faults, after=4, settings=settings)
    assert {path.name for path in Path("runs").iterdir()} == {"small", "small-2"}
    result = succeeds("train", "run.toml", *options(*settings))
    assert "continues after step 3, from runs/small-2/checkpoints/00001-step-3" in result.stdout
    result = train("run.toml", "--json", settings=settings)
    assert [event["event"] for event in events(result)] == ["warning"]


def test_without_a_checkpoint_there_is_nothing_to_resume(runs: Path) -> None:
    shutil.rmtree(runs / "small")
    error = refused("train", "run.toml", "--resume")
    assert "there is no checkpoint of a run 'small' in runs to go on from" in error
    for place in ("runs/whole/checkpoints", "runs/whole/checkpoints/00005-step-14"):
        assert f"{place} is no run: give the folder" in refused("train", place, "--resume")
    Path("runs/other").mkdir()
    error = "runs/other has no checkpoint to go on from"
    assert error in refused("train", "other", "--resume")
    error = "runs/other is the folder of a run; with --resume it continues"
    assert error in refused("train", "runs/other")
    Path("data/shards").mkdir(parents=True)
    error = "--set data.kind=prepared --set data.folder=data does without one"
    for words in (("data",), ("data", "--resume")):
        assert error in refused("train", *words)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(runs: Path) -> None:
    (shard,) = (CHECKPOINTS / "00002-step-6/rows").glob("000-*")
    spoil(shard)
    result = resumed()
    assert "00002-step-6 cannot be used" in result.stderr
    assert "load another" not in result.stderr
    assert "continues after step 3" in result.stdout
    assert_same_end()


def test_settings_come_from_the_newest_checkpoint_that_has_them(runs: Path) -> None:
    state = CHECKPOINTS / "00002-step-6/state.json"
    state.write_text(state.read_text().replace("16", "17", 1))
    result = resumed(run="runs/small")
    assert "00002-step-6 cannot be used" in result.stderr
    assert "continues after step 3" in result.stdout
    for path in CHECKPOINTS.glob("*/state.json"):
        path.write_text("{}")
    error = refused("train", "runs/small", "--resume")
    assert "no checkpoint in runs/small/checkpoints can be used" in error


def test_checkpoints_are_saved_by_the_clock_too() -> None:
    settings = ("checkpoint.every_seconds=1e-9", "checkpoint.keep=100")
    settings += ("checkpoint.background=false",)  # else seconds count from the end of one
    Path("run.toml").write_text(RUN_TOML.replace("every_steps = 3", ""))
    trained(*settings, name="small")
    assert len(saved_names()) == STEPS


def test_tensorboard_drops_the_steps_after_the_checkpoint(faults: Faults) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed(faults, after=5, settings=("run.tensorboard=true",))
    resumed("run.tensorboard=true")
    board = accumulator.EventAccumulator("runs/small")
    board.Reload()
    steps = [scalar.step for scalar in board.Scalars("training/loss")]
    assert steps == list(range(1, STEPS + 1))


def test_two_processes_do_not_train_one_run(runs: Path) -> None:
    for path in CHECKPOINTS.glob("*/state.json"):
        path.write_text("{}")  # the second process does not even read them
    with RunWriter.going_on(Path("runs/small"), after=3):
        error = refused("train", "run.toml", "--resume")
    assert "another process is training the run in runs/small" in error


def test_a_run_knows_its_checkpoints_elsewhere(faults: Faults) -> None:
    settings = ("checkpoint.folder=elsewhere",)
    killed(faults, after=4, settings=settings)
    assert Path("elsewhere/small/latest").is_file()
    error = refused("train", "runs/small", "--resume", *options("checkpoint.folder=third"))
    assert "has checkpoints in runs/small/checkpoints, and none in third/small" in error
    result = resumed(run="runs/small")
    assert "continues after step 3, from elsewhere/small/00001-step-3" in result.stdout
    verified = succeeds("verify", "small").stdout
    assert "runs/small/checkpoints/00005-step-14: checkpoint" in verified
    assert "has ended" in resumed(*settings).stderr


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_place_that_takes_no_checkpoints_is_named_before_training(on_error: str) -> None:
    Path("file").touch()
    settings = options("checkpoint.folder=file", f"checkpoint.on_error={on_error}")
    error = refused("train", "run.toml", *settings)
    assert "checkpoints cannot be written to file/small: " in error
    assert len(list(read_steps("runs/small"))) == (STEPS if on_error == "continue" else 0)


def test_a_run_that_is_resumed_leaves_a_checkpoint_of_its_end(faults: Faults) -> None:
    """Exports are of the end of the run, also if the last checkpoint was not saved."""
    Path("run.toml").write_text(RUN_TOML.replace("every_steps = 3", ""))
    stopped(faults, after=4)
    resumed(run="runs/small")
    assert saved_names() == ["00001-step-4", "00002-step-14"]
    shutil.rmtree(CHECKPOINTS / "00002-step-14")
    succeeds("export", "small", "--to", "safetensors", "--out", "tables")
    export_tables("runs/small", "by-python")
    key = "embedding.embedding_bags.cat_0.weight"
    for folder in ("tables", "by-python"):
        exported = load_file(f"{folder}/000-{key}.safetensors")[key]
        assert same_bits(exported, model_of("small")[key])


@pytest.mark.filterwarnings("always:.*is of before the run went on:UserWarning")
@pytest.mark.parametrize("end", ["NaN", "failure", "unsaved"])
def test_a_run_that_is_resumed_and_saves_no_model_says_whose_is_there(
    end: str, faults: Faults
) -> None:
    assert "checkpoint of" not in (result := stopped(faults, "--quiet", after=4)).stdout
    assert "checkpoint of step 4 in runs/small/checkpoints/00002-step-4; " in result.stderr
    before = model_of("small")
    if end == "failure":
        faults.at_step[6] = fail(OSError)
        why = "it failed, was stopped at once, or could not save it"
        refused("train", "runs/small", "--resume")
    elif end == "NaN":
        settings = ("checkpoint.strict=false", "embedding.optimizer.lr=1e25")
        why = "its loss or its weights became NaN or infinite"
        result = train("runs/small", "--resume", settings=settings)
        assert result.exit_code == 3, result.output
    else:
        why = "run.save was false then"
        result = resumed("run.save=false", run="runs/small")
    assert end == "failure" or "runs/small/model stays as it was before" in result.stderr
    warning = succeeds("evaluate", "small").stderr
    assert "model is of before the run went on after step 4, and not of its end" in warning
    assert why in warning
    after = model_of("small")
    assert all(same_bits(before[key], after[key]) for key in before)
    if end != "NaN":
        resumed("training.epochs=3", "run.save=true", run="runs/small")
        assert "is of before" not in succeeds("evaluate", "small").stderr


def test_missing_records_of_steps_are_warned_of(runs: Path) -> None:
    path = Path("runs/small/steps.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + '{"step": 3, "lo')
    assert "has records of 2 steps, and continues after step 6" in resumed().stderr
    assert [record.step for record in read_steps("runs/small")] == [1, 2, *range(7, 15)]
