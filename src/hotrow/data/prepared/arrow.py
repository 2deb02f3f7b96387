"""Arrow, asked for when it is needed: hotrow itself runs without it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pyarrow(module: str = "") -> Any:
    """pyarrow, or one of its modules."""
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ValueError(
            "compressed files, CSV of any columns and Parquet are read with pyarrow, which is not "
            "installed; pip install 'hotrow[data]'"
        ) from error
