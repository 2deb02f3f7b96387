"""`hotrow simulate` prints what strategies would move."""

from __future__ import annotations

import json

import pytest

from commands import refused, succeeds

SMALL = ["--set", "data.batch_size=64", "--batches", "6", "--warm-up", "3", "--depth", "4"]


def test_every_strategy_has_a_line() -> None:
    output = succeeds("simulate", *SMALL, "--slots", "2%,9000").output
    for word in ("uncached", "static", "lru", "scratchpipe", "lookahead", "belady", "9,000"):
        assert word in output
    assert "376,110 rows" in output


def test_look_ahead_is_planned_at_every_depth() -> None:
    words = ["--strategy", "lru,lookahead", "--slots", "2%", "--depths", "2,9", "--json"]
    output = succeeds("simulate", *SMALL, *words).output
    lines = [json.loads(line) for line in output.splitlines()]
    assert [(line["strategy"], line.get("depth")) for line in lines] == [
        ("lru", 0), ("lookahead", 2), ("lookahead", 9), ("belady", None),
    ]  # fmt: skip
    rows = [line["rows_per_batch"] for line in lines]
    assert rows[0] >= rows[1] >= rows[2] >= rows[3] > 0


def test_slots_too_few_for_a_batch_have_no_bound_and_no_prediction() -> None:
    words = ["--strategy", "lru", "--slots", "100,5%", "--machine", "h200", "--dense-ms", "0.5"]
    output = succeeds("simulate", *SMALL, *words, "--json").output
    few, enough, bound = map(json.loads, output.splitlines())
    assert (bound["strategy"], bound["slots"]) == ("belady", enough["slots"])
    assert enough["all_fast_is"] == "given"
    assert few["chunked_batches"] == 6
    assert "step_ms" not in few
    assert enough["step_ms"] > 0.5
    output = succeeds("simulate", *SMALL, *words).output
    assert "6 of 6" in output
    assert "No step is predicted where batches are chunked" in output
    few_line, enough_line = (line for line in output.splitlines() if line.startswith("lru "))
    assert "%" in enough_line.split("0 of 6")[1]
    assert "%" not in few_line.split("6 of 6")[1]


def test_machines_get_one_object_per_line() -> None:
    output = succeeds("simulate", *SMALL, "--slots", "5%", "--pin", "ranks", "--json").output
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["strategy"] for line in lines] == [
        "uncached", "static", "lru", "scratchpipe", "lookahead", "belady",
    ]  # fmt: skip
    rows = [line["rows_per_batch"] for line in lines]
    # Pinned rows are there before the batches that count, whether a batch has read them or not.
    assert rows[5] <= min(rows[0], rows[2], rows[3])
    assert all(line["batches"] == 6 and 0 < line["hit_rate"] < 1 for line in lines)


def test_other_orders_of_leaving_stand_beside_lru() -> None:
    orders = "lru,least-frequent,random,most-recent"
    words = [*SMALL, "--strategy", orders, "--slots", "800", "--warm-up", "20", "--json"]
    output = succeeds("simulate", *words).output
    found = {line["strategy"]: line for line in map(json.loads, output.splitlines())}
    assert list(found) == [*orders.split(","), "belady"]
    rows = {name: line["rows_per_batch"] for name, line in found.items()}
    assert len(set(rows.values())) == 5
    assert max(rows, key=rows.__getitem__) == "most-recent"
    assert min(rows, key=rows.__getitem__) == "belady"
    again = [
        json.loads(line)
        for line in succeeds("simulate", *words, "--machine", "h200").output.splitlines()
    ]
    assert again[2]["fetched_rows"] == found["random"]["fetched_rows"]
    assert again[2]["all_fast_is"] == "guessed"


def test_bytes_and_the_slots_that_batches_need_are_told() -> None:
    words = [*SMALL, "--strategy", "lru,scratchpipe,lookahead", "--slots", "2%"]
    sizes = {}
    for dim in (16, 32):
        output = succeeds(
            "simulate", *words, "--set", f"model.embedding_dim={dim}", "--json"
        ).output
        *planned, _ = map(json.loads, output.splitlines())
        for each in planned:
            moved = (each["fetched_rows"] + each["evicted_rows"]) / each["batches"]
            # Row-wise Adagrad keeps one number beside a row's.
            assert each["bytes_per_batch"] == pytest.approx(moved * 4 * (dim + 1))
        sizes[dim] = {each["strategy"]: each["fits_from_slots"] for each in planned}
    lru, scratchpipe, lookahead = sizes[16].values()
    assert sizes[32] == sizes[16]
    assert lru < lookahead < scratchpipe
    for slots, chunked in ((lru, False), (lru - 1, True)):
        lru_alone = ["--strategy", "lru", "--slots", str(slots), "--json"]
        output = succeeds("simulate", *SMALL, *lru_alone).output
        assert (json.loads(output.splitlines()[0])["chunked_batches"] > 0) == chunked
    output = succeeds("simulate", *words).output
    told = " ".join(output.split())
    assert f"{lru:,} for lru; {lookahead:,} for lookahead; {scratchpipe:,} for scr" in told
    assert "KiB" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "many"], "--slots: cannot read 'many'"),
        (["--slots", "0"], "--slots: 0 makes 0 slots; there may be 1 to 376,110"),
        (["--slots", "200%"], "--slots: 200% makes 752,220 slots; there may be 1 to 376,110"),
        (["--strategy", "lur"], "did you mean 'lru'"),
        (["--strategy", "none"], "no strategy 'none'; simulated are uncached, static, lru"),
        (["--strategy", "lru+nothing"], "scratchpipe, lookahead, least-frequent, random, most-"),
        (["--strategy", "all-fast"], "all-fast moves nothing"),
        (["--strategy", "lru,hybrid"], "hybrid has no slots"),
        (["--set", "embedding.budget=5%"], "embedding.budget=5%: a simulation uses [data] and"),
        (["--strategy", "fae"], "--strategy fae: which samples are trained, and when"),
        (["--strategy", "hotline"], "--strategy static. Simulated are uncached, static"),
        (["--strategy", "lru+slipstream"], "its rows follow lru: give --strategy lru"),
        (["--set", "embedding.strategy=fae"], "its rows follow static: give --strategy static"),
        (["--set", "embedding.strategy=lru"], "give --strategy instead"),
        (["--set", "training.steps=5"], "--set training.steps=5: a simulation uses [data]"),
        (["."], ". is a folder, and the TOML file of a run is wanted"),
        (["--pin", "guess"], "--pin must be ranks or learned"),
        (["--batches", "0"], "--batches must be at least 1, not 0"),
        (["--depths", "4,-1"], "--depths must be at least 0, not -1"),
        (["--depths", "far"], "--depths: cannot read 'far'"),
        (["--machine", "h200", "--set", "embedding.budget=5%"], "give --slots instead"),
        (["--dense-ms", "1"], "--dense-ms belongs to --machine"),
        (["--machine", "h200", "--dense-ms", "-1"], "--dense-ms must be a number of at least 0"),
        (["--machine", "h100", "--batches", "10000000"], "did you mean 'h200'?"),  # at once
        (["--slots", "inf%"], "--slots: cannot read 'inf%'"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words: list[str], message: str) -> None:
    assert message in refused("simulate", *SMALL, *words)
