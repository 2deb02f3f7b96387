"""What `hotrow.ahead` knows of the modules of a model: how their ids follow from batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hotrow.distributed.exchange import Exchange
from hotrow.embedding.in_models import module_tables_in, named_modules, user_name
from hotrow.embedding.module_tables import ModuleTables
from hotrow.embedding.table_modules import TableModule
from hotrow.inputs.calls import JoinedCalls
from hotrow.support.messages import few, warn

_MOST_BATCHES = 4  # from which is learned where ids are, if one does not tell


class ServedModules:
    """The collections that serve modules, by name."""

    def __init__(self, tables: Mapping[str, ModuleTables]) -> None:
        self._tables, self._left = dict(tables), _MOST_BATCHES
        self.is_learning = False

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __bool__(self) -> bool:
        return bool(self._tables)

    def begin(self) -> bool:
        """Return whether the next batch is to be learned from; record its forward pass then."""
        to_learn = [
            tables
            for tables in self._tables.values()
            if tables.collection.training and not tables.id_sources.are_certain
        ]
        self.is_learning = bool(to_learn) and self._left > 0
        if self._left > 0:
            # What one rank is certain of may not be so on another: batches are planned on all, or
            # on none.
            for exchange in self._exchanges:
                learns = "learns" if self.is_learning else ""
                self.is_learning = exchange.first_of(learns) is not None
        for tables in to_learn if self.is_learning else ():
            tables.collection.calls.record()
        return self.is_learning

    @property
    def _exchanges(self) -> list[Exchange]:
        every = (tables.collection.exchange for tables in self._tables.values())
        return [exchange for exchange in every if exchange is not None][:1]

    def learn(self, batch: Any) -> None:
        """Learn from what was recorded; `batch` is on the device."""
        self._left -= 1
        for tables in self._tables.values():
            calls = tables.collection.calls.take_recorded()
            if calls:
                tables.id_sources.learn(batch, calls)
        if self._left and not all(x.id_sources.are_certain for x in self._tables.values()):
            return
        unknown = [name for x in self._tables.values() for name in x.id_sources.unknown]
        said = [f"{name.replace('/', '.')!r}: function of a batch" for name in unknown]
        if unknown:
            warn(
                f"what {few(map(repr, unknown))} looks up was not found in the batch, so it is not "
                "read ahead, which is right but slower. Say what it is: hotrow.ahead(loader, "
                f"model, ids={{{few(said)}}})"
            )

    def joined(self, name: str, batch: Any) -> JoinedCalls | None:
        """Return what the modules of a collection will look up; None: it is not known."""
        sources = self._tables[name].id_sources
        joined = sources.joined(batch) if sources.are_known else None
        return joined if joined is not None and joined.calls else None

    def is_guess(self, name: str) -> bool:
        """Whether what modules look up was learned, and no function of the user said it."""
        return name in self._tables and not self._tables[name].id_sources.has_functions


def served_modules(
    model: nn.Module, functions: Mapping[str, Callable[[Any], Any]] | None
) -> ServedModules:
    """Return what serves the modules of a model; `functions` say what some of them look up, by
    their names in the model."""
    served = module_tables_in(model)
    by_tables: dict[int, dict[str, Callable[[Any], Any]]] = {}
    for name, function in (functions or {}).items():
        modules = dict(named_modules(model))
        module = modules.get(user_name(model, name))
        if not isinstance(module, TableModule):
            known = [x for x, module in modules.items() if isinstance(module, TableModule)]
            raise ValueError(
                f"ids= names {name!r}, which is no module of hotrow's in this model; these are: "
                f"{few(map(repr, known))}"
            )
        if not callable(function):
            raise TypeError(f"ids[{name!r}] must be a function of a batch")
        by_tables.setdefault(id(module.tables), {})[module.table] = function
    for tables in served.values():
        tables.expect(by_tables.get(id(tables)))
    return ServedModules(served)
