"""`hotrow train` writes true records, and says in one sentence what is wrong."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import Result

from commands import SMALL, Faults, events, full_disk, hotrow, refused, settings, succeeds
from hotrow import STRATEGIES
from hotrow.checkpoint import SavedModel
from hotrow.cli import _in_plain_words
from hotrow.cli._process import refuse_ranks
from hotrow.cli._watch import Screen, summary_facts
from hotrow.embedding.pipeline import Pipeline
from hotrow.run.config import load
from hotrow.run.files import read_run, read_steps
from hotrow.run.job import Job, build, same_bits
from hotrow.run.open_run import open_trained
from hotrow.run.tally import Tally
from hotrow.support.records import EvalRecord
from step_records import RUN, STEP

RUN_TOML = SMALL + "[training]\neval_every = 4\ncheck_equality = true\n"
UNCHECKED = "training.check_equality=false"
pytestmark = pytest.mark.usefixtures("folder")


def train(*given: str, words: tuple[str, ...] = (), code: int = 0) -> Result:
    result = hotrow("train", "run.toml", *words, *settings(*given))
    assert result.exit_code == code, result.output
    return result


def test_a_run_ends_with_true_records_and_a_true_summary() -> None:
    result = succeeds("train", "run.toml")
    run, steps = read_run("runs/small"), list(read_steps("runs/small"))
    assert [step.step for step in steps] == list(range(1, 11))
    assert [evaluation.step for evaluation in run.evaluations] == [4, 8, 10]
    assert run.outcome == "finished"
    assert run.settings["embedding"]["budget"] == "60%"
    assert run.environment["versions"]["torch"]
    summary = run.summary
    assert summary.bytes_moved == sum(step.bytes_fetched + step.bytes_evicted for step in steps)
    assert summary.loss == steps[-1].loss
    assert summary.auc == run.evaluations[-1].auc
    assert summary.equal_to_all_fast is True
    for text in (
        *run.memory,
        f"{summary.auc:.4f}",
        f"{summary.hit_rate:.2%} of {summary.lookups:,} lookups",
        "finished after 10 steps, 160 samples",
        "yes, to the bit",
        "model saved to runs/small/model; hotrow evaluate runs/small reads it",
    ):
        assert text in result.stdout
    SavedModel(Path("runs/small/model")).verify()


def test_json_has_the_same_facts_and_an_earlier_run_is_kept() -> None:
    for name in ("small", "small-2"):
        first, *middle, last = events(train(words=("--json",)))
        assert first["event"] == "start"
        assert first["steps"] == 10
        assert {event["event"] for event in middle} == {"progress"}
        assert {"samples_per_second", "loss", "auc", "hit_rate"} <= middle[0].keys()
        assert last["event"] == "end"
        assert last["memory"] == first["memory"]
        assert last["summary"]["auc"] == read_run(f"runs/{name}").summary.auc
        assert (last["folder"], last["name"]) == (f"runs/{name}", name)
        assert last["model"] == f"runs/{name}/model"
    one, two = read_run("runs/small").summary, read_run("runs/small-2").summary
    assert (one.loss, one.auc) == (two.loss, two.auc)


SLOTS = {
    "cpu": "none: rows stay in slow memory",
    "uncached": "% of the rows, none kept between batches",
    "static": "% of the rows\n",
    "all-fast": "for 100.00% of the rows\n",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_all_fast_and_says_what_its_slots_are_for(strategy: str) -> None:
    result = train(f"embedding.strategy={strategy}", "training.steps=6")
    assert read_run("runs/small").summary.equal_to_all_fast is True
    lines = "".join(line.rstrip() + "\n" for line in result.stdout.splitlines())
    assert SLOTS.get(strategy, "") in lines
    assert not re.search(r"total +0 B", lines)  # a table of fast memory without a part


@pytest.mark.parametrize(
    ("width", "facts"),
    [
        (100, "loss AUC hits link waited memory"),
        (80, "loss AUC hits link waited"),
        (40, "loss AUC hits"),
    ],
)
def test_the_line_below_the_bar_fits_the_screen(width: int, facts: str) -> None:
    written, screen, tally = io.StringIO(), Screen(), Tally()
    screen._console = Console(file=written, width=width, force_terminal=True, color_system=None)
    screen._memory = {"slots": 3 << 29}
    for step in range(1, 20):
        tally.add(replace(STEP, step=step, bytes_fetched=1 << 26, waited=0.125))
    tally.evaluations.append(EvalRecord(step=19, samples=32, auc=0.7, log_loss=0.6))
    with screen.progress("training", steps=20) as advance:
        advance(tally)
    bar, line, _ = written.getvalue().splitlines()[-3:]  # the cursor is shown again
    assert "samples/s" in bar  # so the line below is a whole one
    assert [fact.split()[0] for fact in line.split(" · ")] == [*facts.split()]


REMEDY = r"--set (embedding\.budget=[0-9.]+%|embedding\.strategy=all-fast)"


def test_a_budget_too_small_for_batches_is_one_warning_with_a_remedy() -> None:
    def chunked(*words: str) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return train("embedding.budget=30%", "data.batch_size=80", UNCHECKED, words=words)

    result = chunked()
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: a batch of ")
    match = re.search(rf"\. {REMEDY} would hold it$", line)
    assert match is not None
    assert "warning" not in result.stdout
    assert read_run("runs/small").summary.chunked_batches == 2
    assert sum(step.chunk_seconds for step in read_steps("runs/small")) > 0
    result = chunked("--json")
    (event,) = [event for event in events(result) if event["event"] == "warning"]
    assert event["message"].startswith("a batch of ")
    assert result.stderr == ""
    # And the remedy helps.
    train("data.batch_size=80", UNCHECKED, match[1])
    assert read_run("runs/small-3").summary.chunked_batches == 0
    assert sum(step.chunk_seconds for step in read_steps("runs/small-3")) == 0


def test_the_built_in_job_needs_no_file_and_runs_go_where_they_are_asked_to(folder: Path) -> None:
    succeeds("train", *settings("training.steps=3", "run.save=false"), "--runs", "elsewhere/deep")
    assert read_run("elsewhere/deep/default").summary.equal_to_all_fast is True
    assert not (folder / "elsewhere/deep/default/model").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.toml"], "error: cannot read missing.toml: No such file or directory"),
        (
            ["run.toml", "--set", "training.step=3"],
            "error: --set training.step=3: unknown key 'step' in [training]; did you mean 'steps'?",
        ),
        (["run.toml", "--set", "embedding.budget=64"], "the smallest that works"),
        (
            ["run.toml", *settings("embedding.budget=100B", "data.rows=[5, 4, 3]")],
            "need none: --set embedding.strategy=all-fast\n",
        ),
        (
            ["run.toml", "--runs", "run.toml/runs"],
            "cannot make a folder for the run in run.toml/runs (Not a directory); give another by "
            "--runs",
        ),
        *(
            (
                ["run.toml", "--set", f"run.device={device}"],
                f"error: device '{device}': torch {torch.__version__} sees no CUDA",
            )
            for device in ("cuda", "cuda:0")
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in refused("train", *words)
    assert not (folder / "runs").exists()


@pytest.mark.gpu
def test_a_run_on_a_gpu_equals_all_fast() -> None:
    train("run.device=cuda", "training.epochs=4")
    run, steps = read_run("runs/small"), list(read_steps("runs/small"))
    assert [step.step for step in steps] == list(range(1, 41))
    assert run.summary.loss == steps[-1].loss
    assert run.summary.equal_to_all_fast is True
    assert run.environment["gpu"] == torch.cuda.get_device_name()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_what_was_done(faults: Faults, times: int) -> None:
    """The first one saves the model of the step; the second one ends at once."""
    before = signal.getsignal(signal.SIGINT)
    faults.at_step[3] = lambda job: [signal.raise_signal(signal.SIGINT) for _ in range(times)]
    result = train(code=130)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(list(read_steps("runs/small"))) == 3
    run = read_run("runs/small")
    assert (run.outcome, run.summary.steps) == ("interrupted", 3)
    assert run.summary.equal_to_all_fast is None
    assert "stopping after this step" in result.stderr
    assert Path("runs/small/model").exists() == (times == 1)
    if times == 1:
        assert "interrupted after 3 steps, 48 samples" in result.stdout
        assert "not compared" in result.stdout
        stopped, job = open_trained("small"), build(load(Path("run.toml")))
        for _ in zip(range(3), job.train(), strict=False):
            pass
        assert stopped.trainer.step == 3
        weights, saved = job.model.state_dict(), stopped.model.state_dict()
        assert all(same_bits(weights[key], saved[key]) for key in weights)


class Dying:
    """Interrupts in its finalizer, where Python loses what a handler raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_ctrl_c_that_python_loses_ends_the_run(faults: Faults) -> None:
    def interrupt(job: Job) -> None:
        signal.raise_signal(signal.SIGINT)
        Dying()

    faults.at_step[3] = interrupt
    train(code=130)
    assert not Path("runs/small/model").exists()


def test_a_second_ctrl_c_at_the_end_of_a_pass_is_raised(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = Pipeline.leave

    def interrupted(pipeline: Pipeline, *given: Any, **options: Any) -> None:
        leave(pipeline, *given, **options)
        if pressed:
            pressed.clear()
            signal.raise_signal(signal.SIGINT)

    pressed: list[int] = []
    monkeypatch.setattr(Pipeline, "leave", interrupted)
    faults.at_step[3] = lambda job: pressed.append(signal.raise_signal(signal.SIGINT) or 3)
    train(code=130)
    assert not pressed
    assert not Path("runs/small/model").exists()


def test_a_full_disk_loses_the_model_and_not_the_record(faults: Faults) -> None:
    faults.at_open = full_disk("model", "001-00000")
    result = train(code=2)
    message = "error: the model was not saved: the disk is full: runs/small/model/rows/001-00000"
    assert message in result.stderr
    assert "Traceback" not in result.output
    run = read_run("runs/small")
    assert run.outcome == "finished"
    assert run.summary.equal_to_all_fast is True
    assert len(list(read_steps("runs/small"))) == 10
    assert not Path("runs/small/model").exists()


@pytest.mark.filterwarnings("default")
def test_a_full_disk_loses_the_record_and_not_the_model(faults: Faults) -> None:
    faults.at_open = full_disk("runs/small/", ".json.partial")
    faults.at_step[1] = lambda job: setattr(faults, "at_open", full_disk("run.json"))
    result = train(UNCHECKED, code=2)
    assert "warning: the disk is full: runs/small/start.json was not written" in result.stderr
    assert "error: the disk is full: runs/small/run.json was not written" in result.stderr
    assert "; the model is in runs/small/model" in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in Path("runs/small").iterdir() if "run.json" in path.name] == []
    SavedModel(Path("runs/small/model")).verify()


def test_little_space_on_the_disk_is_warned_of_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    first, second, *others = events(train(UNCHECKED, words=("--json",)))
    assert first["event"] == "start"
    assert "warning" not in {event["event"] for event in others}
    pattern = r"the model will take \d+\.\d KiB, and runs/small has 0 B free"
    assert re.search(pattern, second["message"])


@pytest.mark.parametrize(
    ("strategy", "code", "said"),
    [
        ("lookahead", 1, "NO"),
        ("static-hybrid", 0, "not to the bit, and promised is: exact up to rounding"),
    ],
)
def test_a_run_that_is_not_equal_says_so(
    faults: Faults, strategy: str, code: int, said: str
) -> None:
    def differ(job: Job) -> None:
        job.embedding.load_weights("cat_0", 7, torch.ones(1, 4))

    faults.at_step[10] = differ
    result = train(f"embedding.strategy={strategy}", code=code)
    assert "not equal to all-fast: rows of table cat_0\n" in result.stdout
    assert said in " ".join(result.stdout.split())
    assert read_run("runs/small").summary.equal_to_all_fast is False


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Job, bool], EvalRecord]]:
    """Functions of which the last takes the place of an evaluation, if there is one."""
    functions: list[Callable[[Job, bool], EvalRecord]] = []
    evaluate = Job.evaluate

    def hooked(self: Job, *, at_end: bool = False) -> EvalRecord:
        return functions[-1](self, at_end) if functions else evaluate(self, at_end=at_end)

    monkeypatch.setattr(Job, "evaluate", hooked)
    return functions


def test_a_run_ends_when_its_auc_has_settled(evaluated: list[Any]) -> None:
    aucs = iter([0.6, 0.7, float("nan"), 0.69, 0.71])
    evaluated.append(lambda job, at_end: EvalRecord(job.trainer.step, 64, next(aucs), 0.5))
    train("training.eval_every=2", "training.patience=2")
    run = read_run("runs/small")
    assert run.outcome == "finished"
    assert run.summary.steps == 8  # evaluations at 2, 4, 6 and 8; the second was the best
    assert run.summary.equal_to_all_fast is True


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_evaluation_that_fails_loses_no_trained_model(
    evaluated: list[Any], at_the_end: bool
) -> None:
    def evaluate(job: Job, at_end: bool) -> EvalRecord:
        if at_end == at_the_end:
            raise ValueError("the samples are under water")
        return EvalRecord(job.trainer.step, 64, 0.6, 0.5)

    evaluated.append(evaluate)
    result = train(UNCHECKED, code=2)
    assert "error: the samples are under water" in result.stderr
    run = read_run("runs/small")
    assert (run.outcome, run.summary.steps) == ("failed", 10 if at_the_end else 4)
    assert Path("runs/small/model/manifest.json").exists() == at_the_end


def test_a_run_clips_its_gradients() -> None:
    plain, clipped = (
        [record.loss for record in build(load("run.toml", overrides=given)).train()]
        for given in ([], ["training.clip_norm=0.001"])
    )
    assert clipped[0] == plain[0]
    assert clipped[1:] != plain[1:]


def test_a_loss_that_is_nan_ends_a_run() -> None:
    result = train("embedding.optimizer.lr=1e25", UNCHECKED, code=3)
    assert read_run("runs/small").outcome == "diverged"
    losses = [step.loss for step in read_steps("runs/small")]
    first = next(step for step, loss in enumerate(losses, 1) if loss != loss)
    assert f"warning: the loss is NaN since step {first}, " in result.stderr
    assert len(losses) == first
    assert "the model is not saved: its loss is NaN" in result.stderr
    assert not Path("runs/small/model").exists()
    message = "has no model: its loss or its weights became NaN or infinite. Train it"
    assert message in refused("evaluate", "small")
    message = "runs/small holds no checkpoint and no model; a run saves no model with"
    assert message in refused("export", "small", "--to", "npz", "--out", "tables")


def test_weights_that_the_last_step_has_spoilt_are_not_saved(faults: Faults) -> None:
    """The last loss is that of the weights before the last step."""
    faults.at_step[2] = lambda job: next(job.model.parameters()).data.fill_(torch.nan)
    result = train("training.steps=2", UNCHECKED, code=3)
    assert "the model is not saved: bottom.0.weight holds NaN or infinite" in result.stderr
    assert read_run("runs/small").outcome == "diverged"
    assert not Path("runs/small/model").exists()


@pytest.mark.parametrize("entropy", [1.00000001, 1.25, 1.0, 0.8, float("nan")])
def test_a_run_worse_than_a_constant_prediction_says_so(entropy: float) -> None:
    evaluation = replace(RUN.evaluations[0], log_loss=0.7, normalised_entropy=entropy)
    text = summary_facts(replace(RUN, evaluations=(evaluation,)))["test log-loss"]
    match = re.fullmatch(r"0\.7000, normalised entropy (\S+): worse than always pred.*", text)
    assert (match is not None) == (entropy > 1)
    assert match is None or float(match[1]) > 1


def test_a_real_run_with_much_too_large_learning_rates_says_so() -> None:
    for result in (train("training.optimizer.lr=3", UNCHECKED), hotrow("evaluate", "small")):
        text = " ".join(result.stdout.split())
        assert "worse than always predicting the share of clicks" in text


def test_output_that_cannot_be_written_stops_no_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full disk is an error at the end; a reader that has gone, as `head` does, is none."""
    done = []

    def command() -> None:
        for number in range(3):
            print("line", number)
            done.append(number)

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone, redirect_stdout(gone):
        _in_plain_words(command)()
    with (
        open("/dev/full", "w", buffering=1) as full,
        redirect_stdout(full),
        pytest.raises(typer.Exit),
    ):
        _in_plain_words(command)()
    assert done == [0, 1, 2] * 2
    message = "error: not all that was said could be written: No space left on device\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_has_gone_does_not_end_a_run(words: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", "hotrow", "train", "run.toml", *words]
    command += settings(UNCHECKED, "training.steps=40")
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.close()
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert read_run("runs/small").outcome == "finished"
    assert (folder / "runs/small/model/manifest.json").exists()


@pytest.mark.parametrize("command", ["size", "evaluate"])
@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_ranks_are_refused(command: str, launcher: str) -> None:
    result = hotrow(command, "run.toml", **{launcher: "2"})
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: hotrow {command} was started as 2 ranks, ")
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["run.toml"]


def test_a_process_group_is_refused_and_one_rank_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_ranks("size")
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2
    )
    with pytest.raises(ValueError, match="was started as 2 ranks"):
        refuse_ranks("size", group)
