"""Training that goes on from a checkpoint ends in the bits of training that was never stopped."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotrow
from dense_masters import MasterWeights
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import Lock, clean, latest_in, named_in, saved_in
from hotrow.data import ClickBatch
from hotrow.run.job import same_bits
from hotrow.support.random_states import random_states, restore_random_states
from saved_training import (
    BATCHES,
    DEVICE,
    RULES,
    TABLES,
    Bag,
    Loop,
    Optimizer,
    Small,
    is_whole,
    names_in,
    on_gpu,
    rows_of,
    same,
)

DENSE: dict[str, Optimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "masters": lambda model: MasterWeights(
        model, lambda masters: torch.optim.Adam(masters, lr=0.01)
    ),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
FEW = [batch[:3] for batch in BATCHES]  # few, where Triton is interpreted


@pytest.mark.parametrize(("rule", "dense"), [*zip(RULES, DENSE, strict=True)])
def test_training_goes_on_in_the_middle(rule: str, dense: str, tmp_path: Path) -> None:
    whole = Loop(rule, DENSE[dense], strategy="lookahead", budget="60%")

    def save(step: int) -> None:
        if step == 4:
            whole.save(tmp_path, step, extra={"batches": step})

    whole.train(0, 8, save)  # saving in the middle of a pass changes nothing
    expected = whole.everything()
    plain = Loop(rule, DENSE[dense], strategy="lookahead", budget="60%")
    plain.train(0, 8)
    assert same(plain, expected)
    # Another budget, strategy and start.
    other = Loop(rule, DENSE[dense], strategy="all-fast", seed=5)
    loaded = other.load(tmp_path)
    assert loaded.step == loaded.extra["batches"] == 4
    other.train(loaded.step, 8)
    assert same(other, expected)
    other.model.embedding.check()


@pytest.mark.parametrize("strategy", hotrow.STRATEGIES)
def test_every_strategy_saves_and_loads_the_same_rows(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "budget": "60%"}
    one, other = Loop("adagrad", **options), Loop("adagrad", seed=3, **options)
    one.train(0, 4, lambda step: step == 3 and one.save(tmp_path, step))
    saved = Checkpoint(latest_in(tmp_path) or "")
    other.train(0, 4)  # so that some rows have slots
    other.load(tmp_path)
    for table, rows in zip(TABLES, rows_of(other.embedding), strict=True):
        key = f"embedding.{one.embedding.key_of(table.name)}"
        assert same_bits(torch.cat([rows for _, rows in saved.rows(key)]), rows)
    other.embedding.check()
    other.train(3, 8)
    expected, third = other.everything(), Loop("adagrad", **options)
    third.load(tmp_path)
    third.train(3, 8)
    assert same(third, expected)


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_an_incremental_one_holds_what_has_changed(strategy: str, tmp_path: Path) -> None:
    loop = Loop("adam", strategy=strategy, budget="60%")
    kept: dict[int, Any] = {}

    def save(step: int) -> None:
        loop.save(tmp_path, step, full_every=9, keep=1)
        kept[step] = loop.everything()

    loop.train(0, 4, save)
    first, last = saved_in(tmp_path)
    assert [first.name, last.name] == ["00001-step-1", "00004-step-4"]
    assert is_whole(first)
    four = Checkpoint(last)
    touched = len(torch.cat([batch[:, :2].flatten() for batch in BATCHES[1:4]]).unique())
    assert sum(shard.rows for shard in four.tables[0].shards) == touched < 500
    four.verify()
    other = Loop("adam", strategy="uncached", budget="80%", seed=2)
    other.load(last)
    assert same(other, kept[4])
    rows = torch.cat([rows for _, rows in four.rows("embedding.embedding_bags.item.weight")])
    assert same_bits(rows, rows_of(other.embedding)[0])


ON_A_DEVICE = ("lookahead", "all-fast", "lru", "static", "scratchpipe", "hybrid")


@pytest.mark.usefixtures("device_engine")
@pytest.mark.parametrize(
    "strategy",
    ["lookahead", pytest.param("all-fast", marks=pytest.mark.slow), *map(on_gpu, ON_A_DEVICE)],
)
def test_an_incremental_one_holds_what_a_device_has_changed(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "budget": "60%", "device": DEVICE}
    one, other = (
        hotrow.EmbeddingBagCollection(TABLES, RULES["adagrad"], seed=seed, **options)
        for seed in (0, 1)
    )
    batches = FEW[:4]
    for step, ids in enumerate(hotrow.ahead(batches, one), 1):
        one(ids).values().sum().backward()
        if step in (1, 3):  # others are planned by then, and some of their rows are there
            last = Checkpoint(hotrow.save_checkpoint(tmp_path, one, step=step, full_every=9))
            kept = rows_of(one)
    touched = torch.cat([batch[:, :2].flatten() for batch in batches[1:3]]).unique()
    assert last.manifest.parent is not None
    assert sum(shard.rows for shard in last.tables[0].shards) == len(touched)
    if strategy != "hybrid":
        words = sum(rows // 32 + 1 for rows in (700, 30))
        assert one.memory()["which rows changed"] == (4 * words if DEVICE == "cuda" else 0)
    for ids in hotrow.ahead(batches[:1], other):  # so that some of its rows have slots
        other(ids).values().sum().backward()
    hotrow.load_checkpoint(tmp_path, other)
    assert all(map(same_bits, rows_of(other), kept))
    assert not all(map(same_bits, rows_of(one), kept))
    other.check()


@pytest.mark.usefixtures("device_engine")
@pytest.mark.parametrize("strategy", ["static", on_gpu("static")])
def test_an_incremental_one_after_one_saved_while_the_host_trains(
    strategy: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "budget": "60%", "device": DEVICE, "seed": 0}
    one = hotrow.EmbeddingBagCollection(TABLES, RULES["adagrad"], **options)
    batches = FEW[:4]
    for place, batch in enumerate(batches):
        (one.train_on_host if place % 2 else one.train_in_slots)()
        for ids in hotrow.ahead([batch], one):
            one(ids).values().sum().backward()
        if place in (1, 3):
            last = Checkpoint(hotrow.save_checkpoint(tmp_path, one, step=place, full_every=9))
    touched = torch.cat([batch[:, :2].flatten() for batch in batches[2:]]).unique()
    assert last.manifest.parent is not None
    assert sum(shard.rows for shard in last.tables[0].shards) == len(touched)


@pytest.mark.parametrize("strategy", [on_gpu("lookahead")])
def test_captured_steps_note_what_they_change(strategy: str, tmp_path: Path) -> None:
    class Scores(Small):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.sparse)

    def make(seed: int) -> Scores:
        options = {"strategy": strategy, "budget": "60%", "device": "cuda", "seed": seed}
        return Scores(RULES["adam"], **options)

    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([500, 500, 30, 200])
    ids = [(torch.rand(32, 4, generator=draw) * sizes).long() for _ in range(90)]
    batches = [ClickBatch(torch.zeros(32, 1), each, torch.ones(32)) for each in ids]
    model = make(0)
    trainer = hotrow.Trainer(
        model,
        nn.functional.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch.sparse,
        device="cuda",
    )
    for record in trainer.run(batches):
        if record.step in (40, 50, 60):
            saved = hotrow.save_checkpoint(tmp_path, model, step=record.step, full_every=9)
            kept = rows_of(model.embedding)
    last = Checkpoint(saved)
    assert last.manifest.parent is not None
    touched = torch.cat([each[:, :2].flatten() for each in ids[40:60]]).unique()
    assert sum(shard.rows for shard in last.tables[0].shards) == len(touched)
    other = make(1)
    hotrow.load_checkpoint(tmp_path, other)
    assert all(map(same_bits, rows_of(other.embedding), kept))


def test_which_ones_are_whole(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    loop = Loop()
    for step in range(5):
        loop.save(one, step, full_every=3)
    assert [is_whole(path) for path in saved_in(one)] == [True, False, False, True, False]
    (saved_in(one)[3] / "checkpoint.json").write_text("{}")  # damaged
    assert is_whole(loop.save(one, 5, full_every=9))
    loop.load(one)  # changes are not known since then
    assert is_whole(loop.save(one, 6, full_every=9))
    loop.train(0, 1)
    assert not is_whole(loop.save(one, 7, full_every=9))
    loop.save(two, 8, full_every=9)
    assert is_whole(loop.save(one, 8, full_every=9))
    cannot_tell = Loop(strategy="static-hybrid", budget="30%")
    for step in (1, 2):
        assert is_whole(cannot_tell.save(tmp_path / "hybrid", step, full_every=9))


def test_a_checkpoint_of_another_folder_is_no_parent(tmp_path: Path) -> None:
    """Changes are known since the last save, which went to another folder, under the same name."""
    loop, one, two = Loop(), tmp_path / "one", tmp_path / "two"
    loop.save(one, 1, full_every=9)
    loop.train(0, 2)
    assert loop.save(two, 1, full_every=9).name == saved_in(one)[0].name
    loop.train(2, 3)
    loop.save(one, 2, full_every=9)
    expected, loaded = loop.everything(), Loop(seed=1)
    loaded.load(one)
    assert same(loaded, expected)


@pytest.mark.parametrize("other", ["a part", "other names"])
def test_a_checkpoint_of_another_model_is_no_parent(other: str, tmp_path: Path) -> None:
    """The same collections, but not in the same places: rows of the parent would be others'."""
    torch.manual_seed(0)
    table = Bag("item", 40, 4, ["item"])
    one, two = (
        hotrow.EmbeddingBagCollection([table], RULES["adam"], strategy="all-fast", seed=seed)
        for seed in (1, 2)
    )
    hotrow.save_checkpoint(tmp_path, nn.ModuleDict({"a": one, "b": two}), step=1, full_every=9)
    for each in (one, two):
        each(torch.tensor([[3], [7]])).values().square().sum().backward()
    model = nn.ModuleDict({"a": two, "b": one}) if other == "other names" else one
    path = hotrow.save_checkpoint(tmp_path, model, step=2, full_every=9)
    assert is_whole(path)
    saved = [one, two] if other == "other names" else [one]
    expected = [next(each.rows("item"))[1].clone() for each in saved]
    for each in saved:
        each.load_weights("item", 0, torch.zeros(40, 4))
    hotrow.load_checkpoint(path, model)
    assert all(map(same_bits, [next(each.rows("item"))[1] for each in saved], expected))


def test_a_parent_that_was_replaced_is_refused(tmp_path: Path) -> None:
    loop, other = Loop(), Loop(seed=1)
    parent = loop.save(tmp_path / "one", 1, full_every=9)
    loop.train(0, 1)
    child = loop.save(tmp_path / "one", 2, full_every=9)
    assert not is_whole(child)
    shutil.rmtree(parent)
    other.save(tmp_path / "two", 1, full_every=9).rename(parent)
    Checkpoint(parent).verify()  # a whole checkpoint, with the parent's name
    before = other.everything()
    with pytest.raises(ValueError, match="is not the parent that"):
        other.load(child)
    assert same(other, before)


def test_old_ones_are_removed_and_the_latest_never(tmp_path: Path) -> None:
    loop = Loop()
    for step in range(5):
        loop.save(tmp_path, step, keep=2)
    assert [path.name for path in saved_in(tmp_path)] == ["00004-step-3", "00005-step-4"]
    assert (tmp_path / "latest").read_text() == "00005-step-4"
    (tmp_path / "latest").write_text("00004-step-3")
    assert loop.load(tmp_path).step == 3
    (tmp_path / "latest").write_bytes(b"\xff")  # nonsense: the newest
    assert loop.load(tmp_path).step == 4
    (tmp_path / "00009-step-9.partial").mkdir()
    loop.save(tmp_path, 5, keep=1)
    assert names_in(tmp_path) == ["00006-step-5", "latest"]


def test_one_without_its_manifest_goes_when_a_whole_one_would(tmp_path: Path) -> None:
    loop = Loop()
    for step in range(3):
        manifest = loop.save(tmp_path, step) / "checkpoint.json"
        if step < 2:
            manifest.unlink()
    loop.save(tmp_path, 3, keep=3)  # whole, the second one would stay
    assert len(named_in(tmp_path)) == 4
    (tmp_path / "00004-step-3" / "checkpoint.json").unlink()
    loop.save(tmp_path, 4, keep=2)
    left = ["00003-step-2", "00004-step-3", "00005-step-4"]
    assert [path.name for path in named_in(tmp_path)] == left
    loop.save(tmp_path, 5, keep=1, full_every=9)
    assert [path.name for path in named_in(tmp_path)] == ["00006-step-5"]
    loop.save(tmp_path, 6, full_every=9)
    (tmp_path / "00006-step-5" / "checkpoint.json").unlink()  # a user may put it back
    clean(tmp_path, keep=1)
    assert [path.name for path in named_in(tmp_path)] == ["00006-step-5", "00007-step-6"]


def test_one_process_saves_into_a_folder_at_a_time(tmp_path: Path) -> None:
    loop = Loop()
    loop.save(tmp_path, 0)
    others = tmp_path / "00002-step-9.partial"
    others.mkdir()
    lock = Lock(tmp_path)
    for save in (hotrow.save_checkpoint, hotrow.begin_checkpoint):
        with pytest.raises(OSError, match=r"another process is saving a checkpoint in .*let one"):
            save(tmp_path, loop.model, step=1)
    assert others.is_dir()
    lock.release()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # what fails lets others save
    with pytest.raises(OSError, match="latest") as failed:
        loop.save(tmp_path, 1)
    (tmp_path / "latest").rmdir()
    loop.save(tmp_path, 1)
    assert failed.value is not None  # with the frames in which it was raised
    assert not others.exists()
    hotrow.begin_checkpoint(tmp_path, loop.model, step=2).wait()
    Lock(tmp_path).release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_locks_are_of_one_process_and_of_folders_that_know_them(tmp_path: Path) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    lock = Lock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError, match="another process"):
        Lock(tmp_path)
    Lock(tmp_path, flock).release()
    lock.release()


def test_names_of_new_folders_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(
        "os.fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    hotrow.save_checkpoint(tmp_path / "runs" / "first", nn.Linear(2, 2), step=1)
    assert flushed[:2] == [str(tmp_path), str(tmp_path / "runs")]


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [torch.rand(2).tolist(), np.random.rand(2).tolist(), random.gauss(0, 1)]

    random.gauss(0, 1)  # the second of a pair is kept
    loop = Loop()
    loop.save(tmp_path, 1)
    expected = draw()
    loop.load(tmp_path)
    assert draw() == expected
    hotrow.load_checkpoint(tmp_path, loop.model, random=False, **loop.parts)
    assert draw() != expected
    kind, keys, _, *rest = np.random.get_state()
    for place in (-1, 625, 1 << 30, 1.5):  # numpy would read far behind its own
        states = {**random_states(), "numpy": [kind, keys, place, *rest]}
        with pytest.raises(ValueError, match="numpy"):
            restore_random_states(states)


def test_the_row_that_is_nan_is_named_in_an_incremental_one(tmp_path: Path) -> None:
    model = Small()
    hotrow.save_checkpoint(tmp_path, model, step=1, full_every=2)
    model.embedding.load_weights("item", 3, torch.zeros(1, 8))
    model.embedding.load_weights("item", 6, torch.full((1, 8), torch.nan))
    path = hotrow.save_checkpoint(tmp_path, model, step=2, full_every=2)
    with pytest.raises(ValueError, match="row 6 holds NaN or infinite values"):
        Checkpoint(path).verify()


def test_a_grad_scaler_and_anything_else_with_a_state_go_along(tmp_path: Path) -> None:
    class Odd:
        def __init__(self) -> None:
            self.state: Any = {
                (1, "a"): [1.5, float("inf"), None, True, -(2**70)],
                2: {"b.c": torch.ones(2, 0), "b": {"c": np.arange(3)}, "n": np.int64(4)},
                "half": torch.ones(3, dtype=torch.bfloat16),
                "flag": torch.tensor([True]),
            }

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    model, odd, scaler = Small(), Odd(), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    hotrow.save_checkpoint(tmp_path, model, step=1, odd=odd, scaler=scaler)
    other = torch.amp.GradScaler("cpu")
    hotrow.load_checkpoint(tmp_path, model, odd=odd, scaler=other)
    assert other.get_scale() == 4.0
    assert odd.loaded[(1, "a")] == odd.state[(1, "a")]
    assert odd.loaded[2]["b"]["c"].tolist() == [0, 1, 2]
    assert odd.loaded[2]["b.c"].shape == (2, 0)
    assert odd.loaded[2]["n"] == 4
    assert torch.equal(odd.loaded["half"], odd.state["half"])


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    model = Small()
    with pytest.raises(ValueError, match=r"state\.extra\.a\.0 has the type builtins\.object"):
        hotrow.save_checkpoint(tmp_path, model, step=1, extra={"a": [object()]})
    with pytest.raises(TypeError, match="loader has the type list, which has no state_dict"):
        hotrow.save_checkpoint(tmp_path, model, step=1, loader=[])
    with model.embedding.accumulate(), pytest.raises(RuntimeError, match="inside of accumulate"):
        hotrow.save_checkpoint(tmp_path, model, step=1)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    loop = Loop()
    loop.train(0, 2)
    loop.save(tmp_path, 2)
    for rule in ("adagrad", "adamw"):
        other = Loop(rule)
        before = other.everything()
        with pytest.raises(ValueError, match=rf"Adam has trained, and (?i:{rule})"):
            other.load(tmp_path)
        assert same(other, before)
    with pytest.raises(
        ValueError, match="with the parts optimizer, schedule, rows_schedule; you passed"
    ):
        hotrow.load_checkpoint(tmp_path, loop.model, optimizer=loop.optimizer)
    loop.model.last = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"last.weight is saved as \[1, 6\], and the model's is"):
        loop.load(tmp_path)
    stream = hotrow.ahead(BATCHES, loop.model)
    with pytest.raises(ValueError, match=r"holds no checkpoint"):
        loop.load(tmp_path / "elsewhere")
    next(iter(stream))
    loop.model.last = nn.Linear(6, 1)
    with pytest.raises(RuntimeError, match=r"while hotrow\.ahead is running"):
        loop.load(tmp_path)
    stream.close()


def compiled(model: Any, *, whole: bool) -> Any:
    if whole:
        return torch.compile(model, backend="eager")
    model.first = torch.compile(model.first, backend="eager")
    return model


def test_a_compiled_model_has_the_names_of_a_plain_one(tmp_path: Path) -> None:
    """Also where earlier versions have saved the names that torch.compile gives."""
    names = {f"embedding.embedding_bags.{table.name}.weight" for table in TABLES}
    names |= {name for name in Small().state_dict() if not name.startswith("embedding")}
    for number, whole in enumerate((True, False)):
        folder, model = tmp_path / str(number), compiled(Small(seed=1), whole=whole)
        checkpoint = Checkpoint(hotrow.save_checkpoint(folder, model, step=1))
        assert {*(table.key for table in checkpoint.tables), *checkpoint.dense} == names
        hotrow.save_model(folder / "model", model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotrow.checkpoint.parts.plain_names", lambda _: lambda name: name)
            hotrow.save_checkpoint(folder / "earlier", model, step=1)
        loads: list[tuple[Any, str, Any]] = [
            (hotrow.load_checkpoint, "", Small()),
            (hotrow.load_checkpoint, "", compiled(Small(), whole=not whole)),
            (hotrow.load_checkpoint, "earlier", compiled(Small(), whole=whole)),
            (hotrow.load_model, "model", Small()),
        ]
        for load, place, other in loads:
            load(folder / place, other)
            pairs = zip(other.state_dict().values(), model.state_dict().values(), strict=True)
            assert all(same_bits(x, y) for x, y in pairs)


class Inside(nn.Module):
    """Has the name that wrappers give to a model inside of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.module = Small(seed=seed)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_wrapped_model_may_have_a_part_named_module(wrapped: bool, tmp_path: Path) -> None:
    model, wrap = Inside(1), nn.DataParallel
    hotrow.save_checkpoint(tmp_path, wrap(model) if wrapped else model, step=1)
    hotrow.save_model(tmp_path / "model", wrap(model) if wrapped else model)
    for load, folder in (
        (hotrow.load_checkpoint, tmp_path),
        (hotrow.load_model, tmp_path / "model"),
    ):
        for rewrapped in (True, False):
            other = Inside(2)
            load(folder, wrap(other) if rewrapped else other)
            pairs = zip(other.state_dict().values(), model.state_dict().values(), strict=True)
            assert all(same_bits(x, y) for x, y in pairs)


def test_checkpoints_of_the_first_format_load() -> None:
    """Written once, by `first_format` below, and read by every version."""
    model, optimizer = first_format()
    loaded = hotrow.load_checkpoint(FIRST_FORMAT, model, random=False, optimizer=optimizer)
    assert loaded.step == 2
    assert loaded.extra == {"batches": 2, "shape": (1, 2.5)}
    embedding: Any = model[0]
    rows = torch.cat([rows for _, rows in embedding.rows("item")])
    assert rows[:, :2].tolist() == FIRST_ROWS
    assert embedding.optimizer.steps == [2]
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert model[1].weight.tolist() == [[0.25, -0.5]]


FIRST_FORMAT = Path(__file__).parents[1] / "saved" / "checkpoints-format-1"
# Of five rows that begin as 0, two were updated, one of them twice.
FIRST_ROWS = [[0.0, 0.0], [-0.125, 0.25], [0.0, 0.0], [-0.0625, 0.125], [0.0, 0.0]]


def first_format() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    table = Bag("item", 5, 2, ["item"], init=hotrow.Constant(0.0))
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(lr=0.25), strategy="all-fast")
    model = nn.Sequential(embedding, nn.Linear(2, 1, bias=False))
    return model, torch.optim.Adam(model.parameters(), lr=0.0)


def test_a_newer_format_is_refused_and_a_missing_parent_named(tmp_path: Path) -> None:
    loop = Loop()
    for step in (1, 2):
        loop.save(tmp_path, step, full_every=9)
        loop.train(step - 1, step)
    (parent, child) = saved_in(tmp_path)
    parent.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"has rows of its parent alone, and .* is no checkpoint"):
        loop.load(child)
    manifest = json.loads((child / "checkpoint.json").read_text())
    (child / "checkpoint.json").write_text(json.dumps(manifest | {"format": 3}))
    with pytest.raises(ValueError, match=r"newer hotrow: its format is 3, and this one reads 2"):
        loop.load(child)
