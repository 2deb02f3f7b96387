"""The parts of a model that are saved: tables of its collections, and all that is no row.

`pack` turns states of any shape into JSON beside named tensors. JSON has no tuples, no keys but
text, no NaN and no infinity: such values are tables with one entry that says what they are, and so
is a table itself. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.checkpoint.places import Share
from hotrow.checkpoint.wrapped import cut_like, plain_names
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in
from hotrow.embedding.table_modules import TableModule

_NAMED = 3  # differences in a message
# How an optimizer computes: that is for the device here to say.
_FORMS = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class TableRows:
    """A table of one of the model's collections."""

    collection: EmbeddingBagCollection
    name: str
    rows: int
    dim: int

    @property
    def share(self) -> Share:
        """Which of its rows are here."""
        owners, rank = self.collection.row_access.owners_of(self.name) or (None, 0)
        return Share(self.rows, owners, rank)

    @property
    def stored(self) -> Tensor:
        """All of its rows that are here where they lie, with their state."""
        return self.collection.row_access.stored(self.name)

    @property
    def state(self) -> dict[str, int]:
        """Numbers of each piece of state behind the weights of a row."""
        return self.collection.row_access.stored_widths(self.name)


def collections_of(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """Return all collections of a model by name."""
    return collections_in(model)


def tables_of(model: nn.Module) -> dict[str, TableRows]:
    """Return all tables by the names that their weights have in a state dict."""
    places = {
        f"{name}.{module.key_of(table.name)}": (module, table)
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
        for table in module.tables
    }
    for name, module in model.named_modules():
        if isinstance(module, TableModule):
            table = next(x for x in module.tables.tables if x.name == module.table)
            places[f"{name}.weight"] = (module.collection, table)
    plain = plain_names(model)
    return {
        plain(name.lstrip(".")): TableRows(
            collection, table.name, table.num_embeddings, table.embedding_dim
        )
        for name, (collection, table) in places.items()
    }


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without rows, which would not fit one. Tensors that are cut among ranks
    are not whole."""
    plain = plain_names(model)
    with rows_apart(model):
        state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} has the type {type(value).__name__}, and only tensors are saved; take "
                "it out of the module's extra state"
            )
    return {plain(name): value for name, value in state.items()}


def names_for(model: nn.Module, saved: Iterable[str]) -> Callable[[str], str]:
    """Return what turns the names of saved tensors into those of this model. Earlier versions have
    saved names with the parts of wrappers."""
    plain, here = plain_names(model), {*tables_of(model), *dense_state(model)}
    is_earlier = any(name not in here and plain(name) in here for name in saved)
    return plain if is_earlier else str


def load_dense(model: nn.Module, dense: Mapping[str, Tensor]) -> None:
    """Load what `dense_state` returned, of this model or of one in other wrappers."""
    plain, name_for = plain_names(model), names_for(model, dense)
    with rows_apart(model):
        here = model.state_dict()
        names = {plain(name): name for name in here}
        state = {names.get(name_for(name), name): value for name, value in dense.items()}
        model.load_state_dict(
            {name: cut_like(value, here.get(name)) for name, value in state.items()}
        )


def rows_apart(model: nn.Module) -> ExitStack:
    """Inside, the model's state dict is the dense part's."""
    stack = ExitStack()
    for collection in collections_of(model).values():
        stack.enter_context(collection.row_access.apart())
    return stack


def refuse_other(folder: Path, saved: Mapping[str, list[int]], model: nn.Module) -> None:
    """Compare names and shapes with a model's; a ValueError says what differs."""
    here = {key: [table.rows, table.dim] for key, table in tables_of(model).items()}
    here |= {key: list(tensor.shape) for key, tensor in dense_state(model).items()}
    unlike = [f"{key} {shape} is saved alone" for key, shape in saved.items() if key not in here]
    unlike += [f"{key} {shape} is not saved" for key, shape in here.items() if key not in saved]
    unlike += [
        f"{key} is saved as {saved[key]}, and the model's is {here[key]}"
        for key in saved
        if key in here and saved[key] != here[key]
    ]
    if unlike:
        more = f"; {len(unlike) - _NAMED} more" if len(unlike) > _NAMED else ""
        raise ValueError(f"{folder} is of another model: {'; '.join(unlike[:_NAMED])}{more}")


def load_part(part: Any, state: Any) -> None:
    """Load the state of an optimizer, or of whatever else has one, on the device that is here."""
    if isinstance(part, torch.optim.Optimizer):
        _load_optimizer(part, state)
    else:
        part.load_state_dict(state)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    groups = [
        {**then, **{key: now[key] for key in _FORMS if key in now}}
        for now, then in zip(before, state["param_groups"], strict=False)
    ]
    params = [param for group in before for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_param = dict(zip(numbers, params, strict=False))
    cut = {
        number: {key: cut_like(value, of_param.get(number)) for key, value in of_number.items()}
        for number, of_number in state["state"].items()
    }
    state = {**state, "state": cut}
    if len(groups) < len(before):
        raise ValueError(
            f"{len(before)} groups of parameters are trained; {len(groups)} were saved"
        )
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, now in zip(optimizer.param_groups, before, strict=True):
        for key in [key for key in group if key != "params"]:
            group[key] = _as_here(group[key], now.get(key))


def _as_here(value: Any, now: Any) -> Any:
    """Return a setting in the form it has here: a captured step reads a tensor at one place."""
    if isinstance(now, Tensor) and isinstance(value, Tensor | float | int):
        return now.copy_(torch.as_tensor(value))
    if isinstance(now, float) and isinstance(value, Tensor):
        return float(value)
    return value


_KEYS = (str, int, bool, float, type(None), tuple)


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return a value as JSON; its tensors go to `tensors`, named by their place in it."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _named(value, tensors, where)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensor = torch.tensor(value)  # a copy: that of an empty array has the strides of torch
        return {"array": _named(tensor, tensors, where)}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{where}.{place}") for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping) and all(isinstance(key, _KEYS) for key in value):
        return {
            "table": [
                [pack(key, tensors, where), pack(item, tensors, f"{where}.{key}")]
                for key, item in value.items()
            ]
        }
    raise ValueError(
        f"{where} has the type {type(value).__module__}.{type(value).__qualname__}, which is not "
        "saved: numbers, text, tensors, lists and tables of them are"
    )


def _named(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    while where in tensors:  # a key may have a dot in it
        where += "'"
    tensors[where] = tensor
    return where


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what was packed; a ValueError names what has none of its forms."""
    if packed is None or isinstance(packed, bool | str | int | float):
        return packed
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if isinstance(packed, dict) and len(packed) == 1:
        ((kind, value),) = packed.items()
        if kind == "float" and value in ("nan", "inf", "-inf"):
            return float(value)
        if kind in ("tensor", "array") and isinstance(value, str) and value in tensors:
            tensor = tensors[value]
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "tuple" and isinstance(value, list):
            return tuple(unpack(item, tensors) for item in value)
        if kind == "table" and isinstance(value, list):
            return dict(_entry(item, tensors) for item in value)
    raise ValueError(f"{json.dumps(packed)[:60]} is no value")


def _entry(packed: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(packed, list) or len(packed) != 2:
        raise ValueError(f"{json.dumps(packed)[:60]} is no entry of a table")
    key = unpack(packed[0], tensors)
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"{key!r} is no key of a table") from None
    return key, unpack(packed[1], tensors)
