"""What programs do to parameters that rows cannot follow is refused, not ignored."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hotrow

IDS = torch.arange(9)


def converted() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1))
    return hotrow.convert(model, "8KiB", seed=1, show=False)


def backward(model: Any) -> None:
    model(IDS).sum().backward()


def averaged(model: Any) -> None:
    """Keep an average of the parameters and evaluate with it, as torch_ema does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = [x.detach().clone() for x in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new.detach(), 0.1)
    for old, new in zip(average, model.parameters(), strict=True):
        new.data.copy_(old)
    model(IDS)


def chosen_by_identity(model: Any) -> None:
    table = model[0].weight
    first = torch.optim.SGD([table], lr=1.0)
    rest = torch.optim.SGD([x for x in model.parameters() if x is not table], lr=1.0)
    backward(model)
    first.step()
    rest.step()


def one_row_without_gradient(model: Any) -> None:
    backward(model)
    model[0].weight.grad[0] = 0


def stepped_in_backward(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda x: None)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "average": (averaged, "was written to, .* average state_dict"),
    "written": (lambda m: [x.data.mul_(2) for x in m.parameters()] and m(IDS), "was written to"),
    "two optimizers": (chosen_by_identity, "two optimizers hold table '0'"),
    "a row of a gradient": (one_row_without_gradient, "__setitem__: .*freeze_rows"),
    "a step in backward()": (stepped_in_backward, "register_post_accumulate_grad_hook: .* no hook"),
    "a hook": (lambda m: next(m.parameters()).register_hook(lambda g: g), "register_hook: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    use, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        use(converted())


def test_groups_that_miss_a_table_by_identity_are_warned_of() -> None:
    model = converted()
    tables = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    groups = [
        {"params": [x for x in model.parameters() if id(x) in tables], "lr": 1.0},
        {"params": [x for x in model.parameters() if id(x) not in tables]},
    ]
    with pytest.warns(UserWarning, match="a param group of SGD is empty"):
        torch.optim.SGD(groups, lr=0.1)


def test_two_optimizers_may_take_turns() -> None:
    model = converted()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    before = model.state_dict()["0.weight"]
    for optimizer in (first, second, second):
        model.zero_grad()
        backward(model)
        optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("read", ["lookup", "weights", "ahead"])
def test_rows_may_be_built_in_inference_mode(read: str) -> None:
    model = converted()
    with torch.inference_mode():
        if read == "lookup":
            model(IDS)
        elif read == "weights":
            list(model[0].weights())
        else:
            next(iter(hotrow.ahead([IDS], model.eval())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train().zero_grad()
    backward(model)
    optimizer.step()


class Slots:
    __slots__ = ("ids",)

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["slots", "padding of -1"])
def test_ids_are_found(kind: str) -> None:
    model = converted()
    ids = torch.tensor([[3, -1], [5, 7]]) if kind != "slots" else IDS.view(3, 3)
    for batch in hotrow.ahead([Slots(ids) for _ in range(4)], model):
        model[0](batch.ids.clamp(min=0)).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("budget", [0, -5, "4 gigs"])
def test_a_budget_that_is_none_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"budget|bytes"):
        hotrow.convert(nn.Sequential(nn.Embedding(1000, 8)), budget, show=False)


def test_a_class_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got type"):
        hotrow.convert(nn.Sequential, "1MiB")  # type: ignore[type-var]


# -- optimizers that change ------------------------------------------------------------------


def plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1))


def adagrad(model: Any, start: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=start)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(IDS + 20 * number).square().sum().backward()
        optimizer.step()


def rows(model: Any) -> Tensor:
    weight: Tensor = model.state_dict()["0.weight"]
    return weight


def two_made(model: Any) -> None:
    held = [sgd(model), adagrad(model), torch.optim.Adam(model.parameters())]
    train(model, held[1])


def another_start(model: Any) -> None:
    train(model, adagrad(model))
    train(model, adagrad(model, 1.0))


def a_closure(model: Any) -> None:
    train(model, adagrad(model))
    optimizer = adagrad(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(IDS).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def frozen_before_backward(model: Any) -> None:
    optimizer = sgd(model)
    loss = model(IDS).sum()
    model[0].requires_grad_(False)
    loss.backward()
    optimizer.step()


CHANGES = {x.__name__: x for x in (two_made, another_start, a_closure, frozen_before_backward)}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_follow_as_in_torch(name: str) -> None:
    expected, found = plain(), hotrow.convert(plain(), "30%", seed=1, show=False)
    CHANGES[name](expected)
    CHANGES[name](found)
    torch.testing.assert_close(rows(found), rows(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].weight, expected[1].weight, rtol=1e-5, atol=1e-6)


def test_optimizers_with_state_in_turns_are_refused() -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    first, second = adagrad(model), adagrad(model)
    train(model, first)
    train(model, second)
    with pytest.raises(RuntimeError, match="two optimizers step table '0' in turns"):
        train(model, first)


NEW_STATE = {
    "Adagrad": lambda model: adagrad(model, 0.5),
    "SparseAdam": lambda model: torch.optim.SparseAdam([model[0].weight], lr=0.1),
}


@pytest.mark.parametrize("name", NEW_STATE)
def test_a_new_optimizer_has_the_state_of_a_new_optimizer(name: str) -> None:
    """Until it steps, the state of rows is that of the optimizer before."""
    expected = plain()
    expected[0].sparse = name == "SparseAdam"
    found = hotrow.convert(plain(), "30%", seed=1, show=False)
    states: list[list[Any]] = [[], []]
    for model, seen in zip((expected, found), states, strict=True):
        first = NEW_STATE[name](model)
        train(model, first)
        second = NEW_STATE[name](model)
        seen += deepcopy([first.state_dict()["state"], second.state_dict()["state"]])
        train(model, first)
        seen += deepcopy([first.state_dict()["state"], second.state_dict()["state"]])
        train(model, second)
        seen += deepcopy([second.state_dict()["state"]])
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)
    assert "sum" not in first.state_dict()["state"].get(0, {})  # rows have it no more


def test_a_new_optimizer_goes_on_with_the_plain_weights() -> None:
    expected, found = plain(), hotrow.convert(plain(), "30%", seed=1, show=False)
    for model in (expected, found):
        train(model, adagrad(model))
        new = adagrad(model, 0.5)
        if model is found:
            hotrow.revert(model, optimizer=new)
        train(model, new)
    torch.testing.assert_close(rows(found), rows(expected), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_loaded_in_the_same_process_keeps_its_state(tmp_path: Any) -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    optimizer = adagrad(model)
    train(model, optimizer)
    hotrow.save_checkpoint(tmp_path, model, step=3, optimizer=optimizer)
    train(model, optimizer)
    expected = rows(model)
    again = adagrad(model)
    hotrow.load_checkpoint(tmp_path, model, optimizer=again)
    train(model, again)
    assert torch.equal(rows(model), expected)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor of one value."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].data_ptr() == self.tensor.data_ptr()
        return func(*args, **(kwargs or {}))


def test_a_rate_in_a_tensor_is_read_once_in_a_step_for_all_tables() -> None:
    """A tensor on a GPU makes the host wait."""
    modules = nn.ModuleList([nn.Embedding(90, 4) for _ in range(5)])
    model = hotrow.convert(modules, "60%", show=False)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    before, counts = model.state_dict(), []
    for _ in range(3):
        optimizer.zero_grad()
        torch.cat([module(IDS) for module in model]).sum().backward()
        with Reads(rate) as reads:
            optimizer.step()
        counts.append(reads.count)
        rate *= 0.5
    assert counts == [2, 1, 1]  # the first step also makes a rule of it
    for name, now in model.state_dict().items():
        torch.testing.assert_close(now[IDS], before[name][IDS] - 0.5 - 0.25 - 0.125)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
def test_a_scaler_skips_steps_of_a_fused_optimizer(name: str) -> None:
    """Such an optimizer divides gradients by the scale itself, in their place."""
    expected, found = plain(), hotrow.convert(plain(), "30%", idle="frozen", seed=1, show=False)
    for model in (expected, found):
        options = {"weight_decay": 0.0} if name == "AdamW" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(6):
            optimizer.zero_grad()
            loss = model(IDS).square().sum() * (float("inf") if number in (2, 3) else 1.0)
            scaler.scale(loss).backward()
            if number == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(rows(found), rows(expected), rtol=1e-4, atol=1e-5)


def waiting_sums(model: Any) -> weakref.ref[Tensor]:
    (sums,) = model[0].collection.torch_steps._pending.for_step._sums.values()
    return weakref.ref(sums.grads)


def test_a_forward_pass_after_zero_grad_frees_the_gradients_of_rows() -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    optimizer = sgd(model)
    train(model, optimizer, 1)
    sums = waiting_sums(model)
    model(IDS)
    assert sums() is not None
    optimizer.zero_grad()
    model(IDS)
    assert sums() is None


def test_a_backward_pass_after_zero_grad_frees_the_gradients_of_rows_first() -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    optimizer = sgd(model)
    train(model, optimizer, 1)
    sums, are_freed = waiting_sums(model), []
    first, second = model[0](IDS), model[0](IDS + 20)
    optimizer.zero_grad()
    first.register_hook(lambda grad: are_freed.append(sums() is None))  # after the second lookup
    torch.cat([first, second]).sum().backward()
    assert are_freed == [True]


def test_an_error_in_a_step_does_not_end_training() -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    optimizer = adagrad(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer)
    handle.remove()
    before = rows(model)
    train(model, optimizer)
    assert not torch.equal(rows(model), before)


def test_weights_are_not_lost_silently_where_building_fails(monkeypatch: Any) -> None:
    from hotrow.embedding import module_tables

    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    of_collection = module_tables.EmbeddingBagCollection

    def fails(*args: Any, **options: Any) -> Any:
        of_collection(*args, **options)
        raise MemoryError

    monkeypatch.setattr(module_tables, "EmbeddingBagCollection", fails)
    with pytest.raises(MemoryError):
        model(IDS)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"'0' were lost .* convert the model anew"):
        model(IDS)


def test_a_step_inside_accumulate_is_refused() -> None:
    model = hotrow.convert(plain(), "30%", seed=1, show=False)
    optimizer = sgd(model)
    train(model, optimizer, 1)
    with model[0].collection.accumulate():
        backward(model)
        with pytest.raises(RuntimeError, match=r"inside of accumulate\(\)"):
            optimizer.step()


class Named(nn.Embedding):
    table = "mine"


def test_a_module_with_attributes_of_the_same_names_is_left() -> None:
    model = nn.Sequential(Named(300, 8), nn.Embedding(300, 8))
    hotrow.convert(model, "60%", show=False)
    assert type(model[0]) is Named
    assert isinstance(model[1], hotrow.Embedding)


def test_a_budget_that_is_too_small_is_refused_before_anything_changes() -> None:
    model = plain()
    optimizer = adagrad(model)
    train(model, optimizer)
    optimizer.zero_grad()
    state = optimizer.state[model[0].weight]["sum"].clone()
    with pytest.raises(ValueError, match="the smallest that works here"):
        hotrow.convert(model, "100B", optimizer=optimizer, show=False)
    assert type(model[0]) is nn.Embedding
    assert torch.equal(optimizer.state[model[0].weight]["sum"], state)
