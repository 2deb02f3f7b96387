"""`hotrow.convert`: an ordinary model's embeddings become hotrow's, in place, and back."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, repeat
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotrow.embedding.arguments import idle_in_modules
from hotrow.embedding.module_tables import ModuleTables
from hotrow.embedding.stand_ins import stand_in_of
from hotrow.embedding.table_modules import (
    Embedding,
    EmbeddingBag,
    TableModule,
    config_of,
    why_unsupported,
)
from hotrow.embedding.torch_rules import common_rule, rules_for
from hotrow.embedding.torch_state import state_of
from hotrow.embedding.torch_steps import note_stand_ins
from hotrow.kernels.rules import SGD, RowRule
from hotrow.support.messages import few, warn
from hotrow.support.units import show_bytes

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Optimizers = Optimizer | Sequence[Optimizer] | None
_PLAIN = (nn.Embedding, nn.EmbeddingBag)
HELD = ("leave", "replace")
OURS = ("collection", "tables", "table")  # attributes that a module gets
_DEPTH = 6  # of containers in which weights are searched for
_INSIDE = " (inside of an object)"
_LOOKED_AT_APART = (nn.Module, Optimizer, ModuleType, type, str, int, float)


@dataclass
class _Table:
    """An embedding's weight, and the modules that look it up."""

    weight: nn.Parameter
    modules: dict[str, nn.Module] = field(default_factory=dict)  # by path
    reason: str | None = None  # why it is left as it is

    @property
    def name(self) -> str:
        return next(iter(self.modules)).replace(".", "/") or "embedding"

    @property
    def module(self) -> Any:
        return next(iter(self.modules.values()))


def convert(
    model: AnyModel,
    budget: Any,
    *,
    optimizer: Optimizers = None,
    device: str | torch.device | None = None,
    idle: str | None = None,
    held: str = "leave",
    show: bool = True,
    **options: Any,
) -> AnyModel:
    """Let the embeddings of a model keep their rows in host memory, and `budget` bytes of fast
    memory for all of them together. The model is changed in place and returned.

    Every `nn.Embedding` and `nn.EmbeddingBag`, of subclasses too, goes on with its weights, its
    calls and its keys of the state dict. Their rows are updated by the torch optimizer that is made
    of `model.parameters()`; one that exists already is given as `optimizer`, and is changed in
    place with its state. An embedding whose weight something else holds, such as a tied layer or a
    list for regularization, stays as it is, and so do others that cannot be converted; a table of
    all of them is printed (`show`), with the reason.

    `device` is that of fast memory, by default that of the model's other parameters.
    Rows that no batch looks up move as torch moves them (Adam, momentum, weight decay); with
    `idle="frozen"` they rest. `held="replace"` puts the small parameters of the converted tables
    into lists that hold weights, where a use of them in a loss raises. Other options are those of
    `hotrow.EmbeddingBagCollection`, such as `strategy` and `seed`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if held not in HELD:
        raise ValueError(f"held must be one of {', '.join(HELD)}, not {held!r}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{type(model).__name__} holds copies of weights or replaces their gradients, and "
            "hotrow trains rows on one device: convert the model without the wrapper"
        )
    given = _listed(optimizer)
    tables = list(_tables_of(model).values())
    holders = _Holders(model, tables)
    for table in tables:
        table.reason = _why_left(table, holders, held)
    chosen = [table for table in tables if table.reason is None]
    _refuse_other_optimizers(chosen, given)
    if chosen:
        _convert(model, chosen, budget, given, device, idle, held, options)
    if show and tables:
        _show(tables)
    name = type(model).__name__
    if not tables and any(isinstance(module, TableModule) for module in model.modules()):
        warn(f"{name} is converted already; hotrow.revert(model) makes it plain again")
    elif not tables:
        warn(
            f"{name} has no nn.Embedding or nn.EmbeddingBag to convert (torch does not see modules "
            "in plain lists: nn.ModuleList holds them)"
        )
    elif not chosen and not show:
        first = tables[0]
        warn(f"no embedding of {name} was converted; {next(iter(first.modules))}: {first.reason}")
    return model


def revert(model: AnyModel, *, optimizer: Optimizers = None) -> AnyModel:
    """Make the modules of a converted model plain again, with the weights of now, in place.

    `optimizer` gets their weights instead of the small parameters that stood for them, and the
    state of their rows. Gradients that wait for its step become gradients of the weights.
    """
    optimizers, by_table = _listed(optimizer), dict[tuple[int, str], list[TableModule]]()
    for module in model.modules():
        if isinstance(module, TableModule):
            by_table.setdefault((id(module.tables), module.table), []).append(module)
    for modules in by_table.values():
        tables, table = modules[0].tables, modules[0].table
        stand_in = tables.stand_in(table)
        has_state = tables.is_built or any(stand_in in x.state for x in optimizers)
        owner = tables.collection.torch_steps if has_state else None
        states = {
            id(x): state_of(x, stand_in, table, owner)
            for x in optimizers
            if owner is not None and any(stand_in is p for g in x.param_groups for p in g["params"])
        }
        grads = None if owner is None else owner.grads_of(table)
        weight = nn.Parameter(
            tables.release(table).to(tables.device), requires_grad=stand_in.requires_grad
        )
        if grads is not None:
            weight.grad = _grad_of(weight, *grads, is_sparse=all(x.sparse for x in modules))
        for module in modules:
            _make_plain(module, weight)
        _replace_in(model, {id(stand_in): weight})
        for each in optimizers:
            each.state.pop(stand_in, None)
            _exchange(each, {id(stand_in): weight})
            state = states.get(id(each))
            if state:
                on_device = {key: x.to(weight.device) for key, x in state.items() if key != "step"}
                each.state[weight] = {**state, **on_device}
        facts = stand_in_of(stand_in)
        assert facts is not None
        facts.belong_to(_Reverted)
    return model


class _Reverted:
    """What an optimizer finds that still holds tables which are plain again."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "this optimizer holds tables that hotrow.revert() has made plain, and would not train "
            "them: give it to hotrow.revert(model, optimizer=optimizer), or make a new one"
        )


# -- what to convert -------------------------------------------------------------------------


def _tables_of(model: nn.Module) -> dict[int, _Table]:
    """Return the weights of all plain embeddings of a model, by identity."""
    tables: dict[int, _Table] = {}
    for path, module in model.named_modules():
        if isinstance(module, _PLAIN) and not isinstance(module, TableModule):
            weight: Any = module.weight
            tables.setdefault(id(weight), _Table(weight)).modules[path] = module
    return tables


def _why_left(table: _Table, holders: _Holders, held: str) -> str | None:
    """Return why a table stays as it is; None: it can be converted."""
    module, weight = table.module, table.weight
    if module._parameters.get("weight") is not weight:
        return "its weight is computed (a parametrization), not a parameter"
    if weight.device.type == "meta":
        return "its weight is on the meta device, without values"
    forms = {(type(x), getattr(x, "mode", None), x.padding_idx) for x in table.modules.values()}
    if len(forms) > 1:
        return "modules of different kinds share its weight"
    part: Any
    for part in table.modules.values():
        reason = why_unsupported(part.max_norm, part.scale_grad_by_freq, weight.dtype)
        if reason is not None:
            return reason
    shadowed = [name for x in table.modules.values() for name in OURS if hasattr(x, name)]
    if shadowed:
        return f"it has an attribute {shadowed[0]!r}, as hotrow's modules have"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "hooks are registered on its weight, which would not be called any more"
    if id(weight) in holders.parameters:
        return f"its weight is also that of {few(holders.parameters[id(weight)])}"
    places = holders.places.get(id(weight), [])
    if held == "replace":  # done in lists, tuples and dicts, not in other objects
        places = [place for place in places if place.endswith(_INSIDE)]
    if places:
        return (
            f"its weight is also held in {few(places)}, which would go on with the old weight; "
            "drop it there, or see held='replace'"
        )
    return None


class _Holders:
    """Where tensors are held, by their identity."""

    def __init__(self, model: nn.Module, tables: Iterable[_Table]) -> None:
        own = {id(module) for table in tables for module in table.modules.values()}
        named = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
        self.parameters: dict[int, list[str]] = {}  # of modules, but weights of the tables
        self.places: dict[int, list[str]] = {}  # other attributes of modules of the model
        outside = [x for x in _alive(nn.Module) if id(x) not in named]
        for module in (*model.modules(), *outside):
            for name, parameter in vars(module).get("_parameters", {}).items():
                if not (id(module) in own and name == "weight"):
                    path = named.get(id(module), f"a {type(module).__name__} outside of this model")
                    self.parameters.setdefault(id(parameter), []).append(f"{path}.{name}")
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    self._note(value, f"{named[id(module)]}.{name}", set(), _DEPTH)

    def _note(self, value: Any, place: str, seen: set[int], depth: int) -> None:
        """Note the tensors below a value."""
        if isinstance(value, Tensor):
            self.places.setdefault(id(value), []).append(place)
            return
        if id(value) in seen or not depth or isinstance(value, _LOOKED_AT_APART):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            parts = value
        else:
            parts = getattr(value, "__dict__", {}).values()
            place = place.removesuffix(_INSIDE) + _INSIDE
        for part in parts:
            self._note(part, place, seen, depth - 1)


def _alive(kind: type) -> list[Any]:
    """Return all objects of a class. Their `__class__` may be a pretence, and cost something."""
    objects = gc.get_objects()  # hundreds of thousands
    return list(compress(objects, map(issubclass, map(type, objects), repeat(kind))))


def _refuse_other_optimizers(tables: Sequence[_Table], given: Sequence[Optimizer]) -> None:
    """Raise if an optimizer holds a weight that will be one no more."""
    weights = {id(table.weight): table.name for table in tables}

    def holding() -> list[Optimizer]:
        held = ((x, p) for x in _alive(Optimizer) for g in x.param_groups for p in g["params"])
        return [x for x, param in held if id(param) in weights and not any(x is y for y in given)]

    if others := holding():
        others.clear()
        gc.collect()  # some may be garbage
        others = holding()
    for other in others:
        for group in other.param_groups:
            names = [weights[id(x)] for x in group["params"] if id(x) in weights]
            if names:
                raise ValueError(
                    f"{type(other).__name__} already holds the weight of {names[0]!r}, and would "
                    "go on with a tensor that the model does not use any more: give it to "
                    "hotrow.convert(model, ..., optimizer=optimizer), or make it afterwards"
                )


# -- converting ------------------------------------------------------------------------------


def _convert(
    model: nn.Module,
    chosen: Sequence[_Table],
    budget: Any,
    optimizers: Sequence[Optimizer],
    device: str | torch.device | None,
    idle: str | None,
    held: str,
    options: Mapping[str, Any],
) -> None:
    if device is None:
        device = _device_of(model, chosen)
    rule = _checked_rule(chosen, optimizers, idle_in_modules(idle, device))
    configs = [_config(table) for table in chosen]
    serving = ModuleTables(
        configs,
        {table.name: table.weight.data for table in chosen},
        device=device,
        budget=budget,
        idle=idle,
        **options,
    )
    serving.check_budget(rule)
    new: dict[int, Any] = {}
    for table in chosen:
        stand_in = serving.stand_in(table.name)
        stand_in.requires_grad_(table.weight.requires_grad)
        new[id(table.weight)] = stand_in
    if held == "replace":
        _replace_in(model, new)
    for table in chosen:
        for module in table.modules.values():
            _make_hotrow(module, serving, table.name)
    states = [_take_over(optimizer, chosen, new) for optimizer in optimizers]
    for table in chosen:
        del table.weight  # or it would keep the memory of the whole table
    for optimizer, by_table in zip(optimizers, states, strict=True):
        _load_states(optimizer, by_table, serving)


def _config(table: _Table) -> Any:
    module = table.module
    mode = getattr(module, "mode", "none")
    rows, dim = table.weight.shape
    return config_of(table.name, rows, dim, mode, module.padding_idx, None)


def _device_of(model: nn.Module, chosen: Sequence[_Table]) -> torch.device:
    converted = {id(table.weight) for table in chosen}
    others = (x.device for x in model.parameters() if id(x) not in converted)
    return next((x for x in others if x.type != "meta"), chosen[0].weight.device)


@cache
def _class_for(plain: type) -> type:
    """Return a class whose lookups are hotrow's and whose other methods are those of `plain`."""
    ours = Embedding if issubclass(plain, nn.Embedding) else EmbeddingBag
    if plain in _PLAIN:
        return ours
    return type(plain.__name__, (plain, ours), {"__module__": plain.__module__})


def _make_hotrow(module: nn.Module, tables: ModuleTables, table: str) -> None:
    plain: Any = type(module)
    module.__class__ = _class_for(plain)  # it keeps its identity: others may refer to it
    vars(module)["plain_class"] = plain
    module.use_tables(tables, table)  # type: ignore[operator]


def _make_plain(module: TableModule, weight: nn.Parameter) -> None:
    default = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    plain = vars(module).pop("plain_class", default)
    module.forget_tables()
    module.__class__ = plain
    module._parameters["weight"] = weight


def _replace_in(model: nn.Module, new: Mapping[int, Any]) -> None:
    """Put other parameters into what the modules of a model hold."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                vars(module)[name] = _replaced(value, new)


def _replaced(value: Any, new: Mapping[int, Any]) -> Any:
    """Return a container with other parts; lists and dicts are changed in place."""
    if id(value) in new:
        return new[id(value)]
    if isinstance(value, dict):
        for key, part in list(value.items()):
            value[key] = _replaced(part, new)
    elif isinstance(value, list):
        value[:] = [_replaced(part, new) for part in value]
    elif type(value) is tuple:
        parts = tuple([_replaced(part, new) for part in value])
        return parts if any(x is not y for x, y in zip(parts, value, strict=True)) else value
    return value


# -- optimizers ------------------------------------------------------------------------------


def _listed(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    listed = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    wrong = [x for x in listed if not isinstance(x, Optimizer)]
    if wrong:
        raise TypeError(
            f"optimizer must be a torch optimizer that exists, or a list of them, got "
            f"{type(wrong[0]).__name__}"
        )
    return listed


def _checked_rule(
    chosen: Sequence[_Table], optimizers: Sequence[Optimizer], idle: str | None
) -> RowRule:
    """Return what optimizers that exist do to rows; raise if they cannot, before anything has
    changed."""
    rule: RowRule = SGD()
    names = {id(table.weight): table.name for table in chosen}
    for optimizer in optimizers:
        groups = {
            names[id(param)]: group
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in names
        }
        if groups:
            rule = common_rule(rules_for(optimizer, groups, idle, None))  # for its state alone
    late = [table.name for table in chosen if table.weight.grad is not None]
    if late:
        warn(
            f"the gradient of {few(late)} from before is dropped: convert a model between an "
            "optimizer's step and the next backward()"
        )
    return rule


def _exchange(optimizer: Optimizer, new: Mapping[int, Any]) -> None:
    """Put other params into an optimizer, in the same places."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(param), param) for param in group["params"]]


def _take_over(
    optimizer: Optimizer, chosen: Sequence[_Table], new: Mapping[int, Any]
) -> dict[str, dict[str, Any]]:
    """Let an optimizer hold stand-ins instead of weights, whose state is returned by table."""
    states = {}
    for table in chosen:
        if table.weight in optimizer.state:
            state = states[table.name] = optimizer.state.pop(table.weight)
            stand_in = new[id(table.weight)]
            optimizer.state[stand_in] = _own_state(state, table.weight, stand_in)
    _exchange(optimizer, new)
    note_stand_ins(optimizer)
    return states


def _load_states(
    optimizer: Optimizer, states: dict[str, dict[str, Any]], tables: ModuleTables
) -> None:
    """Move the state of weights to the rows, table by table."""
    for name in [name for name, state in states.items() if state]:
        state, owner = states.pop(name), tables.collection.torch_steps
        assert owner is not None
        step = int(state.get("step", 1))  # torch's SGD counts none
        widths = tables.collection.row_access.state_widths(name)
        owner.load_state(optimizer, name, {key: state[key] for key in widths}, step)


def _own_state(state: Mapping[str, Any], weight: Tensor, stand_in: Tensor) -> dict[str, Any]:
    """Return what an optimizer keeps of a stand-in, some of it from its construction on."""
    return {
        key: (torch.zeros_like(stand_in) if getattr(x, "shape", None) == weight.shape else x)
        for key, x in state.items()
    }


def _grad_of(weight: Tensor, rows: Tensor, grads: Tensor, *, is_sparse: bool) -> Tensor:
    """Return gradients of rows as torch keeps that of a weight."""
    rows, grads = rows.to(weight.device), grads.to(weight.device)
    if is_sparse:
        return torch.sparse_coo_tensor(rows.unsqueeze(0), grads, weight.shape, is_coalesced=True)
    return torch.zeros_like(weight).index_copy_(0, rows, grads)


# -- what was done ---------------------------------------------------------------------------


def _show(tables: Sequence[_Table]) -> None:
    from rich.console import Console  # takes a tenth of a second
    from rich.table import Table

    shown = Table(title="hotrow.convert", title_justify="left")
    for name in ("module", "rows", "dim", "size", "now"):
        shown.add_column(name, justify="left" if name in ("module", "now") else "right")
    for table in tables:
        module = table.module
        rows, dim = module.num_embeddings, module.embedding_dim
        now = (
            "hotrow, in the shared budget" if table.reason is None else f"as it was: {table.reason}"
        )
        size = show_bytes(4 * rows * dim)
        paths = ", ".join(table.modules) or "(the model itself)"
        shown.add_row(paths, f"{rows:,}", str(dim), size, now)
    Console(soft_wrap=False).print(shown)
