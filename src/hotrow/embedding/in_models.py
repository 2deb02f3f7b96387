"""The collections of a model: those that are its modules, and those that serve its modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.module_tables import ModuleTables
from hotrow.embedding.table_modules import TableModule


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by the names that a user knows."""
    for name, module in model.named_modules():
        # torch.compile wraps a model under this name, which no user wrote.
        yield name.removeprefix("_orig_mod."), module


def module_tables_in(model: nn.Module) -> dict[str, ModuleTables]:
    """Return what serves the modules of a model, by the name of the first module it serves."""
    served: dict[int, tuple[str, ModuleTables]] = {}
    for name, module in named_modules(model):
        if isinstance(module, TableModule):
            served.setdefault(id(module.tables), (name, module.tables))
    return dict(served.values())


def collections_in(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """Return the collections of a model by name; those of modules have the first one's name."""
    collections = {
        name: module
        for name, module in named_modules(model)
        if isinstance(module, EmbeddingBagCollection)
    }
    served = module_tables_in(model).items()
    return {**collections, **{name: tables.collection for name, tables in served}}


def some_collections_in(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """Return the collections of a model by name; raise if it has none."""
    collections = collections_in(model)
    if not collections:
        raise ValueError(
            f"{type(model).__name__} holds no hotrow collection or module; give the model that "
            "calls it, or convert it before: hotrow.convert(model, budget=...)"
        )
    return collections
