"""What each of several ranks has of its own, beside rows: random states, and whatever else differs.

Rank 0 saves the whole state. Another rank saves the entries of its state that are not rank 0's, to
the bit. An entry is a part, a tensor of the dense model, or one of the states of `STATES`.

    parts/optimizer   dense/first.weight   random   rows   extra
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.checkpoint.parts import pack
from hotrow.checkpoint.tensors import packed
from hotrow.support.random_states import restore_random_states

STATES = ("rows", "random", "extra")
_PARTS, _DENSE = "parts/", "dense/"


def entries_of(state: Mapping[str, Any], dense: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        **{key: state[key] for key in STATES},
        **{_PARTS + name: part for name, part in state["parts"].items()},
        **{_DENSE + name: tensor for name, tensor in dense.items()},
    }


def digests_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each entry: equal where all bits are."""
    return {key: _digest(value) for key, value in entries.items()}


def _digest(value: Any) -> str:
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256(json.dumps(pack(value, tensors, "")).encode())
    for part in packed(tensors):
        digest.update(part)
    return digest.hexdigest()[:32]


def merged(
    state: Mapping[str, Any], dense: Mapping[str, Tensor], own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return rank 0's state and dense model with the entries that a rank has of its own."""
    entries = {**entries_of(state, dense), **own}
    parts = {key: x for key, x in entries.items() if key.startswith(_PARTS)}
    tensors = {key: x for key, x in entries.items() if key.startswith(_DENSE)}
    whole: dict[str, Any] = {key: entries[key] for key in STATES}
    whole["parts"] = {key.removeprefix(_PARTS): x for key, x in parts.items()}
    return whole, {key.removeprefix(_DENSE): x for key, x in tensors.items()}


def restore_random_of(states: dict[str, Any], rank: int | None) -> None:
    """Restore random states. `rank`: of one that has none, which is to draw other numbers than the
    rank whose states these are: it draws its seeds from them."""
    restore_random_states(states)
    if rank is None:
        return
    words = states["torch"].numpy().tobytes() + rank.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(words).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
