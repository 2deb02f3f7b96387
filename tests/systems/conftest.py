"""What tests of the systems share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotrow.embedding.collection
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows

ENGINES = {"rows": cpu_rows, "device-rows": gpu_rows}


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Collections are built with this engine on a CPU. Tests marked `gpu` are for GPUs."""

    def use(name: str) -> None:
        if name == "device-rows" and torch.cuda.is_available():
            pytest.skip("kernels are compiled where there is a GPU")
        monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: ENGINES[name])

    return use


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, use_engine: Any) -> str:
    use_engine(request.param)
    return str(request.param)


@pytest.fixture
def device_rows(use_engine: Any) -> None:
    """The engine of GPUs; on a CPU its kernels are interpreted."""
    if not torch.cuda.is_available():
        use_engine("device-rows")
