"""What idle rows have to make up for: the settings of all steps of a table, as coefficients.

Steps are cut into blocks. `near[l]` takes a row from step l to the end of l's block, or to now in
the current one; `far[b]` takes it from the end of block b to now. So a step changes the entries
of its own block and one per earlier block, and a row needs two of them. Runs on the host.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.dense_rules import STILL, DenseRule, Kind
from hotrow.kernels.idle_recursions import MOST_ERROR, TERMS, Entries, Linear, Recursion, Series
from hotrow.kernels.rules import STEP, Setting
from hotrow.support.messages import few

BLOCK = 512  # steps
_BLOCKS_AT_ONCE = 8  # when the entries of earlier blocks are computed again: they fit in a cache


@dataclass(frozen=True)
class IdleTables:
    """What takes rows to step `now`: views of buffers that the next `append` changes."""

    kind: Kind
    start: int  # the step of the first row of `near`: no row's last gradient is of before
    now: int
    near: Tensor  # [now + 1, K] float32, by the step of a row's last gradient
    far: Tensor  # [now // BLOCK + 1, K] float32, by the block of that step
    steps: Tensor  # replay: [now + 1, S] float32, the scalars of each step; else [0, S]
    scalar_names: tuple[str, ...]  # of the columns of `steps`
    eps: float  # of the series
    still: bool  # no step so far moves a row without a gradient

    def to(self, device: torch.device | str) -> IdleTables:
        """Return the tables with copies on a device."""
        near, far, steps = (x.to(device) for x in (self.near, self.far, self.steps))
        return replace(self, near=near, far=far, steps=steps)

    def near_changed_since(self, step: int) -> int:
        """Return the first row of `near` that differs from the tables of an earlier step.

        Rows before it are final. `far` changes as a whole, and `steps` from row `step` + 1 on;
        where `kind` or the width of `near` differs, everything does.
        """
        return (step - self.start) // BLOCK * BLOCK


class Runs:
    """A number per step, as runs of equal ones."""

    def __init__(self, values: Any = (), counts: Any = ()) -> None:
        self.values, self.counts = array("d", values), array("q", counts)

    def append(self, value: float) -> None:
        if self.values and self.values[-1] == value:
            self.counts[-1] += 1
        else:
            self.values.append(value)
            self.counts.append(1)

    def steps(self) -> NDArray[np.float64]:
        """Return the number of each step."""
        return np.repeat(np.array(self.values), np.array(self.counts))


class Rows:
    """Rows of float32 in a buffer that grows by doubling."""

    def __init__(self, width: int) -> None:
        self._buffer = np.zeros((0, width), dtype=np.float32)
        self.count = 0

    def write(self, start: int, rows: NDArray[Any]) -> None:
        """Replace the rows from `start` on by these."""
        self.count = start + len(rows)
        if self.count > len(self._buffer):
            grown = np.zeros(
                (max(2 * len(self._buffer), self.count, 64), rows.shape[1]), np.float32
            )
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start : self.count] = rows

    def tensor(self) -> Tensor:
        """Return a view of the rows."""
        return torch.from_numpy(self._buffer[: self.count])


class Blocks:
    """The entries of a recursion: one per step of the current block, one per earlier block.

    The entry of a block's first step goes on after the block: it is `far` of the block before.
    """

    def __init__(self, recursion: Recursion, term: Any, origin: int) -> None:
        """`origin`: the number of steps before."""
        self._origin = origin
        self._recursion = recursion
        self._columns = np.zeros((recursion.size, 2 * BLOCK))
        self._count = self._own = 0  # columns; the first of them that is of the current block
        self._now = 0
        self._near, self._far = Rows(recursion.rows), Rows(recursion.rows)
        self._identity = np.array(recursion.start(origin, term))
        self._begin(self._identity)
        self._write()

    @property
    def entries(self) -> Entries:
        """The entries as they are now, [size, count]."""
        return self._columns[:, : self._count]

    def error(self) -> float:
        return self._recursion.error(self.entries)

    def near(self) -> Tensor:
        return self._near.tensor()

    def far(self) -> Tensor:
        return self._far.tensor()

    @np.errstate(over="ignore", invalid="ignore")  # settings with which rows grow without bound
    def append(self, term: Any) -> None:
        """Add a step."""
        self._recursion.advance(self.entries, term)
        self._now += 1
        if self._now % BLOCK == 0:
            self._write_near(self._now - BLOCK)
            self._count = self._own = self._now // BLOCK - 1
        self._begin(self._recursion.start(self._origin + self._now, term))
        self._write()

    def _begin(self, start: Any) -> None:
        if self._count == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, self._count] = start
        self._count += 1

    def _write(self) -> None:
        block = self._now // BLOCK
        self._write_near(block * BLOCK)
        rows = self._recursion.rows
        self._far.write(0, self._columns[:rows, :block].T)
        self._far.write(block, self._identity[None, :rows])

    def _write_near(self, start: int) -> None:
        rows = self._columns[: self._recursion.rows, self._own : self._count]
        self._near.write(start, rows.T)

    @np.errstate(over="ignore", invalid="ignore")
    def restore(self, terms: list[Any], entries: Entries) -> None:
        """Take up the state after some steps: their terms, and the entries then."""
        self._now = len(terms)
        self._count, self._own = entries.shape[1], max(self._now // BLOCK - 1, 0)
        self._columns = np.zeros((len(entries), max(2 * BLOCK, 2 * self._count)))
        self._columns[:, : self._count] = entries
        blocks = self._now // BLOCK
        for first in range(0, blocks, _BLOCKS_AT_ONCE):
            self._rebuild(range(first, min(first + _BLOCKS_AT_ONCE, blocks)), terms)
        self._write()

    def _rebuild(self, blocks: range, terms: list[Any]) -> None:
        """Compute `near` of finished blocks again, side by side, step by step."""
        recursion, make = self._recursion, type(terms[0])
        columns = np.zeros((recursion.rows, len(blocks), BLOCK))
        first, last = blocks.start * BLOCK, blocks.stop * BLOCK
        numbers = np.array(terms[first:last]).reshape(len(blocks), BLOCK, -1)
        for place in range(BLOCK):
            starts = [
                recursion.start(self._origin + step, terms[step - 1]) if step else self._identity
                for step in range(first + place, last, BLOCK)
            ]
            columns[:, :, place] = np.array(starts).T[: recursion.rows]
            recursion.advance(columns[:, :, : place + 1], make(*numbers[:, place].T[:, :, None]))
        self._near.write(first, columns.reshape(recursion.rows, -1).T)


class History:
    """The settings of all steps of a table, and what they do to rows without a gradient."""

    def __init__(self, rule: DenseRule, *, start: int = 0) -> None:
        """`start`: the steps of before are not known, and no row is of before."""
        self.rule, self.start = rule, start
        self.now = start
        self.kind: Kind = rule.idle_kind()
        self._first = self._last = rule  # with the settings of the first and the last step
        self._runs = {name: Runs() for name in numbers_of(rule)}
        self._names = tuple(name for name in rule.scalars(setting_of(rule), 1) if name != STEP)
        self._steps = Rows(len(self._names))
        self._terms = TERMS[0]  # of the series
        self._blocks = self._no_blocks()
        self._eps = 0.0  # of the series: that of the first step
        self._still = True

    def copy(self) -> History:
        """Return a history that goes on by itself."""
        return copy.deepcopy(self)

    def append(self, setting: Setting) -> None:
        """Add a step with these settings; a ValueError says which cannot be used."""
        rule = self._last.with_setting(setting)
        self.now += 1
        for name, number in numbers_of(rule).items():
            self._runs[name].append(number)
        if self.now == self.start + 1:
            self._begin(rule)
        self._last = rule
        self._add(rule)

    def _begin(self, rule: DenseRule) -> None:
        """Take up the settings of the first step."""
        self._first, self._eps = rule, numbers_of(rule).get("eps", 0.0)
        self.kind = rule.idle_kind()
        self._blocks = self._no_blocks()

    def _add(self, rule: DenseRule) -> None:
        if self.kind == "replay" and self.now > self.start + 1:
            self._steps.write(self.now - self.start, self._scalars(rule, self.now))
        elif self._needs_replay(rule):
            self._replay()
        else:
            term = rule.idle_step(self.now)
            self._still &= self.kind == "linear" and term == STILL
            self._blocks.append(term)
            while self._blocks.error() > MOST_ERROR:
                self._refine()

    def _needs_replay(self, rule: DenseRule) -> bool:
        if self.kind == "series" and numbers_of(rule)["eps"] != self._eps:
            return True  # the series holds for one eps
        return rule.idle_kind() == "replay"

    def _refine(self) -> None:
        """Give the series more terms, from the first step on; where that is too few, replay."""
        more = [terms for terms in TERMS if terms > self._terms]
        if not more:
            self._replay()
            return
        self._terms = more[0]
        self._blocks = self._no_blocks()
        for step, rule in self.settings():
            self._blocks.append(rule.idle_step(step))

    def _replay(self) -> None:
        """From now on rows make up for their steps one by one."""
        self.kind, self._still = "replay", False
        self._blocks = self._no_blocks()
        rows = [self._scalars(rule, step) for step, rule in self.settings()]
        self._steps.write(0, np.concatenate([np.zeros((1, len(self._names))), *rows]))

    def settings(self) -> Iterator[tuple[int, DenseRule]]:
        """Each step so far, with the rule of its settings."""
        columns = [runs.steps() for runs in self._runs.values()]
        last, rule = None, self.rule
        for step, numbers in enumerate(zip(*columns, strict=True), start=self.start + 1):
            if numbers != last:
                last, rule = (
                    numbers,
                    with_numbers(self.rule, dict(zip(self._runs, numbers, strict=True))),
                )
            yield step, rule

    def _scalars(self, rule: DenseRule, step: int) -> NDArray[np.float64]:
        numbers = rule.scalars(setting_of(rule), step)
        return np.array([[numbers[name] for name in self._names]])

    def _no_blocks(self) -> Blocks:
        series = self.rule.closed_form == "series"
        recursion = Series(self._terms) if series else Linear()
        return Blocks(recursion, self._first.idle_step(self.start + 1), self.start)

    def tables(self) -> IdleTables:
        """Return what takes rows to the last step that was appended; the next one changes it."""
        return IdleTables(
            kind=self.kind,
            start=self.start,
            now=self.now,
            near=self._blocks.near(),
            far=self._blocks.far(),
            steps=self._steps.tensor(),
            scalar_names=self._names,
            eps=self._eps,
            still=self._still,
        )

    def state(self) -> dict[str, Any]:
        """Return a copy of everything as numbers, texts and arrays; `load` takes it."""
        runs = {name: (np.array(x.values), np.array(x.counts)) for name, x in self._runs.items()}
        return {
            "start": self.start,
            "now": self.now,
            "kind": self.kind,
            "block": BLOCK,
            "terms": self._terms,
            "values": {name: values for name, (values, _) in runs.items()},
            "counts": {name: counts for name, (_, counts) in runs.items()},
            "entries": self._blocks.entries.copy(),
        }

    @classmethod
    def load(cls, rule: DenseRule, state: Mapping[str, Any]) -> History:
        """Return the history that `state` was taken of; its tables have the same bits."""
        if state["block"] != BLOCK:
            raise ValueError(
                f"this history of steps has blocks of {state['block']} steps, and this version "
                f"of hotrow has blocks of {BLOCK}; load it with the version that saved it."
            )
        history = cls(rule, start=int(state["start"]))
        if set(state["values"]) != set(history._runs):
            raise ValueError(
                f"this history has the settings {few(sorted(state['values']))}, and "
                f"{type(rule).__name__} has {few(sorted(history._runs))}; use the optimizer that "
                "the rows were trained with."
            )
        for name in history._runs:
            history._runs[name] = Runs(state["values"][name], state["counts"][name])
        history.now, history.kind = int(state["now"]), state["kind"]
        history._terms = int(state["terms"])
        if history.now > history.start:
            history._restore(np.asarray(state["entries"], dtype=np.float64))
        return history

    def _restore(self, entries: Entries) -> None:
        steps = list(self.settings())
        kind, self._last = self.kind, steps[-1][1]
        self._begin(steps[0][1])
        if kind == "replay":
            self._replay()
            return
        terms = [rule.idle_step(step) for step, rule in steps]
        self._still = kind == "linear" and all(term == STILL for term in terms)
        self._blocks.restore(terms, entries)


def setting_of(rule: DenseRule) -> dict[str, Any]:
    """Return the settings of a rule."""
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def numbers_of(rule: DenseRule) -> dict[str, float]:
    """Return the settings of a rule as one number each; the pair of betas is two."""
    numbers: dict[str, float] = {}
    for name, value in setting_of(rule).items():
        parts = value if isinstance(value, tuple) else (value,)
        names = [name] if len(parts) == 1 else [f"{name}.{i}" for i in range(len(parts))]
        numbers.update(zip(names, map(float, parts), strict=True))
    return numbers


def with_numbers(rule: DenseRule, numbers: Mapping[str, float]) -> DenseRule:
    """Return a rule with the settings that `numbers_of` gave."""
    setting: dict[str, Any] = {}
    for name, value in setting_of(rule).items():
        if isinstance(value, tuple):
            setting[name] = tuple(numbers[f"{name}.{i}"] for i in range(len(value)))
        else:
            setting[name] = type(value)(numbers[name])
    return rule.with_setting(setting)
