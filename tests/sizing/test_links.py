"""Times of exchanges and of steps on several ranks follow from links and from what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.cost import Work, all_fast_ms, step_time
from hotrow.sizing.machines import between_of, find_machine, links
from hotrow.sizing.rank_cost import RankWork, ranked_step

H200 = find_machine("h200")
BETWEEN = between_of(H200)
OWNED = Work(
    lookups=50_000, unique_rows=30_000, row_bytes=256, table_bytes=1e9, fetched_rows=5_000,
    evicted_rows=5_000, vector_bytes=256,
)  # fmt: skip
WORK = RankWork(
    ranks=64, lookups=200_000, unique_rows=50_000, vector_bytes=256, asked_rows=50_000, owned=OWNED,
    balance=1.0, id_bytes=2e5, mark_bytes=6e3, early_bytes=4e6, late_bytes=9e6, grad_bytes=13e6,
)  # fmt: skip
LOOKAHEAD = STRATEGIES["lookahead"]


def test_an_exchange_takes_a_start_its_messages_and_its_bytes() -> None:
    link = links()["infiniband"]
    assert link.ms(0, 1e9) == 0
    assert link.ms(7, 48e6) == pytest.approx(1e-3 * (link.us + 7 * link.message_us) + 1.0)


def test_ranks_of_one_machine_meet_inside_and_the_slower_link_decides() -> None:
    assert BETWEEN.neighbours(1) == (0, 0)
    assert BETWEEN.neighbours(8) == (7, 0)
    assert BETWEEN.neighbours(64) == (7, 56)
    inside = BETWEEN.links["nvlink"].ms(7, 7e6)
    assert BETWEEN.exchange_ms_of(8, 7e6) == pytest.approx(inside)
    outside = BETWEEN.links["infiniband"].ms(56, 56e6)
    assert BETWEEN.exchange_ms_of(64, 63e6) == pytest.approx(outside)
    # A slow link inside of machines decides in its turn.
    slow = replace(BETWEEN.links["nvlink"], gb=1e-3)
    assert replace(BETWEEN, links={**BETWEEN.links, "nvlink": slow}).exchange_ms_of(
        64, 63e6
    ) == pytest.approx(slow.ms(7, 7e6))


def test_a_step_waits_for_late_rows_and_gradients_but_early_ones_travel_beside_it() -> None:
    between = replace(BETWEEN, prepare_ns=0.0, exchange_ms=0.0, rank_ms=0.0, messages="nvlink")
    step = ranked_step(H200, between, LOOKAHEAD, WORK, dense_ms=0.5)
    late, grads = (between.exchange_ms_of(64, sent) for sent in (9e6, 13e6))
    assert (step.late_ms, step.grads_ms) == pytest.approx((late, grads))
    assert step.all_fast_ms == pytest.approx(step.training_ms + late + grads)
    assert step.ms > step.all_fast_ms  # plans and moved rows
    sent_later = replace(WORK, early_bytes=0.0, late_bytes=13e6)
    assert ranked_step(H200, between, LOOKAHEAD, sent_later, dense_ms=0.5).ms > step.ms
    flood = replace(WORK, early_bytes=1e9)
    found = ranked_step(H200, between, LOOKAHEAD, flood, dense_ms=0.5)
    assert (found.ms, found.limit) == (found.early_ms, "network")


def test_the_host_decides_where_messages_take_longest() -> None:
    step = ranked_step(H200, BETWEEN, LOOKAHEAD, WORK, dense_ms=0.5)
    assert (step.ms, step.limit) == (step.host_ms, "host")
    more = ranked_step(H200, BETWEEN, LOOKAHEAD, replace(WORK, ranks=128), dense_ms=0.5)
    assert more.host_ms > 1.5 * step.host_ms


def test_the_most_loaded_owner_decides() -> None:
    steps = [
        ranked_step(H200, BETWEEN, LOOKAHEAD, replace(WORK, balance=x), dense_ms=0.5)
        for x in (1.0, 1.5)
    ]
    assert steps[1].training_ms > steps[0].training_ms
    assert steps[1].grads_ms > 1.3 * steps[0].grads_ms


def test_one_rank_is_predicted_as_without_others() -> None:
    """It sends nothing, and its own lookups are all that it is asked for."""
    owned = replace(OWNED, lookups=200_000, unique_rows=50_000, row_bytes=512)
    nothing = dict.fromkeys(
        ("id_bytes", "mark_bytes", "early_bytes", "late_bytes", "grad_bytes"), 0
    )
    alone = replace(WORK, ranks=1, owned=owned, **nothing)
    step = ranked_step(H200, BETWEEN, LOOKAHEAD, alone, dense_ms=0.5)
    assert (step.late_ms, step.grads_ms, step.early_ms) == (0, 0, 0)
    assert step.host_ms == H200.host_ms
    fast = all_fast_ms(H200, owned, dense_ms=0.5)
    assert step.all_fast_ms == pytest.approx(fast)
    assert step.ms == pytest.approx(step_time(H200, LOOKAHEAD, owned, all_fast_ms=fast).ms)


# -- files of machines -----------------------------------------------------------------------

LINES = """
gpu = "Some GPU"
cores = 8
memory_gib = 40.0
link_gb = 20.0
hbm_gb = 1000.0
rows_part = 0.3
dense_tflops = 50.0
row_rates = [[1.0, 100.0]]
sorted_gain = [[1000.0, 1.0]]
sort_ns = 1.0
plan_ns = 1.0
host_ms = 0.4
plan_drag = 0.4
read_drag = 0.4
fill_drag = 0.4
error = 0.5
"""
RANKS = """
per_machine = 4
ram_gib = 64.0
inside = "pcie"
outside = "mine"
messages = "tcp"
prepare_ns = 20.0
exchange_ms = 1.0
rank_ms = 0.1
"""
MINE = '[links.mine]\ngb = 1.0\nus = 100.0\nmessage_us = 10.0\nsource = "measured"\n'
WHOLE = f"[mine]\n{LINES}\n[mine.ranks]\n{RANKS}\n{MINE}"


def test_a_file_describes_a_machine_and_its_links(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(WHOLE)
    machine = find_machine(str(path))
    assert (machine.name, machine.memory_gib, machine.is_gpu) == ("mine", 40.0, True)
    between = between_of(machine)
    assert between.exchange_ms_of(8, 7e6) == pytest.approx(0.1 + 4 * 0.01 + 4.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[mine]\n{LINES}", r"links between ranks of machine 'mine' are not known; add a table"),
        (WHOLE.replace('"mine"', '"pci"'), r"no link 'pci' \(did you mean 'pcie'\?\)"),
        (WHOLE.replace("gb = 1.0", "gb = 0"), r"links.mine\]: gb must be above 0"),
        (WHOLE.replace("gb = 1.0", 'gb = "fast"'), "gb must be a number of at least 0, not 'fast'"),
        (WHOLE.replace("per_machine = 4", ""), r"\[mine.ranks\] lacks per_machine"),
        (WHOLE.replace("cores", "core"), r"\[mine\] has no key 'core' \(did you mean 'cores'\?\)"),
        (f"{WHOLE}\n[other]\n{LINES}", "describes 2 machines; give a file with one"),
        (MINE, "describes 0 machines"),
        (WHOLE.replace("[[1.0, 100.0]]", "[]"), r"row_rates must be points of two numbers above 0"),
        (WHOLE.replace("[[1.0, 100.0]]", "[[1.0]]"), "row_rates must be points"),
        (
            WHOLE.replace("[mine.ranks]", "[mine.forms]\nbulk = 3\n[mine.ranks]"),
            "forms must be poi",
        ),
        (WHOLE.replace('"Some GPU"', "5"), r"\[mine\]: gpu must be a text, not 5"),
        (WHOLE.replace("memory_gib = 40.0", "memory_gib = 0"), "memory_gib must be above 0"),
        ("mine = 1", r"mine stands outside of a machine's table"),
        ("mine =", "not valid TOML"),
    ],
)
def test_a_fault_in_a_file_says_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        between_of(find_machine(str(path)))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot read absent\.toml"):
        find_machine("absent.toml")


def test_links_of_a_measured_machine_are_not_known() -> None:
    with pytest.raises(ValueError, match="name another one: h200, or a TOML file"):
        between_of(replace(H200, name="this", ranks=None))
