"""`--ranks` of `hotrow simulate` and `hotrow size` predicts ranks that share rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hotrow
from commands import refused, succeeds

SMALL = [
    "--set", "data.batch_size=64", "--set", "data.rows=[20000, 3000, 50]",
    "--batches", "6", "--warm-up", "6",
]  # fmt: skip
SIMULATE = ["simulate", *SMALL, "--depth", "4", "--slots", "50%"]
SIZE = ["size", *SMALL, "--depths", "4", "--machine", "h200", "--dense-ms", "0.5"]


def lines_of(*words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in succeeds(*words, "--json").output.splitlines()]


def test_each_number_of_ranks_has_a_line() -> None:
    *facts, last = lines_of(*SIMULATE, "--ranks", "4,1,2", "--machine", "h200", "--dense-ms", "0.5")
    assert [x["ranks"] for x in facts] == [1, 2, 4]
    assert all(x["drawn"] and x["is_prediction"] and x["strategy"] == "lookahead" for x in facts)
    assert facts[0]["sent_bytes"] == facts[0]["header_bytes"] == facts[0]["vector_bytes"] == 0
    assert facts[1]["sent_bytes"] < facts[2]["sent_bytes"]
    owned = [x["rows_owned"] for x in facts]
    assert owned[0] == 23_050
    assert all(x["ranks"] * x["rows_owned"] >= 23_050 for x in facts)
    assert facts[0]["host_bytes"] > facts[1]["host_bytes"] > facts[2]["host_bytes"]
    assert facts[0]["budget_bytes"] > facts[1]["budget_bytes"] > facts[2]["budget_bytes"]
    assert all(x["step_ms"] >= x["all_fast_ms"] >= 0.4 for x in facts)
    text = " ".join(last["assumptions"])
    for words in ("nvlink: 370 GB/s", "No step on several GPUs was measured", "2 owners"):
        assert words in text


def test_people_see_bytes_by_kind_and_what_is_assumed() -> None:
    words = ["--ranks", "2,4", "--machine", "h200", "--dense-ms", "1", "--replicate", "64KiB"]
    output = " ".join(succeeds(*SIMULATE, *words).output.split())
    for expected in (
        "early rows", "late rows", "gradients", "balance with", "host memory", "samples/s",
        "Assumed", "The dense part takes 1 ms, given", "963 ", "infiniband: 48 GB/s",
    ):  # fmt: skip
        assert expected in output, expected


def test_many_ranks_are_computed_and_few_owners_planned() -> None:
    words = [*SIMULATE, "--ranks", "2,1024", "--owners", "3", "--set", "data.rows=[2000000]"]
    few, many, _ = lines_of(*words)
    assert [x["drawn"] for x in (few, many)] == [True, False]
    assert [x["owners_planned"] for x in (few, many)] == [2, 3]
    assert many["sent_bytes"] > few["sent_bytes"]
    assert "step_ms" not in many


def test_links_decide_how_long_a_step_takes() -> None:
    words = [*SIMULATE, "--ranks", "2", "--machine", "h200", "--set", "model.embedding_dim=256"]
    times = {}
    for links in ("nvlink,infiniband", "pcie,ethernet"):
        fact, _ = lines_of(*words, "--links", links)
        assert fact["links"] == links
        times[links] = fact["late_ms"] + fact["grads_ms"]
    assert times["nvlink,infiniband"] < times["pcie,ethernet"]


def test_strategies_that_do_not_read_ahead_send_nothing_early() -> None:
    words = [*SIMULATE, "--ranks", "2", "--strategy", "lru,lookahead"]
    lru, ahead, _ = lines_of(*words)
    assert (lru["early_row_bytes"], lru["mark_bytes"]) == (0, 0)
    both = ahead["early_row_bytes"] + ahead["late_row_bytes"]
    assert lru["late_row_bytes"] == pytest.approx(both)
    assert ahead["early_row_bytes"] > 0


def test_no_step_is_predicted_where_batches_do_not_fit() -> None:
    words = [*SIMULATE, "--slots", "1%", "--ranks", "4", "--machine", "h200", "--dense-ms", "1"]
    fact, _ = lines_of(*words)
    assert fact["chunked_batches"]
    assert "step_ms" not in fact


def test_the_fewest_ranks_that_hold_the_rows_are_proposed(tmp_path: Path) -> None:
    (found,) = lines_of(*SIZE, "--ranks", "1,2,8")
    chosen = found["chosen"]
    assert [x["ranks"] for x in found["best"]] == [1, 2, 8]
    assert chosen["ranks"] == 1
    assert chosen["of_all_fast"] >= 0.95
    # Where a rank's memory holds a third of the rows, four are the fewest.
    file = Path(hotrow.__file__).parent / "sizing" / "machines.toml"
    text = file.read_text().partition("# Links:")[0]
    gib = chosen["host_bytes"] / 3 / 2**30
    path = tmp_path / "small.toml"
    path.write_text(text.replace("ram_gib = 256.0", f"ram_gib = {gib:.9f}"))
    words = [*SIZE, "--machine", str(path), "--ranks", "1,2,4"]
    (found,) = lines_of(*words)
    assert [x["fits_host"] for x in found["best"]] == [False, False, True]
    assert found["chosen"]["ranks"] == 4
    output = " ".join(succeeds(*words).output.split())
    assert "Take 4 ranks with a budget of" in output
    (found,) = lines_of(*SIZE, "--machine", str(path), "--ranks", "1,2")
    assert found["chosen"] is None
    assert "give more --ranks" in found["notes"][0]


def test_a_machine_without_links_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    file = Path(hotrow.__file__).parent / "sizing" / "machines.toml"
    path = tmp_path / "lonely.toml"
    text = file.read_text().partition("# How ranks meet")[0]
    path.write_text(text.replace("[h200", "[lonely"))
    words = ["--machine", str(path), "--dense-ms", "1"]
    message = "the links between ranks of machine 'lonely' are not known; add a table [NAME.ranks]"
    assert message in refused(*SIMULATE, *words, "--ranks", "2", "--batches", "100000000")
    assert message in refused("size", *SMALL, *words, "--ranks", "2")
    succeeds(*SIMULATE, *words)  # one rank needs none


@pytest.mark.parametrize("words", [["size", "--ranks", "1,2"], [*SIMULATE, "--ranks", "2"]])
def test_this_machine_has_no_links_and_is_not_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hotrow.cli.size", "hotrow.cli.simulate"):
        monkeypatch.setattr(f"{module}.machine_of", lambda *given: pytest.fail("is measured"))
    message = refused(*words, "--machine", "this")
    assert "links between ranks of machine 'this' are not known; name another one: h200" in message


def test_a_page_has_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "ranks.html"
    succeeds(*SIMULATE, "--ranks", "2", "--machine", "h200", "--dense-ms", "1", "--html", str(path))
    text = path.read_text()
    assert "late rows" in text
    assert "No step on several GPUs was measured" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 is not between 1 and 1,024"),
        (["--ranks", "8,2000"], "--ranks: 2,000 is not between 1 and 1,024"),
        (["--ranks", "many"], "--ranks: cannot read 'many'; write 8 or 8,64,1024"),
        (["--ranks", "2", "--machine", "h20"], "no machine 'h20' (did you mean 'h200'?)"),
        (["--ranks", "2", "--machine", "this"], "links between ranks of machine 'this' are not"),
        (["--ranks", "2", "--machine", "no.toml"], "cannot read no.toml"),
        (["--ranks", "2", "--links", "nvlink,pcie"], "--links belongs to --machine"),
        (["--ranks", "2", "--machine", "h200", "--links", "nvlink"], "--links nvlink: name two"),
        (["--ranks", "2", "--machine", "h200", "--links", "a,b"], "--links: there is no link 'a'"),
        (["--ranks", "2", "--pin", "ranks"], "--pin ranks is for one rank"),
        (["--ranks", "2", "--owners", "0"], "--owners must be at least 1"),
        (["--ranks", "2", "--replicate", "lots"], "cannot read 'lots' as a number of bytes"),
        (["--replicate", "1MiB"], "--replicate belongs to --ranks"),
        (["--owners", "2"], "--owners belongs to --ranks"),
        (
            ["--ranks", "1024", "--set", "data.drift=0.1"],
            "--set data.drift=0",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words: list[str], message: str) -> None:
    assert message in refused(*SIMULATE, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 is not between 1 and 1,024"),
        (["--links", "nvlink,pcie"], "--links belongs to --ranks"),
        (["--ranks", "2", "--out", "sized.toml"], "--out is for one rank"),
    ],
)
def test_size_refuses_what_has_no_effect(words: list[str], message: str) -> None:
    assert message in refused(*SIZE, *words)
