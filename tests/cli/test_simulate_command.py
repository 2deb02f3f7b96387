"""`hotrow simulate` prints what strategies would move."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hotrow.cli import make_app

SMALL = ["--set", "data.batch_size=64", "--batches", "6", "--warm-up", "3", "--depth", "4"]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["simulate", *words])
    return result.exit_code, result.output


def test_every_strategy_has_a_line() -> None:
    code, output = run(*SMALL, "--slots", "2%,9000")
    assert code == 0
    for word in ("uncached", "static", "lru", "scratchpipe", "lookahead", "9,000", "376,110 rows"):
        assert word in output


def test_machines_get_one_object_per_line() -> None:
    code, output = run(*SMALL, "--slots", "5%", "--pin", "ranks", "--json")
    assert code == 0
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["strategy"] for line in lines] == [
        "uncached", "static", "lru", "scratchpipe", "lookahead",
    ]  # fmt: skip
    assert all(line["batches"] == 6 and 0 < line["hit_rate"] < 1 for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "many"], "--slots: cannot read 'many'"),
        (["--slots", "0"], "--slots: 0 makes 0 slots; there may be 1 to 376,110"),
        (["--slots", "200%"], "--slots: 200% makes 752,220 slots; there may be 1 to 376,110"),
        (["--strategy", "lur"], "did you mean 'lru'"),
        (["--strategy", "all-fast"], "all-fast moves nothing"),
        (["--strategy", "lru,hybrid"], "hybrid has no slots"),
        (["--set", "embedding.budget=5%"], "embedding.budget=5%: a simulation uses [data] and"),
        (["--set", "embedding.budget=5%"], "give --slots instead"),
        (["--strategy", "fae"], "--strategy fae: which samples are trained, and when"),
        (
            ["--strategy", "hotline"],
            "--strategy static. Simulated are uncached, static",
        ),
        (["--strategy", "lru+slipstream"], "its rows follow lru: give --strategy lru"),
        (["--set", "embedding.strategy=fae"], "its rows follow static: give --strategy static"),
        (["--set", "embedding.strategy=lru"], "give --strategy instead"),
        (["--set", "training.steps=5"], "--set training.steps=5: a simulation uses [data]"),
        (["--pin", "guess"], "--pin must be ranks or learned"),
        (["--batches", "0"], "--batches must be at least 1, not 0"),
        (["--depth", "-1"], "--depth must be at least 0, not -1"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words: list[str], message: str) -> None:
    code, output = run(*SMALL, *words)
    assert code == 2
    assert message in output
