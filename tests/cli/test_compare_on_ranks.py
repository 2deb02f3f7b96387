"""`hotrow compare` on several ranks: one table, contracts as on one rank, and failures together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from commands import SMALL, hotrow, refused, settings, succeeds
from hotrow.run.config import RunConfig
from hotrow.run.source import Samples
from hotrow.run.strategy_names import find_named
from hotrow.study.systems import (
    SYSTEMS,
    OtherBatches,
    StrategySystem,
    SystemKind,
    register,
    reordered_batches,
    with_strategy,
)
from hotrow.support.records import StepRecord
from rank_processes import run

RUN_TOML = SMALL.replace("160", "96").replace('"small"', '"small"\nthreads = 1')
Said = tuple[int, str, str]  # exit code, stdout and stderr of a rank
Before = Callable[[int], object]
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN_TOML)
    return tmp_path


def of_rank(rank: int, world: int, folder: str, words: list[str], before: Before | None) -> Said:
    """Call the command in one rank. What `before` registers is forgotten."""
    known = dict(SYSTEMS)
    try:
        if before is not None:
            before(rank)
        with chdir(folder):
            result = hotrow(*words)
    finally:
        SYSTEMS.clear()
        SYSTEMS.update(known)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def compare(ranks: int, *words: str, before: Before | None = None, **options: Any) -> list[Said]:
    """Compare run.toml on several ranks; return what each has said."""
    every = ["compare", "run.toml", "--out", "out", *words]
    said: list[Said] = run(ranks, of_rank, os.getcwd(), every, before, **options)
    return said


def record() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path("out/compare.json").read_text())
    return values


def figures() -> dict[str, dict[str, Any]]:
    """Return the figures by strategy, as the first rank has written them."""
    return {each["strategy"]: each for each in record()["strategies"]}


def test_strategies_are_compared_on_two_ranks_in_one_table() -> None:
    names = "all-fast,lookahead,fae,lookahead+random-drop,hybrid-plain"
    given = settings("embedding.budget=6KB", "data.samples=320")
    said = compare(2, "--strategies", names, "--repeat", "2", "--json", *given)
    assert [code for code, *_ in said] == [4, 4], said[0]  # hybrid-plain
    assert (said[1][1], said[1][2]) == ("", "")  # the first rank says it all
    last = json.loads(said[0][1].splitlines()[-1])
    assert last["event"] == "table"
    assert last["ranks"] == 2
    found = figures()
    assert list(found) == names.split(",")
    assert found["lookahead"]["equal"] == "bits"
    for name in ("fae", "lookahead+random-drop"):
        assert (found[name]["contract"], found[name]["equal"]) == ("changed", "no"), found[name]
    assert found["hybrid-plain"]["outcome"] == "failed"
    assert "trains on one rank: each of 2 processes" in found["hybrid-plain"]["message"]
    for name in names.split(",")[:-1]:
        assert found[name]["outcome"] == "finished", found[name]["message"]
        assert found[name]["repeatable"] is True
        assert [x["rank"] for x in found[name]["ranks"]] == [0, 1]
        assert 0.3 < found[name]["auc"] < 1


def test_figures_are_those_of_all_ranks() -> None:
    """Samples, lookups and quality of ranks are those that one rank has."""
    words = ("--strategies", "all-fast,lookahead", "--repeat", "1", "--json")
    compare(2, *words)
    shared = figures()["lookahead"]
    succeeds("compare", "run.toml", "--out", "out", *words)
    alone = figures()["lookahead"]
    assert record()["ranks"] == 1
    assert alone["ranks"] == []
    assert shared["samples"] == alone["samples"] == 96
    assert shared["auc"] == pytest.approx(alone["auc"], abs=1e-3)
    ranks = shared["ranks"]
    assert sum(x["samples"] for x in ranks) == 96
    lookups, fetched = (sum(x[n] for x in ranks) for n in ("lookups", "fetched_rows"))
    assert lookups == 3 * 96
    assert shared["hit_rate"] == pytest.approx(1 - fetched / lookups)
    moved = sum(x["fetched_rows"] + x["evicted_rows"] + x["loaded_rows"] for x in ranks)
    assert shared["rows_per_sample"] == pytest.approx(moved / 96)
    data = sum(x["bytes_fetched"] + x["bytes_evicted"] for x in ranks)
    assert shared["bytes_per_sample"] == pytest.approx(data / 96)


def with_little_memory(rank: int, world: int, *words: Any) -> Said:
    """Call the command; only the first rank has room for batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotrow.study.compare.available_bytes", lambda: 0 if rank else 1 << 30)
        return of_rank(rank, world, *words)


@pytest.mark.slow
def test_no_rank_keeps_batches_if_one_has_no_room() -> None:
    words = ["compare", "run.toml", "--out", "out", "--strategies", "all-fast,fae", "--repeat", "1"]
    given = settings("embedding.budget=6KB", "data.samples=320")
    said = run(2, with_little_memory, os.getcwd(), [*words, *given], None)
    assert [code for code, *_ in said] == [0, 0], said
    assert "batches take more than 0" in [note[:24] for note in record()["notes"]]


def test_the_page_and_the_screen_show_what_ranks_did() -> None:
    (_, out, _), _ = compare(2, "--strategies", "all-fast,lru", "--repeat", "1")
    for words in ("for each of 2 ranks", "sent/sample", "Bytes per sample that all ranks"):
        assert words in " ".join(out.split()), words
    text = Path("out/compare.html").read_text()
    assert "Bytes per sample that all ranks together have sent" in text
    for words in ("for each of 2 ranks", "fast memory of a rank", "lookups: largest / mean"):
        assert words in text, words


# -- contracts ---------------------------------------------------------------------------------


class Tampered(StrategySystem):
    """all-fast, but for one weight at the end, on every rank."""

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        for first, rows in super().rows(table):
            yield first, rows + (0.5 if first == 0 else 0.0)


def tamper(rank: int) -> None:
    def build(config: RunConfig, samples: Samples) -> StrategySystem:
        return Tampered(with_strategy(config, find_named("all-fast")), samples)

    for contract in ("exact", "exact up to rounding"):
        register(SystemKind(contract.replace(" ", "-"), "tampered with", contract, build=build))


def reorder(rank: int) -> None:
    def build(config: RunConfig, samples: Samples) -> StrategySystem:
        other = OtherBatches(samples, reordered_batches(samples, 7))
        return StrategySystem(with_strategy(config, find_named("all-fast")), cast(Samples, other))

    register(
        SystemKind("other-order", "sums in another order", "exact up to rounding", build=build)
    )


def test_a_changed_bit_breaks_an_exact_contract_on_all_ranks() -> None:
    said = compare(2, "--strategies", "exact,exact-up-to-rounding", "--repeat", "1", before=tamper)
    assert [code for code, *_ in said] == [1, 1]
    found = figures()
    assert (found["exact"]["equal"], found["exact-up-to-rounding"]["equal"]) == ("no", "no")
    assert "rows of table" in found["exact"]["equal_note"]
    assert "5.0e-01" in found["exact-up-to-rounding"]["equal_note"]


@pytest.mark.slow  # a third process
def test_rounding_is_within_tolerance_on_three_ranks() -> None:
    said = compare(3, "--strategies", "other-order", "--repeat", "1", before=reorder)
    assert [code for code, *_ in said] == [0] * 3
    found = figures()["other-order"]
    assert found["equal"] == "tolerance"
    assert "losses differ by up to" in found["equal_note"]


@pytest.mark.gpu
def test_ranks_of_one_gpu_are_compared() -> None:
    names = "all-fast,lookahead,scratchpipe,hybrid"
    given = settings("run.device=cuda", "embedding.budget=32KB", "data.samples=640")
    said = compare(2, "--strategies", names, "--repeat", "2", *given, timeout=280)
    assert [code for code, *_ in said] == [0, 0], said[0]
    found = figures()
    assert [found[x]["equal"] for x in ("lookahead", "scratchpipe")] == ["bits"] * 2
    assert found["hybrid"]["equal"] in ("bits", "tolerance")
    assert all(x["device"] == "cuda:0" for x in found["lookahead"]["ranks"])


# -- failures and signals ----------------------------------------------------------------------


class Failing(StrategySystem):
    """Fails in its third step."""

    def train(self) -> Iterator[StepRecord]:
        for step, record in enumerate(super().train()):
            if step == 2:
                raise OSError("the disk is gone")
            yield record


def _register_failing(fails: bool) -> None:
    kind = Failing if fails else StrategySystem

    def build(config: RunConfig, samples: Samples) -> StrategySystem:
        return kind(with_strategy(config, find_named("lru")), samples)

    register(SystemKind("failing", "fails", "exact", build=build))


def fail_alike(rank: int) -> None:
    _register_failing(True)


def fail_alone(rank: int) -> None:
    _register_failing(rank == 1)


def test_a_failure_of_all_ranks_is_noted_and_the_others_go_on() -> None:
    said = compare(2, "--strategies", "failing,lookahead", "--repeat", "2", before=fail_alike)
    assert [code for code, *_ in said] == [4, 4]
    found = figures()
    assert (found["failing"]["outcome"], found["failing"]["message"]) == (
        "failed", "the disk is gone",
    )  # fmt: skip
    assert found["lookahead"]["equal"] == "bits"
    assert found["lookahead"]["repetitions"] == 2


@pytest.mark.slow
def test_a_budget_that_is_too_small_fails_alone() -> None:
    given = settings("embedding.budget=100")
    said = compare(2, "--strategies", "all-fast,lookahead", "--repeat", "1", *given)
    assert [code for code, *_ in said] == [4, 4]
    assert figures()["lookahead"]["outcome"] == "failed"
    assert figures()["all-fast"]["outcome"] == "finished"


@pytest.mark.slow
def test_a_failure_of_one_rank_ends_all_with_what_there_is() -> None:
    words = ("--strategies", "all-fast,failing,lookahead", "--repeat", "1")
    said = compare(2, *words, before=fail_alone, group_timeout=300)  # no rank waits so long
    (code, _, lost), (other_code, _, own) = said
    assert code != 0
    assert other_code == 2
    assert "failing failed on rank 1 alone" in own + lost
    assert "the disk is gone" in own + lost
    assert record()["outcome"] == "interrupted"
    assert figures()["all-fast"]["outcome"] == "finished"


class Interrupting(StrategySystem):
    """The second rank gets Ctrl-C in its third step."""

    is_second = False

    def train(self) -> Iterator[StepRecord]:
        for step, record in enumerate(super().train()):
            if step == 2 and self.is_second:
                os.kill(os.getpid(), signal.SIGINT)
            yield record


def interrupt(rank: int) -> None:
    Interrupting.is_second = rank == 1

    def build(config: RunConfig, samples: Samples) -> StrategySystem:
        return Interrupting(with_strategy(config, find_named("lru")), samples)

    register(SystemKind("interrupting", "is stopped", "exact", build=build))


def test_ctrl_c_at_one_rank_stops_all_after_the_same_step() -> None:
    words = ("--strategies", "all-fast,interrupting", "--repeat", "1", "--json")
    said = compare(2, *words, before=interrupt)
    assert [code for code, *_ in said] == [130, 130]
    assert record()["outcome"] == "interrupted"
    assert figures()["all-fast"]["outcome"] == "finished"
    assert figures()["interrupting"]["outcome"] == "not run"


# -- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_starts_the_ranks_itself(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--strategies", "all-fast,lookahead", "--repeat", "1", "--quiet")
    result = hotrow("compare", "run.toml", "--out", "out", *words, "--ranks", "2")
    assert result.exit_code == 0, result.output
    shown = capfd.readouterr().out  # of the first rank
    assert shown.count("lookahead") >= 2
    assert figures()["lookahead"]["equal"] == "bits"
    assert record()["ranks"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0: give a number of ranks from 1 to 1,024"),
        (["--ranks", "two"], "--ranks two: give a number of ranks"),
        (["--ranks", "17"], "data.batch_size is 16, and 17 ranks share each batch"),
        (["--ranks", "2", "--strategies", "lookahed"], "did you mean 'lookahead'"),
        (["--ranks", "2", "--out", "run.toml"], "--out"),
        (["--ranks", "2", "--repeat", "0"], "--repeat must be at least 1"),
    ],
)
def test_a_mistake_is_told_before_ranks_are_started(words: list[str], message: str) -> None:
    assert message in refused("compare", "run.toml", *words)
    assert not Path("comparisons").exists()


def test_what_ranks_do_not_know_is_refused_on_all() -> None:
    said = compare(2, "--strategies", "lru", *settings("embedding.budget=auto"))
    assert [code for code, *_ in said] == [2, 2]
    assert 'embedding.budget = "auto" leaves open what each of 2 ranks takes' in said[0][2]
    assert not Path("out").exists()


def test_ranks_of_torchrun_take_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "torchrun has started this one already" in refused("compare", "--ranks", "2")
    for command in ("evaluate", "simulate", "size"):
        error = refused(command, "small")
        assert f"hotrow {command} was started as 2 ranks" in error
        assert "only `hotrow train` and `hotrow compare` share theirs" in error


def test_a_record_of_one_rank_has_no_section_of_ranks() -> None:
    succeeds("compare", "run.toml", "--out", "out", "--strategies", "all-fast", "--repeat", "1")
    assert "largest / mean" not in Path("out/compare.html").read_text()
    assert record()["ranks"] == 1
