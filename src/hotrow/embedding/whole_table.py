"""A whole table as one tensor: read when it is used, and never changed in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

_MESSAGE = (
    "{name} changes the weight of a hotrow module in place, but what it changes is a copy, so "
    "its rows would stay as they are. To start with other values use init=, to replace rows "
    "load_weights(first, weights), or change the plain model before hotrow.convert()"
)
# What is known without reading a row.
_FACTS = {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_sparse"}
_FACTS |= {"is_leaf", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes", "grad", "names"}
_FACTS |= {"size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex"}
_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__iter__"}
_FACTS |= {"element_size", "get_device", "__len__", "__hash__"}


class CopiedRows(Tensor):
    """A copy of rows. Operations on it return ordinary tensors, or views that are copies, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        target = kwargs.get("out", args[0] if args and _changes_its_first(name) else None)
        if isinstance(target, CopiedRows):
            owner = _owner_of(func)
            raise RuntimeError(_MESSAGE.format(name=f"assigning to .{owner}" if owner else name))
        read: list[Tensor] = []
        plain = tree_map(lambda x: _as_read(x, read), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain[0], **plain[1])
            memory = {tensor.untyped_storage().data_ptr() for tensor in read}
            return tree_map(lambda x: _protected(x, memory), result)


@dataclass(frozen=True)
class Source:
    """Where the rows of a table come from."""

    read: Callable[[], Tensor]  # all rows
    look_up: Callable[[Tensor], Tensor]  # those of ids
    freeze: Callable[[bool], Any]  # as `requires_grad_`


class WholeTable(CopiedRows):
    """The weights of a table, [rows, dim], which are read when an operation needs them."""

    _source: Source

    @staticmethod
    def of(
        shape: tuple[int, int], device: torch.device, source: Source, *, requires_grad: bool
    ) -> WholeTable:
        table: WholeTable = Tensor._make_wrapper_subclass(
            WholeTable, shape, dtype=torch.float32, device=device, requires_grad=requires_grad
        )
        table._source = source
        return table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), _owner_of(func)
        if (owner if name == "__get__" else name) in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "requires_grad_" or (name == "__set__" and owner == "requires_grad"):
            args[0]._source.freeze(*args[1:], **(kwargs or {}))
            return args[0]
        if func is functional.embedding:
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            if len(args) <= 2 and set(given) == {"input", "weight"}:  # as nn.Embedding looks up
                return given["weight"]._source.look_up(given["input"])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read the rows where torch gets by without its Python functions."""
        plain = tree_map(lambda x: _as_read(x, []), (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"weight of a hotrow module, {list(self.shape)} on {self.device}"


def _as_read(value: Any, read: list[Tensor]) -> Any:
    """Return a copy of rows as an ordinary tensor, which is noted."""
    if not isinstance(value, CopiedRows):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        source = value._source if isinstance(value, WholeTable) else None
        rows = value.as_subclass(Tensor) if source is None else source.read()
        read.append(rows)
        return rows


def _protected(value: Any, memory: set[int]) -> Any:
    """Return views of the copy as such: what is written to them would be lost."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return value.as_subclass(CopiedRows) if value.untyped_storage().data_ptr() in memory else value


def _owner_of(func: Any) -> str:
    """Return the attribute that a getter or setter is of."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _changes_its_first(name: str) -> bool:
    if name in ("__setitem__", "__set__"):
        return True
    is_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    is_operator = is_operator and name != "__iter__"
    return is_operator or (
        name.endswith("_") and not name.endswith("__") and name != "retain_grad_"
    )
