"""Launches of later steps need no kernel that the first steps did not need.

Triton compiles a kernel anew for other types, constants, alignments and divisors of its arguments.
Here its interpreter runs the kernels, and this file keeps the books of what would be compiled;
test_compiled_early.py asks the compiler itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import readout
from contracts import DEVICE, by_gpu
from hotrow.engine.gpu.planning import DevicePlanning
from hotrow.engine.tuning import Tuning

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the compiler itself is asked there")

FIRST_STEPS, STEPS = 6, 25
ROWS = (500, 30, 4000)
FEATURES = [f"f{number}" for number in range(len(ROWS))]


class Variants:
    """What would be compiled, and in which step it was needed for the first time."""

    def __init__(self) -> None:
        self.step, self.first = 0, dict[tuple[Any, ...], int]()

    def note(self, kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        named = {name: value for name, value in options.items() if name in parameters}
        arguments = inspect.signature(kernel.fn).bind(*given, **named).arguments
        plain = kernel.kwargs["do_not_specialize"] or ()
        parts: list[Any] = [kernel.fn.__name__]
        for name, value in arguments.items():
            is_constant = "constexpr" in str(parameters[name].annotation)
            parts.append((name, value if is_constant else variant_of(value, name in plain)))
        parts += [(name, value) for name, value in options.items() if name not in parameters]
        self.first.setdefault(tuple(parts), self.step)

    @property
    def late(self) -> list[tuple[Any, ...]]:
        return [parts for parts, step in self.first.items() if step > FIRST_STEPS]


def variant_of(value: Any, is_plain: bool) -> Any:
    """Return what a kernel is compiled for, where it gets this value."""
    if isinstance(value, Tensor):
        return str(value.dtype), is_plain or value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(variant_of(each, is_plain) for each in value)
    if isinstance(value, int) and not isinstance(value, bool):
        size = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return size if is_plain else (size, value == 1, value % 16 == 0)
    return None if value is None else type(value).__name__


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    from triton.runtime.interpreter import InterpretedFunction

    noted, run = Variants(), InterpretedFunction.run

    def noted_run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        noted.note(self, given, options)
        return run(self, *given, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted_run)
    return noted


def batches(count: int, *, jagged: bool) -> Iterator[Any]:
    """Odd numbers of ids, popularity that moves, and a short batch now and then."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int, rows: int, step: int) -> Tensor:
        return ((torch.rand(count, generator=generator) ** 3 * rows).long() + 11 * step) % rows

    for step in range(count):
        samples = 41 if step % 10 < 9 else 13
        if jagged:
            lengths = torch.randint(0, 3, (len(ROWS) * samples,), generator=generator)
            counts = [int(part.sum()) for part in lengths.split(samples)]
            columns = [ids(size, rows, step) for size, rows in zip(counts, ROWS, strict=True)]
            yield hotrow.KeyedJaggedTensor(FEATURES, torch.cat(columns), lengths=lengths)
        else:
            yield torch.stack([ids(samples, rows, step) for rows in ROWS], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "jagged", "slots"),
    [("bulk", False, 400), ("bulk", True, 900), ("zero-copy", True, 400), ("staged", False, 400)],
)
def test_later_steps_need_no_other_kernels(
    fill: str, jagged: bool, slots: int, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DevicePlanning, "rehearses_on", (DEVICE.type,))
    tuning = Tuning(
        sorted_from=8, least_certain=1, most_packed=16, tombstone_part=50, spare_victims=0
    )
    tables = [
        hotrow.EmbeddingBagConfig(f"t{name}", rows, 8, [name])
        for name, rows in zip(FEATURES, ROWS, strict=True)
    ]
    budget = hotrow.Budget((hotrow.Share(slots, 64, False, 16),), window_bytes=1 << 16)
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.Adam(), strategy="lookahead", seed=3, budget=budget, fill=fill,
        **by_gpu(tuning=tuning),
    )  # fmt: skip
    known = hotrow.ahead(batches(STEPS, jagged=jagged), embedding, depth=7)
    for variants.step, batch in enumerate(known, start=1):
        readout(embedding(batch)).backward()
        if variants.step % 10 == 0:
            embedding.row_access.flush()
    assert embedding.traffic().evicted_rows > 0
    assert embedding.groups[0].memory.host.is_locked
    (one,) = batches(1, jagged=jagged)
    variants.step += 1
    readout(embedding(one)).backward()  # it was not announced
    with torch.no_grad():
        embedding(one)
    assert not variants.late
    assert {parts[0] for parts in variants.first} > {"_classify", "_fill", "_rank_keys"}
