"""One model trained plain and converted, side by side, and what differs between the two."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
_NOISE = 4  # differences may be so many times those of plain models whose lookups are rounded
_SEEDS = (1, 2)  # of the rounding
DENSE = ("Adam", "Adam 1e-5")  # torch has no sparse gradients for these
OPTIMIZERS = ("SGD", "Adagrad", "Adagrad 0.1", "SparseAdam", *DENSE)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Case:
    """A public model and the loop that trains it.

    `train(model, optimizer, losses)` uses the library's own loop and appends the loss of each step;
    `score(model)` returns predictions. `expect` says what `hotrow.convert` should do: "converted",
    "kept" (leave all tables alone and print why) or "refused" (raise in training and say why).
    """

    source: str
    name: str
    build: Callable[[], nn.Module]
    train: Callable[[nn.Module, str, list[float]], None]
    score: Callable[[nn.Module], Tensor]
    budget: str = "20%"
    expect: str = "converted"
    optimizers: tuple[str, ...] = OPTIMIZERS
    not_in_torch: dict[str, str] = field(default_factory=dict)  # optimizer: why plain torch fails
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of convert


@dataclass
class Result:
    """What one case showed."""

    source: str
    model: str
    optimizer: str
    outcome: str = "equal"
    note: str = ""
    lines: int = 0
    tables: str = ""  # converted, of all
    steps: int = 0
    apart: dict[str, float] = field(default_factory=dict)  # the largest differences
    noise: dict[str, float] = field(default_factory=dict)  # those of two plain models
    moved: float = 0.0  # largest change of a weight of the plain model's tables
    evictions: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome == "FAILED"


class Pair:
    """Two optimizers behind one's calls: one for the tables, one for all other parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[int, Any]:
        return {place: part.state_dict() for place, part in enumerate(self.parts)}


def optimizer_parts(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Return optimizers of a model's parameters; SparseAdam takes the tables' alone."""
    if name == "SGD":
        return [torch.optim.SGD(model.parameters(), lr=0.5)]
    if name == "Adagrad":
        return [torch.optim.Adagrad(model.parameters(), lr=0.02)]
    if name == "Adagrad 0.1":
        return [torch.optim.Adagrad(model.parameters(), lr=0.2, initial_accumulator_value=0.1)]
    if name in DENSE:
        decay = 1e-5 if name == "Adam 1e-5" else 0.0
        return [torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)]
    rows = [weight for table in tables_of(model) for weight in table.parameters()]
    known = {id(weight) for weight in rows}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    sparse = torch.optim.SparseAdam(rows, lr=0.002)
    return [sparse, torch.optim.SGD(others, lr=0.05)] if others else [sparse]


def optimizer_of(model: nn.Module, name: str) -> Any:
    parts = optimizer_parts(model, name)
    return parts[0] if len(parts) == 1 else Pair(*parts)


def tables_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _TABLES)]


def seed_all(seed: int = 7) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def recorded(function: Callable[..., Tensor], losses: list[float]) -> Callable[..., Tensor]:
    """Return a loss function that also appends each loss to a list."""

    def record(*args: Any, **kwargs: Any) -> Tensor:
        loss = function(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    return record


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what a library prints, and its progress bars, off the terminal."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


def compare(case: Case, optimizer: str, plain_only: bool) -> Result:
    """Train a model and its converted copy, and return what differs."""
    result = Result(case.source, case.name, optimizer)
    if optimizer in case.not_in_torch:
        result.outcome, result.note = "not in torch", case.not_in_torch[optimizer]
        return result
    seed_all()
    with quiet():
        plain = case.build()
    for table in tables_of(plain):
        table.sparse = optimizer == "SparseAdam"
    other, start = copy.deepcopy(plain), copy.deepcopy(plain)
    if not plain_only:
        other = _convert(case, other, result)
    losses: list[float] = []
    plain_losses: list[float] = []
    try:
        result.seconds = _timed(case, other, optimizer, losses)
    except RuntimeError as error:
        if case.expect != "refused":
            raise
        result.outcome, result.note = "refused", str(error)
        return result
    result.plain_seconds = _timed(case, plain, optimizer, plain_losses)
    result.steps, result.evictions = len(plain_losses), _evictions(other)
    result.moved = _weights_apart(plain, start)["rows"]
    result.apart = _apart_in(case, plain, other, plain_losses, losses)
    if not plain_only and _exceeds(result.apart):
        noises = [_noise(case, optimizer, start, plain, plain_losses, seed) for seed in _SEEDS]
        if optimizer not in ("SparseAdam", *DENSE):  # the first has sparse gradients anyway
            noises.append(_noise(case, optimizer, start, plain, plain_losses, seed=None))
        result.noise = {name: max(noise[name] for noise in noises) for name in result.apart}
    _judge(case, result, plain_only)
    return result


def _noise(
    case: Case,
    optimizer: str,
    start: nn.Module,
    plain: nn.Module,
    plain_losses: list[float],
    seed: int | None,
) -> dict[str, float]:
    """Return how far a plain training is from another one that differs by rounding alone.

    Either the vectors that tables return are rounded at random, or, without a seed, torch sums the
    gradients of rows in another order, as it does for sparse gradients.
    """
    other, losses = copy.deepcopy(start), []
    generator = torch.Generator().manual_seed(seed or 0)

    def round_at_random(module: nn.Module, ids: Any, vectors: Tensor) -> Tensor:
        return vectors * (1 + 2.0**-23 * (torch.rand(vectors.shape, generator=generator) - 0.5))

    hooks = []
    for table in tables_of(other):
        if seed is None:
            table.sparse = True
        else:
            hooks.append(table.register_forward_hook(round_at_random))
    _timed(case, other, optimizer, losses)
    for hook in hooks:
        hook.remove()
    return _apart_in(case, plain, other, plain_losses, losses)


def _convert(case: Case, model: nn.Module, result: Result) -> nn.Module:
    import hotrow

    tables = len(tables_of(model))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = hotrow.convert(model, budget=case.budget, **case.options)
    result.lines = 1
    converted = sum(hasattr(module, "collection") for module in tables_of(model))
    result.tables, result.note = f"{converted}/{tables}", printed.getvalue().strip()
    return model


def _timed(case: Case, model: nn.Module, optimizer: str, losses: list[float]) -> float:
    seed_all()
    start = time.perf_counter()
    with quiet():
        case.train(model, optimizer, losses)
    return time.perf_counter() - start


def _apart_in(
    case: Case, plain: nn.Module, other: nn.Module, plain_losses: list[float], losses: list[float]
) -> dict[str, float]:
    """Return the largest differences between two trained models."""
    with quiet(), torch.no_grad():
        scores = _apart(case.score(plain), case.score(other))
    loss = _largest(zip(plain_losses, losses, strict=True))
    return {"loss": loss, **_weights_apart(plain, other), "scores": scores}


def _weights_apart(plain: nn.Module, other: nn.Module) -> dict[str, float]:
    first, second = plain.state_dict(), other.state_dict()
    if list(first) != list(second):
        raise AssertionError(f"keys of state_dict() differ: {sorted(set(first) ^ set(second))}")
    of_tables = {
        f"{name}.weight" for name, module in plain.named_modules() if isinstance(module, _TABLES)
    }
    rows = _largest((first[key], second[key]) for key in first if key in of_tables)
    dense = _largest((first[key], second[key]) for key in first if key not in of_tables)
    return {"rows": rows, "dense": dense}


def _apart(first: Any, second: Any) -> float:
    difference = torch.as_tensor(first).double() - torch.as_tensor(second).double()
    return float(difference.abs().max()) if difference.numel() else 0.0


def _largest(pairs: Iterable[tuple[Any, Any]]) -> float:
    # max() of Python would drop NaN.
    return float(np.max([_apart(*pair) for pair in pairs], initial=0.0))


def _collections(model: nn.Module) -> list[Any]:
    found = {id(x.collection): x.collection for x in tables_of(model) if hasattr(x, "collection")}
    return list(found.values())


def _evictions(model: nn.Module) -> int:
    return sum(collection.traffic().evicted_rows for collection in _collections(model))


def _exceeds(apart: dict[str, float], noise: dict[str, float] | None = None) -> bool:
    limits = {name: max(TOLERANCE, _NOISE * value) for name, value in (noise or {}).items()}
    return not all(value <= limits.get(name, TOLERANCE) for name, value in apart.items())


def _judge(case: Case, result: Result, plain_only: bool) -> None:
    if plain_only:
        result.outcome = "FAILED" if any(result.apart.values()) else "plain"
    elif case.expect == "kept":
        is_kept = result.tables.startswith("0/") and "as it was" in result.note
        result.outcome = "kept" if is_kept and not _exceeds(result.apart) else "FAILED"
    elif case.expect == "refused" or not result.evictions or _exceeds(result.apart, result.noise):
        result.outcome = "FAILED"
    elif result.noise:
        result.outcome = "rounding"
