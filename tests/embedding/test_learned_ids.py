"""`hotrow.ahead` learns what converted modules look up, and checks every batch.

Each case is a model and its batches. The converted copy trains beside the plain one; a lookup that
was not planned warns, which fails a test that does not expect it.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hotrow

Look = Callable[[Any, Any], list[Tensor]]


class Net(nn.Module):
    """Vectors that `look` looks up, below a layer."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Embedding(300, 8), nn.Embedding(400, 8, padding_idx=0)
        self.c = nn.EmbeddingBag(250, 8, mode="mean")
        self.d = nn.EmbeddingBag(250, 8, mode="sum", include_last_offset=True)
        self.place = nn.Embedding(12, 8)
        self.top = nn.Linear(8, 1)
        self.look = look

    def forward(self, batch: Any) -> Tensor:
        pooled = [x.mean(1) if x.dim() == 3 else x for x in self.look(self, batch)]
        hidden = sum(x * (1 + k) for k, x in enumerate(pooled))
        return torch.tanh(self.top(hidden)).squeeze(1)


@dataclass
class Sample:
    label: Tensor
    ids: Tensor


class Named(NamedTuple):
    ids: Tensor
    extra: list[Tensor]


class Other:
    """A batch of a class of its own."""

    def __init__(self, ids: Tensor) -> None:
        self.name, self.parts = "batch", {"ids": ids, "label": torch.zeros(len(ids))}


class Draw:
    """Random batches; the last one is smaller."""

    def __init__(self, seed: int = 1, count: int = 8) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self.sizes = [12] * (count - 1) + [5]

    def ids(self, size: int, *rows: int) -> Tensor:
        drawn = torch.rand(size, len(rows), generator=self._draw) ** 2
        return (drawn * torch.tensor(rows)).long()

    def lengths(self, size: int) -> Tensor:
        return torch.randint(0, 4, (size,), generator=self._draw)

    def all(self, make: Callable[[Draw, int], Any]) -> list[Any]:
        return [make(self, size) for size in self.sizes]


def jagged(draw: Draw, size: int) -> dict[str, Tensor]:
    lengths = draw.lengths(size)
    ids = draw.ids(int(lengths.sum()), 250)[:, 0]
    return {"offsets": lengths.cumsum(0) - lengths, "ids": ids, "x": draw.ids(size, 300)[:, 0]}


def ending(draw: Draw, size: int) -> tuple[Tensor, Tensor]:
    lengths = draw.lengths(size)
    return nn.functional.pad(lengths.cumsum(0), (1, 0)), draw.ids(int(lengths.sum()), 250)[:, 0]


def four(draw: Draw, size: int) -> Tensor:
    return draw.ids(size, 300, 400, 250, 250)


def sequence(draw: Draw, size: int) -> dict[str, Tensor]:
    return {"seen": draw.ids(size, *[299] * 12), "label": torch.ones(size)}


CASES: dict[str, tuple[Callable[[Draw, int], Any], Look]] = {
    "columns": (four, lambda m, x: [m.a(x[:, 0]), m.b(x[:, 1])]),
    "all columns": (
        lambda draw, size: draw.ids(size, 300, 400),
        lambda m, x: [m.a(x[:, 0]), m.b(x[:, 1])],
    ),
    "in another order": (
        lambda draw, size: draw.ids(size, 400, 300),
        lambda m, x: [m.b(x[:, 0]), m.a(x[:, 1])],
    ),
    "bags of columns": (four, lambda m, x: [m.a(x[:, 0]), m.c(x[:, 2:]), m.c(x[:, 3:])]),
    "cast": (
        lambda draw, size: [four(draw, size).int(), four(draw, size).float()],
        lambda m, x: [m.a(x[0][:, 0].long()), m.b(x[1][:, 1].long()), m.c(x[0][:, 2:])],
    ),
    "shifted": (four, lambda m, x: [m.b(x[:, 0] + 7), m.a(x[:, 2] + 1), m.b(x[:, 1])]),
    "twice": (four, lambda m, x: [m.a(x[:, 0]), m.b(x[:, 1]), m.a(x[:, 2]), m.b(x[:, 1])]),
    "sequences": (
        sequence,
        lambda m, x: [m.a(x["seen"][:, :-1]), m.a(x["seen"][:, 1:]), m.b(x["seen"] + 1)],
    ),
    "positions": (
        sequence,
        lambda m, x: [m.a(x["seen"]) + m.place(torch.arange(12)), m.b(x["seen"])],
    ),
    "offsets": (jagged, lambda m, x: [m.c(x["ids"], x["offsets"]), m.a(x["x"])]),
    "last offset": (ending, lambda m, x: [m.d(x[1], x[0]), m.d(x[1], x[0].int())]),
    "data class": (
        lambda draw, size: Sample(torch.ones(size), four(draw, size)),
        lambda m, x: [m.a(x.ids[:, 0]), m.b(x.ids[:, 1])],
    ),
    "named": (
        lambda draw, size: Named(four(draw, size), [four(draw, size)]),
        lambda m, x: [m.a(x.ids[:, 0]), m.b(x.extra[0][:, 1])],
    ),
    "another class": (
        lambda draw, size: Other(four(draw, size)),
        lambda m, x: [m.a(x.parts["ids"][:, 0]), m.b(x.parts["ids"][:, 1])],
    ),
    "field offsets": (
        lambda draw, size: draw.ids(size, 100, 100, 90),
        lambda m, x: [m.a(x + torch.tensor([0, 100, 200]))],
    ),
    "transposed": (four, lambda m, x: [m.b(x.t()[1]), m.a(x.t()[:1].t().reshape(-1))]),
}


class Both:
    """A converted model and a plain one, which train side by side."""

    def __init__(self, look: Look, **options: Any) -> None:
        self.plain = Net(look)
        model: Any = copy.deepcopy(self.plain)
        options = {"strategy": "lookahead", "seed": 1, **options}
        self.model = hotrow.convert(model, "50%", show=False, **options)
        self.optimizers = [self._optimizer(x) for x in (self.model, self.plain)]

    @staticmethod
    def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
        options = {"lr": 0.1, "initial_accumulator_value": 0.01}
        return torch.optim.Adagrad(model.parameters(), **options)  # type: ignore[arg-type]

    @property
    def collection(self) -> hotrow.EmbeddingBagCollection:
        return self.model.a.collection

    def step(self, batch: Any, beside: Any = None) -> None:
        """Train one batch; `beside`: what the plain model trains."""
        losses = []
        for model, optimizer, given in zip(
            (self.model, self.plain),
            self.optimizers,
            (batch, batch if beside is None else beside),
            strict=True,
        ):
            optimizer.zero_grad()
            loss = (model(given) - 0.5).square().sum() / 4
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.allclose(*losses, atol=1e-5)

    def train(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.step(batch)

    def check(self) -> None:
        found, expected = self.model.state_dict(), self.plain.state_dict()
        for key, value in expected.items():
            assert torch.allclose(found[key], value, atol=1e-5), key
        self.collection.check()

    @property
    def planned_calls(self) -> int:
        """How many calls the newest planned batch has."""
        planned = self.collection.pipeline.planned
        return len(planned[-1].features.calls) if planned else 0


@pytest.mark.parametrize("strategy", ["lookahead", "scratchpipe"])
@pytest.mark.parametrize("case", CASES)
def test_what_modules_look_up_is_learned_and_read_ahead(case: str, strategy: str) -> None:
    make, look = CASES[case]
    both = Both(look, strategy=strategy)
    for epoch in range(2):
        for number, batch in enumerate(hotrow.ahead(Draw(epoch).all(make), both.model)):
            both.step(batch)
            if epoch or number > 3:
                calls = both.planned_calls
                assert calls == len(look(both.plain, batch)) + (case == "positions"), number
    both.check()


def hashed(model: Any, x: Tensor) -> list[Tensor]:
    return [model.a((x[:, 0] * 7919 + x[:, 1]) % 300), model.b(x[:, 1])]


def by_size(model: Any, x: Tensor) -> list[Tensor]:
    return [model.a(x[:, 0]), model.b(x[:, 1])] if len(x) % 2 else [model.b(x[:, 1])]


UNKNOWN: dict[str, tuple[Look, str]] = {
    "hashed": (hashed, "what 'a' looks up was not found"),
    "negatives": (
        lambda m, x: [m.a(x[:, 0]), m.b(x[:, 1] if len(x) == 12 else x[:, 1].flip(0))],
        "module 'b' was called with other ids",
    ),
    "another count": (
        lambda m, x: [m.a(x[:, 0]), m.b(x[:, 1] if len(x) == 12 else x[:1, 1]).sum(0, True)],
        "module 'b' was called with other ids",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_ids_are_looked_up_with_one_warning(case: str) -> None:
    look, match = UNKNOWN[case]
    both = Both(look)
    with pytest.warns(UserWarning, match=match) as caught:
        both.train(hotrow.ahead(Draw(count=10).all(four), both.model))
    assert len(caught) == 1
    both.check()


def test_functions_say_what_is_not_learned() -> None:
    both = Both(hashed)
    ids = {"a": lambda x: (x[:, 0] * 7919 + x[:, 1]) % 300}
    for number, batch in enumerate(hotrow.ahead(Draw().all(four), both.model, ids=ids)):
        both.step(batch)
        assert number < 4 or both.planned_calls == 2
    both.check()
    with pytest.raises(ValueError, match="ids= names 'z', which is no module of hotrow's"):
        hotrow.ahead([], both.model, ids={"z": len})
    with pytest.raises(TypeError, match=r"ids\['a'\] must be a function"):
        hotrow.ahead([], both.model, ids={"a": 3})  # type: ignore[dict-item]


def test_columns_that_are_equal_by_chance_are_told_apart_later() -> None:
    batches = Draw(count=12).all(four)
    batches[0][:, 3] = batches[0][:, 0] = batches[0][:, 2]
    batches[1][:, 3] = batches[1][:, 0]
    both = Both(lambda m, x: [m.a(x[:, 3]), m.b(x[:, 1])])
    for number, batch in enumerate(hotrow.ahead(batches, both.model)):
        both.step(batch)
        assert number < 4 or both.planned_calls == 2
    both.check()


@pytest.mark.parametrize("look", [CASES["all columns"][1], CASES["in another order"][1]])
@pytest.mark.parametrize("by", ["torch", "numpy", "data"])
def test_ids_that_change_after_they_were_planned_are_looked_up_as_they_are(
    look: Look, by: str
) -> None:
    both = Both(look)

    def changed(stream: Any) -> Iterator[Tensor]:
        for number, batch in enumerate(stream):
            if number > 2:
                view = {"torch": batch, "numpy": batch.numpy(), "data": batch.data}[by]
                view[:, number % 2] = 5
            yield batch

    batches = Draw().all(lambda draw, size: draw.ids(size, 300, 300))
    with pytest.warns(UserWarning, match="called with other ids"):
        both.train(changed(hotrow.ahead(batches, both.model)))
    both.check()


def test_offsets_that_change_after_they_were_planned_are_used_as_they_are() -> None:
    both = Both(lambda m, x: [m.c(x["ids"], x["offsets"])])

    def changed(stream: Any) -> Iterator[Any]:
        for number, batch in enumerate(stream):
            if number > 2:
                batch["offsets"][1:] = 0
            yield batch

    with pytest.warns(UserWarning, match="called with other ids"):
        both.train(changed(hotrow.ahead(Draw().all(jagged), both.model)))
    both.check()


def test_a_second_loader_may_have_another_layout() -> None:
    """What was learned of the first one is out of range there, or no tensor of ids."""
    both = Both(lambda m, x: [m.a(x["ids"][:, 0]), m.b(x["ids"][:, 1])])
    first = Draw().all(lambda draw, size: {"ids": four(draw, size)})
    second = Draw(2).all(
        lambda draw, size: {"dense": torch.full((size, 3), 1e9), "ids": four(draw, size)}
    )
    for loader in (first, second, first):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for batch in hotrow.ahead(loader, both.model):
                both.step(batch)
    both.check()


@pytest.mark.filterwarnings("ignore:module 'a' was called with other ids:UserWarning")
def test_bad_ids_are_refused_where_they_are_looked_up() -> None:
    both = Both(CASES["columns"][1])
    batches = Draw().all(four)
    batches[5][3, 1] = 400
    with pytest.raises(ValueError, match="id 400 is outside table 'b'"):
        both.train(hotrow.ahead(batches, both.model))
    for batch in hotrow.ahead(Draw().all(four), both.model):  # a later pass works
        both.model(batch).sum().backward()


def test_loops_may_be_left_and_forward_passes_may_fail() -> None:
    failing: list[bool] = []

    def look(model: Any, x: Tensor) -> list[Tensor]:
        first = model.a(x[:, 0])
        if failing and model is both.model:
            failing.clear()
            raise KeyboardInterrupt
        return [first, model.b(x[:, 1]), model.a(x[:, 2])]

    both = Both(look)
    both.model.look = look
    for stop in (0, 1, 2, 4, 7):
        for number, batch in enumerate(hotrow.ahead(Draw(stop).all(four), both.model)):
            if number == 3:
                failing.append(True)
                with pytest.raises(KeyboardInterrupt):
                    both.model(batch)
            both.step(batch)
            if number == stop:
                break
        both.step(Draw(stop + 10).all(four)[0])
    both.check()


def test_batches_may_be_taken_together_and_trained_in_any_order() -> None:
    both = Both(CASES["columns"][1])
    stream = hotrow.ahead(Draw(count=16).all(four), both.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for first in stream:
            group = [first, *islice(stream, 2)]
            for batch in reversed(group):
                both.step(batch)
    both.check()


def test_a_batch_may_be_passed_several_times() -> None:
    """As with two losses, or a second forward pass while the first one's graph is alive."""
    both = Both(CASES["twice"][1])
    for number, batch in enumerate(hotrow.ahead(Draw().all(four), both.model)):
        both.step(batch)
        both.model.eval()
        with torch.no_grad():
            both.model(batch)
        both.model.train()
        if number % 2:
            both.step(batch)
        for model in (both.model, both.plain):
            model.a.requires_grad_(number % 3 != 0)
        first = [model(batch).sum() for model in (both.model, both.plain)]
        for model in (both.model, both.plain):
            model.a.requires_grad_(True)
        for optimizer in both.optimizers:
            optimizer.zero_grad()
        for model, loss in zip((both.model, both.plain), first, strict=True):
            (loss + model(batch).square().sum()).backward()
        for optimizer in both.optimizers:
            optimizer.step()
    both.check()


def test_modules_may_be_frozen_between_their_lookups_of_a_batch() -> None:
    def look(model: Any, x: Tensor) -> list[Tensor]:
        first = model.a(x[:, 0])
        model.b.requires_grad_(int(x[0, 0]) % 2 == 0)
        return [first, model.b(x[:, 1])]

    both = Both(look)
    both.train(hotrow.ahead(Draw(count=12).all(four), both.model))
    both.check()


def test_another_thread_may_evaluate_meanwhile() -> None:
    both = Both(CASES["columns"][1])
    done, errors = threading.Event(), list[BaseException]()
    ids = Draw(3).all(four)[0]

    def evaluate() -> None:
        try:
            while not done.is_set():
                with torch.no_grad():
                    assert both.model(ids).isfinite().all()
        except BaseException as error:
            errors.append(error)

    both.model(ids)  # builds the rows
    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for batch in hotrow.ahead(Draw(count=20).all(four), both.model):
            both.step(batch)
    finally:
        done.set()
        thread.join()
    assert not errors
    both.check()


def test_threads_that_look_up_first_build_the_rows_once() -> None:
    both = Both(CASES["columns"][1])
    ids = Draw(3).all(four)[0]
    found: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(both.model(ids))

    threads = [threading.Thread(target=evaluate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(x, found[0]) for x in found)
    both.check()


def test_compiled_models_are_read_ahead() -> None:
    both = Both(CASES["columns"][1])
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        compiled = torch.compile(both.model, backend="eager")
        named = {"a": lambda x: x[:, 0]}
        for number, batch in enumerate(hotrow.ahead(Draw().all(four), compiled, ids=named)):
            plain, both.model = both.model, compiled
            both.step(batch)
            both.model = plain
            assert number < 4 or both.planned_calls == 2
    both.check()


def random_look(seed: int) -> Look:
    """Return random calls of random modules, now and then of other ids than usual."""
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=draw))

    calls = [(number(3), number(4), number(3), number(9)) for _ in range(1 + number(5))]
    rare = number(5)

    def look(model: Any, x: Tensor) -> list[Tensor]:
        vectors = []
        for place, (module, column, form, shift) in enumerate(calls):
            if int(x[0, 0]) % 7 == rare and place == 0 and len(calls) > 1:
                continue
            ids = x[:, column] % 200 if (rare, module) == (3, 1) else x[:, column] // 2 + shift
            if form == 1:
                ids = ids.view(-1, 1)
            if module == 2:
                bags = ids.view(-1, 1) if form else ids
                vectors.append(model.c(bags, None if form else torch.arange(len(x))))
            else:
                vectors.append((model.a if module == 0 else model.b)(ids))
        return vectors

    return look


def programs(seed: int) -> Iterator[Any]:
    draw = Draw(seed, count=10)
    draw.sizes = [1 + (seed * 7 + k * 5) % 11 for k in range(10)]
    yield from draw.all(lambda draw, size: 2 * (draw.ids(size, 240, 240, 240, 240) // 2))


@pytest.mark.parametrize("seed", range(12))
def test_random_models_train_as_plain_ones(seed: int) -> None:
    names = ("lookahead", "scratchpipe", "lru", "static", "uncached", "hybrid")
    both = Both(random_look(seed), strategy=names[seed % 6])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for batch in hotrow.ahead(list(programs(seed)), both.model):
            both.step(batch)
    both.check()
