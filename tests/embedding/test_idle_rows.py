"""With `idle="decay"` rows that no batch looks up move as with torch's dense optimizers, and have
the same bits with every strategy, however often they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hotrow
from builders import variant
from hotrow.run.job import same_bits

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer], Any]
ROWS, DIM, STEPS = 300, 8, 30
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adam-decay": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd-decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=1e-2, weight_decay=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.tags = nn.Embedding(ROWS, DIM, padding_idx=3), nn.EmbeddingBag(40, DIM)
        self.last = nn.Linear(3 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        items = self.items(ids[:, :2]).flatten(1)
        return self.last(torch.cat([items, self.tags(ids[:, 2:])], 1).tanh()).squeeze(1)


def batches(count: int = STEPS, seed: int = 0) -> list[Tensor]:
    """Few ids are frequent, so that rows rest for a step, or for nearly all of them."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([ROWS, ROWS, 40, 40, 40])
    return [(torch.rand(6, 5, generator=draw) ** 4 * sizes).long() for _ in range(count)]


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS)


@dataclass
class Trained:
    losses: list[float]
    model: Model
    optimizer: torch.optim.Optimizer

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()["state"]


def train(
    optimizer: str,
    schedule: Schedule | None = None,
    after: Callable[[int, Model, torch.optim.Optimizer], Any] = lambda *_: None,
    **options: Any,
) -> Trained:
    """Train a model; without `options` it is not converted."""
    model = Model()
    if options:
        budget = options.pop("budget", "60%")
        hotrow.convert(model, budget, show=False, seed=0, **options)
    steps = OPTIMIZERS[optimizer](model.parameters())
    schedules = [] if schedule is None else [schedule(steps)]
    losses = []
    stream = hotrow.ahead(batches(), model) if options else batches()
    for step, batch in enumerate(stream):
        steps.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        steps.step()
        for each in schedules:
            each.step()
        losses.append(loss.item())
        after(step, model, steps)
    return Trained(losses, model, steps)


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    weights = found.weights
    for name, weight in expected.weights.items():
        assert same_bits(weights[name], weight), name
    for number, state in expected.state().items():
        for name, value in state.items():
            assert same_bits(torch.as_tensor(found.state()[number][name]), torch.as_tensor(value))


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    # Others have no momentum that a cycle could change.
    [(name, None) for name in OPTIMIZERS]
    + [(name, one_cycle) for name in ("adam", "adam-decay", "adamw", "momentum", "nesterov")],
)
def test_rows_train_as_with_torch(optimizer: str, schedule: Schedule | None) -> None:
    expected = train(optimizer, schedule)
    found = train(optimizer, schedule, strategy="lookahead")
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
    weights = found.weights
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=3e-6, msg=name)
    of_torch = expected.state()
    for number, state in found.state().items():
        assert state.keys() >= of_torch[number].keys()
        for name, value in of_torch[number].items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        ("lookahead", "own"), ("lookahead", "random"), ("lru", "most-recent"), ("static", "own"),
        ("uncached", "own"), ("scratchpipe", "random"), ("cpu", ""), ("hybrid", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adam", "nesterov", "adam-decay"])
def test_every_strategy_has_the_bits_of_all_fast(
    optimizer: str, strategy: str, victims: str
) -> None:
    chosen = variant(strategy, victims=victims) if victims else strategy
    expected = train(optimizer, strategy="all-fast")
    assert_same(train(optimizer, strategy=chosen), expected)


@each_optimizer
def test_reading_rows_changes_none(optimizer: str) -> None:
    def read(step: int, model: Model, steps: torch.optim.Optimizer) -> None:
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                model(batches(1, seed=step)[0])
            model.train()
        if step % 7 == 0:
            model.state_dict()
            steps.state_dict()

    expected = train(optimizer, strategy="lookahead")
    assert_same(train(optimizer, after=read, strategy="lookahead"), expected)


@each_optimizer
def test_a_checkpoint_goes_on_with_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    def save(step: int, model: Model, steps: torch.optim.Optimizer) -> None:
        if step == STEPS // 2:
            hotrow.save_checkpoint(tmp_path, model, step=step, optimizer=steps)

    expected = train(optimizer, after=save, strategy="lookahead")
    model = hotrow.convert(Model(), "60%", show=False, seed=0, strategy="lookahead")
    steps = OPTIMIZERS[optimizer](model.parameters())
    loaded = hotrow.load_checkpoint(tmp_path, model, optimizer=steps)
    assert loaded is not None
    losses = []
    for batch in hotrow.ahead(batches()[STEPS // 2 + 1 :], model):
        steps.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses == expected.losses[STEPS // 2 + 1 :]
    assert_same(Trained(expected.losses, model, steps), expected)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nesterov"])
def test_a_torch_state_dict_goes_on_as_with_torch(optimizer: str) -> None:
    """State of torch's own model, of which hotrow has not seen the steps."""

    def go_on(model: Model, steps: torch.optim.Optimizer) -> None:
        for batch in batches(10, seed=5):
            steps.zero_grad()
            (model(batch) - 1).square().mean().backward()
            steps.step()

    expected = train(optimizer)
    model = hotrow.convert(Model(), "60%", show=False, strategy="lookahead")
    steps = OPTIMIZERS[optimizer](model.parameters())
    model.load_state_dict(expected.weights)
    steps.load_state_dict(deepcopy(expected.optimizer.state_dict()))  # torch keeps its tensors
    go_on(model, steps)
    go_on(expected.model, expected.optimizer)
    found = model.state_dict()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=3e-6, msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nesterov"])
def test_frozen_rows_rest_and_then_move_again(optimizer: str) -> None:
    frozen = torch.arange(0, ROWS, 2)
    kept: list[Tensor] = []

    def freeze(step: int, model: Model, steps: torch.optim.Optimizer) -> None:
        collection: Any = model.items.collection  # type: ignore[attr-defined]
        if step == 10:
            collection.freeze_rows({"items": frozen})
            kept.append(model.state_dict()["items.weight"][frozen])
        if step == 20:
            assert same_bits(model.state_dict()["items.weight"][frozen], kept[0])
            assert not same_bits(model.state_dict()["items.weight"][frozen + 1], kept[0])
            collection.freeze_rows(None)
            assert same_bits(model.state_dict()["items.weight"][frozen], kept[0])

    expected = train(optimizer, after=freeze, strategy="all-fast")
    assert not same_bits(expected.weights["items.weight"][frozen], kept[0])
    for strategy in ("lookahead", "hybrid"):
        assert_same(train(optimizer, after=freeze, strategy=strategy), expected)


def test_a_table_without_a_gradient_does_not_advance() -> None:
    models = [Model(), hotrow.convert(Model(), "60%", show=False)]
    for model in models:
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for number, batch in enumerate(batches(20)):
            steps.zero_grad()
            if number % 3:
                model(batch).sum().backward()
            else:
                model.tags(batch[:, 2:]).sum().backward()
            steps.step()
    expected, found = (model.state_dict() for model in models)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=3e-6, msg=name)


@pytest.mark.parametrize("rule", [hotrow.Adam(lr=0.01), hotrow.AdamW(lr=0.01)])
def test_a_collection_moves_rows_in_backward(rule: Any) -> None:
    """Without a torch optimizer: the rule of hotrow with `idle="decay"` is torch's dense one."""
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("a", 400, 8, ["a"])], rule, "40%", idle="decay", seed=0
    )
    weight = nn.Parameter(embedding.state_dict()["embedding_bags.a.weight"].clone())
    kind = torch.optim.AdamW if isinstance(rule, hotrow.AdamW) else torch.optim.Adam
    steps = kind([weight], lr=0.01)
    draw = torch.Generator().manual_seed(0)
    for _ in range(30):
        ids = torch.randint(400, (4, 1), generator=draw)
        embedding(ids).values().square().sum().backward()
        steps.zero_grad()
        weight[ids[:, 0]].square().sum().backward()
        steps.step()
    found = embedding.state_dict()["embedding_bags.a.weight"]
    torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adagrad, {"lr": 0.05})],
)
@pytest.mark.parametrize("decays", [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0)])
def test_decay_may_differ_between_param_groups_and_steps(
    kind: Any, settings: dict[str, float], decays: tuple[float, float]
) -> None:
    """A table without decay, beside one with it, or until it begins."""
    models = [Model(), hotrow.convert(Model(), "60%", show=False)]
    for model in models:
        parts = (model.items, model.tags, model.last)
        groups = [
            {"params": [*part.parameters()], "weight_decay": decay}
            for part, decay in zip(parts, (*decays, 0.1), strict=True)
        ]
        steps = kind(groups, **settings)
        for number, batch in enumerate(batches()):
            if number == 20 and any(decays):
                for group in steps.param_groups:
                    group["weight_decay"] = 0.1 - group["weight_decay"]
            steps.zero_grad()
            (model(batch) - 1).square().mean().backward()
            steps.step()
    expected, found = (model.state_dict() for model in models)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=3e-6, msg=name)


@pytest.mark.parametrize("momenta", [(0.9, 0.0), (0.0, 0.9)])
def test_one_momentum_per_collection_is_zero_or_not(momenta: tuple[float, float]) -> None:
    model = hotrow.convert(Model(), "60%", show=False)
    before = model.state_dict()
    parts = zip((model.items, model.tags), momenta, strict=True)
    steps = torch.optim.SGD(
        [{"params": [*part.parameters()], "momentum": x} for part, x in parts], lr=0.1
    )
    model(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match="in all its param groups"):
        steps.step()
    assert all(same_bits(x, before[name]) for name, x in model.state_dict().items())


def test_a_momentum_that_ends_is_refused_before_anything_has_changed() -> None:
    trained = train("momentum", strategy="lookahead")
    before = trained.weights
    trained.optimizer.param_groups[0]["momentum"] = 0.0
    trained.model(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"momentum was 0\.9"):
        trained.optimizer.step()
    assert all(same_bits(x, before[name]) for name, x in trained.weights.items())
    trained.optimizer.param_groups[0]["momentum"] = 0.9
    trained.optimizer.step()
    assert not same_bits(trained.weights["items.weight"], before["items.weight"])


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "adamw"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_state_from_before_the_first_step_starts_rows_anew(
    optimizer: str, steps_before: int
) -> None:
    """torch's state of a weight is empty then; rows that have one forget it."""
    models = [Model(), hotrow.convert(Model(), "60%", show=False)]
    for model in models:
        steps = OPTIMIZERS[optimizer](model.parameters())
        if optimizer == "momentum":
            steps.param_groups[0]["dampening"] = 0.5
        fresh = deepcopy(steps.state_dict())
        for number, batch in enumerate(batches(12)):
            if number == 6:
                steps.load_state_dict(deepcopy(fresh))
            steps.zero_grad()
            (model(batch) - 1).square().mean().backward()
            steps.step()
            if number < steps_before:
                fresh = deepcopy(steps.state_dict())
    expected, found = (model.state_dict() for model in models)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=3e-6, msg=name)


def test_torch_goes_on_with_a_state_from_before_the_first_step() -> None:
    """Its buffer begins as the first gradient, without dampening; zeros would not do."""
    plain, model = Model(), hotrow.convert(Model(), "60%", show=False)
    plain.load_state_dict(model.state_dict())
    kinds = [torch.optim.SGD(x.parameters(), 0.1, 0.9, dampening=0.5) for x in (plain, model)]
    kinds[0].load_state_dict(kinds[1].state_dict())
    for steps, trained in zip(kinds, (plain, model), strict=True):
        for batch in batches(5):
            steps.zero_grad()
            (trained(batch) - 1).square().mean().backward()
            steps.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=3e-6, msg=name)


def test_rows_are_right_for_threads_that_read_between_steps() -> None:
    """Readers may be the first to note the newest step, several at once."""
    expected = train("adamw", strategy="lookahead")
    model = hotrow.convert(Model(), "60%", show=False, seed=0, strategy="lookahead")
    steps, stop, errors = OPTIMIZERS["adamw"](model.parameters()), Event(), []

    def read() -> None:
        collection: Any = model.items.collection  # type: ignore[attr-defined]
        try:
            while not stop.is_set():
                [*collection.weights("items")]
                collection.optimizer.settings_dict()
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for batch in hotrow.ahead(batches(), model):
        steps.zero_grad()
        (model(batch) - 1).square().mean().backward()
        steps.step()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    for name, weight in expected.weights.items():
        assert same_bits(model.state_dict()[name], weight), name


def test_a_decay_that_begins_late_is_refused() -> None:
    model = hotrow.convert(Model(), "60%", show=False)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches(2)):
        steps.zero_grad()
        model(batch).sum().backward()
        if number == 0:
            steps.step()
    steps.param_groups[0]["weight_decay"] = 0.1
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="moves rows that no batch looks up from this step on"):
        steps.step()
    assert all(same_bits(model.state_dict()[name], x) for name, x in before.items())
