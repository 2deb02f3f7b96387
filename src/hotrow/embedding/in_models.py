"""The collections of a model: those that are its modules, and those that serve its modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.module_tables import ModuleTables
from hotrow.embedding.table_modules import TableModule


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by the names that a user knows: wrappers of torch add parts to names."""
    known: dict[str, str] = {}  # by torch's names
    wrappers: dict[str, str] = {}  # their parts of names, by torch's names
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if not name or wrappers.get(parent) == last:
            known[name] = known[parent] if name else ""
        else:
            known[name] = f"{known[parent]}.{last}".lstrip(".")
        part = part_of_wrapper(module)
        if part is not None:
            wrappers[name] = part
        yield known[name], module


def user_name(model: nn.Module, name: str) -> str:
    """Return a module's name as a user knows it; `name` may have the parts of wrappers."""
    torch_names = (torch_name for torch_name, _ in model.named_modules())
    pairs = zip(torch_names, named_modules(model), strict=True)
    return {torch_name: known for torch_name, (known, _) in pairs}.get(name, name)


def bare(model: nn.Module) -> nn.Module:
    """Return the model that wrappers were built around."""
    part = part_of_wrapper(model)
    return model if part is None else bare(getattr(model, part))


def part_of_wrapper(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper of torch has its model; None: it is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else None  # of torch.compile


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
