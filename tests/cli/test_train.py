"""`hotrow train` leaves records that are true, and says in one sentence what is wrong."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import hotrow.run.session
from commands import SMALL, events
from commands import hotrow as invoke
from hotrow import STRATEGIES
from hotrow.checkpoint import SavedModel
from hotrow.cli import make_app
from hotrow.cli._watch import Screen
from hotrow.run.config import CLICK_MODELS, load
from hotrow.run.files import RunWriter, read_run, read_steps
from hotrow.run.job import Job, build, same_bits
from hotrow.run.open_run import open_trained
from hotrow.run.tally import Tally
from hotrow.support.files import Disk
from hotrow.support.records import EvalRecord, StepRecord
from hotrow.training.trainer import Trainer

RUN_TOML = SMALL + "[training]\neval_every = 4\ncheck_equality = true\n"
pytestmark = pytest.mark.usefixtures("folder")


def train(*arguments: str) -> Result:
    return invoke("train", *arguments)


def test_a_run_ends_with_a_true_summary() -> None:
    result = train("run.toml")
    assert result.exit_code == 0, result.output
    found = read_run("runs/small").summary
    assert found.equal_to_all_fast is True
    assert f"{found.auc:.4f}" in result.stdout
    assert f"{found.hit_rate:.2%} of {found.lookups:,} lookups" in result.stdout
    assert "finished after 10 steps, 160 samples" in result.stdout
    assert "yes, to the bit" in result.stdout


def test_the_start_says_where_fast_memory_goes() -> None:
    result = train("run.toml")
    for part in read_run("runs/small").memory:
        assert part in result.stdout


def test_records_are_written_for_every_step_and_evaluation() -> None:
    train("run.toml")
    run = read_run("runs/small")
    steps = list(read_steps("runs/small"))
    assert [step.step for step in steps] == list(range(1, 11))
    assert [each.step for each in run.evaluations] == [4, 8, 10]
    assert run.outcome == "finished"
    assert run.settings["embedding"]["budget"] == "60%"
    assert run.environment["versions"]["torch"]
    moved = sum(step.bytes_fetched + step.bytes_evicted for step in steps)
    assert run.summary.bytes_moved == moved
    assert run.summary.loss == steps[-1].loss
    assert run.summary.auc == run.evaluations[-1].auc


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_all_fast(strategy: str) -> None:
    result = train("run.toml", "--set", f"embedding.strategy={strategy}", "--json")
    assert result.exit_code == 0, result.output
    assert events(result)[-1]["summary"]["equal_to_all_fast"] is True


@pytest.mark.parametrize("kind", CLICK_MODELS)
def test_every_kind_of_model_is_trained(kind: str) -> None:
    settings = RUN_TOML.replace("bottom = [8]\ntop = [8]", f'kind = "{kind}"')
    Path("run.toml").write_text(settings)
    result = train("run.toml")
    assert result.exit_code == 0, result.output
    assert f"{kind}, 3 tables" in result.stdout
    assert "yes, to the bit" in result.stdout
    trained = read_run("runs/small").settings["model"]
    assert trained["kind"] == kind
    for name, default in CLICK_MODELS[kind].items():
        assert trained[name] == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize(
    ("width", "facts"),
    [
        (100, "loss AUC hits link waited memory"),
        (80, "loss AUC hits link waited"),
        (40, "loss AUC hits"),
    ],
)
def test_the_line_below_the_bar_fits_the_screen(width: int, facts: str) -> None:
    written = io.StringIO()
    screen = Screen()
    screen._console = Console(file=written, width=width, force_terminal=True, color_system=None)
    screen._memory = {"slots": 3 << 29}
    tally = Tally()
    for step in range(1, 20):
        tally.add(StepRecord(step, 0.5, 32, 0.01, 100, 60, 25, 5, 1 << 26, 0, waited=0.125))
    tally.evaluations.append(EvalRecord(step=19, samples=32, auc=0.7, log_loss=0.6))
    with screen.progress("training", steps=20) as advance:
        advance(tally)
    bar, line, _ = written.getvalue().splitlines()[-3:]  # the cursor is shown again
    assert "samples/s" in bar  # so the line below is a whole one, and not the end of a longer
    assert [each.split()[0] for each in line.split(" · ")] == [*facts.split()]


def test_json_gives_the_same_facts_and_no_bar() -> None:
    result = train("run.toml", "--json")
    first, *middle, last = events(result)
    assert first["event"] == "start"
    assert first["steps"] == 10
    assert {each["event"] for each in middle} == {"progress"}
    assert {"samples_per_second", "loss", "auc", "hit_rate"} <= middle[0].keys()
    assert last["event"] == "end"
    assert last["memory"] == first["memory"]
    assert last["summary"]["auc"] == read_run("runs/small").summary.auc


REMEDY = r"--set (embedding\.budget=[0-9.]+%|embedding\.strategy=all-fast)"


def chunked(*arguments: str) -> Result:
    """A run whose budget is too small for its batches, with warnings as users have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return train("run.toml", "--set", "embedding.budget=30%", *arguments)


def test_a_warning_is_one_line() -> None:
    result = chunked("--set", "data.batch_size=80")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: a batch of ")
    assert re.search(rf"\. {REMEDY} would hold it$", line)
    assert "warning" not in result.stdout


def test_the_last_advice_of_a_run_in_chunks_is_a_budget() -> None:
    more = ("data.batch_size=80", "data.samples=4000", "training.check_equality=false")
    result = chunked(*(word for each in more for word in ("--set", each)))
    assert result.exit_code == 0, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("warning: limited by a budget too small for batches: of a step, ")
    match = re.search(rf"\. {REMEDY} would hold them$", last)
    assert match is not None
    assert "a budget too small for batches, " in result.stdout
    found = read_run("runs/small")
    assert found.times is not None
    assert found.limit is not None
    assert found.times.seconds > found.times.chunk_seconds > 0
    assert sum(step.chunk_seconds for step in read_steps("runs/small")) > found.times.chunk_seconds
    # And taking it helps.
    train("run.toml", *(word for each in (*more, match[1]) for word in ("--set", each)))
    assert read_run("runs/small-2").summary.chunked_batches == 0
    assert sum(step.chunk_seconds for step in read_steps("runs/small-2")) == 0


def test_a_budget_too_small_is_told_in_options() -> None:
    result = train("run.toml", "--set", "embedding.budget=100B", "--set", "data.rows=[5, 4, 3]")
    assert result.exit_code == 2
    assert result.stderr.endswith("need none: --set embedding.strategy=all-fast\n")


def test_a_warning_is_an_event_for_machines() -> None:
    result = chunked("--set", "data.batch_size=80", "--json")
    (told,) = [each for each in events(result) if each["event"] == "warning"]
    assert told["message"].startswith("a batch of ")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("cpu", "none: rows stay in slow memory"),
        ("uncached", "% of the rows, none kept between batches"),
        ("static", "% of the rows\n"),
        ("all-fast", "for 100.00% of the rows\n"),
    ],
)
def test_the_summary_says_what_slots_are_for(strategy: str, said: str) -> None:
    result = train("run.toml", "--set", f"embedding.strategy={strategy}")
    lines = "".join(line.rstrip() + "\n" for line in result.stdout.splitlines())
    assert said in lines
    assert not re.search(r"total +0 B", lines)  # a table of fast memory without anything in it


def test_a_folder_that_cannot_be_made_is_told() -> None:
    Path("taken").write_text("")
    result = train("run.toml", "--runs", "taken/runs")
    assert result.exit_code == 2
    assert "cannot make a folder for the run in taken/runs (Not a directory)" in result.stderr
    assert "--runs" in result.stderr


def test_the_built_in_job_needs_no_file() -> None:
    result = train("--set", "training.steps=3", "--json")
    assert result.exit_code == 0, result.output
    assert read_run("runs/default").summary.equal_to_all_fast is True


def test_an_earlier_run_is_kept() -> None:
    first, second = train("run.toml", "--json"), train("run.toml", "--json")
    assert events(first)[-1]["folder"] == "runs/small"
    assert events(second)[-1]["folder"] == "runs/small-2"
    assert events(second)[-1]["name"] == "small-2"
    one, two = read_run("runs/small").summary, read_run("runs/small-2").summary
    assert (one.loss, one.auc) == (two.loss, two.auc)


def test_runs_go_where_they_are_asked_to(folder: Path) -> None:
    train("run.toml", "--runs", "elsewhere/deep")
    assert (folder / "elsewhere" / "deep" / "small" / "run.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.toml"], "error: cannot read missing.toml: No such file or directory"),
        (
            ["run.toml", "--set", "training.step=3"],
            "error: --set training.step=3: unknown key 'step' in [training]; did you mean 'steps'?",
        ),
        (["run.toml", "--set", "embedding.budget=64"], "the smallest that works"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, folder: Path
) -> None:
    result = train(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, folder: Path, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = train("run.toml", "--set", f"run.device={device}")
    assert result.exit_code == 2
    assert f"error: device '{device}': torch {torch.__version__} sees no CUDA" in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "runs").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_equals_all_fast() -> None:
    result = train("run.toml", "--set", "run.device=cuda", "--set", "training.epochs=4")
    assert result.exit_code == 0, result.output
    run = read_run("runs/small")
    steps = list(read_steps("runs/small"))
    assert [step.step for step in steps] == list(range(1, 41))
    assert run.summary.loss == steps[-1].loss
    assert run.summary.equal_to_all_fast is True
    assert run.environment["gpu"] == torch.cuda.get_device_name()


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, after_step: int, times: int = 1) -> None:
    write = RunWriter.step

    def step(self: RunWriter, record: StepRecord) -> None:
        write(self, record)
        if record.step == after_step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunWriter, "step", step)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_what_was_done(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    press_ctrl_c(monkeypatch, after_step=3, times=times)
    result = train("run.toml")
    assert result.exit_code == 130
    assert len(list(read_steps("runs/small"))) == 3
    run = read_run("runs/small")
    assert run.outcome == "interrupted"
    assert run.summary.steps == 3
    assert run.summary.equal_to_all_fast is None
    assert signal.getsignal(signal.SIGINT) is before


def test_the_model_is_saved_and_told() -> None:
    result = train("run.toml")
    assert "model saved to runs/small/model; hotrow evaluate runs/small reads it" in result.stdout
    assert Path("runs/small/model/manifest.json").is_file()
    found = events(train("run.toml", "--json"))[-1]
    assert found["model"] == "runs/small-2/model"


def test_a_model_that_nobody_wants_is_not_saved() -> None:
    result = train("run.toml", "--set", "run.save=false")
    assert "model saved" not in result.stdout
    assert not Path("runs/small/model").exists()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_the_model_of_that_step(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    press_ctrl_c(monkeypatch, after_step=3, times=times)
    assert train("run.toml").exit_code == 130
    assert Path("runs/small/model").exists() == (times == 1)
    if times == 1:  # the second time ends at once
        stopped = open_trained("small")
        job = build(load(Path("run.toml")))
        for _ in zip(range(3), job.train(), strict=False):
            pass
        assert stopped.trainer.step == 3
        mine, other = job.model.state_dict(), stopped.model.state_dict()
        assert all(same_bits(mine[key], other[key]) for key in mine)


class Full(Disk):
    def open(self, path: Path) -> Any:
        if "001-00000" in path.name:
            return Path("/dev/full").open("wb", buffering=0)
        return super().open(path)


def test_a_full_disk_takes_the_model_and_not_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.checkpoint.model.Disk", Full)
    result = train("run.toml")
    assert result.exit_code == 2
    told = "error: the model was not saved: the disk is full: runs/small/model/rows/001-00000"
    assert told in result.stderr
    assert "Traceback" not in result.output
    run = read_run("runs/small")
    assert run.outcome == "finished"
    assert run.summary.equal_to_all_fast is True
    assert len(list(read_steps("runs/small"))) == 10
    assert not Path("runs/small/model").exists()


class FullFile(io.FileIO):
    """Takes so many bytes, and then no more."""

    room = 0

    def write(self, data: Any) -> int:
        taken = super().write(bytes(data)[: FullFile.room])
        FullFile.room -= taken
        if data and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("room", [0, 1000])
def test_a_disk_that_is_full_while_training_costs_steps_and_not_the_model(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Half a line is none; and when there is room again, steps are recorded again."""
    real = Path.open

    def opened(self: Path, *words: Any, **options: Any) -> Any:
        if self.name == "steps.jsonl" and words[:1] == ("wb",):
            return FullFile(self, "w")
        return real(self, *words, **options)

    real_step = RunWriter.step

    def step(self: RunWriter, record: StepRecord) -> None:
        if record.step == 9:
            FullFile.room = 1 << 20
        real_step(self, record)

    FullFile.room = room
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(RunWriter, "step", step)
    result = train("run.toml")
    assert result.exit_code == 0, result.output
    found = [record.step for record in read_steps("runs/small")]
    before = len(found) - 2
    assert found == [*range(1, before + 1), 9, 10]
    assert (before > 0) == (room > 0)
    told = f"step {before + 1} was not recorded in runs/small/steps.jsonl: No space left on device"
    assert result.stderr.count(told) == 1
    assert f"lacks {8 - before} steps" in result.stderr
    assert open_trained("small").trainer.step == 10


@pytest.mark.filterwarnings("default")
def test_a_record_that_finds_no_room_costs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRecord(Disk):
        def open(self, path: Path) -> Any:
            return Path("/dev/full").open("wb", buffering=0)

    monkeypatch.setattr("hotrow.run.files.Disk", NoRecord)
    result = train("run.toml")
    assert result.exit_code == 2
    assert "warning: the disk is full: runs/small/start.json was not written" in result.stderr
    assert "error: the disk is full: runs/small/run.json was not written" in result.stderr
    assert "; the model is in runs/small/model" in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in Path("runs/small").iterdir() if "run.json" in path.name] == []
    SavedModel(Path("runs/small/model")).verify()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_log_on_a_full_disk_stops_no_training(stream: str) -> None:
    with Path("/dev/full").open("wb") as full:
        other = "stderr" if stream == "stdout" else "stdout"
        pipes: dict[str, Any] = {stream: full, other: subprocess.PIPE}
        command = [sys.executable, "-m", "hotrow", "train", "run.toml", "--json"]
        result = subprocess.run(command, check=False, **pipes)
    said = (result.stdout or b"") + (result.stderr or b"")
    assert b"Traceback" not in said
    assert open_trained("small").trainer.step == 10
    if stream == "stdout":  # somebody waits for what it would have said
        assert result.returncode == 2
        assert b"not all that was said could be written: No space left on device" in said
    else:
        assert result.returncode == 0


def test_the_record_is_there_before_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while the model is saved has the record, and can go on."""
    outcomes = []

    def save(folder: Path, model: object) -> None:
        outcomes.append(read_run(folder.parent).outcome)

    monkeypatch.setattr(hotrow.run.session, "save_model", save)
    assert train("run.toml").exit_code == 0
    assert outcomes == ["interrupted"]


@pytest.mark.parametrize("free", [0, 10**9])
def test_little_room_on_the_disk_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    room = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    first, *others = events(train("run.toml", "--json"))
    assert first["event"] == "start"
    told = [each["message"] for each in others if each["event"] == "warning"]
    assert [others[0]["event"] == "warning", len(told)] == ([False, 0] if free else [True, 1])
    if told:
        assert re.search(r"the model will take \d+\.\d KiB, and runs/small has 0 B free", told[0])


def test_ctrl_c_says_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    press_ctrl_c(monkeypatch, after_step=3)
    result = train("run.toml")
    assert "stopping after this step" in result.stderr
    assert "interrupted after 3 steps, 48 samples" in result.stdout
    assert "not compared" in result.stdout


def test_a_run_that_fails_says_so_in_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Trainer[Any], batches: object) -> None:
        raise ValueError("the disk is full of water")

    monkeypatch.setattr(Trainer, "evaluate", fail)
    result = train("run.toml")
    assert result.exit_code == 2
    assert "error: the disk is full of water" in result.stderr
    assert read_run("runs/small").outcome == "failed"
    assert read_run("runs/small").summary.steps == 4


def test_a_run_that_is_not_equal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(left: Job, right: Job) -> list[str]:
        return ["rows of table cat_0"]

    monkeypatch.setattr(hotrow.run.session, "differences", differ)
    result = train("run.toml")
    assert result.exit_code == 1
    assert "not equal to all-fast: rows of table cat_0" in result.stdout
    assert read_run("runs/small").summary.equal_to_all_fast is False


def test_a_run_that_promises_no_bits_says_how_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotrow.run.session, "differences", lambda left, right: ["rows of table a"])
    result = train("run.toml", "--set", "embedding.strategy=static-hybrid")
    assert result.exit_code == 0, result.output
    assert "not to the bit, and promised is: exact up to rounding" in result.stdout


@pytest.mark.parametrize("strategy", ["hotline", "fae", "lookahead+random-drop", "hybrid"])
def test_the_built_in_job_compares_bits_where_they_are_promised(strategy: str) -> None:
    assert not load(overrides=[f"embedding.strategy={strategy}"]).training.check_equality
    assert load(overrides=["embedding.strategy=lru"]).training.check_equality


def test_a_run_ends_when_its_auc_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    aucs = iter([0.6, 0.7, float("nan"), 0.69, 0.71])
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self, batches: EvalRecord(self.step, 64, next(aucs), 0.5)
    )
    result = train("run.toml", "--set", "training.eval_every=2", "--set", "training.patience=2")
    assert result.exit_code == 0, result.output
    found = read_run("runs/small")
    assert found.outcome == "finished"
    assert found.summary.steps == 8  # evaluations at 2, 4, 6 and 8; the second was the best
    assert found.summary.equal_to_all_fast is True


def test_learning_rates_of_a_run_follow_its_schedule() -> None:
    def losses(*settings: str) -> list[float]:
        arguments = [each for one in settings for each in ("--set", one)]
        result = train("run.toml", *arguments)
        assert result.exit_code == 0, result.output
        (folder,) = Path("runs").glob("*")
        found = [step.loss for step in read_steps(folder)]
        shutil.rmtree("runs")
        return found

    plain = losses()
    warm = losses("training.schedule.warmup_steps=1000000")
    assert warm[0] == plain[0]
    assert warm[-1] != plain[-1]
    falling = losses("training.schedule.decay_start=5", "training.schedule.decay_steps=2")
    assert falling[:5] == plain[:5]
    assert falling[-1] != plain[-1]
    assert losses("training.clip_norm=0.001")[1:] != plain[1:]


def test_a_loss_that_is_no_number_ends_a_run() -> None:
    rate = "embedding.optimizer.lr=1e25"
    result = train("run.toml", "--set", rate, "--set", "training.check_equality=false")
    assert result.exit_code == 3, result.output
    assert read_run("runs/small").outcome == "diverged"
    losses = [step.loss for step in read_steps("runs/small")]
    first = next(step for step, loss in enumerate(losses, 1) if loss is None or loss != loss)
    assert f"warning: the loss is NaN since step {first}, " in result.stderr
    assert len(losses) == first
    assert "the model is not saved: its loss is NaN" in result.stderr
    assert not Path("runs/small/model").exists()
    told = CliRunner().invoke(make_app(), ["evaluate", "small"])
    assert told.exit_code == 2
    assert "has no model: its loss or its weights became NaN or infinite. Train it" in told.stderr
    told = CliRunner().invoke(make_app(), ["export", "small", "--to", "npz", "--out", "tables"])
    assert told.exit_code == 2
    assert "runs/small holds no checkpoint and no model; a run saves no model with" in told.stderr


def test_weights_that_the_last_step_has_spoilt_are_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last loss is that of the weights before it."""
    real = Job.train

    def train_badly(self: Job) -> Iterator[StepRecord]:
        for record in real(self):
            if record.step == 2:
                with torch.no_grad():
                    next(self.model.parameters())[0] = torch.nan
            yield record

    monkeypatch.setattr(Job, "train", train_badly)
    settings = ("training.steps=2", "training.check_equality=false")
    result = train("run.toml", *(word for each in settings for word in ("--set", each)))
    assert result.exit_code == 3, result.output
    assert "the model is not saved: bottom.0.weight holds NaN or infinite values" in result.stderr
    assert read_run("runs/small").outcome == "diverged"
    assert not Path("runs/small/model").exists()


def test_a_last_evaluation_that_fails_takes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.evaluate

    def evaluate(self: Job, *, at_end: bool = False) -> Any:
        if at_end:
            raise ValueError("the test split is under water")
        return real(self)

    monkeypatch.setattr(Job, "evaluate", evaluate)
    result = train("run.toml", "--set", "training.check_equality=false")
    assert result.exit_code == 2, result.output
    assert "error: the test split is under water" in result.stderr
    assert read_run("runs/small").outcome == "failed"
    assert Path("runs/small/model/manifest.json").exists()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_has_gone_does_not_end_a_run(words: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", "hotrow", "train", "run.toml", *words]
    settings = ("--set", "training.check_equality=false", "--set", "training.steps=40")
    running = subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.close()
    _, told = running.communicate(timeout=120)
    assert running.returncode == 0, told
    assert read_run("runs/small").outcome == "finished"
    assert (folder / "runs/small/model/manifest.json").exists()


@pytest.mark.parametrize("command", ["train", "compare", "size"])
@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "process group"])
def test_several_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, command: str, launcher: str
) -> None:
    if launcher == "process group":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    else:
        monkeypatch.setenv(launcher, "2")
    result = invoke(command, "run.toml")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: hotrow {command} was started as 2 ranks, ")
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["run.toml"]


def test_one_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert CliRunner().invoke(make_app(), ["train", "run.toml"]).exit_code == 0


@pytest.mark.slow
def test_torchrun_trains_nothing_twice() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, "-m", "hotrow", "train", "run.toml"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "was started as 2 ranks" in done.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize("entropy", [1.00000001, 1.25, 1.0, 0.8, float("nan")])
def test_a_run_worse_than_a_constant_prediction_says_so(
    monkeypatch: pytest.MonkeyPatch, entropy: float
) -> None:
    def evaluate(self: Job, *, at_end: bool = False) -> EvalRecord:
        return EvalRecord(10, 64, 0.5, 0.7, entropy)

    monkeypatch.setattr(Job, "evaluate", evaluate)
    result = train("run.toml", "--quiet")
    assert result.exit_code == 0
    told = " ".join(result.stdout.split())
    found = re.search(r"log-loss 0\.7000, normalised entropy (\S+): worse than always pred", told)
    assert (found is not None) == (entropy > 1)
    assert found is None or float(found[1]) > 1
    assert "worse" in told or not entropy > 1


def test_a_real_run_with_much_too_large_learning_rates_says_so() -> None:
    words = ["train", "run.toml", "--set", "training.optimizer.lr=3"]
    for result in (
        CliRunner().invoke(make_app(), words),
        CliRunner().invoke(make_app(), ["evaluate", "small"]),
    ):
        told = " ".join(result.stdout.split())
        assert "worse than always predicting the share of clicks" in told
