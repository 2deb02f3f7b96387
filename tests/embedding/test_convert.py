"""A converted model trains as the plain one, or refuses with a sentence.

Small programs run on a plain model and on its converted copy, side by side. Losses, whole tables
and dense weights are compared after every step. Between `backward()` and a step, rows are driven
out of fast memory.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import hotrow
from builders import variant

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}
STRATEGIES: dict[str, Any] = {
    "SGD": variant("lookahead", victims="random"),
    "Adagrad": variant("lru", victims="most-recent"),
    "SparseAdam": variant("scratchpipe"),
}
SIZES = {"a": (300, 8), "b": (200, 8), "c": (250, 16)}


class Net(nn.Module):
    """Embeddings and bags below a layer."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Embedding(*SIZES["a"], sparse=sparse)
        self.b = nn.Embedding(*SIZES["b"], padding_idx=1, sparse=sparse)
        self.c = nn.EmbeddingBag(*SIZES["c"], mode="mean", sparse=sparse)
        self.top = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        parts = [self.a(ids[:, 0]), self.b(ids[:, 1]), self.c(ids[:, 2:])]
        return torch.tanh(self.top(torch.cat(parts, 1))).squeeze(1)


def batch(draw: torch.Generator, size: int = 16) -> Tensor:
    rows = torch.tensor([300, 200, 250, 250])
    return (torch.rand(size, 4, generator=draw) ** 2 * rows).long()


def batches(count: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return iter([batch(draw) for _ in range(count)])


class Run:
    """A model, the optimizer of its tables, and SGD for the rest."""

    def __init__(self, model: Any, make: Make) -> None:
        self.model, self.make = model, make
        modules = [x for x in model.modules() if isinstance(x, nn.Embedding | nn.EmbeddingBag)]
        self.tables = [x._parameters["weight"] for x in dict.fromkeys(modules)]
        self.tables = list(dict.fromkeys(self.tables))
        held = {id(x) for x in self.tables}
        self.dense = [x for x in model.parameters() if id(x) not in held]
        self.optimizers = [make(self.tables), torch.optim.SGD(self.dense, lr=0.1)]
        self.is_sparse = isinstance(self.optimizers[0], torch.optim.SparseAdam)
        self._draw = torch.Generator().manual_seed(5)

    def loss(self, ids: Tensor) -> Tensor:
        return (self.model(ids) - 0.5).square().sum() / 8

    def drive_out(self) -> None:
        """Let the rows of earlier batches leave fast memory."""
        ids = batch(self._draw, 24)
        for module, column in zip("abc", range(3), strict=True):
            if hasattr(self.model, module):
                part = ids[:, column : column + 1] % 100
                getattr(self.model, module)(part)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def train(self, loss: Tensor) -> Tensor:
        """Make an ordinary step."""
        self.zero_grad()
        loss.backward()
        self.drive_out()
        self.step()
        return loss


Program = Callable[[Run], Iterator[Any]]
PROGRAMS: dict[str, tuple[Program, Callable[..., nn.Module]]] = {}


def program(of: Callable[..., nn.Module] = Net) -> Callable[[Program], Program]:
    """Add a program, which trains a model and yields what is to be compared."""

    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = function, of
        return function

    return add


@program()
def ordinary(run: Run) -> Iterator[Any]:
    for ids in batches(4):
        yield run.train(run.loss(ids))


@program()
def accumulation(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(6)):
        loss = run.loss(ids) / 3
        loss.backward()
        run.drive_out()
        if number % 3 == 2:
            run.step()
            run.zero_grad()
        yield loss


@program()
def two_backward_passes_of_one_graph(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        loss = run.loss(ids)
        loss.backward(retain_graph=True)
        yield run.train(loss * 1.0 if run.is_sparse else loss)


@program()
def skipped_steps(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(5)):
        run.zero_grad()
        loss = run.loss(ids)
        loss.backward()
        if number % 2:
            run.step()
        yield loss


@program()
def zeroing_in_place_or_not(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(5)):
        run.zero_grad(set_to_none=number % 2 == 0)
        if number == 3:
            run.step()
        loss = run.loss(ids)
        loss.backward()
        run.step()
        if number == 2:
            run.model.zero_grad(set_to_none=False)
            run.step()
        run.model.zero_grad()
        run.step()
        yield loss


@program()
def closures(run: Run) -> Iterator[Any]:
    for ids in batches(3):

        def closure(ids: Tensor = ids) -> Tensor:
            run.zero_grad()
            loss = run.loss(ids)
            loss.backward()
            run.drive_out()
            return loss

        yield run.optimizers[0].step(closure)  # type: ignore[arg-type]
        run.optimizers[1].step()


@program()
def scaler_with_an_overflow(run: Run) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number, ids in enumerate(batches(5)):
        run.zero_grad()
        scaler.scale(run.loss(ids) * (float("inf") if number == 2 else 1.0)).backward()
        run.drive_out()
        for optimizer in run.optimizers:
            scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(scaler.get_scale())


@program()
def clipping(run: Run) -> Iterator[Any]:
    for ids in batches(4):
        run.zero_grad()
        run.loss(ids).backward()
        run.drive_out()
        if run.is_sparse:  # torch clips no sparse gradients
            yield clip_grad_norm_(run.dense, 0.1)
        else:
            yield clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()


@program()
def clipping_one_weight(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        run.zero_grad()
        run.loss(ids).backward()
        if not run.is_sparse:
            yield clip_grad_norm_([run.model.a.weight, run.model.c.weight], 0.01)
        run.model.b.weight.grad = None
        run.step()
        yield torch.zeros(1)


@program()
def schedules(run: Run) -> Iterator[Any]:
    made = [torch.optim.lr_scheduler.StepLR(x, 2, 0.5) for x in run.optimizers]
    for ids in batches(4):
        yield run.train(run.loss(ids))
        for schedule in made:
            schedule.step()


@program()
def rates_by_module(run: Run) -> Iterator[Any]:
    """With the weights themselves, which stand for their tables."""
    model = run.model
    groups = [
        {"params": model.a.weight, "lr": 0.2},
        {"params": [model.b.weight]},
        {"params": list(model.c.parameters()), "lr": 0.05},
    ]
    run.optimizers[0] = run.make(groups)
    for number, ids in enumerate(batches(5)):
        yield run.train(run.loss(ids))
        run.optimizers[0].param_groups[number % 3]["lr"] *= 0.5


@program()
def called_twice(run: Run) -> Iterator[Any]:
    for ids in batches(4):
        vectors = [run.model.a(ids[:, 0]), run.model.a(ids[:8, 1]), run.model.a(ids[:, 0])]
        yield run.train(torch.cat(vectors).square().sum() + run.loss(ids))


@program()
def not_always_called(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(6)):
        vectors = [run.model.a(ids[:, 0]), run.model.b(ids[:, 1]), run.model.c(ids[:, 2:])]
        del vectors[number % 3]
        yield run.train(torch.cat(vectors, 1).square().sum())


@program()
def evaluation_between(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(4)):
        run.zero_grad()
        run.loss(ids).backward()
        run.model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            loss = run.loss(ids.flip(0))
        yield loss
        if number == 3:
            yield run.loss(ids[:5])  # as torch's own modules, it has a graph
        run.model.train()
        run.drive_out()
        run.step()


@program()
def trained_in_eval_mode(run: Run) -> Iterator[Any]:
    run.model.eval()
    yield from ordinary(run)


@program()
def saving_and_loading(run: Run) -> Iterator[Any]:
    yield from ordinary(run)
    saved = copy.deepcopy((run.model.state_dict(), [x.state_dict() for x in run.optimizers]))
    yield from ordinary(run)
    again = Run(run.model, run.make)
    again.model.load_state_dict(saved[0])
    for optimizer, state in zip(again.optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    yield from ordinary(again)


@program()
def freezing(run: Run) -> Iterator[Any]:
    model = run.model
    for number, ids in enumerate(batches(9)):
        if number in (1, 3):
            model.a.requires_grad_(number != 1)
        if number in (2, 5):
            model.c.weight.requires_grad = number != 2
        if number in (4, 6):
            model.b.weight.requires_grad_(number != 4)
        yield run.train(run.loss(ids))
        if number == 7:
            model.requires_grad_(False)
            assert not run.loss(ids).requires_grad
            model.requires_grad_(True)


@program()
def recomputation(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(5)):
        scale = torch.ones((), requires_grad=True)
        part = lambda scale, ids: run.loss(ids) * scale  # noqa: E731
        loss = checkpoint(part, scale, ids, use_reentrant=number % 2 == 0)
        assert isinstance(loss, Tensor)
        yield run.train(loss + run.model.a(ids[:, 0]).sum())


@program()
def some_gradients(run: Run) -> Iterator[Any]:
    for ids in batches(4):
        run.zero_grad()
        loss = run.loss(ids)
        (grad,) = torch.autograd.grad(loss, [run.model.top.weight], retain_graph=True)
        yield grad
        loss.backward(inputs=[run.tables[1], run.model.top.weight], retain_graph=True)
        run.drive_out()
        loss.backward(inputs=[run.tables[1], run.tables[2]])
        run.step()


@program()
def empty_batches(run: Run) -> Iterator[Any]:
    for number, ids in enumerate(batches(4)):
        yield run.train(run.loss(ids[: 0 if number == 1 else 7]))


@program()
def shapes_and_types(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        a, b, c = run.model.a, run.model.b, run.model.c
        vectors = [
            a(ids[0, 0]), a(ids[:, 0].int()), b(ids[:, 1].view(4, 2, 2)), b(ids[:0, 1]),
            c(ids[:, 2], torch.tensor([0, 3, 3, 9])), c(ids[:, 3].int(), torch.tensor([0]).int()),
            c(ids[:0, 2], torch.tensor([0, 0])), a(ids[:, 0].view(2, 8).t()), a(ids[::2, :2]),
        ]  # fmt: skip
        assert [list(x.shape) for x in vectors[:4]] == [[8], [16, 8], [4, 2, 2, 8], [0, 8]]
        loss = sum(x.square().sum() * k for k, x in enumerate(vectors, start=1))
        assert isinstance(loss, Tensor)
        yield run.train(loss)


@program()
def vectors_changed_in_place(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        vectors = run.model.b(ids[:, 1])
        vectors *= 2
        vectors[0] = 0.5
        other = run.model.a(ids[:, 0]).relu_()
        yield run.train((vectors * other).sum())


@program()
def hooks(run: Run) -> Iterator[Any]:
    model = run.model
    model.a.register_forward_hook(lambda module, args, out: out * 2)
    model.c.register_forward_pre_hook(lambda module, args: (args[0].flip(1) % 9,))
    model.b.register_full_backward_hook(lambda module, given, grads: None)
    seen: list[Any] = []
    model.top.register_full_backward_hook(lambda *args: seen.append(args))
    yield from ordinary(run)
    assert len(seen) == 4


@program()
def functional_lookups(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        a, b = run.model.a, run.model.b
        form: Any = {"sparse": run.is_sparse}
        vectors = functional.embedding(ids[:, 0], a.weight, **form)
        vectors = vectors - functional.embedding(ids[:, 1], b.weight, b.padding_idx, **form)
        assert list(functional.embedding(ids[:, 1], b.weight).shape) == [16, 8]
        yield run.train(vectors.square().sum())


@program()
def in_graphs(run: Run) -> Iterator[Any]:
    torch._dynamo.reset()
    plain, run.model = run.model, torch.compile(run.model, backend="eager")
    for ids in batches(3):
        yield run.train(run.loss(ids))
    run.model = plain


@program()
def by_data_parallel(run: Run) -> Iterator[Any]:
    plain, run.model = run.model, nn.DataParallel(run.model)
    yield from ordinary(run)
    run.model = plain


@program()
def gradients_of_gradients(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        loss = run.loss(ids)
        (grad,) = torch.autograd.grad(loss, [run.model.top.weight], create_graph=True)
        yield run.train(loss + 0.01 * grad.square().sum())


@program()
def replaced_rows(run: Run) -> Iterator[Any]:
    for ids in batches(3):
        loss = run.train(run.loss(ids))
        if isinstance(run.model.a, hotrow.Embedding):
            run.model.a.load_weights(3, torch.full((2, 8), 0.25))
        else:
            run.model.a.weight.data[3:5] = 0.25
        yield loss


class Tied(nn.Module):
    """A next-item model, whose logits are by the table itself."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Embedding(100, 8, padding_idx=0)
        self.c = nn.EmbeddingBag(120, 8, mode="sum")
        self.top = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.top(self.a(ids[:, 0] % 100)) + self.c(ids[:, 1:3] % 120)
        logits = functional.linear(hidden, self.a.weight) + hidden @ self.a.weight.t()
        return logits.log_softmax(1).gather(1, ids[:, 3:] % 100) + self.c.weight.norm() * 0.01


@program(Tied)
def tied_weights(run: Run) -> Iterator[Any]:
    if run.is_sparse:  # torch has a dense gradient then, which SparseAdam refuses
        return
    for ids in batches(4):
        yield run.train(-run.model(ids).sum())
        with torch.no_grad():
            seen = run.model.a.weight[3:5].sum() + run.model.a.weight.data.norm()
        yield seen


class Shared(nn.Module):
    """A module of two parents, two modules of one weight, and a subclass with more to it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Embedding(300, 8, sparse=sparse)
        self.left = nn.ModuleDict({"x": self.a, "y": nn.Embedding(200, 8, sparse=sparse)})
        self.right = nn.ModuleList([self.a, nn.Embedding(200, 8, sparse=sparse)])
        self.right[1].weight = self.left["y"].weight
        self.own = Scaled(250, 8, sparse=sparse)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        left = self.left["x"](ids[:, 0]) * self.left["y"](ids[:, 1])
        right = self.right[0](ids[:, 1]) - self.right[1](ids[:, 1])
        return torch.tanh(self.top(left + right + self.own(ids[:, 2:]))).squeeze(1)


class Scaled(nn.Embedding):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))
        self.map = nn.Linear(self.embedding_dim, self.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.map(super().forward(ids).sum(1) * self.scale)


@program(Shared)
def shared_modules_and_subclasses(run: Run) -> Iterator[Any]:
    yield from ordinary(run)
    saved = copy.deepcopy(run.model.state_dict())
    yield from ordinary(run)
    run.model.load_state_dict(saved)
    yield torch.stack([x.sum() for x in run.model.state_dict().values()])
    run.model.to("cpu", torch.float32)
    assert not run.model.state_dict(keep_vars=False)["own.scale"].requires_grad


def converted(model: nn.Module, maker: str = "SGD", **options: Any) -> Any:
    options = {"strategy": STRATEGIES[maker], "show": False, "seed": 3, **options}
    return hotrow.convert(model, options.pop("budget", "60%"), **options)


def assert_alike(run: Run, plain: Run, found: Any, expected: Any) -> None:
    states = run.model.state_dict(), plain.model.state_dict()
    assert list(states[0]) == list(states[1])
    pairs = [(found, expected), *((states[0][key], states[1][key]) for key in states[1])]
    for one, other in pairs:
        size = other.detach().abs().max().clamp(min=1.0) if other.numel() else 1.0
        assert one.shape == other.shape
        assert not one.numel() or float(((one - other) / size).detach().abs().max()) < 2e-5


@pytest.mark.thinned(2)  # every program, with one or two optimizers
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
def test_a_converted_model_means_what_the_plain_one_means(name: str, maker: str) -> None:
    function, of = PROGRAMS[name]
    plain = of(sparse=maker == "SparseAdam")
    model = converted(copy.deepcopy(plain), maker, budget="400%" if of is Tied else "60%")
    runs = Run(model, MAKERS[maker]), Run(plain, MAKERS[maker])
    for found, expected in zip(*map(function, runs), strict=True):
        assert_alike(*runs, found, expected)
    next(iter(hotrow_modules(model))).collection.check()


def hotrow_modules(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if isinstance(x, hotrow.Embedding | hotrow.EmbeddingBag)]


# -- what is refused -------------------------------------------------------------------------


def trained(model: Net, **options: Any) -> Run:
    run = Run(model, MAKERS["SGD"])
    run.train(run.loss(next(batches(1)), **options))
    return run


def in_other_hands(model: Net) -> None:
    """As EMA weights are evaluated."""
    weights = {name: x * 0.5 for name, x in model.state_dict().items()}
    torch.func.functional_call(model, weights, (next(batches(1)),))


def tie_to_another(model: Net) -> None:
    model.a.weight = nn.Parameter(torch.zeros(300, 8))


def write_rows(model: Net) -> None:
    with torch.no_grad():
        model.a.weight[3] = 0.0


def write_by_lists(model: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model.a.weight, model.b.weight], 0.9)


def moves_late(model: Net) -> None:
    trained(model)
    modules = hotrow_modules(model)
    modules[0].tables.move_to(torch.device("cuda:7"))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepcopy": (copy.deepcopy, "cannot be copied.*before hotrow.convert"),
    "pickle": (pickle.dumps, r"cannot be pickled; save state_dict\(\), or.*revert"),
    "half": (lambda model: model.half(), "rows are float32 and cannot become torch.float16.*auto"),
    "double": (lambda model: model.double(), "float32 and cannot become torch.float64"),
    "meta": (lambda model: model.to("meta"), "device 'meta' is not supported"),
    "functional_call": (in_other_hands, "replaced by another tensor, as torch.func.functional_c"),
    "parametrized": (
        lambda model: nn.utils.parametrizations.weight_norm(model.a),
        "replaced by another tensor",
    ),
    "another parameter": (tie_to_another, r"load_weights\(0, weights\), or hotrow.revert"),
    "no parameter": (lambda model: setattr(model.top, "weight", model.a.weight), "."),
    "hook": (lambda model: model.a.weight.register_hook(print), "register hooks on the vectors"),
    "initialises": (
        lambda model: nn.init.xavier_uniform_(model.a.weight),
        "in place.*init=.*load_weights",
    ),
    "initialises by data": (lambda model: model.a.weight.data.normal_(), "init=.*load_weights"),
    "a view of data": (lambda model: model.a.weight.data[0].zero_(), "init=.*load_weights"),
    "data is replaced": (
        lambda model: setattr(model.a.weight, "data", torch.zeros(300, 8)),
        "assigning to .data.*init=.*load_weights",
    ),
    "a row": (write_rows, "__setitem__ changes.*init=.*load_weights"),
    "lists": (write_by_lists, "_foreach_mul_ changes.*load_weights"),
    "out": (
        lambda model: torch.mul(torch.zeros(300, 8), 2, out=model.a.weight),
        "mul changes.*load_weights",
    ),
    "numpy": (lambda model: model.a.weight.data.numpy().fill(0), "read-only"),
    "whole table": (
        lambda model: model.c.weight.sum(),
        r"one tensor takes .* budget .*module\(ids",
    ),
    "resets": (lambda model: model.a.reset_parameters(), "rows start by init="),
    "negative id": (lambda model: model.a(torch.tensor([4, -1])), "id -1 is outside table 'a'"),
    "too large": (lambda model: model.c(torch.tensor([[250]])), "id 250 is outside table 'c'"),
    "too large in evaluation": (
        lambda model: torch.no_grad()(model.b)(torch.tensor(200)),
        "id 200 is outside",
    ),
    "floats": (lambda model: model.a(torch.tensor([1.0])), "ids must be int64"),
    "offsets begin late": (lambda model: model.c(torch.arange(3), torch.tensor([1])), "start at 0"),
    "offsets fall": (
        lambda model: model.c(torch.arange(3), torch.tensor([0, 2, 1])),
        "must not fall",
    ),
    "no offsets": (lambda model: model.c(torch.arange(3)), "offsets say where bags begin"),
    "weights of means": (
        lambda model: model.c(torch.ones(2, 2).long(), None, torch.ones(2, 2)),
        "per_sample_weights work with mode='sum' only",
    ),
    "moves late": (moves_late, "trained on cpu, and their fast memory cannot move"),
    "wrong shape": (
        lambda model: model.load_state_dict({**model.state_dict(), "a.weight": torch.ones(2, 8)}),
        r"a.weight: its shape is \[2, 8\], the table's \[300, 8\]",
    ),
    "missing weight": (
        lambda model: model.a.load_state_dict({}),
        "Missing key.*weight",
    ),
    "unknown weight": (
        lambda model: model.a.load_state_dict({"weight": torch.ones(300, 8), "bias": 1}),
        "Unexpected key.*bias",
    ),
    "another Adam": (
        lambda model: torch.optim.Adam(trained(model).model.parameters()).step(),
        "rows have the state of SGD, and Adam steps them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_converted_modules_cannot_do_is_refused(case: str) -> None:
    function, match = REFUSED[case]
    model = converted(Net())
    if case == "moves late":
        with pytest.raises((RuntimeError, ValueError), match=f"{match}|CUDA|cuda"):
            function(model)
        return
    before = model.state_dict() if case != "another Adam" else {}
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError), match=match):
        function(model)
    if case not in ("no parameter", "parametrized", "double", "half", "meta", "unknown weight"):
        again = model.state_dict()
        assert all(torch.equal(again[key], value) for key, value in before.items())


# -- what is converted -------------------------------------------------------------------------


def reasons(model: nn.Module, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    hotrow.convert(model, 0, strategy="all-fast", **options)
    return " ".join(capsys.readouterr().out.split())


class Holder:
    def __init__(self, *weights: Tensor) -> None:
        self.weights = list(weights)


def tied(model: Net) -> Any:
    layer = nn.Linear(8, 300)
    layer.weight = model.a.weight
    return layer


LEFT: dict[str, tuple[Callable[[Net], Any], str]] = {
    "tied inside": (lambda model: setattr(model, "out", tied(model)), "also that of out.weight"),
    "tied outside": (tied, "also that of a Linear outside of this model"),
    "a list": (
        lambda model: setattr(model, "penalised", [model.a.weight]),
        "held in Net.penalised",
    ),
    "an object": (
        lambda model: setattr(model, "penalty", Holder(model.a.weight)),
        "held in Net.penalty",
    ),
    "max_norm": (lambda model: setattr(model.a, "max_norm", 1.0), "max_norm changes rows"),
    "frequency": (lambda model: setattr(model.a, "scale_grad_by_freq", True), "scale_grad_by"),
    "double": (lambda model: model.a.double(), "rows are float32, not torch.float64"),
    "meta": (lambda model: model.a.to("meta"), "meta device"),
    "parametrized": (
        lambda model: nn.utils.parametrizations.weight_norm(model.a),
        "its weight is computed",
    ),
    "hooks": (
        lambda model: model.a.weight.register_hook(lambda grad: grad),
        "hooks are registered",
    ),
}


@pytest.mark.filterwarnings("ignore:no embedding of")
@pytest.mark.parametrize("case", LEFT)
def test_tables_that_cannot_be_converted_are_left_with_the_reason(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    change, reason = LEFT[case]
    model = Net()
    kept = change(model)
    weight = model.a.weight
    assert reason in reasons(model, capsys)
    assert type(model.a).__module__.startswith("torch")
    assert case in ("parametrized",) or model.a.weight is weight
    assert isinstance(model.b, hotrow.Embedding)
    assert isinstance(model.c, hotrow.EmbeddingBag)
    del kept


def test_lists_of_weights_can_hold_stand_ins(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    model.penalised = [model.a.weight, {"x": (model.b.weight,)}]  # type: ignore[assignment]
    model.penalty = Holder(model.c.weight)  # type: ignore[assignment]
    converted(model, held="replace")
    assert model.penalised[0] is model.a._parameters["weight"]
    assert model.penalised[1]["x"][0] is model.b._parameters["weight"]
    assert not isinstance(model.c, hotrow.EmbeddingBag)  # objects are not searched through
    with pytest.raises(RuntimeError, match="stands for table 'a'"):
        model.penalised[0].square().sum().backward()


def test_one_weight_is_refused_if_one_of_its_modules_is() -> None:
    model = Net()
    model.other = nn.Embedding(300, 8, max_norm=1.0)
    model.other.weight = model.a.weight
    converted(model)
    assert type(model.a) is nn.Embedding
    assert model.a.weight is model.other.weight


@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("maker", MAKERS)
def test_an_optimizer_and_its_state_move_there_and_back(maker: str) -> None:
    """Three steps as a plain model, three converted, and three as a plain one again."""
    models = [Net(sparse=maker == "SparseAdam") for _ in range(2)]
    runs = [Run(model, MAKERS[maker]) for model in models]
    draw = list(batches(9))
    for number, ids in enumerate(draw):
        if number == 3:
            optimizers = runs[0].optimizers
            converted(models[0], maker, optimizer=optimizers)
            held = {id(p) for x in optimizers for g in x.param_groups for p in g["params"]}
            assert held == {id(x) for x in models[0].parameters()}
        if number == 6:
            hotrow.revert(models[0], optimizer=runs[0].optimizers)
            assert [type(x) for x in models[0].children()] == [
                type(x) for x in models[1].children()
            ]
        found, expected = (run.train(run.loss(ids)) for run in runs)
        assert_alike(runs[0], runs[1], found, expected)
    one, other = (run.optimizers[0].state_dict()["state"] for run in runs)
    assert one.keys() == other.keys()
    for place in other:
        assert one[place].keys() == other[place].keys()
        for key, value in other[place].items():
            assert torch.allclose(
                torch.as_tensor(one[place][key]), torch.as_tensor(value), atol=1e-5
            )


@pytest.mark.parametrize("zeroed", [None, True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_gradient_that_waits_moves_to_the_plain_weight(maker: str, zeroed: bool | None) -> None:
    """`zeroed`: whether `zero_grad()` removed the gradients of a first pass, or made them zeros."""
    models = [Net(sparse=maker == "SparseAdam") for _ in range(2)]
    runs = [Run(model, MAKERS[maker]) for model in models]
    converted(models[0], maker, optimizer=runs[0].optimizers)
    draw = list(batches(6))
    for ids in draw[:2]:
        for run in runs:
            run.train(run.loss(ids))
    for run in runs:
        run.zero_grad()
        run.loss(draw[2]).backward()
        run.tables = [run.optimizers[0].param_groups[0]["params"][k] for k in range(3)]
        if zeroed is None and not run.is_sparse:
            clip_grad_norm_(run.model.parameters(), 0.1)
        elif zeroed is not None:
            run.zero_grad(set_to_none=zeroed)
            (run.model.a(draw[3][:, 0]).sum() * 0.5).backward()
    hotrow.revert(models[0], optimizer=runs[0].optimizers)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.layout is other.grad.layout
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
    for run in runs:
        run.step()
    assert_alike(*runs, torch.zeros(0), torch.zeros(0))
    for ids in draw[4:]:
        assert_alike(*runs, *(run.train(run.loss(ids)) for run in runs))


def test_modules_that_looked_nothing_up_give_an_optimizer_its_state_back() -> None:
    models = [Net() for _ in range(2)]
    converted(models[0])
    runs = [Run(model, MAKERS["Adagrad"]) for model in models]
    hotrow.revert(models[0], optimizer=runs[0].optimizers)
    for ids in batches(2):
        assert_alike(*runs, *(run.train(run.loss(ids)) for run in runs))


def test_optimizers_that_were_forgotten_are_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD already holds the weight of 'a'"):
        converted(model)
    converted(model, optimizer=optimizer)
    hotrow.revert(model)
    model(next(batches(1))).sum().backward()
    with pytest.raises(RuntimeError, match=r"made plain.*revert\(model, optimizer=optimizer\)"):
        optimizer.step()


def test_a_converted_model_and_a_plain_one_exchange_state_dicts() -> None:
    plain, model = Net(), converted(Net())
    with torch.no_grad():
        plain.a.weight.add_(1.0)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model(next(batches(1))), plain(next(batches(1))))
    trained(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.a.weight, model.a.weight.data)


@pytest.mark.parametrize("name", ["ordinary", "called_twice", "accumulation", "not_always_called"])
@pytest.mark.parametrize("ahead", [False, True])
def test_bits_do_not_depend_on_strategy_or_budget(name: str, ahead: bool) -> None:
    """With ahead, the pass reads other batches than it trains: what is planned is not used."""
    ends = []
    for strategy in ("all-fast", "lookahead", "uncached", "static", "lru", "scratchpipe"):
        for budget in ("60%", "110%") if strategy != "all-fast" else ("1%",):
            model = converted(Net(), strategy=strategy, budget=budget)
            run = Run(model, MAKERS["Adagrad"])
            stream = hotrow.ahead([batch(run._draw) for _ in range(30)], model) if ahead else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for _ in PROGRAMS[name][0](run):
                    if stream is not None:
                        next(stream)
            ends.append(list(model.state_dict().values()))
    assert all(torch.equal(x, y) for end in ends for x, y in zip(end, ends[0], strict=True))


def test_a_model_moves_before_its_first_step_and_not_after() -> None:
    model = converted(Net())
    tables = model.a.tables
    model.a(torch.tensor([1]))
    before = model.state_dict()
    built = tables.collection
    tables.stand_ins.move_to(torch.device("cpu"))
    model.to("cpu")
    assert tables.collection is built  # nothing to do
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
