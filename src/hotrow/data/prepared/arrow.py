"""Arrow, asked for when it is needed: hotrow itself runs without it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_READ = "Parquet is read"


def pyarrow(module: str = "", *, what: str = _READ) -> Any:
    """pyarrow, or one of its modules; `what` is done with it."""
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ValueError(
            f"{what} with pyarrow, which is not installed: pip install pyarrow"
        ) from error


def is_lists(kind: Any) -> bool:
    """Whether values of a type are lists, in any of Arrow's forms."""
    types = pyarrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def value_type(kind: Any) -> Any:
    """What is in lists of a type; the type itself where it is none of lists."""
    return kind.value_type if is_lists(kind) else kind
