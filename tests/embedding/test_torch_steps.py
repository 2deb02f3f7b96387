"""With `update="step"` an ordinary loop means for rows what it means for torch's parameters.

Each program runs on a collection and on torch's own modules, and everything is compared: losses,
rows and dense weights. Between `backward()` and the step, rows are driven out of fast memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import hotrow
from builders import variant
from contracts import DEVICE
from hotrow.engine.gpu.rows import gpu_rows

SIZES = {"a": (300, 8), "b": (200, 8), "c": (250, 16)}
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}


class Model(nn.Module):
    """A layer on the vectors of three tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.top(torch.cat(self.vectors(ids), 1))
        return torch.tanh(vectors).squeeze(1)

    def loss(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.top.weight.device)
        return (self(ids) - 0.5).square().sum()

    def vectors(self, ids: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def weight(self, name: str) -> nn.Parameter:
        raise NotImplementedError

    def weights(self) -> list[nn.Parameter]:
        return [self.weight(name) for name in SIZES]

    def rows(self, name: str) -> Tensor:
        raise NotImplementedError

    def drive_out(self) -> None:
        """Let the rows of earlier batches leave fast memory."""


class Rows(Model):
    def __init__(self, strategy: Any, idle: str | None = None, **options: Any) -> None:
        super().__init__()
        tables = [hotrow.EmbeddingBagConfig(n, *SIZES[n], [f"f{n}"]) for n in SIZES]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, None, "40%", update="step", seed=3, strategy=strategy, idle=idle, **options
        )
        self.to(self.embedding.device)
        self._draw = torch.Generator().manual_seed(5)

    def vectors(self, ids: Tensor) -> list[Tensor]:
        return list(self.embedding(ids).to_dict().values())

    def weight(self, name: str) -> nn.Parameter:
        return dict(self.embedding.named_parameters())[self.embedding.key_of(name)]

    def rows(self, name: str) -> Tensor:
        return torch.cat([chunk for _, chunk in self.embedding.weights(name)])

    def drive_out(self) -> None:
        self.embedding(batch(self._draw).to(self.embedding.device))


class Plain(Model):
    def __init__(self, rows: Rows, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        for name, size in SIZES.items():
            self.tables[name] = nn.EmbeddingBag(*size, mode="sum", sparse=sparse)
            self.tables[name].load_state_dict({"weight": rows.rows(name)})
        self.to(rows.embedding.device)

    def vectors(self, ids: Tensor) -> list[Tensor]:
        return [table(ids[:, [k]]) for k, table in enumerate(self.tables.values())]

    def weight(self, name: str) -> nn.Parameter:
        weight = self.tables[name].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def rows(self, name: str) -> Tensor:
        return self.weight(name).detach()


def batch(draw: torch.Generator, size: int = 24) -> Tensor:
    columns = [torch.rand(size, generator=draw) ** 2 * rows for rows, _ in SIZES.values()]
    return torch.stack(columns, 1).long()


def batches(count: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield batch(draw)


class Both:
    """The optimizer of tables under test, and SGD for the dense part, as one."""

    def __init__(self, model: Model, make: Make) -> None:
        self.tables = make(model.weights())
        self.dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
        self.every = [self.tables, self.dense]

    def step(self) -> None:
        for optimizer in self.every:
            optimizer.step()

    def zero_grad(self, **options: Any) -> None:
        for optimizer in self.every:
            optimizer.zero_grad(**options)


# -- programs --------------------------------------------------------------------------------
# Each trains a model, and yields what is to be compared.

Program = Callable[[Model, Make], Iterator[Tensor]]


def ordinary(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(8):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        model.drive_out()
        both.step()
        yield loss


def accumulates(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(12)):
        loss = model.loss(ids) / 3
        loss.backward()
        model.drive_out()
        if number % 3 == 2:
            both.step()
            both.zero_grad()
        yield loss


def zeroes_in_place(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(10)):
        loss = model.loss(ids)
        loss.backward()
        if number % 4:  # else the gradients are dropped, or zeros are stepped
            both.step()
        both.zero_grad(set_to_none=False)
        if number == 5:
            both.step()
        yield loss


def never_zeroes(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(4):
        loss = model.loss(ids) * 0.1
        loss.backward()
        model.drive_out()
        both.step()
        yield loss


def steps_twice(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(4):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        both.step()
        model.drive_out()
        both.step()
        yield loss


def skips_steps(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(8)):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        if number % 2:
            both.step()
        yield loss


def two_losses(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(5):
        both.zero_grad()
        vectors = model.vectors(ids.to(model.top.weight.device))
        for vector in vectors:
            vector.square().sum().backward(retain_graph=True)
        loss = torch.cat(vectors, 1).sum()
        loss.backward()
        both.step()
        yield loss


def one_graph_twice(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(4):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward(retain_graph=True)
        model.drive_out()
        loss.backward()
        both.step()
        yield loss


def two_lookups(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    pairs = list(batches(8))
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        both.zero_grad()
        loss = model.loss(first) + 0.5 * model.loss(second)
        loss.backward()
        both.step()
        yield loss


def closure(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(4):

        def run(ids: Tensor = ids) -> Tensor:
            both.zero_grad()
            loss = model.loss(ids)
            loss.backward()
            model.drive_out()
            return loss

        yield both.tables.step(run)  # type: ignore[arg-type, misc]
        both.dense.step()


def scaler(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for number, ids in enumerate(batches(8)):
        both.zero_grad()
        loss = model.loss(ids) * (float("inf") if number in (2, 3) else 1.0)
        scaler.scale(loss).backward()
        model.drive_out()
        for optimizer in both.every:
            scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(scaler.get_scale())


def scaler_accumulates_and_clips(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for number, ids in enumerate(batches(8)):
        scaler.scale(model.loss(ids) / 2).backward()
        if number % 2:
            for optimizer in both.every:
                scaler.unscale_(optimizer)
            yield clip(model, 0.5)
            for optimizer in both.every:
                scaler.step(optimizer)
            scaler.update()
            both.zero_grad()


def clip(model: Model, most: float) -> Tensor:
    """Clip all gradients; torch itself cannot clip sparse ones."""
    weights = [x for x in model.parameters() if x.grad is not None and not x.grad.is_sparse]
    return clip_grad_norm_(weights, most)


def clips(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(6):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        model.drive_out()
        yield clip(model, 0.1)
        both.step()


def clips_between_passes(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(9)):
        loss = model.loss(ids)
        loss.backward()
        yield clip(model, 0.2)
        model.drive_out()
        if number % 3 == 2:
            both.step()
            both.zero_grad()


def multiplies_gradients(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(6)):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        for place, weight in enumerate(model.weights()):
            assert weight.grad is not None
            if number % 2:
                weight.grad.mul_(0.5 + place)
            else:
                weight.grad = weight.grad * (0.5 + place)
        both.step()
        yield loss


def drops_one_table(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(9)):
        loss = model.loss(ids)
        loss.backward()
        model.weight("abc"[number % 3]).grad = None
        if number % 2:
            both.step()
            both.zero_grad()
        yield loss


def schedules(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    schedule = torch.optim.lr_scheduler.ExponentialLR(both.tables, 0.7)
    for ids in batches(6):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        both.step()
        schedule.step()
        yield loss


def rates_by_table(model: Model, make: Make) -> Iterator[Tensor]:
    groups = [{"params": [x], "lr": 0.1 * k} for k, x in enumerate(model.weights(), start=1)]
    both = Both(model, lambda params: make(groups))
    for number, ids in enumerate(batches(6)):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        both.step()
        both.tables.param_groups[number % 3]["lr"] *= 0.5
        yield loss


def freezes(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(9)):
        model.weight("b").requires_grad_(number < 2 or number > 5)
        model.weight("c").requires_grad_(number != 4)
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        both.step()
        yield loss


def uses_some_tables(model: Model, make: Make) -> Iterator[Tensor]:
    """SparseAdam counts steps by table."""
    both = Both(model, make)
    for number, ids in enumerate(batches(9)):
        both.zero_grad()
        vectors = model.vectors(ids.to(model.top.weight.device))
        loss = vectors[number % 3].square().sum() + vectors[(number + 1) % 3].sum()
        loss.backward()
        model.drive_out()
        both.step()
        yield loss


def two_optimizers(model: Model, make: Make) -> Iterator[Tensor]:
    first, second = make([model.weight("a")]), make([model.weight("b"), model.weight("c")])
    for number, ids in enumerate(batches(8)):
        loss = model.loss(ids)
        loss.backward()
        model.drive_out()
        if number % 2:
            first.step()
            first.zero_grad()
        if number % 3 == 2:
            second.step()
            second.zero_grad()
        yield loss


def new_optimizer(model: Model, make: Make) -> Iterator[Tensor]:
    """A new one begins with new state."""
    for _ in range(3):
        yield from ordinary(model, make)


def saves_and_loads(model: Model, make: Make) -> Iterator[Tensor]:
    yield from ordinary(model, make)
    both = Both(model, make)
    for ids in batches(3):
        model.loss(ids).backward()
        both.step()
        both.zero_grad()
    weights, state = deepcopy((model.state_dict(), both.tables.state_dict()))
    yield from ordinary(model, make)
    model.load_state_dict(weights)
    both = Both(model, make)
    both.tables.load_state_dict(state)
    for ids in batches(5):
        both.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        both.step()
        yield loss


def evaluates_in_between(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(5):
        both.zero_grad()
        model.loss(ids).backward()
        model.eval()
        with torch.no_grad():
            yield model.loss(ids)
        model.train()
        both.step()


def recomputes(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(5):
        both.zero_grad()
        loss = checkpoint(model.loss, ids, use_reentrant=False)
        assert isinstance(loss, Tensor)
        loss.backward()
        both.step()
        yield loss


def asks_for_some_gradients(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(5):
        both.zero_grad()
        loss = model.loss(ids)
        (grad,) = torch.autograd.grad(loss, [model.top.weight], retain_graph=True)
        yield grad
        loss.backward(inputs=[model.top.weight, model.weight("b")], retain_graph=True)
        model.drive_out()
        loss.backward(inputs=[model.weight("b"), model.weight("c")])
        both.step()


def fails_in_between(model: Model, make: Make) -> Iterator[Tensor]:
    """Gradients of a pass that failed do not stay, as torch's own partly would."""
    both = Both(model, make)
    for ids in batches(4):
        both.zero_grad()
        loss = model.loss(ids)
        with pytest.raises(RuntimeError, match="element 0"):
            loss.detach().backward()
        loss.backward()
        both.step()
        yield loss


def empty_batch(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for number, ids in enumerate(batches(5)):
        both.zero_grad()
        loss = model.loss(ids[:0] if number == 2 else ids)
        loss.backward()
        both.step()
        yield loss


def penalises_gradients(model: Model, make: Make) -> Iterator[Tensor]:
    both = Both(model, make)
    for ids in batches(4):
        both.zero_grad()
        loss = model.loss(ids)
        (grad,) = torch.autograd.grad(loss, [model.top.weight], create_graph=True)
        (loss + 0.01 * grad.square().sum()).backward()
        both.step()
        yield loss


PROGRAMS: list[Program] = [
    ordinary,
    accumulates,
    zeroes_in_place,
    never_zeroes,
    steps_twice,
    skips_steps,
    two_losses,
    one_graph_twice,
    two_lookups,
    closure,
    scaler,
    scaler_accumulates_and_clips,
    clips,
    clips_between_passes,
    multiplies_gradients,
    drops_one_table,
    schedules,
    rates_by_table,
    freezes,
    uses_some_tables,
    two_optimizers,
    new_optimizer,
    saves_and_loads,
    evaluates_in_between,
    recomputes,
    asks_for_some_gradients,
    fails_in_between,
    empty_batch,
    penalises_gradients,
]
STRATEGIES = {
    "random": variant("lookahead", victims="random"),
    "most-recent": variant("lru", victims="most-recent"),
    "all-fast": "all-fast",
    "hybrid": "hybrid",
}


def differences(program: Program, make: Make, rows: Rows, plain: Plain) -> list[float]:
    seen = [[x.detach().cpu() for x in program(model, make)] for model in (rows, plain)]
    for found, model in zip(seen, (rows, plain), strict=True):
        found += [model.rows(name).cpu() for name in SIZES]
        found += [weight.detach().cpu() for weight in model.top.parameters()]
    pairs = [((x - y).abs(), y.abs().max().clamp(min=1.0)) for x, y in zip(*seen, strict=True)]
    return [float((difference / size).max()) for difference, size in pairs]


@pytest.mark.thinned(2)  # every program, with one or two optimizers
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_means_what_it_means_in_torch(program: Program, maker: str) -> None:
    for strategy in STRATEGIES.values():
        rows = Rows(strategy, None)
        plain = Plain(rows, sparse=maker == "SparseAdam")
        found = differences(program, MAKERS[maker], rows, plain)
        assert max(found) < 1e-5, (strategy, found)


def by_gpu(strategy: Any, fill: str = "auto") -> Rows:
    """Rows of a GPU's engine: in Triton's interpreter where there is no GPU."""
    return Rows(strategy, engine=gpu_rows, device=DEVICE, fill=fill)


ENGINES = {
    "zero-copy": lambda: by_gpu(variant("lookahead", victims="random"), "zero-copy"),
    "most-recent": lambda: by_gpu(variant("lru", victims="most-recent")),
    "all-fast": lambda: by_gpu("all-fast"),
}


def assert_alike_by_gpu(program: Program, maker: str, engine: str) -> None:
    rows = ENGINES[engine]()
    plain = Plain(rows, sparse=maker == "SparseAdam")
    found = differences(program, MAKERS[maker], rows, plain)
    assert max(found) < 1e-5, found


@pytest.mark.gpu
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_on_a_gpu(program: Program, maker: str) -> None:
    for engine in ENGINES:
        assert_alike_by_gpu(program, maker, engine)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the whole list runs on a GPU")
@pytest.mark.parametrize(
    ("program", "maker", "engine"),
    [
        (clips_between_passes, "Adagrad", "zero-copy"),
        (uses_some_tables, "SparseAdam", "most-recent"),
        (freezes, "SGD", "all-fast"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_programs_on_a_gpus_engine(program: Program, maker: str, engine: str) -> None:
    assert_alike_by_gpu(program, maker, engine)


# -- what is refused -------------------------------------------------------------------------


def trained(model: Rows, optimizer: torch.optim.Optimizer, **step: Any) -> None:
    optimizer.zero_grad()
    model.loss(next(batches(1))).backward()
    optimizer.step(**step)


def perturbs(model: Rows) -> None:
    """As sharpness-aware minimisation does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    with torch.no_grad():
        for weight in model.weights():
            weight.add_(0.1)
    trained(model, optimizer)


def clips_values(model: Rows) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(next(batches(1))).backward()
    clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


def adds_noise(model: Rows) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(next(batches(1))).backward()
    for weight in model.weights():
        assert weight.grad is not None
        weight.grad.data.add_(0.1)
    optimizer.step()


def clips_another_norm(model: Rows) -> None:
    model.loss(next(batches(1))).backward()
    clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))


def has_no_optimizer(model: Rows) -> None:
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    for _ in range(2):
        trained(model, optimizer)


def initialises(model: Rows) -> None:
    for weight in model.parameters():
        nn.init.normal_(weight)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def penalises_parameters(model: Rows) -> None:
    loss = model.loss(next(batches(1)))
    (loss + sum(weight.square().sum() for weight in model.parameters())).backward()


def changes_its_class(model: Rows) -> None:
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained(model, torch.optim.Adagrad(model.parameters(), lr=0.1))


def steps(make: Make) -> Callable[[Rows], None]:
    return lambda model: trained(model, make(model.parameters()))


REFUSED: dict[str, tuple[Callable[[Rows], None], str]] = {
    "Adam": (
        steps(torch.optim.Adam),
        "Adam moves rows in every step.*idle='decay'.*SparseAdam.*idle='frozen'",
    ),
    "AdamW": (steps(torch.optim.AdamW), "AdamW moves rows in every step"),
    "RMSprop": (steps(torch.optim.RMSprop), "RMSprop moves rows.*idle='decay'"),
    "LBFGS": (
        lambda model: trained(
            model,
            torch.optim.LBFGS(model.parameters()),
            closure=lambda: model.loss(next(batches(1))),
        ),
        "LBFGS has no rule",
    ),
    "momentum": (
        steps(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        "SGD with momentum moves rows",
    ),
    "weight decay": (
        steps(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1)),
        "SGD with weight_decay moves rows.*idle='frozen'",
    ),
    "Adagrad's decay": (
        steps(lambda params: torch.optim.Adagrad(params, lr_decay=0.1)),
        "lr_decay with idle='decay' alone; else use a scheduler",
    ),
    "maximize": (
        steps(lambda params: torch.optim.SGD(params, lr=0.1, maximize=True)),
        "maximize=True",
    ),
    "perturbs": (perturbs, "was written to, but it holds no rows.*SAM"),
    "clips values": (clips_values, "something else than a multiplication.*clip_grad_value_"),
    "adds noise": (adds_noise, "something else than a multiplication"),
    "another norm": (clips_another_norm, "norm_type=inf.*norm_type=2 only"),
    "no optimizer": (has_no_optimizer, "no optimizer holds the tables' stand-ins"),
    "penalises": (penalises_parameters, "the loss uses the parameter that stands for table"),
    "initialises": (initialises, "was written to.*init=.*load_weights"),
    "another class": (changes_its_class, "rows have the state of SGD, and Adagrad steps them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_rows_cannot_do_is_refused_before_a_row_changes(case: str) -> None:
    program, match = REFUSED[case]
    model = Rows("lru", None)
    if case not in ("perturbs", "another class", "no optimizer"):
        before = [model.rows(name).clone() for name in SIZES]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=match):
        program(model)
    if case not in ("perturbs", "another class", "no optimizer"):
        assert all(map(torch.equal, before, [model.rows(name) for name in SIZES]))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.Adam(params, lr=0.05),
        lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
        lambda params: torch.optim.SGD(params, lr=0.05, weight_decay=0.1),
    ],
    ids=["Adam", "AdamW", "SGD"],
)
def test_idle_rows_rest_and_others_move_as_in_torch(make: Make) -> None:
    """Every row of a small table has a gradient in every step, so torch moves no idle row."""
    rows = Rows("lru", "frozen")
    plain = Plain(rows, sparse=False)
    ids = torch.arange(24).unsqueeze(1).expand(24, 3)
    for model in (rows, plain):
        optimizer = make(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model.loss(ids).backward()
            optimizer.step()
    for name in SIZES:
        assert torch.allclose(rows.rows(name)[:24], plain.rows(name)[:24], rtol=0, atol=2e-6)
    untouched = Rows("lru", "frozen")
    assert torch.equal(rows.rows("a")[24:], untouched.rows("a")[24:])


def test_optimizers_step_many_parameters_at_once_beside_stand_ins() -> None:
    rows = Rows("lookahead")
    # Of other classes torch steps parameters one by one: slower, and on a GPU with other bits.
    assert {type(parameter) for parameter in rows.parameters()} == {nn.Parameter}
