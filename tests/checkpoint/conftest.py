"""Small files, and disks that fail, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hotrow.support.files import Disk


@pytest.fixture(scope="module", autouse=True)
def _small_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Several shards to a table, and several pieces to a shard; a module may say how large."""
    shard, piece = getattr(request.module, "FILE_SIZES", (12_000, 1_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)  # no machine is lost here
        patch.setattr("hotrow.checkpoint.tensors.SHARD_BYTES", shard)
        patch.setattr("hotrow.checkpoint.tensors.PIECE_BYTES", piece)
        yield


@pytest.fixture
def use_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Disk]], None]:
    """Lets checkpoints and models be written to another kind of disk."""

    def use(kind: type[Disk]) -> None:
        for module in ("writing", "model"):
            monkeypatch.setattr(f"hotrow.checkpoint.{module}.Disk", kind)

    return use


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of the largest tensor that torch was asked for; more than 1 MiB is an error."""
    asked, real = [0], torch.empty

    def empty(*shape: Any, **options: Any) -> Any:
        made = real(*shape, **{**options, "device": "meta"})
        asked[0] = max(asked[0], made.numel() * made.element_size())
        assert asked[0] < 1 << 20, "more than the files have"
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return asked
