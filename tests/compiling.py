"""A stand-in for torch.compile that notes what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def note_compiled(
    monkeypatch: pytest.MonkeyPatch, size_of: Callable[[Any], int | None]
) -> list[int]:
    """Sizes of batches that go through what was compiled; `size_of` gives None for what is none."""
    sizes: list[int] = []

    def compile(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            if (size := size_of(args[0])) is not None:
                sizes.append(size)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    return sizes
