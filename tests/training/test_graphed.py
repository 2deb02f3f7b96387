"""Captured steps without a GPU: a stand-in for a CUDA graph repeats what the host knew when it was
captured, so anything that depends on another batch's numbers fails.

test_gpu_graphed.py has real graphs: schedules, counts of the host, unused features, batches that
are too large or do not fit. Triton's interpreter takes seconds for each run here.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import RULES, Outcome, outcome, readout, skewed
from graph_replays import Replays, StandIn, without_gpu
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows
from hotrow.engine.strategy import STRATEGIES, as_listed
from hotrow.inputs.batch import fixed_outline, lookups_of, parse, weights_of
from hotrow.inputs.room import Room
from hotrow.inputs.spread import columns_of
from hotrow.inputs.tables import feature_order, group_by_width
from hotrow.support.streams import lanes_of
from hotrow.training.captured import GraphSettings
from hotrow.training.graphed import GraphedStep

CPU = torch.device("cpu")
SIZE = 4  # samples
Table = hotrow.EmbeddingBagConfig
TABLES = {
    "sum": [Table("a", 80, 5, ["f"]), Table("b", 30, 5, ["g"])],
    "mean": [Table("a", 80, 4, ["f"], pooling="mean", padding_idx=3), Table("b", 30, 4, ["g"])],
    "two-widths": [Table("a", 60, 4, ["f", "h"]), Table("b", 50, 6, ["g"])],
    "shared": [
        Table("a", 80, 4, ["f", "g"]),
        Table("b", 60, 4, ["f"], padding_idx=3),
        Table("c", 50, 3, ["g", "h"]),
    ],
    "unpooled": [Table("a", 60, 4, ["f"], pooling="none"), Table("b", 50, 4, ["g"])],
}


def batch_of(
    tables: list[Table],
    generator: torch.Generator,
    *,
    most: int = 6,
    least: int = 3,
    size: int = SIZE,
    empty: bool = True,
    weighted: bool = False,
) -> dict[str, Any]:
    """Samples with several lookups, `empty` ones among them, keys in an order of their own."""
    rows = {name: table.num_embeddings for table in tables for name in table.feature_names}
    keys = sorted(rows)
    lengths = torch.randint(least, most + 1, (len(keys), size), generator=generator)
    if empty:
        lengths[0, int(lengths.sum()) % size] = 0
    ids = [
        skewed(generator, rows[key], int(each.sum()))
        for key, each in zip(keys, lengths, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return {
        "ids": hotrow.KeyedJaggedTensor(keys, values, lengths=lengths.flatten(), weights=weights),
        "label": torch.rand(size, generator=generator),
    }


def batches_of(name: str, count: int, **options: Any) -> list[dict[str, Any]]:
    """The first has the most lookups: with so few, the room for them would change all the time."""
    generator = torch.Generator().manual_seed(5)
    options = {"most": 6, **options}
    full = {**options, "least": options["most"], "empty": False}
    first = batch_of(TABLES[name], generator, **full)
    rest = [batch_of(TABLES[name], generator, **options) for _ in range(count - 1)]
    return [first, *rest]


class Model(nn.Module):
    """Rows, and a dense part that scales the weights, if there are any, and the sum of all."""

    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, batch: Any) -> Tensor:
        ids = batch["ids"]
        weights = ids.weights_or_none()
        if weights is not None:
            ids = hotrow.KeyedJaggedTensor(
                ids.keys(), ids.values(), offsets=ids.offsets(), weights=weights * self.scale
            )
        out = readout(self.embedding(ids))
        return out * 0.01 * self.scale + self.bias[: len(batch["label"])]


def squares(found: Tensor, labels: Tensor) -> Tensor:
    return (found - labels).square()


def make(
    tables: str,
    rule: str = "sgd",
    strategy: Any = "all-fast",
    slots: int = 0,
    model: type[Model] = Model,
    *,
    engine: Any = gpu_rows,
) -> Model:
    """By default the GPU's engine, in Triton's interpreter."""
    budget = None
    if slots:
        widths = len(group_by_width(TABLES[tables]))
        budget = hotrow.Budget((hotrow.Share(slots, 32, True),) * widths, window_bytes=1 << 14)
        strategy = replace(STRATEGIES[strategy], eviction=EVICTIONS["random"], order=as_listed)
    return model(
        hotrow.EmbeddingBagCollection(
            TABLES[tables], RULES[rule], strategy=strategy, budget=budget, seed=3, engine=engine
        )
    )


def step_of(model: Model, replays: Replays | None = None, **options: Any) -> GraphedStep:
    """A step that is captured by `replays`; None: an eager one."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return GraphedStep(
        model,
        options.pop("loss_fn", squares),
        optimizer,
        labels=lambda batch: batch["label"],
        lanes=lanes_of(CPU) if replays is not None else None,
        graphs=None if replays is None else replays.settings(),
        **options,
    )


def stream(batches: Any, model: Model, step: GraphedStep) -> hotrow.Ahead:
    return hotrow.ahead(batches, model, ids=lambda batch: batch["ids"], step=step)


def run(
    model: Model, batches: list[Any], replays: Replays | None = None, **options: Any
) -> Outcome:
    step = step_of(model, replays, **options)
    losses = [step(batch) for batch in stream(batches, model, step)]
    return found_in(model, losses)


@cache
def eager(name: str, rule: str, count: int, **options: Any) -> Outcome:
    """What eager steps give, with all rows in fast memory."""
    return run(make(name, rule), batches_of(name, count, **options))


def found_in(model: Model, losses: list[Tensor]) -> Outcome:
    found = outcome(model.embedding, losses)
    dense = {name: each.detach().clone() for name, each in model.named_parameters()}
    return replace(found, weights={**found.weights, **dense})


def test_a_step_that_updates_no_rows_counts_no_update(seen: Replays) -> None:
    class Frozen(Model):
        def forward(self, batch: Any) -> Tensor:
            return readout(self.embedding(batch["ids"])).detach() * self.scale

    seen.tables = None
    model = make("sum", "adam", model=Frozen)
    run(model, batches_of("sum", 9), seen)
    assert seen.replays > 3
    assert model.embedding.optimizer.steps == [0, 0]


@without_gpu
def test_a_captured_step_follows_when_rows_are_frozen(seen: Replays) -> None:
    batches, outcomes = batches_of("sum", 16), []
    for replays in (None, seen):
        model = make("sum", "adam")
        step, embedding = step_of(model, replays), model.embedding
        captures = []
        for number, batch in enumerate(stream(batches, model, step)):
            if number in (6, 11):
                embedding.requires_grad_(number == 11)
                seen.tables = ("a", "b") if number == 11 else None
                captures.append(seen.captures)
            step(batch)
        outcomes.append(found_in(model, []))
        assert embedding.optimizer.steps == [11, 11]
    assert 0 < captures[0] < captures[1] < seen.captures
    assert outcomes[0].same_bits(outcomes[1])


# -- fixed places ----------------------------------------------------------------------------


def test_room_is_what_came_first_and_then_has_some_to_spare() -> None:
    room = Room()
    assert [room(100), room(100), room(90)] == [100, 100, 100]
    assert room(101) == room(120) == room(101) == room(100) == 120
    assert room(20) == 20
    assert room(33) == 36
    assert room(0) == 0
    sizes = {room(count) for count in range(1, 5000)}
    assert len(sizes) < 100


def test_room_that_is_fixed_does_not_grow() -> None:
    room = Room()
    room.fix(64)
    assert [room(60), room(64), room(65), room(40)] == [64, 64, 72, 64]


@pytest.mark.parametrize("name", ["sum", "mean", "two-widths", "shared"])
def test_the_outline_of_fixed_size_says_the_same_of_the_lookups_there_are(name: str) -> None:
    for batch in batches_of(name, 6, weighted=name != "mean"):
        features = batch["ids"]
        columns = feature_order(TABLES[name])
        for layout in group_by_width(TABLES[name]):
            parsed = parse(features, columns, CPU)
            right = lookups_of(parsed, layout)
            count, size = right.ids.numel(), right.ids.numel() + 7
            room = parsed.values.numel() + 9
            padded = replace(parsed, values=torch.nn.functional.pad(parsed.values, (0, 9), value=1))
            is_real = torch.nn.functional.pad(right.ids >= 0, (0, 7))
            x = fixed_outline(padded, layout, columns_of(parsed.keys, layout, CPU), size, is_real)
            assert x.offsets is not None
            assert right.offsets is not None
            assert torch.equal(x.offsets, right.offsets)
            assert x.bags_per_feature == right.bags_per_feature
            assert torch.equal(x.bag_of()[:count], right.bag_of())
            assert x.bag_of().max() < x.num_bags
            if name == "mean":
                assert x.divisor is not None
                assert right.divisor is not None
                assert torch.equal(x.divisor, right.divisor)
                continue
            exact = features.weights_or_none().clone().requires_grad_()
            longer = torch.nn.functional.pad(exact, (0, 9), value=5.0).detach().requires_grad_()
            mine = weights_of((padded.values, parsed.offsets, longer), x, layout)
            theirs = weights_of((parsed.values, parsed.offsets, exact), right, layout)
            assert mine is not None
            assert theirs is not None
            assert mine.shape == (size,)
            assert torch.equal(mine[:count], theirs)
            slope = torch.rand(size)
            mine.backward(slope)
            theirs.backward(slope[:count])
            assert longer.grad is not None
            assert exact.grad is not None
            assert longer.grad.shape == (room,)
            torch.testing.assert_close(longer.grad[: exact.numel()], exact.grad)
            assert name == "shared" or torch.equal(longer.grad[: exact.numel()], exact.grad)
            assert not longer.grad[exact.numel() :].any()


# -- bits ------------------------------------------------------------------------------------

CHOICES = [
    ("sum", "sgd", True),
    ("sum", "adagrad", False),
    ("mean", "row-wise", False),
    ("two-widths", "adam", True),
    ("mean", "adamw", False),
]


@without_gpu
@pytest.mark.thinned(5)
@pytest.mark.parametrize(("name", "rule", "weighted"), CHOICES)
def test_padding_gives_the_bits_of_none(
    name: str, rule: str, weighted: bool, seen: Replays
) -> None:
    batches = batches_of(name, 12, weighted=weighted)
    model = make(name, rule, "lookahead", slots=40)
    assert run(model, batches, seen).same_bits(eager(name, rule, 12, weighted=weighted))
    assert seen.captures >= 4
    assert seen.strange > 0, "no graph met another batch than its own"
    assert model.embedding.traffic().evicted_rows > 0
    traffic = model.embedding.traffic()
    assert traffic.lookups == sum(
        int((batch["ids"].values() >= 0).sum()) for batch in batches
    ) - padding_in(name, batches)


@without_gpu
@pytest.mark.parametrize("weighted", [True, False])
def test_features_of_several_tables_are_captured(weighted: bool, seen: Replays) -> None:
    seen.tables = ("a", "b", "c")
    batches = batches_of("shared", 12, weighted=weighted)
    found = run(make("shared", "adagrad", "lookahead", slots=60), batches, seen)
    assert found.same_bits(eager("shared", "adagrad", 12, weighted=weighted))
    assert seen.replays > 0
    assert seen.strange > 0
    on_cpu = run(make("shared", "adagrad", engine=cpu_rows), batches)
    for name, weight in on_cpu.weights.items():
        torch.testing.assert_close(found.weights[name], weight)


def padding_in(name: str, batches: list[Any]) -> int:
    """Lookups of a padding index, which read nothing."""
    if name != "mean":
        return 0
    count = 0
    for batch in batches:
        ends = int(batch["ids"].offsets()[SIZE])
        count += int((batch["ids"].values()[:ends] == 3).sum())
    return count


@without_gpu
@pytest.mark.slow
def test_a_row_that_most_lookups_read_is_summed_in_the_same_order(seen: Replays) -> None:
    """More than a chunk of equal ids beside more than a chunk of padding."""
    batches = batches_of("sum", 11, most=12, least=5, size=8)
    for place, batch in enumerate(batches):
        batch["ids"].values()[:: 1 + place % 2] = 7
    expected = run(wide("all-fast"), batches)
    found = run(wide("lookahead", 60), batches, seen)
    assert found.same_bits(expected)
    assert seen.strange > 0


def wide(strategy: str, slots: int = 0) -> Model:
    model = make("sum", "adagrad", strategy, slots)
    model.bias = nn.Parameter(torch.zeros(8))
    return model


@without_gpu
@pytest.mark.slow
def test_vectors_without_pooling_are_captured_where_their_number_is_the_same(seen: Replays) -> None:
    for options in ({"most": 3, "empty": False}, {"most": 9}):
        seen.replays = 0
        model = make("unpooled", "adagrad", "lookahead", slots=40)
        found = run(model, batches_of("unpooled", 8, **options), seen)
        assert found.same_bits(eager("unpooled", "adagrad", 8, **options))
        assert (seen.replays > 3) == ("empty" in options)


@without_gpu
def test_a_shape_that_goes_takes_the_memory_of_its_graphs_along() -> None:
    """As torch does it, a pool whose last graph has gone is refused ever after."""
    graphs: dict[object, WeakSet[StandIn]] = {}

    class Pools(Replays):
        def settings(self) -> GraphSettings:
            return replace(super().settings(), forgotten=3)

        def capture(self, launch: Any, pool: Any, priority: int) -> Any:
            gc.collect()  # what stands in for a graph knows its input, which knows the graph
            if pool is not None and not graphs[pool]:
                raise RuntimeError("the pool's last graph has gone")
            own = object() if pool is None else pool
            graph = super().capture(launch, pool, priority)
            graph.pool = lambda: own
            graphs.setdefault(own, WeakSet()).add(graph)
            return graph

    generator = torch.Generator().manual_seed(1)
    short = [batch_of(TABLES["sum"], generator, size=SIZE - 1) for _ in range(5)]
    batches = [*batches_of("sum", 5), *short, *batches_of("sum", 5, most=7)]
    model = make("sum", "sgd", "lookahead", slots=80)
    found = run(model, batches, Pools(), batch_size=SIZE)
    assert found.same_bits(run(make("sum"), batches))
    assert len(graphs) == 2


@without_gpu
def test_a_step_is_captured_anew_when_rows_are_frozen_at_first_and_no_longer(seen: Replays) -> None:
    """Not when others are: their bits lie at the same place."""
    changes: dict[int, Any] = {5: {"a": torch.arange(40)}, 8: {"b": torch.arange(20)}, 9: {}}
    changes[10] = None
    model, graphs = make("sum", "adagrad"), []
    step = step_of(model, seen)
    for place, batch in enumerate(stream(batches_of("sum", 11, most=2, least=1), model, step)):
        if place in changes:
            model.embedding.freeze_rows(changes[place])
        step(batch)
        assert step.landing is not None
        graphs.append(step.landing.num_graphs)
    assert [graphs[place] for place in changes] == [1, 4, 4, 1]  # all others are gone, or none


# -- a user's loop ---------------------------------------------------------------------------


@without_gpu
def test_a_loop_may_pull_batches_together_skip_some_and_leave(seen: Replays) -> None:
    """Batches read ahead overwrite none that are pulled; skipped ones free their inputs."""
    batches, trained, losses = batches_of("sum", 18), [], []
    model = make("sum", "adagrad", "lookahead", slots=60)
    step = step_of(model, seen)
    source = stream(batches[:13], model, step)
    for place in (0, 4):
        pulled = [next(source) for _ in range(4)]
        losses += [step(batch) for batch in pulled]
        trained += batches[place : place + 4]
    for place in (8, 9, 10, 11):
        batch = next(source)
        if place % 2:
            losses.append(step(batch))
            trained.append(batches[place])
    source.close()  # two batches were read ahead
    for batch in stream(batches[12:], model, step):
        losses.append(step(batch))
    trained += batches[12:]
    assert found_in(model, losses).same_bits(run(make("sum", "adagrad"), trained))
    assert seen.strange > 0


@without_gpu
def test_a_batch_that_was_overwritten_is_refused(seen: Replays) -> None:
    batches = batches_of("sum", 12, most=3)
    model = make("sum", "sgd", "lookahead", slots=40)
    step = step_of(model, seen)
    kept: list[Any] = []
    for place, batch in enumerate(stream(batches, model, step)):
        if place == 6:
            kept.append(batch)
            continue
        step(batch)
    assert seen.replays > 0
    with pytest.raises(RuntimeError, match="this batch has been overwritten"):
        step(kept[0])


@without_gpu
@pytest.mark.parametrize("rebuilds", [False, True], ids=["capture fails", "ids made anew"])
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so_once(rebuilds: bool) -> None:
    """Also from inputs with padding, of which an eager step must see nothing."""

    class Refuses(Replays):
        def capture(self, launch: Any, pool: Any, priority: int) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    class Rebuilds(Model):
        def forward(self, batch: Any) -> Tensor:
            ids = batch["ids"]
            anew = hotrow.KeyedJaggedTensor(
                ids.keys(), ids.values().clone(), offsets=ids.offsets().clone()
            )
            found: Tensor = super().forward({**batch, "ids": anew if rebuilds else ids})
            return found + (ids.values().float().mean() if rebuilds else 0.0)

    batches = batches_of("sum", 5)
    expected = run(make("sum", "adagrad", model=Rebuilds), batches)
    model = make("sum", "adagrad", "lookahead", 40, model=Rebuilds)
    reason = "ValueError: offsets must end" if rebuilds else "RuntimeError: .* not permitted"
    with pytest.warns(UserWarning, match=f"cannot be captured .* {reason}") as told:
        found = run(model, batches, Refuses())
    assert sum("captured" in str(each.message) for each in told) == 1
    assert found.same_bits(expected)


@without_gpu
@pytest.mark.slow
def test_a_loss_that_raises_leaves_everything_usable() -> None:
    """In an eager step, and while it is captured."""
    batches = batches_of("sum", 13)
    batches[6] = batch_of(TABLES["sum"], torch.Generator().manual_seed(1), size=SIZE - 1)
    captures = []

    class FailsOnce(Replays):
        def capture(self, launch: Any, pool: Any, priority: int) -> Any:
            captures.append(pool)
            if len(captures) == 2:
                raise ValueError("this capture fails")
            return super().capture(launch, pool, priority)

    def picky(found: Tensor, labels: Tensor) -> Tensor:
        if len(labels) != SIZE:
            raise ValueError("too few labels")
        return squares(found, labels)

    seen = FailsOnce()
    model = make("sum", "adagrad", "lookahead", slots=40)
    step, losses, trained = step_of(model, seen, loss_fn=picky), [], []
    for batch, given in zip(stream(batches, model, step), batches, strict=True):
        with suppress(ValueError):
            losses.append(step(batch))
            trained.append(given)
    assert len(losses) == 11
    expected = run(make("sum", "adagrad"), trained)
    assert found_in(model, losses).same_bits(expected)
    assert seen.strange > 0


@without_gpu
def test_an_error_behind_the_update_of_the_rows_does_not_update_them_twice(
    seen: Replays,
) -> None:
    """When the step is tried with padding: one that failed before would be run again without."""
    batches, tries = batches_of("sum", 5), []

    def raises_once(*_: Any) -> None:
        is_tried = any(work.is_fixed for work in model.embedding.pipeline.planned[-1].works)
        if is_tried and not tries:
            tries.append("failed")
            raise ValueError("this hook fails once")

    model = make("sum", "adagrad", "lookahead", slots=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(raises_once)
    step, losses = step_of(model, seen, optimizer=optimizer), []
    for batch in stream(batches, model, step):
        with suppress(ValueError):
            losses.append(step(batch))
    assert tries == ["failed"]
    assert len(losses) == 4
    twin = make("sum", "adagrad")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    expected = run(twin, batches, optimizer=optimizer)
    assert found_in(model, expected.losses).same_bits(expected)


@without_gpu
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.Adam, {}), (torch.optim.Adagrad, {"lr_decay": 0.1})]
)
def test_an_optimizer_whose_numbers_follow_a_count_of_the_host_is_not_captured(
    kind: Any, options: Any, seen: Replays
) -> None:
    batches = batches_of("sum", 5)
    model, twin = make("sum", "sgd", "lookahead", slots=40), make("sum")
    with pytest.warns(UserWarning, match=rf"{kind.__name__} counts its steps on the host") as told:
        found = run(model, batches, seen, optimizer=kind(model.parameters(), lr=0.1, **options))
    assert sum("captured" in str(each.message) for each in told) == 1
    assert seen.captures == 0
    assert found.same_bits(run(twin, batches, optimizer=kind(twin.parameters(), lr=0.1, **options)))


# -- what a user calls -----------------------------------------------------------------------


def cpu_model() -> Model:
    return make("sum", engine=None)


def test_on_a_cpu_a_step_gives_the_bits_of_a_loop_written_by_hand() -> None:
    batches = batches_of("sum", 8)
    twin = make("sum", "adam", engine=None)
    optimizer, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for batch in hotrow.ahead(batches, twin, ids=lambda batch: batch["ids"]):
        loss = squares(twin(batch), batch["label"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model = make("sum", "adam", "lookahead", slots=60, engine=None)
    step = hotrow.graphed(
        model,
        squares,
        torch.optim.SGD(model.parameters(), lr=0.1),
        labels=lambda batch: batch["label"],
        batch_size=SIZE,
        max_lookups=100,
    )
    found = [step(batch) for batch in stream(batches, model, step)]
    assert found_in(model, found).same_bits(found_in(twin, losses))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss_fn": None}, "loss_fn must be a function, got NoneType"),
        ({"labels": "label"}, "labels must be a function, got str"),
        ({"optimizer": hotrow.SGD()}, "optimizer must be a torch optimizer .* got SGD"),
        (
            {"optimizer": cpu_model().embedding.optimizer},
            "optimizer is a collection's own",
        ),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"max_lookups": 1.5}, r"max_lookups must be a whole number of at least 1, not 1\.5"),
        ({"model": nn.Linear(1, 1)}, "Linear holds no hotrow collection"),
    ],
)
def test_wrong_arguments_are_told(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "model": cpu_model(),
        "loss_fn": squares,
        "optimizer": None,
        **wrong,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        hotrow.graphed(**given)


def test_a_step_that_graphed_did_not_give_is_refused() -> None:
    with pytest.raises(TypeError, match=r"step must be what hotrow.graphed gave, got function"):
        hotrow.ahead([], cpu_model(), step=squares)


def test_labels_that_were_not_named_are_asked_for() -> None:
    model = cpu_model()
    step = hotrow.graphed(model, squares, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AttributeError, match=r"a dict, has no \.label; say where .* labels=lambda"):
        step(batches_of("sum", 1)[0])


def test_a_trainer_refuses_rows_settings_for_the_dense_part() -> None:
    model = cpu_model()
    with pytest.raises(TypeError, match="dense_optimizer is a collection's own"):
        hotrow.Trainer(
            model, squares, dense_optimizer=model.embedding.optimizer, ids=lambda b: b["ids"]
        )
