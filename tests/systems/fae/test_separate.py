"""Hot and cold samples of any loader: each once an epoch, as it was, in batches of one kind."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hotrow
from hotrow.systems.fae.hot_cold_schedule import HotColdOrder, Separated, ShuffleRate
from hotrow.systems.fae.separate import MOST_BYTES, SetOptions, separate


class Clicks(NamedTuple):
    """Of sample i: its number, an id beyond float32's whole numbers, a list of i % 4 ids."""

    number: Tensor
    more: dict[str, Any]


BIG = (1 << 40) + 1  # and 2^24 + 1 in an int32
CENTRE = (1 << 24) + 1


def clicks(numbers: range) -> Clicks:
    number = torch.arange(numbers.start, numbers.stop)
    lengths = torch.cat([number % 4, torch.ones_like(number)])
    values = torch.cat([number.repeat_interleave(number % 4) + BIG, number + BIG])
    return Clicks(
        number,
        {
            "small": (number + CENTRE).int()[:, None].repeat(1, 2),
            "half": torch.stack([number % 200, number % 3], 1).bfloat16(),
            "flag": number % 5 == 0,
            "ids": hotrow.KeyedJaggedTensor(
                ["f", "g"], values, lengths=lengths, weights=values.double() / 2
            ),
            "name": "clicks",
        },
    )


def check(batch: Clicks) -> list[int]:
    """The samples of a batch; that everything of theirs came along."""
    number = batch.number
    size, more = len(number), batch.more
    assert torch.equal(more["small"].long(), (number + CENTRE)[:, None].repeat(1, 2))
    assert more["half"].dtype == torch.bfloat16
    assert more["half"][:, 0].tolist() == (number % 200).tolist()
    assert torch.equal(more["flag"], number % 5 == 0)
    assert more["name"] == "clicks"
    ids = more["ids"]
    assert torch.equal(ids.lengths(), torch.cat([number % 4, torch.ones_like(number)]))
    assert torch.equal(ids.values()[-size:], number + BIG)
    assert torch.equal(ids.values()[:-size], number.repeat_interleave(number % 4) + BIG)
    assert torch.equal(ids.weights_or_none(), ids.values().double() / 2)
    return [int(each) for each in number]


def is_third(batch: Clicks) -> Tensor:
    return batch.number % 3 == 0


def loader(samples: int, size: int) -> list[Clicks]:
    return [clicks(range(low, min(low + size, samples))) for low in range(0, samples, size)]


def epochs_of(found: Separated, percent: float = 50) -> list[list[tuple[str, list[int]]]]:
    epochs: list[list[tuple[str, list[int]]]] = [[] for _ in range(found.epochs)]
    for segment in HotColdOrder(found, rate=ShuffleRate(percent)):
        epochs[segment.epoch] += [(segment.kind, check(batch)) for batch in segment]
    return epochs


def small_blocks(**options: Any) -> SetOptions:
    """Blocks and stretches of a few samples, so that there are many of them."""
    return SetOptions(block=7, mixed=20, **options)


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 90),
    loaded=st.integers(1, 40),
    every=st.sampled_from([0, 1, 3, 50]),  # 0: none is hot, 1: all are
    percent=st.sampled_from([1.0, 50.0]),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    most_bytes=st.sampled_from([0, 900, MOST_BYTES]),  # file, both, memory
)
@pytest.mark.filterwarnings("ignore:none of the .* samples is hot")
def test_every_sample_comes_once_an_epoch_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    samples: int,
    loaded: int,
    every: int,
    percent: float,
    seed: int | None,
    most_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("sets")

    def popular(batch: Clicks) -> Tensor:
        return batch.number % every == 0 if every else torch.zeros(len(batch.number)).bool()

    found = separate(
        iter(loader(samples, loaded)),  # read once
        popular,
        small_blocks(epochs=2, seed=seed),
        folder=folder, most_bytes=most_bytes,
    )  # fmt: skip
    assert list(folder.iterdir()) == []  # nothing to be left behind
    size = min(loaded, samples)
    hot = [number for number in range(samples) if every and number % every == 0]
    wanted = {"hot": hot, "cold": sorted(set(range(samples)) - set(hot))}
    for batches in epochs_of(found, percent):
        for kind, here in (("hot", found.hot), ("cold", found.cold)):
            mine = [numbers for name, numbers in batches if name == kind]
            assert len(mine) == here.batches_per_epoch
            assert all(len(numbers) == size for numbers in mine[:-1])  # one short tail
            numbers = [number for batch in mine for number in batch]
            assert (numbers if seed is None else sorted(numbers)) == wanted[kind]


def test_a_file_gives_what_memory_gives(tmp_path: Path) -> None:
    options = small_blocks(epochs=2, seed=1)
    in_memory = separate(loader(100, 16), is_third, options)
    in_file = separate(loader(100, 16), is_third, options, folder=tmp_path, most_bytes=0)
    assert epochs_of(in_memory) == epochs_of(in_file)


def test_a_seed_decides_and_every_epoch_differs() -> None:
    def order(seed: int) -> list[Any]:
        return epochs_of(separate(loader(100, 16), is_third, small_blocks(epochs=2, seed=seed)))

    assert order(1) == order(1) != order(2)
    first, second = order(1)
    assert first != second


def test_a_data_loader_is_read_once_for_all_epochs() -> None:
    data = TensorDataset(torch.arange(50), torch.rand(50, 3))
    given = DataLoader(data, batch_size=8)
    told = []
    found = separate(given, lambda batch: batch[0] < 20, SetOptions(epochs=3), advance=told.append)
    assert sum(told) == 50
    for segment in HotColdOrder(found):
        for number, values in segment:
            assert torch.equal(values, data.tensors[1][number])
            assert bool((number < 20).all()) == (segment.kind == "hot")
    assert (found.hot.samples, found.cold.samples) == (20, 30)


def test_what_a_loader_writes_over_is_kept() -> None:
    buffer = torch.empty(4, dtype=torch.int64)

    def reusing() -> Iterator[Tensor]:
        for first in range(0, 12, 4):
            buffer.copy_(torch.arange(first, first + 4))
            yield buffer

    found = separate(reusing(), lambda batch: batch % 2 == 0, SetOptions(seed=None))
    assert torch.cat(list(found.hot.batches())).tolist() == [0, 2, 4, 6, 8, 10]


def test_batches_have_the_size_of_the_first_one_with_samples() -> None:
    given = [torch.arange(0), torch.arange(4), torch.arange(4, 8)]
    found = separate(given, lambda batch: batch % 2 == 0, SetOptions(seed=None))
    assert [batch.tolist() for batch in found.hot.batches()] == [[0, 2, 4, 6]]


def test_threads_end_with_the_loop() -> None:
    found = separate(loader(100, 16), is_third)
    before = threading.active_count()
    for segment in HotColdOrder(found):
        next(iter(segment))
        break
    assert threading.active_count() == before


# -- Bad input ---------------------------------------------------------------------------


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no sample to train with$"):
        separate([], is_third)


def test_more_than_fits_into_memory_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="more than 100 bytes of memory: give folder="):
        separate(loader(20, 6), is_third, most_bytes=100)


def test_a_full_disk_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Full(BytesIO):
        def write(self, part: object) -> int:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("hotrow.systems.fae.separate.TemporaryFile", lambda dir: Full())
    with pytest.raises(OSError, match=r"the disk is full: .*samples was not written"):
        separate(loader(20, 6), is_third, folder=tmp_path, most_bytes=0)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (lambda size: torch.zeros(size), TypeError, r"instead of a tensor of torch.float32, shape"),
        (lambda size: [True] * size, TypeError, "instead of list"),
        (lambda size: torch.ones(size, 1).bool(), TypeError, r"shape \(6, 1\)"),
        (lambda size: torch.ones(size + 1).bool(), ValueError, "of 7 samples holds a tensor of"),
    ],
)
def test_another_answer_than_a_bool_per_sample_is_refused(
    said: Callable[[int], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        separate(loader(20, 6), lambda batch: said(len(batch.number)))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            [{"a": torch.ones(2)}, {"a": torch.ones(2).int()}],
            "torch.int32 instead of torch.float32",
        ),
        ([{"a": torch.ones(2), "n": "x"}, {"a": torch.ones(2), "n": "y"}], "'y' instead of 'x'"),
        ([{"a": torch.ones(2, 3)}, {"a": torch.ones(2, 4)}], "batch 1 .* 4 instead of 3"),
        ([{"a": torch.ones(2), "b": np.ones(2)}], "holds a numpy.ndarray, of which samples cannot"),
    ],
)
def test_batches_whose_samples_cannot_be_mixed_are_refused(
    batches: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        separate(batches, lambda batch: batch["a"].flatten()[:2] == 1)


def test_what_is_another_in_each_batch_is_for_functions() -> None:
    batches = [{"a": torch.arange(4) + 4 * i, "names": list("abcd"), "i": i} for i in range(3)]

    def take(batch: dict[str, Any], places: Tensor) -> dict[str, Any]:
        names = [batch["names"][place] for place in places]
        return {"a": batch["a"][places], "names": names, "i": batch["i"]}

    def join(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        names = [name for batch in batches for name in batch["names"]]
        return {"a": torch.cat([batch["a"] for batch in batches]), "names": names, "i": 0}

    found = separate(batches, lambda batch: batch["a"] % 2 == 0, SetOptions(take=take, join=join))
    for each in found.hot.batches():
        assert each["names"] == ["abcd"[place % 4] for place in each["a"]]
    with pytest.raises(ValueError, match=r"batch 1 .*: 1 instead of 0; .*take= and join="):
        separate([{**each, "names": None} for each in batches], lambda batch: batch["a"] % 2 == 0)
