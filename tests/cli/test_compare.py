"""`hotrow compare` trains strategies in turn, and says truly what came of it."""

from __future__ import annotations

import html
import json
import math
import re
import signal
import sys
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import Result

from commands import SMALL, events, hotrow, settings
from hotrow import STRATEGIES
from hotrow.run.config import RunConfig
from hotrow.run.source import Samples
from hotrow.run.strategy_names import find_named
from hotrow.study.systems import SYSTEMS, StrategySystem, SystemKind, register, with_strategy
from hotrow.support.records import ComparisonRecord, Figures, StepRecord

RUN_TOML = SMALL.replace("160", "96") + '[embedding.optimizer]\nname = "adagrad"\n'
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """What a test registers, no other test sees."""
    before = dict(SYSTEMS)
    yield
    SYSTEMS.clear()
    SYSTEMS.update(before)


def compare(*arguments: str, code: int = 0) -> Result:
    result = hotrow("compare", "run.toml", *arguments)
    assert result.exit_code == code, result.output
    return result


def table(result: Result) -> dict[str, dict[str, Any]]:
    """The figures by strategy, as --json gives them last."""
    last = events(result)[-1]
    assert last["event"] == "table"
    return {each["strategy"]: each for each in last["strategies"]}


class Tampered(StrategySystem):
    """all-fast, but for one weight of one row at the end."""

    def __init__(self, config: RunConfig, samples: Samples, by: float) -> None:
        super().__init__(with_strategy(config, find_named("all-fast")), samples)
        self._by = by

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        for first, rows in super().rows(table):
            if table == "cat_1" and first == 0:
                rows[3, 2] += self._by
            yield first, rows


class Failing(StrategySystem):
    def train(self) -> Iterator[StepRecord]:
        for record in super().train():
            if record.step == 3:
                raise RuntimeError("the third step is <b>too</b> steep")
            yield record


def test_every_strategy_is_compared_with_all_fast() -> None:
    names = [*STRATEGIES, "hotline", "hybrid-plain"]
    result = compare("--strategies", ",".join(names), "--repeat", "1", "--json")
    found = table(result)
    assert list(found) == names  # all-fast is the first of STRATEGIES
    for name, each in found.items():
        assert each["outcome"] == "finished"
        assert each["samples"] == 96
        assert each["timed_steps"] == 6 - 3
        assert each["slow_samples_per_second"] <= each["samples_per_second"]
        assert each["samples_per_second"] <= each["fast_samples_per_second"]
        assert each["auc"] == pytest.approx(found["all-fast"]["auc"], abs=1e-4)
        if each["contract"] == "exact" and name != "all-fast":
            assert each["equal"] == "bits"
            assert each["log_loss"] == found["all-fast"]["log_loss"]
    assert found["hybrid-plain"]["equal"] == "tolerance"
    assert "losses differ by up to" in found["hybrid-plain"]["equal_note"]
    assert found["hybrid"]["speed_up"] == 1
    ratio = found["lru"]["whole_run"] / found["hybrid"]["whole_run"]
    assert found["lru"]["speed_up"] == pytest.approx(ratio)
    assert found["all-fast"]["rows_per_sample"] == 0
    assert found["uncached"]["rows_per_sample"] > found["lookahead"]["rows_per_sample"] > 0
    assert not found["all-fast"]["is_within_budget"]


def test_strategies_take_turns_and_all_fast_is_added_to_compare_with() -> None:
    result = compare("--strategies", "lru,static", "--repeat", "2", "--json")
    over = [each for each in events(result) if each["event"] == "repetition"]
    turns = [(each["repetition"], each["strategy"]) for each in over]
    assert turns == [(1, "all-fast"), *((n, name) for n in (1, 2) for name in ("lru", "static"))]
    found = table(result)
    assert found["all-fast"]["repetitions"] == 1
    assert found["all-fast"]["is_optional"]
    assert (found["lru"]["equal"], found["lru"]["repeatable"]) == ("bits", True)
    assert found["lru"]["timed_steps"] == 2 * (6 - 3)
    assert events(result)[-1]["baseline"] == "lru"  # hybrid is not there, and lru was asked for


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["dlrm", "dcnv2", "deepfm", "tbsm"])
def test_plain_pytorch_trains_every_model(name: str, kind: str) -> None:
    model = RUN_TOML.replace("bottom = [8]\ntop = [8]", f'kind = "{kind}"')
    if kind != "tbsm":
        model = model.replace("samples = 96", "samples = 96\nlookups = [3, 1, 2]")
    Path("run.toml").write_text(model)
    warming = ("--set", "training.schedule.warmup_steps=4")
    optimizer = ("--set", f"embedding.optimizer.name={name}")
    result = compare(
        "--strategies", "hybrid-plain", "--repeat", "1", "--json", *optimizer, *warming
    )
    assert table(result)["hybrid-plain"]["equal"] == "tolerance"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["name=adamw"],
            "has no adamw for sparse gradients; hybrid-plain takes sgd, adagrad",
        ),
        (["name=sgd", "weight_decay=0.1"], "refuses weight_decay"),
    ],
)
def test_what_plain_pytorch_cannot_train_is_refused(given: list[str], message: str) -> None:
    options = settings(*(f"embedding.optimizer.{each}" for each in given))
    result = compare(
        "--strategies", "hybrid-plain,lru", "--repeat", "1", "--json", *options, code=4
    )
    found = table(result)
    assert found["hybrid-plain"]["outcome"] == "failed"
    assert message in found["hybrid-plain"]["message"]
    assert found["lru"]["outcome"] == "finished"


def test_a_budget_that_is_too_small_fails_alone() -> None:
    options = ("--repeat", "2", "--set", "embedding.budget=64")
    result = compare("--strategies", "lru,hybrid", *options, code=4)
    assert "lru failed: " in result.stdout
    assert "the smallest that works" in result.stdout
    saved = json.loads(Path("comparisons/small/compare.json").read_text())
    by_name = {each["strategy"]: each for each in saved["strategies"]}
    assert by_name["lru"]["outcome"] == "failed"
    assert by_name["lru"]["traceback"] == ""
    assert by_name["hybrid"]["repetitions"] == 2
    assert saved["outcome"] == "finished"


def test_any_error_is_told_and_the_others_go_on() -> None:
    register(SystemKind("steep", "", "changed", build=Failing))
    result = compare("--strategies", "steep,lru", "--repeat", "2", "--json", code=4)
    found = table(result)
    assert found["steep"]["message"] == "RuntimeError: the third step is <b>too</b> steep"
    assert "in train" in found["steep"]["traceback"]
    assert found["steep"]["repetitions"] == 0
    assert found["steep"]["auc"] is None
    assert found["lru"]["repetitions"] == 2
    failed = [each for each in events(result) if each.get("stage") == "failed"]
    assert len(failed) == 1  # what has failed is not tried again
    page = Path("comparisons/small/compare.html").read_text()
    assert "<b>too" not in page
    assert "&lt;b&gt;too" in page


@pytest.mark.parametrize(
    ("contract", "by", "code", "equal", "note"),
    [
        ("exact", 1e-7, 1, "no", "other bits: rows of table cat_1"),
        ("exact up to rounding", 1e-6, 0, "tolerance", "; 1 of 3,971 values.* 0 of them by more"),
        ("exact up to rounding", 1e-2, 0, "no", "; 1 of 3,971 values.* 1 of them by more"),
        ("changed", 0.5, 0, "no", "it changes the training"),
    ],
)
def test_a_changed_bit_is_judged_by_the_contract(
    contract: str, by: float, code: int, equal: str, note: str
) -> None:
    build = partial(Tampered, by=by)
    register(SystemKind("tampered", "", contract, build))
    result = compare("--strategies", "tampered,lru", "--repeat", "1", "--json", code=code)
    found = table(result)
    assert found["tampered"]["equal"] == equal
    assert re.search(note, found["tampered"]["equal_note"])
    assert found["lru"]["equal"] == "bits"
    assert "Take lru" in events(result)[-1]["advice"]


def test_a_repetition_with_other_bits_is_told() -> None:
    built = iter([0.0, 0.0, 1e-7])
    kind = SystemKind("moody", "", "exact", lambda *given: Tampered(*given, next(built)))
    register(kind)
    result = compare("--strategies", "moody", "--repeat", "3", "--json", code=1)
    found = table(result)["moody"]
    assert found["equal"] == "bits"
    assert found["repeatable"] is False
    assert found["repeat_note"] == "repetition 3: rows of table cat_1"


def test_one_system_is_in_memory_at_a_time() -> None:
    alive: list[weakref.ref[Any]] = []

    def counted(kind: SystemKind) -> SystemKind:
        def build(config: RunConfig, samples: Samples) -> Any:
            assert not [each for each in alive if each() is not None]
            system = kind.build(config, samples)
            alive.append(weakref.ref(system))
            return system

        return replace(kind, build=build)

    register(SystemKind("steep", "", "changed", build=Failing))
    for name in ("all-fast", "lookahead", "steep", "hybrid"):
        SYSTEMS[name] = counted(SYSTEMS[name])
    result = compare("--strategies", "lookahead,steep,hybrid", "--repeat", "2", "--json", code=4)
    assert {each["outcome"] for each in table(result).values()} == {"finished", "failed"}
    assert len(alive) == 1 + 2 + 1 + 2


def test_without_all_fast_nothing_is_compared_and_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(SYSTEMS["all-fast"], refuses=lambda config: "the GPU is too small")
    monkeypatch.setitem(SYSTEMS, "all-fast", small)
    result = compare("--strategies", "lru", "--repeat", "1", "--json")
    assert table(result)["lru"]["equal"] == "not compared"
    assert table(result)["lru"]["equal_note"] == "all-fast failed: the GPU is too small"
    result = compare("--strategies", "lru,all-fast", "--repeat", "1", "--json", code=4)


def test_a_loss_that_is_no_number_is_told() -> None:
    options = ("--repeat", "1", "--set", "embedding.optimizer.lr=1e25")
    result = compare("--strategies", "lru", *options, "--json", code=3)
    assert table(result)["lru"]["outcome"] == "diverged"
    assert table(result)["lru"]["equal"] == "bits"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_with_what_there_is(times: int) -> None:
    pressed = []

    class Stopping(StrategySystem):
        def train(self) -> Iterator[StepRecord]:
            for record in super().train():
                if record.step == 2:
                    pressed.append(record)
                    for _ in range(times):
                        signal.raise_signal(signal.SIGINT)
                yield record

    register(SystemKind("stopping", "", "exact", build=Stopping))
    result = compare("--strategies", "lru,stopping,hybrid", "--repeat", "2", "--json", code=130)
    assert len(pressed) == 1
    saved = json.loads(Path("comparisons/small/compare.json").read_text())
    assert saved["outcome"] == "interrupted"
    by_name = {each["strategy"]: each["outcome"] for each in saved["strategies"]}
    assert by_name == {
        "all-fast": "finished", "lru": "unfinished", "stopping": "not run", "hybrid": "not run",
    }  # fmt: skip
    if times == 1:
        assert table(result)["lru"]["equal"] == "bits"
    assert not list(Path("comparisons/small").glob("*.partial"))


def test_what_is_written_has_every_fact_and_no_other() -> None:
    result = compare("--strategies", "lru,hybrid", "--repeat", "1")
    saved = json.loads(Path("comparisons/small/compare.json").read_text())
    assert saved.keys() == {"format", *(each.name for each in fields(ComparisonRecord))}
    for each in saved["strategies"]:
        assert each.keys() == {each.name for each in fields(Figures)}
    assert saved["format"] == 1
    assert saved["settings"]["data"]["rows"] == [400, 60, 5]
    assert saved["tolerance"] == {"relative": 1e-4, "absolute": 1e-5, "outliers": 0.01}
    assert saved["rows_bytes"] == 465 * 4 * 8
    assert saved["advice"] in " ".join(result.stdout.split())


def test_quiet_leaves_the_table_and_only_a_named_folder_is_replaced() -> None:
    result = compare("--strategies", "lru", "--repeat", "2", "--quiet")
    assert result.stderr == ""
    assert "- all-fast was trained once, to compare with" in result.stdout
    quick = ("--repeat", "1", "--quiet", "--json")
    (line,) = compare("--strategies", "lru", *quick).stdout.splitlines()
    assert json.loads(line)["event"] == "table"
    assert Path("comparisons/small-2/compare.html").is_file()
    for strategy in ("lru", "static"):
        compare("--strategies", strategy, *quick, "--out", "deep/mine")
    saved = json.loads(Path("deep/mine/compare.json").read_text())
    assert [each["strategy"] for each in saved["strategies"]] == ["all-fast", "static"]
    assert {path.name for path in Path("deep/mine").iterdir()} == {"compare.json", "compare.html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "lokahead"], "no strategy 'lokahead' (did you mean 'lookahead'?)"),
        (["--strategies", "lru, lru"], "strategy 'lru' is named twice"),
        (["--repeat", "0"], "--repeat must be at least 1, not 0"),
        (["--warm-up", "6"], "a warm-up of 6 steps leaves none of 6 to be timed"),
        (["--set", "embedding.strategy=lru"], "name what is compared by --strategies instead"),
        (["--set", "training.step=3"], "did you mean 'steps'?"),
        (["--set", "run.device=cuda"], "sees no CUDA device"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = compare(*arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "comparisons").exists()


def test_the_page_is_whole_and_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)  # else it has charts, and a script
    result = compare("--strategies", "lru,hybrid,hybrid-plain", "--repeat", "1", "--json")
    text = Path("comparisons/small/compare.html").read_text()
    for word in ("://", "url(", "@import", "<script", "<link", "<img", "src=", "href=", " data="):
        assert word not in text
    assert text.count("<rect") == 4  # a bar for each
    for each in table(result).values():
        assert f"{each['whole_run']:,.0f}</text>" in text  # as the table and the advice have it
        assert f"{each['auc']:.4f}" in text
    assert events(result)[-1]["advice"] in html.unescape(text)
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 50rem" in text


@pytest.mark.gpu
def test_strategies_are_compared_on_a_gpu() -> None:
    names = "all-fast,hybrid,hybrid-plain,cpu,static,lru,scratchpipe,lookahead"
    options = ("--set", "run.device=cuda", "--set", "training.steps=40", "--repeat", "2")
    result = compare("--strategies", names, *options, "--json")
    for name, each in table(result).items():
        assert each["outcome"] == "finished", each
        assert each["repeatable"] is True, each
        assert each["samples_per_second"] > 0
        assert math.isfinite(each["auc"])
        if each["contract"] == "exact" and name != "all-fast":
            assert each["equal"] == "bits", each
    assert events(result)[-1]["environment"]["gpu"] == torch.cuda.get_device_name()
