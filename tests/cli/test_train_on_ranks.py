"""`hotrow train` on several ranks trains one run; they stop, save and fail together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow.checkpoint.together as together
from commands import Faults, hotrow, inject_faults, refused, settings, succeeds
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.saving import Save
from hotrow.cli._ranks import share_cores
from hotrow.embedding.row_verifier import CorruptRows, RowVerifier
from hotrow.run.config import RunSection
from hotrow.run.files import read_run, read_start, read_steps
from hotrow.run.job import Job
from hotrow.run.ranks import Place, RunRanks, _agreed_name, find_place
from hotrow.run.saving import Saving
from rank_processes import run
from ranked_runs import RUN_TOML, assert_same, losses_of

__all__ = ["RUN_TOML"]  # the fixture `folder` writes it
STEPS = 14  # two epochs of seven batches
ONE_BY_ONE = ("embedding.depth=0",)  # one rank counts a batch when it is planned
EVERY = ("checkpoint.every_steps=3",)
pytestmark = pytest.mark.usefixtures("folder")


@dataclass(frozen=True)
class Ended:
    """What a command has said in one rank."""

    code: int
    out: str
    err: str


@contextmanager
def _within(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def command(
    rank: int,
    world: int,
    folder: str,
    words: list[str],
    patches: Callable[[int, pytest.MonkeyPatch], None] | None = None,
) -> Ended:
    with _within(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        if patches is not None:
            patches(rank, patch)
        result = hotrow(*words)
        if result.exit_code:  # the process would end, and its connections with it
            torch.distributed.destroy_process_group()
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)


def train(ranks: int, *words: str, given: tuple[str, ...] = (), patches: Any = None) -> list[Ended]:
    """Train run.toml on several ranks; return what each of them has said."""
    every = ["train", *(words or ("run.toml",)), *settings(*given)]
    ended: list[Ended] = run(ranks, command, os.getcwd(), every, patches)
    return ended


def trained(ranks: int, *words: str, given: tuple[str, ...] = (), patches: Any = None) -> str:
    """Train a run that must end well; return what the first rank has said. Others are silent."""
    first, *others = train(ranks, *words, given=given, patches=patches)
    assert [x.code for x in (first, *others)] == [0] * ranks, first.err
    assert all(x.out == x.err == "" for x in others)
    return first.out + first.err


# -- one run -------------------------------------------------------------------------------


def test_ranks_train_one_run_with_the_bits_of_all_fast() -> None:
    said = trained(2, given=("training.check_equality=true", "training.verify_every=3"))
    assert "equal to all-fast" in said
    assert "yes, to the bit" in said
    words = " ".join(said.split())
    assert "1,265 rows (" in words
    assert ", on 2 ranks; rank 0 owns " in words
    assert said.count("fast memory") == 1
    assert sorted(x.name for x in Path("runs").iterdir()) == ["small"]
    names = ["model", "run.json", "start.json", "steps.jsonl"]
    assert sorted(x.name for x in Path("runs/small").iterdir()) == names
    record = read_run("runs/small")
    assert record.outcome == "finished"
    assert record.summary.equal_to_all_fast is True
    assert record.environment["ranks"] == 2
    assert [x.rank for x in record.ranks] == [0, 1]
    assert sum(x.samples for x in record.ranks) == record.summary.samples == 224
    succeeds("train", "run.toml", *settings("run.name=one"))
    assert_same("small", "one", exact=False)
    assert "runs/small" in succeeds("report", "runs/small").output
    assert "AUC" in succeeds("evaluate", "small").output


def test_lines_for_machines_are_those_of_the_first_rank() -> None:
    first, other = train(2, "run.toml", "--json", "--trace", "steps=2", given=EVERY)
    assert other == Ended(0, "", "")
    lines = [json.loads(line) for line in first.out.splitlines()]
    assert [lines[0]["event"], lines[0]["ranks"]] == ["start", 2]
    assert [x["step"] for x in lines if x["event"] == "checkpoint"] == [3, 6, 9, 12, 14]
    assert lines[-1]["event"] == "end"
    assert len(lines[-1]["ranks"]) == 2
    assert Path("runs/small/trace.json.gz").is_file()


def test_replicated_rows_change_no_bit() -> None:
    trained(2, given=("embedding.replicate=2KiB", "training.check_equality=true"))
    trained(2, given=("run.name=without",))
    assert read_run("runs/small").summary.equal_to_all_fast is True
    assert_same("small", "without", exact=True)
    sent = [read_run(f"runs/{name}").ranks[0].bytes_of_rows for name in ("small", "without")]
    assert sent[0] < sent[1]


@pytest.mark.parametrize("strategy", ["hotline", "fae+random-drop"])
def test_a_system_on_ranks_stops_and_goes_on(strategy: str) -> None:
    given = (f"embedding.strategy={strategy}", "embedding.budget=80%")
    said = trained(2, given=given, patches=signals(signal.SIGTERM, 5))
    assert "at the end, where replicated rows changed since the start" in " ".join(said.split())
    assert read_run("runs/small").outcome == "interrupted"
    trained(2, "runs/small", "--resume")
    record = read_run("runs/small")
    # Replicas are no slots. One slot is for padding; a row has four numbers, and one of state.
    assert record.ranks[0].num_slots == record.memory["slots"] // 20 - 1
    slots, owned = (sum(getattr(x, n) for x in record.ranks) for n in ("num_slots", "owned_rows"))
    assert record.summary.fast_rows_share == pytest.approx(slots / owned)
    assert record.outcome == "finished"
    assert record.resumed_after == (6,)
    assert record.system
    assert record.memory["replicated rows"] > 0  # half of the budget is for pins
    assert record.settings["embedding"]["budget"] == "80%"


def test_pins_need_a_number_of_bytes() -> None:
    given = ("embedding.strategy=hotline", "embedding.budget=auto")
    for ended in train(2, given=given):
        assert ended.code == 2
        assert "leaves open what hotline may pin on 2 ranks: give embedding.replicate" in ended.err


def test_a_loss_that_is_nan_ends_all_ranks() -> None:
    ended = train(2, given=("training.optimizer.lr=1e38", "training.optimizer.name=sgd"))
    assert [x.code for x in ended] == [3, 3]
    assert "the loss is NaN since step" in ended[0].err
    assert ended[1].err == ""


def test_evaluations_without_a_gain_end_all_ranks() -> None:
    frozen = (
        "training.optimizer.lr=0.0", "embedding.optimizer.lr=1e-30", "training.patience=1",
        "training.eval_every=2",
    )  # fmt: skip
    trained(2, given=frozen)
    assert read_run("runs/small").summary.steps == 4


# -- warnings ------------------------------------------------------------------------------


def warns_of_its_own(rank: int, patch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("always")
    faults = inject_faults(patch)
    faults.at_step[2] = lambda job: warnings.warn("both know", stacklevel=1)
    if rank == 1:
        faults.at_step[3] = lambda job: warnings.warn("one knows", stacklevel=1)


def test_a_warning_of_all_ranks_is_shown_once() -> None:
    said = trained(2, patches=warns_of_its_own)
    assert said.count("both know") == 1
    assert said.count("warning: rank 1: one knows") == 1


# -- stopping, saving, resuming ------------------------------------------------------------


def signals(number: int, at: int) -> Callable[[int, pytest.MonkeyPatch], None]:
    return _Signals(number, at)


@dataclass(frozen=True)
class _Signals:
    """Sends a signal to rank 1 after a step."""

    number: int
    at: int

    def __call__(self, rank: int, patch: pytest.MonkeyPatch) -> None:
        if rank == 1:
            inject_faults(patch).at_step[self.at] = lambda job: signal.raise_signal(self.number)


def test_a_stopped_run_is_resumed_by_any_number_of_ranks() -> None:
    trained(2, given=("run.name=whole",))
    said = trained(2, patches=signals(signal.SIGTERM, 5))
    assert said.count("stopping after this step") == 1
    assert "checkpoint of step 6" in said
    assert read_run("runs/small").outcome == "interrupted"
    assert len(losses_of("small")) == 6  # of both ranks the same step
    for ranks, name in ((2, "two"), (1, "alone"), (3, "three")):
        shutil.copytree("runs/small", f"runs/{name}")
        if ranks == 1:
            succeeds("train", f"runs/{name}", "--resume")
        else:
            trained(ranks, f"runs/{name}", "--resume")
        assert read_run(f"runs/{name}").resumed_after == (6,)
        assert_same(name, "whole", exact=ranks == 2)
        assert lookups_of(name) == lookups_of("whole")


def lookups_of(run: str) -> int:
    return read_run(f"runs/{run}").summary.lookups


@pytest.mark.slow
def test_a_run_on_changing_numbers_of_ranks_counts_what_all_have_done(faults: Faults) -> None:
    succeeds("train", "run.toml", *settings("run.name=whole"))
    trained(2, patches=signals(signal.SIGTERM, 5))
    first = read_run("runs/small").summary
    faults.at_step[9] = lambda job: signal.raise_signal(signal.SIGTERM)
    succeeds("train", "runs/small", "--resume", *settings(*ONE_BY_ONE))
    second = read_run("runs/small").summary
    alone = list(read_steps("runs/small"))[6:]
    assert second.steps == 9
    assert second.bytes_sent == first.bytes_sent > 0
    moved = sum(x.bytes_fetched + x.bytes_evicted for x in alone)
    assert second.bytes_moved == first.bytes_moved + moved
    assert second.lookups == first.lookups + sum(x.lookups for x in alone)
    trained(3, "runs/small", "--resume")
    run = read_run("runs/small")
    last, ranks = run.summary, run.ranks
    assert run.resumed_after == (6, 9)
    for name in ("bytes_sent", "bytes_moved", "lookups"):
        since = sum(getattr(x, name) for x in ranks)
        assert getattr(last, name) == getattr(second, name) + since, name
    fetched = [(1 - x.hit_rate) * x.lookups for x in (second, last)]
    since = sum(x.fetched_rows for x in ranks)
    assert fetched[1] == pytest.approx(fetched[0] + since)
    assert last.lookups == lookups_of("whole")


@pytest.mark.slow
def test_parts_of_other_numbers_of_ranks_are_not_compared_with_all_fast() -> None:
    checked = ("training.check_equality=true",)
    trained(2, given=checked, patches=signals(signal.SIGTERM, 5))
    said = trained(1, "runs/small", "--resume", patches=stops_alone)
    assert "it was trained on 2 ranks, and goes on with 1: results go on up to rounding" in said
    said = trained(1, "runs/small", "--resume")  # as many as before, and other ones before that
    assert "goes on with" not in said
    assert "not compared with all-fast: parts of it were trained on 1 and 2 ranks" in said
    assert read_run("runs/small").summary.equal_to_all_fast is None


def stops_alone(rank: int, patch: pytest.MonkeyPatch) -> None:
    inject_faults(patch).at_step[9] = lambda job: signal.raise_signal(signal.SIGTERM)


def test_ranks_resume_what_one_rank_has_trained(faults: Faults) -> None:
    faults.at_step[5] = lambda job: signal.raise_signal(signal.SIGTERM)
    succeeds("train", "run.toml", *settings(*ONE_BY_ONE))
    trained(2, "run.toml", "--resume")
    succeeds("train", "run.toml", *settings("run.name=whole"))
    assert read_run("runs/small").resumed_after == (5,)
    assert_same("small", "whole", exact=False)
    assert lookups_of("small") == lookups_of("whole")


def test_ctrl_c_at_one_rank_stops_all() -> None:
    ended = train(2, patches=signals(signal.SIGINT, 5))
    assert [x.code for x in ended] == [130, 130]
    assert len(losses_of("small")) == 6
    steps = read_steps("runs/small")
    assert lookups_of("small") == 3 * sum(x.samples for x in steps)
    assert Path("runs/small/model/manifest.json").is_file()


def is_slow_on_the_second(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Let one rank notice late that a checkpoint was written."""
    done = Save.done.fget
    assert done is not None
    patch.setattr(Save, "done", property(lambda self: rank == 0 and done(self)))
    patch.setattr(Save, "join", lambda self: self._ended.wait())


@pytest.mark.parametrize("background", ["true", "false"])
def test_timed_checkpoints_are_of_the_same_steps(background: str) -> None:
    given = ("checkpoint.every_seconds=1e-9", f"checkpoint.background={background}")
    trained(
        2, given=(*given, "checkpoint.full_every=2", "checkpoint.keep=99"),
        patches=is_slow_on_the_second if background == "true" else None,
    )  # fmt: skip
    folders = saved_in(Path("runs/small/checkpoints"))
    assert len(folders) >= 3
    assert folders[-1].name.endswith(f"step-{STEPS}")
    for path in folders:
        succeeds("verify", str(path))


def stops_its_clock(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        patch.setattr(Saving, "request", lambda self: pytest.fail("this rank has no timer"))


def test_the_timer_of_the_first_rank_decides() -> None:
    trained(2, given=("checkpoint.every_seconds=1e-9",), patches=stops_its_clock)


@dataclass(frozen=True)
class _Fails:
    """Raises on rank 1 after a step, in a process that torchrun has (re)started."""

    at: int | None
    restarts: int = 0
    launch: str = "one"

    def __call__(self, rank: int, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(self.restarts))
        patch.setenv("TORCHELASTIC_RUN_ID", self.launch)
        if rank == 1 and self.at is not None:
            inject_faults(patch).at_step[self.at] = _raises


def _raises(job: Job) -> None:
    raise ValueError("the fault of a test")


def failing(*given: str, at: int, launch: str = "one") -> list[Ended]:
    return train(2, given=given, patches=_Fails(at, launch=launch))


def test_an_error_of_one_rank_ends_the_others() -> None:
    first, other = failing(*EVERY, at=7)
    assert (other.code, other.out) == (2, "")
    assert other.err == "error: rank 1: the fault of a test\n"
    assert first.code == 5
    assert "error: rank 0 of 2 lost the others" in first.err
    assert "the checkpoint of step 6 is whole" in first.err
    assert read_run("runs/small").outcome == "failed"


def test_restarted_ranks_go_on_and_end_in_the_bits_of_an_undisturbed_run() -> None:
    trained(2, given=("run.name=whole", *EVERY))
    failing(*EVERY, at=7)
    said = trained(2, given=EVERY, patches=_Fails(None, restarts=1))
    assert "continues after step 6" in said
    assert sorted(x.name for x in Path("runs").iterdir()) == ["small", "whole"]
    assert_same("small", "whole", exact=True)


@pytest.mark.slow
def test_a_restart_leaves_runs_of_other_launches_alone() -> None:
    failing(*EVERY, at=7)
    said = trained(2, given=EVERY, patches=_Fails(None, restarts=1, launch="another"))
    assert "continues" not in said
    assert sorted(x.name for x in Path("runs").iterdir()) == ["small", "small-2"]
    failing(at=2, launch="third")  # without a checkpoint
    trained(2, given=EVERY, patches=_Fails(None, restarts=1, launch="third"))
    assert read_run("runs/small-4").resumed_after == ()


# -- what is refused -----------------------------------------------------------------------


def finds_wrong_rows(rank: int, patch: pytest.MonkeyPatch) -> None:
    verify = RowVerifier.verify

    def verified(self: RowVerifier, step: int) -> int:
        if rank == 1 and step == 8:
            raise CorruptRows("at step 8 a row is wrong", 4)
        return verify(self, step)

    patch.setattr(RowVerifier, "verify", verified)


def test_wrong_rows_of_one_rank_end_all_and_go_back_to_a_right_checkpoint() -> None:
    first, other = train(
        2, given=(*EVERY, "training.verify_every=4"), patches=finds_wrong_rows
    )  # fmt: skip
    assert (first.code, other.code) == (2, 2)
    assert "error: rank 1: at step 8 a row is wrong" in first.err
    assert "names 00001-step-3 again" in " ".join(first.err.split())
    latest = Path("runs/small/checkpoints/latest").read_text().strip()
    assert latest == "00001-step-3"


def elsewhere(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(together, "SECONDS_TO_SEE", 0.3)
    if rank == 1:
        Path("other").mkdir()
        Path("other/run.toml").write_text(Path("run.toml").read_text())
        os.chdir("other")


def test_a_folder_that_one_rank_does_not_see_is_an_error_before_training() -> None:
    for ended in train(2, patches=elsewhere):
        assert ended.code == 2
        assert "is another folder than on rank 0" in ended.err
    assert losses_of("small") == []


def with_another_setting(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        elsewhere(rank, patch)
        text = Path("run.toml").read_text().replace("batch_size = 16", "batch_size = 8")
        Path("run.toml").write_text(text)


def test_ranks_with_other_settings_are_refused() -> None:
    for ended in train(2, patches=with_another_setting):
        assert ended.code == 5
        assert "data.batch_size is 16 on rank 0 and 8 on rank 1" in ended.err
    assert not Path("runs").exists()


def with_another_version(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        patch.setattr("hotrow.run.ranks.__version__", "0.0.1")


def test_ranks_with_other_versions_are_refused() -> None:
    for ended in train(2, patches=with_another_version):
        assert ended.code == 5
        assert "ranks have different versions: rank 0 has hotrow" in ended.err
        assert "rank 1 has hotrow 0.0.1 and torch" in ended.err


@pytest.mark.parametrize("count", ["0", "two", "-1", "1.5", "4096"])
def test_a_bad_number_of_ranks_is_refused(count: str) -> None:
    message = refused("train", "run.toml", f"--ranks={count}")
    assert message == f"error: --ranks {count}: give a number of ranks from 1 to 1,024\n"


def test_one_rank_is_an_ordinary_run() -> None:
    succeeds("train", "run.toml", "--ranks", "1")
    assert read_run("runs/small").ranks == ()
    start = read_start("runs/small")
    assert start is not None
    assert "ranks" not in start.environment


def test_mistakes_are_shown_before_ranks_are_started() -> None:
    words = ("train", "run.toml", "--ranks", "2")
    assert "'stpes'" in refused(*words, *settings("training.stpes=3"))
    assert "there is no checkpoint of a run 'small'" in refused(*words, "--resume")
    message = refused(*words[:-1], "17")
    assert "data.batch_size is 16, and 17 ranks share each batch" in message
    assert sorted(x.name for x in Path().iterdir()) == ["run.toml"]


def test_ranks_of_torchrun_take_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    message = refused("train", "run.toml", "--ranks", "2")
    assert "torchrun has started this one already (RANK is 1 of 2)" in message


def test_a_place_is_read_from_the_variables_of_torchrun() -> None:
    variables = {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "first", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "job",
    }  # fmt: skip
    assert find_place(variables) == Place(5, 8, 1, 4, 2, "job", is_started=True)
    assert find_place({}) == Place()
    without = {key: value for key, value in variables.items() if key != "MASTER_PORT"}
    with pytest.raises(ValueError, match="WORLD_SIZE is 8, and MASTER_PORT is not set: start"):
        find_place(without)
    with pytest.raises(ValueError, match="mpirun has started 3 processes, each"):
        find_place({"OMPI_COMM_WORLD_SIZE": "3"})
    assert find_place(variables | {"OMPI_COMM_WORLD_SIZE": "8"}).size == 8


def test_ranks_agree_on_a_name_that_no_start_before_had() -> None:
    store, names = torch.distributed.HashStore(), set()
    store.set("hotrow/asks/2", "of a rank that was killed before it had an answer")
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            agreed = list(pool.map(lambda rank: _agreed_name(store, rank, 3), range(3)))
        assert len(set(agreed)) == 1
        names |= set(agreed)
    assert len(names) == 3


def test_ranks_that_cannot_be_reached_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def refuses(address: str) -> Any:
        raise torch.distributed.DistNetworkError("connection refused\nmore lines")

    monkeypatch.setattr("hotrow.run.ranks.rendezvous", refuses)
    result = hotrow("train", "run.toml")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: rank 1 of 2 cannot reach the others: check that all")
    assert result.stderr.endswith("torch says: connection refused\n")


def test_each_rank_takes_a_gpu_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    places = [Place(4 + local, 8, local, 2) for local in range(2)]
    assert [RunRanks(place)._take_gpu("cuda") for place in places] == [True, True]
    assert taken == [0, 1]
    places = [Place(local, 4, local, 4) for local in range(4)]
    assert [RunRanks(place)._take_gpu("cuda") for place in places] == [False] * 4  # shared
    assert taken[2:] == [0, 1, 0, 1]
    assert not RunRanks(places[0])._take_gpu("cuda:1")
    assert not RunRanks(places[0])._take_gpu("cpu")
    assert len(taken) == 6


def test_ranks_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    place, of_torchrun = Place(1, 8, 1, 4), {"RANK": "1", "OMP_NUM_THREADS": "1"}
    share_cores(RunSection(), place, {})
    share_cores(RunSection(), place, of_torchrun)
    share_cores(RunSection(threads=2), place, of_torchrun)
    assert threads == [3, 3, 2]
    share_cores(RunSection(), place, of_torchrun | {"OMP_NUM_THREADS": "5"})
    share_cores(RunSection(), place, of_torchrun | {"HOTROW_RANK_REPORTS": "folder"})
    assert threads == [3, 3, 2]  # what the user has set
