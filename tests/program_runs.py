"""Programs of programs.py, run and compared.

`difference(program)` runs a program three times and returns the first difference, or None:

1. `Plain`: nn.EmbeddingBag and nn.Embedding in float64, with sparse gradients and a reference of
   each optimizer that updates the rows of these gradients alone.
2. `Rows` with all-fast and the plainest loop. Equal to 1 within OF_TORCH.
3. `Rows` with the program's strategy, loader, look-ahead and threads. Equal to 2 to the bit, or
   within UP_TO_ROUNDING where that is the strategy's contract.

    python tests/program_runs.py 17   # run the program of a seed; print it if it fails
    python tests/program_runs.py 0:500 --without thread,refill
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as conftest.py does

from program_models import Plain, Rows, Vectors
from programs import EVERYTHING, Action, Program, Samples, Step, draw, samples_of

OF_TORCH = {"rtol": 2e-4, "atol": 2e-5}
UP_TO_ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # as in contracts.py
EXACT = {"rtol": 0.0, "atol": 0.0}
PROBE = 99  # the batch that threads look up


@dataclass
class Trace:
    """What a run leaves behind, in order, and the probe's vectors after each change of rows."""

    items: list[tuple[str, Tensor]] = field(default_factory=list)
    history: list[Vectors] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)

    def add(self, label: str, value: Tensor) -> None:
        self.items.append((label, value.detach().cpu().clone()))


@dataclass(frozen=True)
class Watched:
    """What a thread has read, and how many changes of rows had ended before and after."""

    vectors: Vectors
    before: int
    after: int


class Watch:
    """Threads that evaluate the probe again and again while the loop trains."""

    def __init__(self, model: Any, trace: Trace, threads: int) -> None:
        self._model, self._trace, self.changes = model, trace, 0
        self._ends = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read) for _ in range(threads)]

    def _read(self) -> None:
        try:
            while not self._ends.is_set():
                before = self.changes
                vectors = self._model.evaluate(PROBE, "no_grad")
                vectors = {name: each.cpu().clone() for name, each in vectors.items()}
                if len(self._trace.watched) < 2000:
                    self._trace.watched.append(Watched(vectors, before, self.changes))
        except BaseException as error:
            self._errors.append(error)

    @contextmanager
    def running(self) -> Iterator[None]:
        interval = sys.getswitchinterval()
        if self._threads:
            sys.setswitchinterval(1e-5)  # threads meet more often
        for thread in self._threads:
            thread.start()
        try:
            yield
            if self._threads:
                time.sleep(0.002)  # they read the last rows, too
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join()
            sys.setswitchinterval(interval)
        if self._errors:
            raise self._errors[0]


def run(program: Program, model: Any, *, watched: bool = False) -> Trace:
    """Run a program; `watched`: with its threads."""
    trace = Trace()
    watch = Watch(model, trace, program.threads if watched else 0)
    with warnings.catch_warnings(), watch.running():
        for said in ("these ids are not the ones hotrow.ahead planned",  # the program means it
                     "a batch of .* does not fit the .* slots"):  # fmt: skip
            warnings.filterwarnings("ignore", said)
        _run(program, model, trace, watch)
    for name, slope in model.slopes.items():
        trace.add(f"dense weight of feature {name!r}", slope)
    for label, value in (*model.tables(), *model.saved()):
        trace.add(label, value)
    return trace


def _run(program: Program, model: Any, trace: Trace, watch: Watch) -> None:
    def rows_changed() -> None:
        watch.changes += 1
        if program.threads and not watch._threads:
            trace.history.append(model.evaluate(PROBE, "no_grad"))

    if program.threads and not watch._threads:
        trace.history.append(model.evaluate(PROBE, "no_grad"))
    position, numbers = 0, program.numbers
    batches = model.batches(numbers)
    for place, step in enumerate(program.steps):
        if step.new_pass:
            batches.close()
        for action in step.before:
            _act(program, model, trace, action, f"before step {place}: {action.name}")
            if action.name in ("load weights", "unpooled padding"):
                rows_changed()
        if step.new_pass:
            batches = model.batches(numbers[position:])
        position += len(step.batches)
        _train(model, step, batches, trace, f"step {place}")
        if step.how != "no backward":
            rows_changed()
            model.step_of_slopes()
            model.update()
            model.scheduled.step()
    batches.close()


def _train(model: Any, step: Step, batches: Iterator[Any], trace: Trace, label: str) -> None:
    """One step of a loop, up to the end of its backward pass."""
    seen = []

    def pull() -> tuple[Any, Samples]:
        batch, samples = next(batches)
        if step.change is not None:
            batch = model.change(batch, step.change)
        seen.append(batch)
        return batch, samples

    def note(losses: list[Tensor]) -> None:
        for number, loss in enumerate(losses):
            trace.add(f"{label}: loss {number}", loss)

    if step.how == "accumulate":
        losses = []
        with model.accumulate():
            for _ in step.batches:
                losses.append(model.loss(step, *pull()))
                (losses[-1] * model.scale).backward()
    else:
        if step.how == "checkpoint":
            batch, samples = pull()
            losses = [checkpoint(model.loss, step, batch, samples, use_reentrant=False)]
        elif step.how == "twice":
            batch, samples = pull()
            losses = [model.loss(step, batch, samples), model.loss(step, batch, samples) * 0.5]
        else:
            pulled = [pull() for _ in step.batches]
            losses = [model.loss(step, batch, samples) for batch, samples in pulled]
        if step.extra is not None:
            batch, samples = model.at(step.extra), samples_of(model.program, step.extra)
            if isinstance(model, Plain):
                samples = batch
            else:
                samples = replace(samples, label=samples.label.to(model.device))
            losses.append(model.loss(step, batch, samples))
        if step.how != "no backward":
            (torch.stack(losses).sum() * model.scale).backward()
    note(losses)
    if model.program.weights == "learned" and step.how != "no backward":
        for number, batch in enumerate(seen):
            trace.add(f"{label}: gradient of weights {number}", model.weight_grads(batch))


def _act(program: Program, model: Any, trace: Trace, action: Action, label: str) -> None:
    if action.name == "evaluate":
        for name, vectors in model.evaluate(*action.value).items():
            trace.add(f"{label}: feature {name!r}", vectors)
    elif action.name == "freeze rows":
        rows: dict[str, Tensor] | None = None if action.value is None else {}
        if action.value:
            table, numbers, form = action.value
            given = torch.tensor(numbers)
            if form == "mask":
                size = next(t.num_embeddings for t in program.tables if t.name == table)
                given = torch.zeros(size, dtype=torch.bool).index_fill_(0, given, True)
            rows = {table: given}
        model.freeze(rows)
    elif action.name in ("load weights", "unpooled padding"):
        table, first, size = action.value
        width = next(t.embedding_dim for t in program.tables if t.name == table)
        generator = torch.Generator().manual_seed(program.seed + first)
        model.load_weights(table, first, torch.rand(size, width, generator=generator) - 0.5)
    elif action.name == "requires_grad":
        model.require_grad(action.value)
    elif action.name == "round trip":
        model.round_trip(action.value)
    elif action.name == "save":
        model.save(action.value)
    elif action.name == "pin rows":
        model.pin_rows({action.value[0]: torch.tensor(action.value[1])})
    else:
        assert action.name == "another engine", action
        model.change_engine()


# -- comparing -----------------------------------------------------------------------------


def difference(program: Program, device: str | torch.device = "cpu") -> str | None:
    """Run a program three times; the first difference in words, or None."""
    device = torch.device(device)
    torch.manual_seed(program.seed)  # random victims
    try:
        fast = Rows(program, device, plainly=True)
        state = fast.embedding.state_dict()
        names = [table.name for table in program.tables]
        start = {name: state[fast.embedding.key_of(name)] for name in names}
        of_torch = run(program, Plain(program, start))
        of_fast = run(program, fast)
        if said := _first_difference(of_fast, of_torch, OF_TORCH):
            return f"all-fast and plain torch differ: {said}"
        of_strategy = run(program, Rows(program, device, plainly=False), watched=True)
    except Exception as error:
        error.add_note(f"The program was:\n{program}")
        raise
    tolerance = EXACT if program.is_exact else UP_TO_ROUNDING
    if said := _first_difference(of_strategy, of_fast, tolerance):
        return f"{program.strategy} and all-fast differ: {said}"
    for watched in of_strategy.watched:
        if said := _why_wrong(watched, of_fast.history, tolerance):
            return f"a thread has read other vectors than those of a finished step: {said}"
    return None


def check(program: Program, device: str | torch.device = "cpu") -> None:
    """Raise an AssertionError with the first difference and the program."""
    said = difference(program, device)
    assert said is None, f"{said}\n{program}"


def _first_difference(found: Trace, expected: Trace, tolerance: dict[str, float]) -> str | None:
    for (label, value), (name, other) in zip(found.items, expected.items, strict=True):
        assert label == name
        if said := _unlike(value, other, tolerance):
            return f"{label}: {said}"
    return None


def _unlike(found: Tensor, expected: Tensor, tolerance: dict[str, float]) -> str | None:
    """How two tensors differ; None if they do not."""
    if found.shape != expected.shape:
        return f"shapes {list(found.shape)} and {list(expected.shape)}"
    if tolerance == EXACT:
        unlike = found.reshape(-1) != expected.reshape(-1).to(found)
    else:
        unlike = ~torch.isclose(
            found.double().reshape(-1), expected.double().reshape(-1), **tolerance
        )
    if not bool(unlike.any()):
        return None
    first = int(unlike.int().argmax())
    place = [int(x) for x in torch.unravel_index(torch.tensor(first), found.shape)]
    values = f"{found.reshape(-1)[first]:.9g} instead of {expected.reshape(-1)[first]:.9g}"
    return f"{values} at {place}; {int(unlike.sum())} of {unlike.numel()} values differ"


def _why_wrong(watched: Watched, history: list[Vectors], tolerance: dict[str, float]) -> str | None:
    """None if a thread's vectors are those of one step between the call and its return."""
    # The step under way may have ended before the loop has counted it.
    steps = range(watched.before, min(watched.after + 1, len(history) - 1) + 1)
    said = ""
    for step in steps:
        unlike = [
            (name, _unlike(vectors.cpu(), history[step][name].cpu(), tolerance))
            for name, vectors in watched.vectors.items()
        ]
        wrong = [f"feature {name!r}: {why}" for name, why in unlike if why]
        if not wrong:
            return None
        said += f"\n  next to {step} changes of rows, {'; '.join(wrong)}"
    return f"between change {watched.before} and {watched.after + 1} of rows{said}"


# -- by hand -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seeds", help="a number, or first:last")
    parser.add_argument("--without", default="", help="ingredients, with commas between")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    for seed in range(int(first), int(last) if last else int(first) + 1):
        check(draw(seed, EVERYTHING - set(filter(None, args.without.split(",")))), args.device)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    main()
