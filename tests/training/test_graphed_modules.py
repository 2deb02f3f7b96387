"""Converted modules in captured steps: with bags, called several times, and with offsets.

On a CPU a stand-in for a CUDA graph launches again what was captured; it runs Triton's interpreter,
so batches are tiny. On a GPU graphs are real.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from builders import skewed
from graph_replays import ModuleReplays
from hotrow.inputs.calls import Call, JoinedCalls
from hotrow.inputs.tree import to_device
from hotrow.support.streams import lanes_of
from hotrow.training.graphed import GraphedStep
from hotrow.training.static_inputs import growing_ids

Batch = dict[str, Tensor]
Look = Callable[[Any, Batch], list[Tensor]]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])
slowly_on_both = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA]
)
pytestmark = pytest.mark.usefixtures("device_engine")


class Net(nn.Module):
    """A layer on what `look` looks up."""

    def __init__(self, look: Look, times: int, dims: tuple[int, int] | None = None) -> None:
        """Tables have `times` as many rows as the smallest do; those of a GPU are wider, too."""
        super().__init__()
        torch.manual_seed(0)
        first, second = dims or ((4, 4) if times < 10 else (16, 16))
        self.user, self.item = (
            nn.Embedding(60 * times, first),
            nn.Embedding(80 * times, first, padding_idx=0),
        )
        self.tags = nn.EmbeddingBag(50 * times, second, mode="mean", padding_idx=1)
        self.words = nn.EmbeddingBag(70 * times, second, mode="sum")
        self.ends = nn.EmbeddingBag(40 * times, first, mode="mean", include_last_offset=True)
        self.most = nn.EmbeddingBag(30 * times, second, mode="max")
        self.top = nn.Linear(8, 1)
        self.look = look

    def forward(self, batch: Batch) -> Tensor:
        pooled = [x.mean(1) if x.dim() == 3 else x for x in self.look(self, batch)]
        hidden = torch.cat([x * (1 + k) for k, x in enumerate(pooled)], 1).sum(1, keepdim=True)
        return self.top(torch.tanh(hidden).repeat(1, 8)).squeeze(1)


def bags(net: Any, batch: Batch) -> list[Tensor]:
    return [net.tags(batch["tags"]), net.words(batch["seen"]), net.user(batch["user"])]


def twice(net: Any, batch: Batch) -> list[Tensor]:
    return [net.item(batch["seen"]), net.item(batch["item"]), net.user(batch["user"])]


def everything(net: Any, batch: Batch) -> list[Tensor]:
    """Also bags that torch pools, whose batches have equal numbers of ids."""
    flat, starts, weights = batch["flat"], batch["starts"], batch["weights"]
    return [
        *bags(net, batch),
        *twice(net, batch),
        net.words(batch["tags"]),
        net.item(batch["seen"][:, 1:]).detach(),
        net.words(batch["tags"], per_sample_weights=weights.view(-1, 2)),
        net.words(flat, starts, per_sample_weights=weights),
        net.most(flat, starts),
    ]


def offsets(net: Any, batch: Batch) -> list[Tensor]:
    return [net.words(batch["ids"], batch["offsets"])]


def mixed(net: Any, batch: Batch) -> list[Tensor]:
    return [
        net.words(batch["ids"], batch["offsets"]),
        *twice(net, batch),
        net.tags(batch["tags"]),
        net.ends(batch["ends_ids"], batch["ends"]),
        net.words(batch["more_ids"], batch["more_offsets"]),
    ]


# Of batches and samples, and `times`; budgets of a GPU, with which rows leave.
SIZES = {"cpu": (14, 4, 2), "cuda": (48, 64, 30)}
BUDGETS = {"offsets": "15%", "bags": "20%", "twice": "20%", "everything": "40%", "mixed": "40%"}
FIXED, JAGGED = (bags, twice, everything), (offsets, mixed)


def batches_of(device: str, look: Look, *, large: int | None = None) -> list[Batch]:
    """The first batches have the most ids, but for the `large` one; the last one is short."""
    draw, (count, size, times) = torch.Generator().manual_seed(4), SIZES[device]

    def ids(rows: int, *shape: int) -> Tensor:
        return skewed(draw, rows * times, torch.Size(shape).numel()).view(shape)

    def bags_of(rows: int, most: int, number: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(most - 1, most + 1, (size,), generator=draw)
        lengths[0] = 0
        if number < 3 or number == large:
            lengths.fill_(most + 3 * (number == large))
        return ids(rows, int(lengths.sum())), F.pad(lengths.cumsum(0), (1, 0))

    batches = []
    for number in range(count):
        if number == count - 1 and look not in JAGGED:
            size //= 2
        batch = {
            "user": ids(60, size),
            "item": ids(80, size),
            "seen": ids(40, size, 3),
            "tags": ids(50, size, 2),
            "flat": ids(30, size * 2),
            "starts": torch.randint(0, size * 2, (size,), generator=draw).sort().values,
            "weights": torch.rand(size * 2, generator=draw),
            "label": torch.rand(size, generator=draw),
        }
        batch["starts"][0] = 0
        if look in JAGGED:  # other tensors of changing shapes would not be captured
            batch["ids"], starts = bags_of(70, 4, number)
            batch["ends_ids"], batch["ends"] = bags_of(40, 3, number)
            batch["more_ids"], more = bags_of(70, 3, number)
            batch |= {"offsets": starts[:-1], "more_offsets": more[:-1]}
        if look is offsets:
            batch = {name: batch[name] for name in ("ids", "offsets", "label")}
        batches.append(batch)
    return batches


def label(batch: Batch) -> Tensor:
    return batch["label"]


def squares(found: Tensor, labels: Tensor) -> Tensor:
    return (found - labels).square()


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.03),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.01),
}
Bits = dict[str, Tensor]


def converted(net: nn.Module, strategy: str, device: str) -> Any:
    twin: Any = deepcopy(net).to(device)
    name = "" if device == "cpu" or isinstance(twin, Sequence) else twin.look.__name__
    budget = BUDGETS.get(name, "60%")
    return hotrow.convert(twin, budget, strategy=strategy, seed=1, show=False)


def bits_of(net: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Bits:
    bits = {name: value.cpu() for name, value in net.state_dict().items()}
    for place, state in optimizer.state_dict()["state"].items():
        bits |= {f"{place}.{name}": torch.as_tensor(x).cpu() for name, x in state.items()}
    return bits | {"losses": torch.stack([x.detach().cpu() for x in losses])}


def by_hand(net: nn.Module, loader: Iterable[Batch], make: str, clip: float | None) -> Bits:
    optimizer, losses = MAKES[make](net.parameters()), []
    for batch in loader:
        optimizer.zero_grad()
        losses.append(squares(net(batch), label(batch)).mean())
        losses[-1].backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return bits_of(net, optimizer, losses)


def eager(
    net: nn.Module, loader: list[Batch], make: str, device: str, clip: float | None = None
) -> Bits:
    """Train all rows in fast memory by a loop without graphs, and check it against torch."""
    rows = converted(net, "all-fast", device)
    bits = by_hand(rows, hotrow.ahead(loader, rows), make, clip)
    on_device = [to_device(batch, torch.device(device)) for batch in loader]
    plain = by_hand(deepcopy(net).to(device), on_device, make, clip)
    for name, value in plain.items():
        tolerance = 1e-4 if device == "cpu" else 1e-3
        torch.testing.assert_close(
            bits[name], value, atol=tolerance, rtol=tolerance, check_dtype=False
        )
    return bits


def step_of(
    rows: nn.Module, optimizer: Any, device: str, seen: ModuleReplays, **options: Any
) -> GraphedStep:
    if device == "cuda":
        return hotrow.graphed(rows, squares, optimizer, labels=label, **options)
    graphs, lanes = seen.settings(), lanes_of(torch.device("cpu"))
    return GraphedStep(
        rows, squares, optimizer, labels=label, lanes=lanes, graphs=graphs, **options
    )


def captured(
    net: nn.Module,
    loader: list[Batch],
    make: str,
    device: str,
    *,
    strategy: str = "lookahead",
    clip: float | None = None,
    **options: Any,
) -> Bits:
    """Train by steps that are captured; some replay the graph of another batch."""
    rows, seen = converted(net, strategy, device), ModuleReplays()
    optimizer = MAKES[make](rows.parameters())
    step = step_of(rows, optimizer, device, seen, clip_norm=clip, **options)
    losses, replayed = [], 0
    assert step.landing is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "a batch of .* does not fit the .* slots")
        for batch in hotrow.ahead(loader, rows, step=step):
            losses.append(step(batch))
            replayed += step.landing.pending_loss is not None
    assert step.landing.num_graphs
    assert replayed > len(loader) // 4
    assert seen.strange or device == "cuda"
    if strategy == "lookahead":
        tables = next(x for x in rows.modules() if isinstance(x, hotrow.Embedding)).collection
        assert tables.traffic().evicted_rows > 0
    return bits_of(rows, optimizer, losses)


def assert_same(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys()
    other = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not other


def cases(*on_cpu: tuple[Look, str, float | None, tuple[int, int]]) -> Any:
    """A few of all on a CPU, where each takes long, and all of them on a GPU."""
    params = [
        pytest.param("cpu", *case, id=f"cpu-{case[0].__name__}", marks=[pytest.mark.slow] * (k > 0))
        for k, case in enumerate(on_cpu)
    ]
    on_gpu = [("Adagrad", None, (16, 16)), ("SGD", 0.05, (16, 32))]
    for look, (make, clip, dims) in product((*FIXED, *JAGGED), on_gpu):
        name = f"cuda-{look.__name__}-{make}"
        marks = pytest.mark.gpu
        params.append(pytest.param("cuda", look, make, clip, dims, id=name, marks=marks))
    return pytest.mark.parametrize(("device", "look", "make", "clip", "dims"), params)


@cases(
    (mixed, "SGD", 0.05, (4, 6)),
    (everything, "Adagrad", None, (4, 4)),
    (twice, "SGD", 0.05, (4, 4)),
    (offsets, "Adagrad", None, (4, 4)),
)
def test_a_captured_step_of_modules_has_the_bits_of_an_eager_one(
    device: str, look: Look, make: str, clip: float | None, dims: tuple[int, int]
) -> None:
    _, size, times = SIZES[device]
    loader, net = batches_of(device, look), Net(look, times, dims)
    expected = eager(net, loader, make, device, clip)
    options: dict[str, Any] = {"clip": clip, "batch_size": size}
    assert_same(captured(net, loader, make, device, **options), expected)
    if device == "cuda":
        assert_same(captured(net, loader, make, device, strategy="all-fast", **options), expected)


def test_ids_side_by_side_in_one_memory_all_get_room() -> None:
    starts, every = torch.tensor([0, 2]), torch.arange(12)
    first, second, third = every.split([5, 4, 3])
    calls = [Call("a", first, starts), Call("b", second, starts)]
    places = {id(first): 0, id(second): 2}
    assert growing_ids(JoinedCalls(calls), places) == {0, 2}
    assert not growing_ids(JoinedCalls([*calls, Call("c", third)]), places)


@slowly_on_both
def test_a_batch_with_more_ids_than_there_is_room_for_runs_eagerly(device: str) -> None:
    count, size, times = SIZES[device]
    loader, net = batches_of(device, offsets, large=count - 3), Net(offsets, times)
    found = captured(net, loader, "SGD", device, batch_size=size, max_lookups=5 * size)
    assert_same(found, eager(net, loader, "SGD", device))


@on_both
def test_ids_that_change_before_a_captured_step_are_noticed(device: str) -> None:
    """A graph compares what it reads with its plan; no version of a tensor tells of `.data`."""
    count, _, times = SIZES[device]
    loader, net = batches_of(device, offsets), Net(offsets, times)
    rows, seen = converted(net, "lookahead", device), ModuleReplays()
    step = step_of(rows, MAKES["SGD"](rows.parameters()), device, seen)

    def loop() -> None:
        for number, batch in enumerate(hotrow.ahead(loader, rows, step=step)):
            if number == count - 2:
                batch["ids"].data[-1] += 1
            step(batch)

    with pytest.raises(RuntimeError, match="its ids were changed after they were read"):
        loop()
    assert step.landing is not None
    assert step.landing.num_graphs


def tied(net: Any, batch: Batch) -> list[Tensor]:
    """Products with all rows of a table, which is looked up, too."""
    vectors = net.user(batch["user"]).unsqueeze(1)
    scores = (vectors * net.user.weight.unsqueeze(0)).sum(2)
    return [scores.view(len(scores), 4, -1).mean(2) * 0.1, net.tags(batch["tags"])]


@slowly_on_both
def test_a_table_that_is_read_as_a_whole_is_captured(device: str) -> None:
    _, size, times = SIZES[device]
    loader, net = batches_of(device, tied), Net(tied, times)
    expected = eager(net, loader, "SGD", device)
    found = captured(net, loader, "SGD", device, strategy="all-fast", batch_size=size)
    assert_same(found, expected)


class Sequence(nn.Module):
    """One module with ids [batch, positions]."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item, self.top = nn.Embedding(80 * times, 16), nn.Linear(16, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.top(self.item(batch["seen"]).tanh().mean(1)).squeeze(1)


@on_both
def test_the_batch_size_of_a_sequence_is_its_number_of_samples(device: str) -> None:
    _, size, times = SIZES[device]
    loader, net = batches_of(device, twice), Sequence(times)
    expected = eager(net, loader, "Adagrad", device)
    found = captured(net, loader, "Adagrad", device, strategy="all-fast", batch_size=size)
    assert_same(found, expected)


def computed(net: Any, batch: Batch) -> list[Tensor]:
    return [net.item(batch["seen"]), net.item(batch["item"].int())]


@pytest.mark.gpu
def test_ids_that_a_model_computes_are_not_captured_and_a_warning_says_so() -> None:
    loader, net = batches_of("cuda", twice), Net(computed, SIZES["cuda"][2])
    expected, rows = eager(net, loader, "SGD", "cuda"), converted(net, "lookahead", "cuda")
    optimizer = MAKES["SGD"](rows.parameters())
    step = step_of(rows, optimizer, "cuda", ModuleReplays(), batch_size=64)
    with pytest.warns(UserWarning, match=r"cannot be captured.* the ids of module 'item'"):
        losses = [step(batch) for batch in hotrow.ahead(loader, rows, step=step)]
    assert_same(bits_of(rows, optimizer, losses), expected)
