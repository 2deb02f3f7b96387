"""Hot and cold samples of prepared data, by their numbers: told apart once, and found again."""

from __future__ import annotations

import errno
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.data import ClickBatch, Loader, PreparedSource, SequenceLoader
from hotrow.data.sources import SubsetSource
from hotrow.support.files import Disk
from hotrow.systems.fae.hot_cold_schedule import HotColdOrder, Separated, ShuffleRate
from hotrow.systems.fae.separate import _others, separate
from samples import Memory, columns, numbers_of
from stored_samples import BIG, prepared


def check(batch: ClickBatch) -> list[int]:
    return numbers_of(batch, BIG)


def one_in(every: int) -> Callable[[ClickBatch], Tensor]:
    """0: none."""

    def popular(batch: ClickBatch) -> Tensor:
        number = torch.tensor(check(batch))
        return number % every == 0 if every else torch.zeros(len(number)).bool()

    return popular


def epochs_of(found: Separated, percent: float = 50) -> list[list[tuple[str, list[int]]]]:
    epochs: list[list[tuple[str, list[int]]]] = [[] for _ in range(found.epochs)]
    for segment in HotColdOrder(found, rate=ShuffleRate(percent)):
        epochs[segment.epoch] += [(segment.kind, check(batch)) for batch in segment]
    return epochs


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    on_disk=st.booleans(),
    kept=st.booleans(),
    batch_size=st.integers(1, 40),
    mixed=st.integers(1, 40),
    every=st.sampled_from([0, 1, 2, 7, 1000]),
    percent=st.sampled_from([1.0, 50.0]),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    drop_last=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:none of the .* samples is hot")
def test_every_sample_comes_once_an_epoch_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    on_disk: bool,
    kept: bool,
    batch_size: int,
    mixed: int,
    every: int,
    percent: float,
    seed: int | None,
    drop_last: bool,
) -> None:
    total = sum(sizes)
    source: Any = Memory(sizes, jagged=True, base=BIG)
    folder = tmp_path_factory.mktemp("data") if on_disk or kept else None
    if on_disk:
        assert folder is not None
        source = prepared(folder / "data", sizes)
    loader = Loader(
        source, batch_size=min(batch_size, total) if drop_last else batch_size, mixed=mixed,
        seed=seed, epochs=2, drop_last=drop_last, workers=2,
    )  # fmt: skip
    sets = folder / "sets" if kept and folder is not None else None
    found = separate(loader, one_in(every), folder=sets, key="rows")
    assert found.epochs == 2
    end = total - total % loader.batch_size if drop_last else total
    hot = list(range(0, total, every)) if every else []
    cold = sorted(set(range(total)) - set(hot))
    assert found.samples == end
    for batches in epochs_of(found, percent):
        numbers = [number for _, mine in batches for number in mine]
        assert len(numbers) == len(set(numbers)) == end  # as many as the loader has
        for kind, every_one in (("hot", hot), ("cold", cold)):
            mine = [each for name, each in batches if name == kind]
            assert all(len(each) == loader.batch_size for each in mine[:-1])
            numbers = [number for each in mine for number in each]
            assert set(numbers) <= set(every_one)
            if end == total:
                assert sorted(numbers) == every_one
            if seed is None:
                assert numbers == [number for number in every_one if number < end]


def test_only_the_samples_asked_for_are_read(tmp_path: Path) -> None:
    prepared(tmp_path, [20, 0, 1, 30])
    source = PreparedSource(tmp_path, "train", dense=["same"], block=8)
    numbers = np.array([0, 3, 19, 20, 21, 22, 49, 50])
    wanted, chosen = columns(numbers, BIG), source.take(numbers)
    subset = SubsetSource(source, numbers)
    assert subset.sizes.sum() == len(numbers)
    assert subset.sizes.min() > 0
    backwards = subset.read(np.arange(len(subset.sizes))[::-1])
    assert sorted(backwards.ids[:, 0].tolist()) == numbers.tolist()
    for found in (chosen, subset.read(np.arange(len(subset.sizes)))):
        np.testing.assert_array_equal(found.ids, wanted.ids)
        np.testing.assert_array_equal(found.dense, wanted.dense[:, 1:])
        np.testing.assert_array_equal(found.label, wanted.label)
        np.testing.assert_array_equal(found.jagged["list"].offsets, wanted.jagged["list"].offsets)
        np.testing.assert_array_equal(found.jagged["list"].values, wanted.jagged["list"].values)


def test_a_set_goes_on_from_any_batch(tmp_path: Path) -> None:
    loader = Loader(prepared(tmp_path, [40, 30, 5]), batch_size=6, mixed=20, seed=2, epochs=2)
    cold: Any = separate(loader, one_in(4)).cold
    every = [check(each) for each in cold.batches()]
    assert len(every) == 2 * cold.batches_per_epoch
    assert every[: cold.batches_per_epoch] != every[cold.batches_per_epoch :]
    for start in range(len(every) + 1):
        assert [check(each) for each in cold.batches(start)] == every[start:]


def test_others_are_all_that_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.systems.fae.separate._PART", 4)
    for hot in ([], [0], [3, 4], [9], [0, 1, 2, 3], list(range(10))):
        found = np.concatenate(list(_others(np.array(hot, np.int64), 10)))
        assert found.tolist() == sorted(set(range(10)) - set(hot))


def test_threads_ask_and_the_work_is_told(tmp_path: Path) -> None:
    names, told = set(), []

    def popular(batch: ClickBatch) -> Tensor:
        names.add(threading.current_thread().name)
        return batch.label == 1

    loader = Loader(prepared(tmp_path, [40, 30, 5]), batch_size=6, workers=2)
    separate(loader, popular, advance=told.append)
    assert threading.current_thread().name not in names
    assert sum(told) == 75


# -- Kept on disk ------------------------------------------------------------------------


class Asked:
    """Counts how often it was asked."""

    def __init__(self, every: int = 3) -> None:
        self.times, self._popular = 0, one_in(every)

    def __call__(self, batch: ClickBatch) -> Tensor:
        self.times += 1
        return self._popular(batch)


@pytest.fixture
def data(tmp_path: Path) -> PreparedSource:
    return prepared(tmp_path / "data", [40, 30, 5])


def run(
    data: PreparedSource, folder: Path, *, key: str | None = "rows", every: int = 3, **options: Any
) -> Any:
    """(samples by epoch, whether they were found again), which must not differ from fresh ones."""
    asked = Asked(every)
    loader = Loader(data, **{"batch_size": 6, "seed": 1, **options})
    found = separate(loader, asked, folder=folder, key=key)
    assert found.reused == (asked.times == 0)
    assert epochs_of(found) == epochs_of(separate(loader, one_in(every)))
    return found.reused


def test_sets_are_written_once_and_found_again(data: PreparedSource, tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    for _ in range(2):  # without a key no set is found again
        assert not run(data, sets, key=None)
        assert not (sets / "sets.json").exists()
    assert not run(data, sets)
    written = {each.name: each.stat().st_mtime_ns for each in sets.iterdir()}
    assert set(written) == {"sets.json", "hot.numbers", "cold.numbers"}
    assert np.fromfile(sets / "hot.numbers", "<i8").tolist() == list(range(0, 75, 3))
    assert run(data, sets)
    assert run(data, sets, batch_size=9, seed=5)  # which change no set
    assert {each.name: each.stat().st_mtime_ns for each in sets.iterdir()} == written


def test_sets_of_something_else_are_made_again(data: PreparedSource, tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    run(data, sets)
    with pytest.warns(UserWarning, match="sets of other hot rows; samples are told apart again"):
        assert not run(data, sets, key="others", every=5)
    assert run(data, sets, key="others", every=5)
    other = prepared(tmp_path / "other", [40, 30, 5], start=1)
    with pytest.warns(UserWarning, match="sets of other samples; samples are told apart again"):
        found = separate(Loader(other, batch_size=6), one_in(5), folder=sets, key="others")
    numbers = Counter(number for _, mine in epochs_of(found)[0] for number in mine)
    assert numbers == Counter(range(1, 76))


def test_sets_for_other_features_are_made_again(data: PreparedSource, tmp_path: Path) -> None:
    def again(loader: Any) -> Separated:
        return separate(loader, lambda batch: batch.label == 1, folder=tmp_path / "s", key="rows")

    again(Loader(data, batch_size=6))
    steps: dict[str, Any] = {"histories": {"a": "list"}, "padding": {"a": 0}, "batch_size": 6}
    for loader in (
        Loader(data, batch_size=6, features=["a"]),
        SequenceLoader(data, steps=3, **steps),
        SequenceLoader(data, steps=4, **steps),
    ):
        with pytest.warns(UserWarning, match="other samples"):
            again(loader)
    found = again(SequenceLoader(data, steps=4, **steps))
    assert found.reused
    assert sorted(len(batch) for batch in found.hot.batches()) == [1, *[6] * 6]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))


def set_key(**changed: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return change


NOTHING = {"file": "x", "bytes": 8, "sha256": ""}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("hot.numbers", cut, "hot.numbers has 192 bytes instead of 200"),
        ("cold.numbers", flip, "cold.numbers has changed since it was written"),
        ("cold.numbers", Path.unlink, "cold.numbers is missing"),
        ("sets.json", cut, "is not valid JSON"),
        ("sets.json", set_key(format=9), "is of format 9, not 1"),
        ("sets.json", set_key(files={}), "files: it lacks hot"),
        (
            "sets.json",
            set_key(files={"hot": NOTHING, "cold": NOTHING | {"file": "y"}}),
            "8 and 8 bytes are not 75 numbers",
        ),
    ],
)
def test_what_is_damaged_is_said_and_made_again(
    data: PreparedSource, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    sets = tmp_path / "sets"
    run(data, sets)
    damage(sets / name)
    with pytest.warns(UserWarning, match=f"{message}.*; samples are told apart again"):
        assert not run(data, sets)
    assert run(data, sets)


def test_sets_that_were_not_finished_are_none(
    data: PreparedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = tmp_path / "sets"
    run(data, sets)
    plain = Disk.open

    def full(self: Disk, path: Path) -> IO[bytes]:
        if path.name.startswith("cold"):
            raise OSError(errno.ENOSPC, "no space")
        return plain(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "open", full)
        with (
            pytest.raises(OSError, match="the disk is full"),
            pytest.warns(UserWarning, match="other hot rows"),
        ):
            run(data, sets, key="others", every=5)
    assert not run(data, sets)  # the manifest went first, so old and new are never mixed
    assert run(data, sets)


def test_an_error_while_asking_leaves_no_sets(data: PreparedSource, tmp_path: Path) -> None:
    def wrong(batch: ClickBatch) -> Tensor:
        raise RuntimeError("no hot rows are known")

    with pytest.raises(RuntimeError, match="no hot rows are known"):
        separate(Loader(data, batch_size=6), wrong, folder=tmp_path / "sets", key="rows")
    assert list((tmp_path / "sets").iterdir()) == []
    with pytest.raises(ValueError, match="each of 75 samples was expected, and 74 came"):
        separate(Loader(data, batch_size=6), lambda batch: batch.label[1:] == 1)
