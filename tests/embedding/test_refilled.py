"""Loaders that fill the same buffers again, and ids that change after they were planned."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hotrow
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.held_batches import Kept
from hotrow.systems.fae.separate import SetOptions, separate

ROWS, SIZE, STEPS = 60, 8, 24
TABLES = [
    hotrow.EmbeddingBagConfig("a", ROWS, 4, ["f"]),
    hotrow.EmbeddingBagConfig("b", ROWS, 4, ["g"]),
]
Parts = dict[str, Tensor]


def build(strategy: str, budget: int = 6000) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        TABLES, hotrow.SGD(lr=0.1), budget, strategy=strategy, seed=1
    )


def some(count: int = STEPS, seed: int = 0) -> list[Parts]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "ids": torch.randint(ROWS, (SIZE, 2), generator=draw),
            "dense": torch.rand(SIZE, 3, generator=draw),
            "label": torch.full((SIZE,), float(number)),
        }
        for number in range(count)
    ]


def copies(batches: list[Parts]) -> list[Parts]:
    return [{name: each.clone() for name, each in batch.items()} for batch in batches]


@dataclass
class Seen:
    """What a loop was given, and what came of it."""

    labels: list[float]
    losses: list[Tensor]
    weights: dict[str, Tensor]

    def same_as(self, other: Seen) -> bool:
        assert self.labels == other.labels
        return all(map(torch.equal, self.losses, other.losses)) and all(
            torch.equal(each, other.weights[name]) for name, each in self.weights.items()
        )


def parts_of(batch: Any) -> Parts:
    return batch


def run(
    strategy: str, loader: Any, parts: Callable[[Any], Parts] = parts_of, **options: Any
) -> Seen:
    embedding, labels, losses = build(strategy), [], []
    for batch in hotrow.ahead(loader, embedding, ids=lambda b: parts(b)["ids"], **options):
        mine = parts(batch)
        labels.append(float(mine["label"][0]))
        assert (mine["label"] == mine["label"][0]).all()
        out = embedding(mine["ids"]).values().sum(1)
        loss = (out * mine["dense"].sum(1) - mine["label"]).square().mean()
        loss.backward()
        losses.append(loss.detach())
    embedding.check()
    return Seen(labels, losses, {k: v.clone() for k, v in embedding.state_dict().items()})


# -- loaders -------------------------------------------------------------------------------


def by_data(there: Tensor, part: Tensor) -> None:
    """Write in a way that torch's versions do not see."""
    there.data.copy_(part)


def by_numpy(there: Tensor, part: Tensor) -> None:
    there.numpy()[:] = part.numpy()


def refilled(
    batches: list[Parts], write: Any = Tensor.copy_, buffers: int = 1, *, anew: bool = False
) -> Iterator[Parts]:
    """Fill the same memory for each batch; `anew`: every batch has new tensors of that memory."""
    rooms = copies(batches[:1] * buffers)
    for number, batch in enumerate(batches):
        room = rooms[number % buffers]
        for name, part in batch.items():
            write(room[name], part)
        yield (
            {name: torch.from_numpy(x.numpy()) for name, x in room.items()} if anew else room.copy()
        )


def into_one_dict(batches: list[Parts]) -> Iterator[Parts]:
    """The tensors are new ones, but the dict that holds them is the same."""
    room: Parts = {}
    for batch in copies(batches):
        room.update(batch)
        yield room


def by_a_thread(batches: list[Parts], buffers: int = 8) -> Iterator[Parts]:
    """A thread refills a buffer as soon as the batch after it was asked for."""
    free: Queue[int] = Queue()
    full: Queue[int | None] = Queue()
    rooms = [{name: x.numpy().copy() for name, x in batches[0].items()} for _ in range(buffers)]
    for number in range(buffers):
        free.put(number)

    def fill() -> None:
        for batch in batches:
            number = free.get()
            for name, part in batch.items():
                rooms[number][name][:] = part.numpy()
            full.put(number)
        full.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    while (number := full.get()) is not None:
        yield {name: torch.from_numpy(array) for name, array in rooms[number].items()}
        free.put(number)
    thread.join()


REFILLS: dict[str, Callable[[list[Parts]], Iterator[Parts]]] = {
    "one-tensor": refilled,
    "two-tensors": partial(refilled, buffers=2),
    "three-tensors": partial(refilled, buffers=3),
    "data": partial(refilled, write=by_data),
    "three-data": partial(refilled, write=by_data, buffers=3),
    "one-array": partial(refilled, write=by_numpy, anew=True),
    "two-arrays": partial(refilled, write=by_numpy, buffers=2, anew=True),
    "three-arrays": partial(refilled, write=by_numpy, buffers=3, anew=True),
    "one-dict": into_one_dict,
    "thread": by_a_thread,
}


@cache
def expected_of(strategy: str) -> Seen:
    return run(strategy, copies(some()))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("refill", REFILLS)
def test_a_loader_may_fill_its_buffers_again(refill: str, strategy: str) -> None:
    assert expected_of(strategy).labels == list(range(STEPS))
    assert run(strategy, REFILLS[refill](some())).same_as(expected_of(strategy))


# -- forms of batches ----------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    ids: Tensor
    dense: Tensor
    label: Tensor


class Plain:
    """Neither a container nor a dataclass; it has a data set that nobody should copy."""

    data_set: Any = object()

    def __init__(self, parts: Parts) -> None:
        self.ids, self.dense, self.label = parts["ids"], parts["dense"], parts["label"]
        self.source = Forbidden()


class Slotted:
    __slots__ = ("ids", "rest")

    def __init__(self, parts: Parts) -> None:
        self.ids, self.rest = parts["ids"], {name: parts[name] for name in ("dense", "label")}


class Forbidden:
    def __copy__(self) -> Any:
        raise AssertionError("nothing of a loader is copied but its batches")

    __deepcopy__ = __copy__


class Called(Plain):
    def __call__(self) -> None:
        """An object that can be called is a batch like any other."""


class ReadOnly(Mapping[str, Tensor]):
    def __init__(self, parts: Parts) -> None:
        self.parts = dict(parts)

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Listed(list[Tensor]):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.values())


def named(batch: Any) -> Parts:
    return dict(zip(("ids", "dense", "label"), batch, strict=True))


class Nested:
    def __init__(self, parts: Parts) -> None:
        self.inner = Plain(parts)


FORMS: dict[str, tuple[Callable[[Parts], Any], Callable[[Any], Parts]]] = {
    "tuple": (lambda parts: tuple(parts.values()), named),
    "nested": (
        lambda parts: [{"in": {"ids": parts["ids"]}}, (parts["dense"], [parts["label"]])],
        lambda b: {"ids": b[0]["in"]["ids"], "dense": b[1][0], "label": b[1][1][0]},
    ),
    "mapping": (UserDict, lambda batch: batch.data),
    "dataclass": (lambda parts: Frozen(**parts), vars),
    "object": (Plain, vars),
    "slots": (Slotted, lambda batch: {"ids": batch.ids, **batch.rest}),
    "called": (Called, vars),
    "read-only": (ReadOnly, lambda batch: batch.parts),
    "listed": (Listed, named),
    "deque": (lambda parts: deque(parts.values()), named),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("refill", ["one-tensor", "two-arrays"])
def test_batches_of_any_form_are_copied_as_they_are(refill: str, form: str) -> None:
    make, parts = FORMS[form]
    loader = (make(each) for each in REFILLS[refill](some()))
    assert run("lookahead", loader, parts).same_as(expected_of("lookahead"))


def test_a_copy_is_of_the_class_that_the_loader_gave() -> None:
    batch = Plain(some(1)[0])
    (found,) = hotrow.ahead(iter([batch]), build("lookahead"), ids=lambda b: b.ids)
    assert type(found) is Plain
    assert found is not batch
    assert found.source is batch.source
    assert torch.equal(found.label, batch.label)


def test_jagged_ids_in_an_object_are_copied() -> None:
    def loader(parts: Iterator[Parts]) -> Iterator[Any]:
        for each in parts:
            batch = Plain(each)
            values, offsets = each["ids"].view(-1), torch.arange(2 * SIZE + 1)
            batch.ids = hotrow.KeyedJaggedTensor(["f", "g"], values, offsets=offsets)
            yield batch

    stream = hotrow.ahead(loader(refilled(some())), build("lookahead"), ids=lambda b: b.ids)
    found = [(b.ids.values().clone(), b.label.clone()) for b in stream]
    for (ids, label), parts in zip(found, some(), strict=True):
        assert torch.equal(ids, parts["ids"].flatten())
        assert torch.equal(label, parts["label"])


def test_ids_in_an_object_that_is_not_copied_are_an_error() -> None:
    loader = map(Nested, refilled(some()))
    with pytest.raises(RuntimeError, match=r"batch 0 of this pass.* its ids"):
        list(hotrow.ahead(loader, build("lookahead"), ids=lambda b: b.inner.ids))


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS * SIZE

    def __getitem__(self, place: int) -> Tensor:
        draw = torch.Generator().manual_seed(place)
        return torch.randint(ROWS, (3,), generator=draw)


class Collate:
    """Puts batches together in one buffer."""

    def __init__(self) -> None:
        self.room = torch.empty(SIZE, 3, dtype=torch.int64)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples, out=self.room)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_may_put_batches_together_in_one_buffer(workers: int) -> None:
    collate = None if workers else Collate()  # what workers send is shared with them
    data = DataLoader(Samples(), batch_size=SIZE, collate_fn=collate, num_workers=workers)
    expected = list(DataLoader(Samples(), batch_size=SIZE))
    stream = hotrow.ahead(data, build("lookahead"), ids=lambda batch: batch[:, :2])
    assert all(map(torch.equal, [x.clone() for x in stream], expected))


class FromLengths:
    """As TorchRec's KeyedJaggedTensor: offsets are computed when they are first asked for."""

    def __init__(self, parts: Parts) -> None:
        self._values, self._lengths = parts["ids"].t().flatten(), torch.ones(2 * SIZE).long()
        self._offsets: Tensor | None = None

    def keys(self) -> list[str]:
        return ["f", "g"]

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        if self._offsets is None:
            self._offsets = torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0))
        return self._offsets


@pytest.mark.parametrize("strategy", ["lookahead", "scratchpipe"])
def test_a_batch_may_compute_tensors_when_it_is_asked_for_ids(strategy: str) -> None:
    embedding, count = build(strategy), 0
    for batch in hotrow.ahead(map(FromLengths, some(150)), embedding):
        embedding(batch).values().square().sum().backward()
        count += 1
    assert count == 150


# -- what is read when ---------------------------------------------------------------------

# How many batches may be read before the one before them has been trained; others read many.
AHEAD = dict.fromkeys(["all-fast", "cpu", "uncached", "static", "lru"], 0)
AHEAD |= {"hybrid": 1, "static-hybrid": 1}


def most_ahead(strategy: str, **options: Any) -> int:
    """The most batches that were read beyond the one that was yielded last."""
    read = most = 0

    def loader() -> Iterator[Tensor]:
        nonlocal read, most
        for batch in some():
            read += 1
            most = max(most, read - yielded - 1)
            yield batch["ids"]

    yielded = 0
    embedding = build(strategy)
    for ids in hotrow.ahead(loader(), embedding, **options):
        yielded += 1
        most = max(most, read - yielded)
        embedding(ids).values().sum().backward()
    assert yielded == STEPS
    return most


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_reads_as_far_ahead_as_documented(strategy: str) -> None:
    found = most_ahead(strategy)
    assert found == AHEAD[strategy] if strategy in AHEAD else found > 2
    assert most_ahead(strategy, depth=0) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_depth_of_zero_gives_the_same_bits(strategy: str) -> None:
    found = run(strategy, REFILLS["one-array"](some()), depth=0)
    assert found.same_as(expected_of(strategy))


# -- who is copied -------------------------------------------------------------------------


def given(loader: Any, **options: Any) -> list[int]:
    """Where the labels lie of what a loop was given."""
    stream = hotrow.ahead(loader, build("lookahead"), ids=lambda b: b["ids"], **options)
    return [batch["label"].data_ptr() for batch in stream]


def test_a_loader_that_gives_new_memory_is_copied_at_first_alone() -> None:
    batches = some(200)
    places = given(iter(batches))
    own = [place == batch["label"].data_ptr() for place, batch in zip(places, batches, strict=True)]
    assert not any(own[:64])
    assert all(own[-64:])


def test_an_epoch_goes_on_where_the_one_before_ended() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Parts]:
            return iter(batches)

    batches, loader = some(40), Loader()
    own = [
        place == batch["label"].data_ptr()
        for _ in range(4)
        for place, batch in zip(given(loader), batches, strict=True)
    ]
    assert not any(own[:64])
    assert all(own[-40:])


def test_a_loader_does_not_keep_batches_after_a_pass() -> None:
    labels: list[weakref.ref[Tensor]] = []

    class Loader:
        def __iter__(self) -> Iterator[Parts]:
            for batch in some(80):
                labels.append(weakref.ref(batch["label"]))
                yield batch

    loader, embedding = Loader(), build("lookahead")
    for batch in hotrow.ahead(loader, embedding, ids=lambda b: b["ids"]):
        embedding(batch["ids"]).values().sum().backward()
    del batch
    gc.collect()
    assert len(labels) == 80
    assert not [label for label in labels if label() is not None]


def test_a_list_is_not_copied() -> None:
    batch = some(1)[0]
    assert set(given([batch] * 20)) == {batch["label"].data_ptr()}


def test_slices_of_one_tensor_are_not_copied_for_good() -> None:
    ids = torch.randint(ROWS, (200, SIZE, 2))
    labels = torch.rand(200, SIZE)
    places = given({"ids": x, "label": y} for x, y in zip(ids, labels, strict=True))
    assert places[-1] == labels[-1].data_ptr()


def test_a_batch_that_comes_again_and_again_is_no_error() -> None:
    batches = some(3)
    found = run("lookahead", (batches[number % 3] for number in range(STEPS)))
    assert found.labels == [number % 3 for number in range(STEPS)]


def test_a_ring_that_is_shorter_than_the_window_is_noticed() -> None:
    """The window grows step by step, and comes to hold more batches than the ring has."""
    batches = some(400)
    found = run("lookahead", refilled(batches, by_numpy, 30, anew=True), depth=60)
    assert found.labels == list(range(400))


def late(batches: list[Parts], write: Callable[[Tensor, Tensor], None]) -> Iterator[Parts]:
    """After 200 batches in new memory, a single buffer."""
    yield from copies(batches[:200])
    room = copies(batches[:1])[0]
    for batch in batches[200:]:
        for name, part in batch.items():
            write(room[name], part)
        yield room


@pytest.mark.parametrize("write", ["torch", "numpy"])
def test_a_loader_that_refills_late_is_an_error_or_right(write: str) -> None:
    """What is wrong is never yielded; the message names batch, tensor and remedy."""

    loader = late(some(240), Tensor.copy_ if write == "torch" else by_numpy)
    labels: list[float] = []
    embedding = build("lookahead")

    def loop() -> None:
        for batch in hotrow.ahead(loader, embedding, ids=lambda b: b["ids"]):
            labels.append(float(batch["label"][0]))
            embedding(batch["ids"]).values().sum().backward()

    what = r"batch\['ids'\]" if write == "torch" else "its ids"
    said = rf"batch 200 of this pass, counted from 0, was changed .*: {what}\. .*batch\.clone\(\)"
    with pytest.raises(RuntimeError, match=said):
        loop()
    assert labels == list(range(200))
    embedding.check()


def test_a_change_of_labels_alone_is_an_error() -> None:
    def loader() -> Iterator[Parts]:
        before = None
        for number, batch in enumerate(some(120)):
            if number > 100 and before is not None:
                before["label"].zero_()
            yield batch
            before = batch

    stream = hotrow.ahead(loader(), build("lookahead"), ids=lambda b: b["ids"])
    with pytest.raises(RuntimeError, match=r"batch 100 .* training: batch\['label'\]\."):
        list(stream)


def test_a_loop_may_change_slices_of_one_tensor() -> None:
    """All of them have one version, which then tells nothing of the others."""
    ids, dense = torch.randint(ROWS, (150, SIZE, 2)), torch.rand(150, SIZE)
    loader = ({"ids": x, "dense": y} for x, y in zip(ids, dense, strict=True))
    embedding = build("lookahead")
    for batch in hotrow.ahead(loader, embedding, ids=lambda b: b["ids"]):
        batch["dense"].clamp_(max=0.5)
        embedding(batch["ids"]).values().sum().backward()


# -- ids that change after a batch was yielded ---------------------------------------------


@pytest.mark.parametrize("part", ["values", "offsets"])
def test_jagged_ids_that_a_loop_changes_are_looked_up_as_they_are(part: str) -> None:
    batch = hotrow.KeyedJaggedTensor(
        ["f", "g"], torch.tensor([1, 2, 3, 4]), offsets=torch.tensor([0, 1, 2, 3, 4])
    )
    embedding = build("lookahead")
    for ids in hotrow.ahead([batch], embedding):
        if part == "values":
            ids.values().numpy()[1] = 9
        else:
            ids.offsets().numpy()[1] = 0
        with pytest.warns(UserWarning, match="changed in place since"):
            found = embedding(ids).values()
    embedding.eval()
    assert torch.equal(found.detach(), embedding(batch).values())


# -- systems that hold batches -------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        budget = hotrow.Budget((hotrow.Share(70, 64, dense_map=True),), window_bytes=1 << 20)
        self.embedding = hotrow.EmbeddingBagCollection(
            TABLES, hotrow.SGD(lr=0.5), budget, strategy=strategy, seed=1
        )
        self.top = nn.Linear(11, 1)

    def forward(self, batch: Parts) -> Tensor:
        vectors = self.embedding(batch["ids"]).values()
        logits: Tensor = self.top(torch.cat([batch["dense"], vectors], 1)).squeeze(1)
        return logits


class Again:
    """Batches in one set of buffers, as often as they are asked for."""

    def __init__(self, refill: str | None, batches: list[Parts]) -> None:
        self._refill, self._batches = refill, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Parts]:
        if self._refill is None:
            return iter(copies(self._batches))
        return iter(REFILLS[self._refill](self._batches))


def clicks(count: int, kind: torch.dtype = torch.float32) -> list[Parts]:
    """A few rows have most lookups, so that some samples are hot."""
    draw = torch.Generator().manual_seed(3)
    return [
        {
            "ids": (torch.rand(SIZE, 2, generator=draw) ** 4 * ROWS).long(),
            "dense": torch.rand(SIZE, 3, generator=draw),
            "label": torch.randint(0, 2, (SIZE,), generator=draw).to(kind),
        }
        for _ in range(count)
    ]


def trainer_of(strategy: str, system: Any = None) -> hotrow.Trainer[Parts]:
    model = Model(strategy)
    return hotrow.Trainer(
        model,
        functional.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch["ids"],
        labels=lambda batch: batch["label"],
        system=system,
    )


def slipstream(**options: Any) -> hotrow.Slipstream:
    return hotrow.Slipstream(
        target=0.4, tolerance=0.2, watched=0.1, sample_rate=0.2, hot_budget="80%",
        validate_every=0, recheck_every=10, **options,
    )  # fmt: skip


class Through:
    """Passes the loader's batches on."""

    def attach(self, trainer: Any) -> None: ...

    def passes(self, batches: Any) -> Iterator[Any]:
        yield batches


SYSTEMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "none": ("lookahead", lambda: None),
    "through": ("lookahead", Through),
    "hotline": ("static", lambda: hotrow.Hotline(window=64, relearn=2, floor=0.5)),
    "slipstream": ("lookahead", slipstream),
    "slipstream-rows": ("all-fast", lambda: slipstream(mode="rows")),
    "random-drop": ("lookahead", lambda: hotrow.RandomDrop(0.2)),
    "hotline+random-drop": ("static", lambda: hotrow.Hotline(skip=hotrow.RandomDrop(0.2))),
    "fae": ("static", lambda: hotrow.FAE(sample_rate=0.5)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("refill", ["one-tensor", "three-tensors", "one-array", "one-dict"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.filterwarnings("ignore:.*(test=|test samples|search|reached|popular)")
def test_systems_may_be_given_a_loader_that_refills(system: str, refill: str) -> None:
    strategy, make = SYSTEMS[system]
    losses, bits = [], []
    for kind in (None, refill):
        trainer = trainer_of(strategy, make())
        losses.append([record.loss for record in trainer.run(Again(kind, clicks(40)))])
        bits.append(list(trainer.model.state_dict().values()))
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *bits))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_evaluation_keeps_the_labels_of_each_batch(kind: torch.dtype) -> None:
    found = [
        trainer_of("lookahead").evaluate(Again(refill, clicks(6, kind)))
        for refill in (None, "one-tensor")
    ]
    assert found[0] == found[1]


def test_samples_that_a_function_takes_may_be_views() -> None:
    """FAE keeps them as long as it trains."""

    def take(batch: Parts, places: Tensor) -> Any:
        every = len(places) == SIZE
        return {name: x if every else x[places] for name, x in batch.items()} | {"tag": Forbidden()}

    def join(batches: list[Any]) -> Any:
        return {
            name: torch.cat([each[name] for each in batches])
            for name in ("ids", "dense", "label")
        }  # fmt: skip

    found, everything = [], torch.ones(SIZE, dtype=torch.bool)
    for kind in (None, "one-array"):
        options = SetOptions(take=take, join=join)
        sets = separate(Again(kind, clicks(10)), lambda batch: everything, options)
        found.append([each["label"] for each in sets.hot.batches()])
    assert all(map(torch.equal, *found))


def test_of_parts_that_batches_share_only_those_are_copied() -> None:
    given: list[dict[str, Tensor]] = []
    offsets = torch.arange(5)

    def loader() -> Iterator[dict[str, Tensor]]:
        for number in range(200):
            given.append({"ids": torch.full((4,), number), "offsets": offsets})
            yield given[-1]

    kept = Kept(loader())
    held = [kept.read(8) for _ in range(200)]
    assert held[0].is_copy
    assert not held[-1].is_copy
    assert held[-1].batch["ids"] is given[-1]["ids"]
    assert held[-1].batch["offsets"] is not offsets
    assert torch.equal(held[-1].batch["offsets"], offsets)
    assert all(kept.check(each) is None for each in held)


def test_a_shared_part_may_change_after_many_batches() -> None:
    """Numpy writes have no version, so nothing but the copy keeps the values of held batches."""
    label = np.zeros(3, dtype=np.float32)

    def loader() -> Iterator[dict[str, Tensor]]:
        for number in range(200):
            label[:] = max(0, number - 100)
            yield {"ids": torch.full((4,), number), "label": torch.from_numpy(label)}

    kept = Kept(loader())
    held = [kept.read(8) for _ in range(200)]
    assert [float(each.batch["label"][0]) for each in held] == [max(0, n - 100) for n in range(200)]


def test_overlapping_windows_of_one_tensor_are_right_and_bounded() -> None:
    values = torch.arange(1000)
    kept = Kept(values[start : start + 50] for start in range(0, 900, 3))
    held = [kept.read(8).batch for _ in range(300)]
    assert all(torch.equal(batch, values[3 * n : 3 * n + 50]) for n, batch in enumerate(held))
    assert len(kept._given._spans) < 20


def test_a_refilling_loader_is_recognised_where_nobody_says_what_is_held() -> None:
    class Refills:
        buffer = torch.zeros(4)

        def __iter__(self) -> Iterator[Tensor]:
            for number in range(300):
                yield self.buffer.fill_(number)

    loader = Refills()
    for _ in range(3):
        assert [int(batch[0]) for batch in Kept(loader)] == [*range(300)]


def test_parts_known_to_be_shared_are_copied_from_the_first_batch_of_a_pass_on() -> None:
    class Labels:
        """Eight batches in a pass, with one buffer for labels that is constant at first."""

        read, buffer = 0, np.zeros(4, dtype=np.float32)

        def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
            for _ in range(8):
                if self.read >= 72:
                    self.buffer[:] = self.read
                self.read += 1
                yield self.read - 1, torch.zeros(4), torch.from_numpy(self.buffer)

    loader = Labels()
    for _ in range(14):
        kept = Kept(loader)
        held = [kept.read(number) for number in range(8)]
        assert all(kept.check(each) is None for each in held)
        for each in held:
            number, _, label = each.batch
            assert int(label[0]) == (number if number >= 72 else 0)
        kept.end()


def test_a_partly_copied_batch_may_compute_tensors_when_asked() -> None:
    class Lazy:
        def __init__(self, values: Tensor) -> None:
            self._values, self._offsets = values, None

        def offsets(self) -> None:
            self._offsets = torch.arange(5)

    shared = torch.zeros(4)
    kept = Kept((Lazy(torch.arange(4) + number), shared) for number in range(80))
    held = deque()
    for number in range(80):
        held.append(kept.read(min(number, 2)))
        held[-1].batch[0].offsets()
        held[-1].note_computed()
        if len(held) > 2:
            assert kept.check(held.popleft()) is None


def test_copies_resolve_conjugated_and_negated_views() -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    for batch in (numbers.conj(), numbers.conj().imag):
        assert torch.equal(Kept(iter([batch])).read(1).batch, batch)
