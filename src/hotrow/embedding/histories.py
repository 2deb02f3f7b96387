"""What was set in every step of each table: an optimizer moves rows by it that have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any

from hotrow.kernels.dense_rules import DenseRule
from hotrow.kernels.idle_history import History
from hotrow.kernels.rules import Setting


class Histories:
    """A history per table; tables that were always stepped alike share one."""

    def __init__(self, rule: DenseRule, names: Sequence[str]) -> None:
        self._rule, self._names = rule, tuple(names)
        shared = History(rule)
        self._of_table = dict.fromkeys(self._names, shared)
        # Of the newest step: rows that it updates are as of the one before.
        self._pending: list[tuple[History, Any]] = []
        self._flushing = Lock()
        self._grouped: dict[tuple[str, ...], list[tuple[History, list[int]]]] = {}

    def of(self, names: tuple[str, ...], *, steps_now: bool) -> list[tuple[History, list[int]]]:
        """Return the different histories of some tables, and the places of the tables that have
        each. `steps_now`: without the newest step, which is being made."""
        if not steps_now:
            self._flush()
        if names not in self._grouped:
            found: dict[int, tuple[History, list[int]]] = {}
            for place, name in enumerate(names):
                history = self._of_table[name]
                found.setdefault(id(history), (history, []))[1].append(place)
            self._grouped[names] = [*found.values()]
        return self._grouped[names]

    def count(self, stepped: Collection[str], setting_of: Callable[[str], Setting]) -> None:
        """Note a step of some tables, with their settings."""
        self._flush()
        kinds: dict[int, dict[Any, list[str]]] = {}
        settings: dict[Any, Setting | None] = {None: None}
        for name, history in self._of_table.items():
            key = None
            if name in stepped:
                setting = setting_of(name)
                key = tuple(setting.values())
                settings[key] = setting
            kinds.setdefault(id(history), {}).setdefault(key, []).append(name)
        for by_setting in kinds.values():
            for number, (key, names) in enumerate(by_setting.items()):
                history = self._of_table[names[0]]
                if number:  # these part from the others
                    history = history.copy()
                    self._use(names, history)
                if settings[key] is not None:
                    self._pending.append((history, settings[key]))

    def _flush(self) -> None:
        with self._flushing:  # several threads may read, or save
            pending, self._pending = self._pending, []
            for history, setting in pending:
                history.append(setting)

    def _use(self, names: Sequence[str], history: History) -> None:
        self._of_table.update(dict.fromkeys(names, history))
        self._grouped.clear()

    def start(self, name: str, step: int) -> None:
        """Forget the steps of a table, whose rows are all as of `step` now."""
        self._flush()
        self._use([name], History(self._rule, start=step))

    def state(self) -> dict[str, Any]:
        """Return all of it as plain values and arrays."""
        self._flush()
        different = list({id(x): x for x in self._of_table.values()}.values())
        places = {id(history): place for place, history in enumerate(different)}
        return {
            "histories": [history.state() for history in different],
            "tables": {name: places[id(x)] for name, x in self._of_table.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._pending.clear()
        histories = [History.load(self._rule, saved) for saved in state["histories"]]
        for name, place in state["tables"].items():
            if name in self._of_table:
                self._of_table[name] = histories[place]
        self._grouped.clear()
