"""A whole table as one tensor: read when it is used, and never changed in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from hotrow.embedding.stand_ins import HOOKS, refuse_hook

_MESSAGE = (
    "{name} changes the weight of a hotrow module in place, but what it changes is a copy, so "
    "its rows would stay as they are. To start with other values use init=, to replace rows "
    "load_weights(first, weights), or change the plain model before hotrow.convert()"
)
# What is known without reading a row.
_FACTS = {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_sparse"}
_FACTS |= {"is_leaf", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes", "names"}
_FACTS |= {"size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex"}
_NO_OPERATORS = {"__index__", "__int__", "__invert__", "__iter__"}
# Of a gradient: what picks rows.
_OF_ROWS = {"__setitem__", "__getitem__", "select", "narrow", "index_select", "index_fill_"}
_OF_ROWS |= {"masked_fill_", "masked_fill", "index_add_", "index_copy_", "unbind", "split"}
_FACTS |= {"element_size", "get_device", "__len__", "__hash__"}


class CopiedRows(Tensor):
    """A copy of rows. Operations on it return ordinary tensors, or views that are copies, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else next(iter(kwargs.values()), None)
        targets = [kwargs.get("out"), first if _changes_its_first(name) else None]
        if any(isinstance(x, CopiedRows) for x in tree_leaves(targets)):
            owner = _owner_of(func)
            raise RuntimeError(_MESSAGE.format(name=f"assigning to .{owner}" if owner else name))
        read: list[Tensor] = []
        plain = tree_map(lambda x: _as_read(x, read), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain[0], **plain[1])
            memory = {tensor.untyped_storage().data_ptr() for tensor in read}
            if name in ("numpy", "__array__"):
                result.flags.writeable = False
            return tree_map(lambda x: _protected(x, memory), result)


@dataclass(frozen=True)
class Source:
    """Where the rows of a table come from."""

    read: Callable[[], Tensor]  # all rows
    # Those of ids, without a gradient for one of them; None: all rows must be read.
    look_up: Callable[[Tensor, int | None], Tensor | None]
    stand_in: nn.Parameter  # has the table's gradient, and whether rows are trained


class TableGrad(Tensor):
    """The gradient of a table, as far as it is a tensor: a norm, which can be scaled and read."""

    @staticmethod
    def of(grad: Tensor) -> TableGrad:
        with torch._C.DisableTorchFunctionSubclass():
            shown = grad.as_subclass(TableGrad)
        shown.is_norm_of_rows = True
        return shown

    is_norm_of_rows: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OF_ROWS:
            raise RuntimeError(
                f"{name}: the gradients of a table's rows are not in one tensor, so those of some "
                "rows cannot be read or changed in weight.grad. To keep rows as they are use "
                "module.collection.freeze_rows({table: rows}), or padding_idx"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class WholeTable(CopiedRows):
    """The weights of a table, [rows, dim], which are read when an operation needs them."""

    _source: Source

    @staticmethod
    def of(shape: tuple[int, int], device: torch.device, source: Source) -> WholeTable:
        trained = source.stand_in.requires_grad
        table: WholeTable = Tensor._make_wrapper_subclass(
            WholeTable, shape, dtype=torch.float32, device=device, requires_grad=trained
        )
        table._source = source
        return table

    @property
    def stand_in(self) -> nn.Parameter:
        """What optimizers hold for this table."""
        return self._source.stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), _owner_of(func)
        if (owner if name == "__get__" else name) in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "requires_grad_" or (name == "__set__" and owner == "requires_grad"):
            with torch._C.DisableTorchFunctionSubclass():
                func(*args, **(kwargs or {}))
            args[0].stand_in.requires_grad_(*args[1:], **(kwargs or {}))
            return args[0]
        if owner == "grad":  # what clips gradients finds the table's here
            grad = func(args[0].stand_in, *args[1:])
            return TableGrad.of(grad) if isinstance(grad, Tensor) and not grad.is_sparse else grad
        if name in HOOKS:
            refuse_hook(name)
        if func is functional.embedding and len(args) <= 2:
            vectors = _looked_up(*args, **(kwargs or {}))
            if vectors is not None:
                return vectors
        is_apart = name == "detach" or (name == "__get__" and owner == "data")
        with torch.no_grad() if is_apart else nullcontext():
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


def _looked_up(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Return what `functional.embedding` does; None: only the whole table can."""
    if max_norm is not None or scale_grad_by_freq or not isinstance(weight, WholeTable):
        return None
    return weight._source.look_up(input, padding_idx)


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
    is_operator = name.startswith("__i") and name not in _NO_OPERATORS
    return is_operator or (
        name.endswith("_") and not name.endswith("__") and name != "retain_grad_"
    )
