"""Random programs train like plain torch modules, and with every strategy like all-fast.

programs.py draws them; program_runs.py runs and compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hotrow
from hotrow.embedding import step as step_module
from hotrow.embedding.row_access import RowAccess
from hotrow.engine.planner import Planner
from hotrow.engine.rules import Hold
from hotrow.engine.strategy import STRATEGIES
from program_runs import check, difference
from programs import EVERYTHING, INGREDIENTS, Program, draw

QUICK = range(120)
SLOW = range(1000, 2000)
ON_A_DEVICE = range(5000, 5120)


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seed", QUICK)
def test_a_program_trains_like_torch_and_like_all_fast(seed: int) -> None:
    check(draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_a_further_program_trains_like_torch_and_like_all_fast(seed: int) -> None:
    check(draw(seed))


def test_the_quick_programs_have_everything() -> None:
    programs = [draw(seed) for seed in QUICK]
    assert set().union(*(program.ingredients for program in programs)) == EVERYTHING
    assert {program.strategy for program in programs} == set(STRATEGIES)
    assert {type(program.rule) for program in programs} == {
        hotrow.SGD, hotrow.Adagrad, hotrow.RowWiseAdagrad, hotrow.Adam, hotrow.AdamW
    }  # fmt: skip
    assert {program.form for program in programs} == {"dense", "kjt", "of", "tuple"}
    assert {program.weights for program in programs} == {"none", "given", "learned"}
    assert {program.buffers for program in programs} == {"fresh", "tensor", "numpy", "data"}
    assert {program.room for program in programs} == {"tight", "chunked", "roomy"}
    for strategy in STRATEGIES:
        mine = [program for program in programs if program.strategy == strategy]
        assert any(program.threads for program in mine), strategy
        assert any(program.loader == "ahead" for program in mine), strategy


@pytest.mark.parametrize("name", INGREDIENTS)
def test_an_ingredient_that_is_left_out_is_not_there(name: str) -> None:
    for seed in QUICK:
        assert name not in draw(seed, EVERYTHING - {name}).ingredients


# -- mistakes are found ----------------------------------------------------------------------


def shorten_hold(patch: pytest.MonkeyPatch) -> None:
    """Rows leave while a batch in flight uses them."""
    made = Planner.__init__

    def init(self: Planner, *args: Any, hold: Hold, **options: Any) -> None:
        made(self, *args, hold=Hold(max(0, hold.past - 1), hold.future), **options)

    patch.setattr(Planner, "__init__", init)


def forget_frozen_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hotrow.EmbeddingBagCollection, "freeze_rows", lambda self, rows: None)


def forget_accumulated(patch: pytest.MonkeyPatch) -> None:
    """Of several gradients of one step the last ones are dropped."""
    join = step_module.joined_grads
    patch.setattr(step_module, "joined_grads", lambda group, waiting: join(group, waiting[:1]))


def forget_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowAccess, "load_state", lambda self, table, state, step: None)


def forget_rates(patch: pytest.MonkeyPatch) -> None:
    """Every table has the learning rate of the first one."""
    scalars = hotrow.embedding.optimizer.RowOptimizer._numbers

    def numbers(self: Any, key: Any, steps: Any, place: int) -> Any:
        return scalars(self, key, steps, 0)

    patch.setattr(hotrow.embedding.optimizer.RowOptimizer, "_numbers", numbers)


@pytest.mark.parametrize(
    ("mistake", "ingredients"),
    [
        (shorten_hold, {"break"}),
        (forget_frozen_rows, {"freeze rows"}),
        (forget_accumulated, {"accumulate"}),
        (forget_state, {"break", "round trip"}),
        (forget_rates, {"rates"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None],
    ingredients: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = [draw(seed, ingredients) for seed in QUICK[:40]]
    mistake(monkeypatch)
    said = next(filter(None, map(difference, programs)), None)
    assert said is not None
    assert "differ: " in said


def test_a_failure_says_which_program_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_frozen_rows(monkeypatch)
    programs = (draw(seed, {"freeze rows"}) for seed in QUICK)
    program = next(program for program in programs if difference(program) is not None)
    with pytest.raises(AssertionError) as error:
        check(program)
    first, second, *rest = str(error.value).splitlines()
    assert "all-fast and plain torch differ: " in first
    assert " instead of " in first
    assert second == f"To repeat it: python tests/program_runs.py {program.seed}"
    assert "freeze rows" in "".join(rest)


# -- on a device -----------------------------------------------------------------------------


def for_device(program: Program) -> Program:
    """`cpu` is for a CPU alone, and weights that are learned are leaves on one device."""
    strategy = "hybrid" if program.strategy == "cpu" else program.strategy
    weights = "given" if program.weights == "learned" else program.weights
    return replace(program, strategy=strategy, weights=weights)


# Ids that were changed by way of numpy or .data may also be refused on a device.
DEVICE_INGREDIENTS = EVERYTHING - {"untracked ids"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; a GPU has its own")
@pytest.mark.parametrize("seed", ON_A_DEVICE[:40])
@pytest.mark.usefixtures("device_engine")
def test_a_program_with_the_device_engine(seed: int) -> None:
    program = draw(seed, DEVICE_INGREDIENTS - {"thread"})  # the interpreter serves one thread
    check(replace(for_device(program), steps=program.steps[:5]))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ON_A_DEVICE)
def test_a_program_on_a_gpu(seed: int) -> None:
    check(for_device(draw(seed, DEVICE_INGREDIENTS)), "cuda")
