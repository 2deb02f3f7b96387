"""The settings of each table's rule in torch's form, and the state of rows as torch saves it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.arguments import refuse_state_dict
from hotrow.embedding.histories import Histories
from hotrow.inputs.tables import EmbeddingBagConfig
from hotrow.kernels.dense_rules import DenseRule
from hotrow.kernels.rules import RowRule, Scalars
from hotrow.support.messages import warn


class RowOptimizer(torch.optim.Optimizer):
    """The settings of each table in torch's form, so that torch's schedulers drive them.

    With `update="backward"` rows are updated in `backward()`, and `step()` and `zero_grad()` have
    nothing left to do. With `update="step"` the params are the tables' stand-ins.
    """

    def __init__(
        self,
        rule: RowRule,
        tables: Sequence[EmbeddingBagConfig],
        stand_ins: Sequence[Tensor] | None = None,
    ) -> None:
        # Without stand-ins, empty tensors: torch wants a parameter in each group.
        params = stand_ins or [torch.empty(0) for _ in tables]
        pairs = zip(params, tables, strict=True)
        groups = [{"params": [param], "name": table.name} for param, table in pairs]
        self.names = [table.name for table in tables]
        super().__init__(groups, _settings_of(rule))
        self._places = {name: place for place, name in enumerate(self.names)}
        # With stand-ins, weights are loaded as torch's are: state is another matter.
        self._watches_loads = stand_ins is None
        self._use(rule)
        self._may_change = False  # settings may, in place: a tensor or a list is among them
        self._steps = [0] * len(tables)
        self._uncounted = 0  # of them, for every table
        # The tables that the step captured last updates; None: it has no update.
        self.in_graph: tuple[str, ...] | None = None
        self.counts_apart = False  # the rule's numbers may differ between tables by their steps
        # Row state was loaded since the last update; weights were, and their state was not.
        self._has_state = self._lacks_state = False
        # The rows of the collection; a strong reference would keep their memory for too long.
        self._owner: Callable[[], Any] = lambda: None

    def _use(self, rule: RowRule) -> None:
        before = getattr(self, "rule", None)
        self.rule, settings = rule, _settings_of(rule)
        if type(rule) is not type(before) or rule.state_names != before.state_names:
            self._histories = None
            if isinstance(rule, DenseRule):
                self._histories = Histories(rule, self.names)
        self.setting_names = list(settings)
        self._scalar_names = list(rule.scalars(settings, 1))
        self._last_scalars: dict[tuple[str, ...], tuple[Any, Any, list[tuple[float, ...]]]] = {}

    def change_rule(self, rule: RowRule) -> None:
        """Take another rule for all tables, with its own settings."""
        self._use(rule)
        for group in self.param_groups:
            kept = {key: group[key] for key in ("params", "name")}
            group.clear()
            group.update(kept, **_settings_of(rule))

    def belongs_to(self, rows: Any) -> None:
        """Keep a weak reference to the rows' `RowAccess`."""
        self._owner = weakref.ref(rows)

    @property
    def rows(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the collection whose rows this optimizer updates is gone")
        return owner

    def scalars(self, names: Sequence[str]) -> Scalars:
        """Return what the rule needs for an update of some tables, [T] float64 each."""
        values = torch.tensor(self.table_scalars(tuple(names)), dtype=torch.float64)
        return dict(zip(self._scalar_names, values.unbind(1), strict=True))

    def table_scalars(self, names: tuple[str, ...]) -> list[tuple[float, ...]]:
        """Return `scalars` as rows of numbers, one row per table; the same list until a change.

        Called several times a step. Adam or a schedule change the numbers in each step.
        """
        key: list[Any] = [group[name] for group in self.param_groups for name in self.setting_names]
        if self._may_change:
            key = list(map(_fixed, key))
        steps = tuple(self.steps) if self.rule.uses_step else None
        last_key, last_steps, rows = self._last_scalars.get(names, (None, None, []))
        if last_key == key and last_steps == steps:
            return rows
        if not self._may_change and any(isinstance(value, Tensor | list) for value in key):
            self._may_change = True
            key = list(map(_fixed, key))
        places = [self._places[name] for name in names]
        many = len(self.setting_names)
        if key == key[:many] * len(self.names) and (steps is None or len(set(steps)) == 1):
            rows = [self._numbers(key, steps, places[0])] * len(names)  # most often
        else:
            rows = [self._numbers(key, steps, place) for place in places]
        self._last_scalars[names] = key, steps, rows
        return rows

    def _numbers(
        self, key: list[Any], steps: tuple[int, ...] | None, place: int
    ) -> tuple[float, ...]:
        many = len(self.setting_names)
        setting = dict(zip(self.setting_names, key[place * many : (place + 1) * many], strict=True))
        step = 1 if steps is None else max(steps[place], 1)  # asked before the first update
        return tuple(map(float, self.rule.scalars(setting, step).values()))

    @property
    def steps(self) -> list[int]:
        """The updates of each table so far, counted by the host without asking a device."""
        if self._uncounted:
            self._steps = [step + self._uncounted for step in self._steps]
            self._uncounted = 0
        return self._steps

    def count_step(self, tables: Collection[str] | None = None) -> None:
        """Count one more update of these tables; None: of all."""
        if self._lacks_state:
            self._warn_of_state()
        self._has_state = False
        if self._histories is not None:
            self._histories.count(self.names if tables is None else tables, self._setting_of)
        if tables is None or len(tables) == len(self.names):
            self._uncounted += 1
        else:
            self.counts_apart = self.rule.uses_step
            places = zip(self.names, self.steps, strict=True)
            self._steps = [step + (name in tables) for name, step in places]
        self.expect_step()

    def _setting_of(self, name: str) -> dict[str, Any]:
        group = self.param_groups[self._places[name]]
        return {key: _fixed(group[key]) for key in self.setting_names}

    def histories(self, names: tuple[str, ...], *, steps_now: bool) -> list[Any]:
        """Return what moves rows of some tables that have no gradient; see `Histories.of`."""
        assert self._histories is not None
        return self._histories.of(names, steps_now=steps_now)

    def steps_of(self, name: str) -> int:
        """Return the number of updates of a table."""
        return self.steps[self._places[name]]

    def expect_step(self) -> None:
        """Let torch's schedulers move: this is what they look for before."""
        self._opt_called = True

    def capture_step(self, tables: tuple[str, ...]) -> None:
        """Note that an update of these tables is being captured; every replay counts it."""
        self.in_graph = tables
        self.counts_apart |= self.rule.uses_step and len(tables) < len(self.names)

    def weights_loaded(self) -> None:
        """Note that weights of rows were replaced, and their state was not."""
        has_all = self._has_state or not self.rule.state_names
        self._lacks_state = self._watches_loads and not has_all

    def load_table(self, name: str, state: Mapping[str, Tensor], step: int) -> None:
        """Replace the state of a table's rows, and how often they were updated."""
        self._load_state(name, state, step)

    def _load_state(self, name: str, state: Mapping[str, Tensor], step: int) -> None:
        self.rows.load_state(name, state, step)
        self.steps[self._places[name]] = step
        if self._histories is not None:
            self._histories.start(name, step)

    def start_anew(self, names: Collection[str]) -> None:
        """Let the state of some tables' rows be as at the start."""
        start = torch.tensor(self.rule.start_of_state())
        for name in names:
            shapes = self.rows.state_shapes(name)
            self.load_table(name, {key: start.expand(shape) for key, shape in shapes.items()}, 0)

    def _state_loaded(self) -> None:
        self._has_state, self._lacks_state = True, False

    def _warn_of_state(self) -> None:
        self._lacks_state = False
        warn(
            f"weights were loaded by load_state_dict, but not the {type(self.rule).__name__} state "
            f"of their rows ({', '.join(self.rule.state_names)}), which stays as it was. To go on "
            "with a run, load that as well: embedding.optimizer.load_state_dict(saved). Where it "
            "is meant to start anew, embedding.load_weights() loads weights without this warning"
        )

    def step(self, closure: Any = None) -> Any:
        """Do nothing: rows were updated in `backward()`, or are updated by a hook after this."""
        return None if closure is None else closure()

    def state_dict(self) -> dict[str, Any]:
        """Return settings, steps, and a copy of all row state; `rows()` streams large tables."""
        if self.rows.is_shared:
            refuse_state_dict("rows(table)")
        settings = self.settings_dict()
        state = {
            name: {"step": step, **self.rows.copy_state(name)}
            for name, step in settings["steps"].items()
        }
        return {"state": state, "param_groups": settings["param_groups"]}

    def settings_dict(self) -> dict[str, Any]:
        """Return what `state_dict` returns, without the state of rows."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        settings: dict[str, Any] = {"rule": type(self.rule).__name__, "param_groups": groups}
        with self.rows.reading():  # another thread may be in the middle of a step
            settings["steps"] = dict(zip(self.names, self.steps, strict=True))
            if self._histories is not None:
                settings["histories"] = self._histories.state()
        return settings

    def numbers(self) -> list[dict[str, Any]]:
        """Return the settings of each table as plain values."""
        names = self.setting_names
        return [{name: _plain(group[name]) for name in names} for group in self.param_groups]

    @contextmanager
    def used(self, numbers: list[dict[str, Any]] | None) -> Iterator[None]:
        """Inside, use the settings that `numbers` gave on another rank; None: these here."""
        before = [{name: group[name] for name in self.setting_names} for group in self.param_groups]
        for group, values in zip(self.param_groups, numbers or before, strict=True):
            group.update(values)
        try:
            yield
        finally:
            for group, values in zip(self.param_groups, before, strict=True):
                group.update(values)

    def load_settings_dict(self, settings: dict[str, Any]) -> None:
        """Load settings and steps; the caller also loads the state of rows."""
        named = {group["name"]: group for group in settings["param_groups"]}
        for place, group in enumerate(self.param_groups):
            saved = named[group["name"]]
            for key in (*self.setting_names, "initial_lr"):  # the last one belongs to schedulers
                if key in saved:
                    group[key] = saved[key]
            self.steps[place] = int(settings["steps"][group["name"]])
        if self._histories is not None:
            self._histories.load(settings["histories"])
        self._state_loaded()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        named = {group.get("name"): group for group in state_dict.get("param_groups", [])}
        for name in self.names:
            state = state_dict.get("state", {}).get(name)
            if name not in named or state is None or "step" not in state:
                raise ValueError(f"the optimizer's state has no table {name!r}, or no step for it")
            self.rows.check_state(name, state)
        for group in self.param_groups:
            name = group["name"]
            group.update({k: v for k, v in named[name].items() if k in group and k != "params"})
            state = state_dict["state"][name]
            self._load_state(name, state, int(state["step"]))
        self._state_loaded()


def _settings_of(rule: RowRule) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _fixed(value: Any) -> Any:
    """Return a copy of a setting: torch's schedules change tensors in place."""
    if isinstance(value, Tensor):
        return float(value)
    return tuple(value) if isinstance(value, list) else value
