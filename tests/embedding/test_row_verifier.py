"""Bits that change by themselves stop a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from commands import SMALL
from commands import hotrow as command
from hotrow.checkpoint.folder import latest_in, saved_in
from hotrow.embedding.row_verifier import CorruptRows, RowVerifier
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.run.files import RunWriter
from hotrow.run.job import Job
from hotrow.support.records import StepRecord

Bag = hotrow.EmbeddingBagConfig
TABLES = (Bag("item", 900, 8, ["item", "last"]), Bag("tag", 30, 4, ["tag"]))


def collection(strategy: str = "lookahead", **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"strategy": strategy, "budget": "60%", "seed": 0, **options}
    return hotrow.EmbeddingBagCollection(TABLES, hotrow.Adagrad(lr=0.1), **options)


def batches(count: int, size: int = 16) -> list[torch.Tensor]:
    """Of other rows as time goes by, so that slots rest for a while before they are emptied."""
    draw = torch.Generator().manual_seed(0)
    return [
        torch.stack(
            [
                (torch.randint(150, (size,), generator=draw) + 20 * step) % 900,
                torch.randint(900, (size,), generator=draw),
                torch.randint(30, (size,), generator=draw),
            ],
            dim=1,
        )
        for step in range(count)
    ]


def train(embedding: Any, count: int, after: Any, size: int = 16) -> None:
    for step, batch in enumerate(hotrow.ahead(batches(count, size), embedding), 1):
        embedding(batch).values().square().sum().backward()
        after(step)


@pytest.mark.filterwarnings("ignore:these ids are not the ones")
@pytest.mark.filterwarnings("ignore:a batch of .* does not fit")
@pytest.mark.parametrize("strategy", hotrow.STRATEGIES)
def test_training_and_saving_raise_no_alarm(strategy: str, tmp_path: Path) -> None:
    embedding, compared = collection(strategy), []
    verifier = RowVerifier(embedding)

    def after(step: int) -> None:
        if step % 5 == 0:
            compared.append(verifier.verify(step))
        if step == 7:
            hotrow.begin_checkpoint(tmp_path, embedding, step=step)
        if step == 12:
            embedding.load_weights("item", 100, torch.ones(300, 8))
        if step == 17:
            embedding(torch.arange(900)[:, None].expand(900, 3) % 30).values().sum().backward()

    train(embedding, 25, after)
    assert min(compared) > 10  # rows that nobody has written
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    RowVerifier(embedding).verify(30)
    assert torch.equal(torch.rand(3), before)  # nobody else's numbers change


DEVICES = [
    pytest.param("cuda", "lookahead", "bulk", marks=pytest.mark.gpu),
    pytest.param("cuda", "lookahead", "zero-copy", marks=pytest.mark.gpu),
    pytest.param("cuda", "lookahead", "staged", marks=pytest.mark.gpu),
    pytest.param("cuda", "scratchpipe", "auto", marks=pytest.mark.gpu),
    pytest.param("cuda", "hybrid", "auto", marks=pytest.mark.gpu),
    pytest.param("cuda", "all-fast", "auto", marks=pytest.mark.gpu),
    pytest.param("cpu", "lookahead", "zero-copy", marks=pytest.mark.slow),
    pytest.param("cpu", "lookahead", "staged", marks=pytest.mark.slow),
    pytest.param("cpu", "all-fast", "auto", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("device", "strategy", "fill"), DEVICES)
def test_no_alarm_on_a_device_and_one_for_a_bit(device: str, strategy: str, fill: str) -> None:
    few = device == "cpu"
    budget: Any = "60%"
    if few:
        shares = (hotrow.Share(60, 32, True), hotrow.Share(30, 32, True))
        budget = hotrow.Budget(shares, window_bytes=1 << 14)
    engine = gpu_rows if few else None  # else the strategy chooses
    embedding = collection(strategy, fill=fill, device=device, budget=budget, engine=engine)
    verifier, compared = RowVerifier(embedding), []
    last = 12 if few else 30

    def after(step: int) -> None:
        if step % 4 == 0:
            compared.append(verifier.verify(step))

    train(embedding, last, after, 5 if few else 16)
    compared.append(verifier.verify(last))
    if strategy == "all-fast":
        return
    assert min(compared) > 10
    embedding.groups[0].store.rows.view(torch.int32)[:, 3] ^= 1
    with pytest.raises(CorruptRows, match="slow memory, but were not written: row 0 of"):
        verifier.verify(last + 1)


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "lru", "hybrid", "static-hybrid"])
def test_a_bit_that_changes_in_slow_memory_is_found(strategy: str) -> None:
    embedding = collection(strategy)
    verifier = RowVerifier(embedding)
    seen = torch.cat([batch[:, :2].flatten() for batch in batches(5)]).unique()
    row = next(each for each in range(899, 0, -1) if each not in seen.tolist())

    def after(step: int) -> None:
        if step == 2:
            embedding.groups[0].store.rows.view(torch.int32)[row, 3] ^= 1 << 20
        if step == 4:
            with pytest.raises(CorruptRows, match=rf"1 of .* in slow memory.*row {row} of table "):
                verifier.verify(step)

    train(embedding, 5, after)


def test_a_bit_that_changes_in_a_slot_is_found() -> None:
    embedding = collection("lru", budget="50%")
    group = embedding.groups[0]
    verifier = RowVerifier(embedding)

    def after(step: int) -> None:
        if step == 16:
            verifier.verify(step)
            oldest = int(group.planner.last_use[group.memory.pad.row_of_slot >= 0].argmin())
            slot = int((group.memory.pad.row_of_slot >= 0).nonzero()[oldest])
            group.slots.view(torch.int32)[slot, 2] ^= 1
            with pytest.raises(CorruptRows, match=r"1 of .* in its slot"):
                verifier.verify(step)

    train(embedding, 17, after)


def test_a_map_that_is_wrong_is_found() -> None:
    embedding = collection()
    train(embedding, 3, lambda step: None)
    verifier = RowVerifier(embedding, step=3)
    rows = embedding.groups[0].memory.pad.row_of_slot
    taken = (rows >= 0).nonzero().squeeze(1)[:2]
    rows[taken] = rows[taken.flip(0)]
    with pytest.raises(CorruptRows, match=r"at step 9 the maps of slots are wrong .*disagree"):
        verifier.verify(9)


RUN = (
    SMALL.replace("160", "320")
    + """
[training]
verify_every = 4
[checkpoint]
every_steps = 3
keep = 9
"""
)


def run(*settings: str) -> Any:
    return command("train", "run.toml", *(w for each in settings for w in ("--set", each)))


@pytest.mark.filterwarnings("ignore:no threshold in")
@pytest.mark.parametrize("strategy", ["lookahead", "hotline", "fae"])
def test_a_run_stops_and_says_what_to_go_on_from(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    settings = (f"embedding.strategy={strategy}", "embedding.budget=90%", "run.save=false")
    result = run(*settings)
    assert result.exit_code == 0, result.output
    assert len(saved_in(Path("runs/small/checkpoints"))) >= 5
    if strategy != "lookahead":
        return
    jobs, write, real = [], RunWriter.step, Job.train

    def note(self: RunWriter, record: StepRecord) -> None:
        write(self, record)
        if record.step == 5:
            jobs[0].embedding.groups[0].store.rows.view(torch.int32)[:, 0] ^= 1

    monkeypatch.setattr(RunWriter, "step", note)
    monkeypatch.setattr(Job, "train", lambda self: (jobs.append(self), real(self))[1])
    result = run(*settings, "run.name=bad")
    assert isinstance(result.exception, CorruptRows)
    assert "They were right after step 4; checkpoints saved since then may" in str(result.exception)
    assert "the checkpoint of step 6 in runs/bad/checkpoints/00002-step-6 may hold" in result.stderr
    found = latest_in(Path("runs/bad/checkpoints"))
    assert found is not None
    assert found.name == "00001-step-3"  # who goes on by itself has right rows, too
    jobs.clear()
    result = run(*settings, "run.name=worse", "training.verify_every=7", "checkpoint.keep=1")
    assert "and there is none of step 0 or before: train anew" in result.stderr
    jobs.clear()
    result = run(*settings, "run.name=late", "training.verify_every=15", "training.steps=6")
    assert isinstance(result.exception, CorruptRows)  # at the end, before the last is saved
    assert "at step 6" in str(result.exception)
