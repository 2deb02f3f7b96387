"""The states of all random generators of a process, as trees of numbers and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of numpy's state


def random_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, keys, *rest],
        "torch": torch.get_rng_state(),
        # An unused device has no state, and asking for it would initialise the device.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, place, *rest = states["numpy"]
    if type(place) is not int or not 0 <= place <= _WORDS:  # numpy would read what lies there
        raise ValueError(f"the state of numpy's random numbers has {place!r} as their place")
    np.random.set_state((kind, keys, place, *rest))
    torch.set_rng_state(states["torch"])
    devices = states["cuda"]
    if devices and torch.cuda.is_available():
        for number, state in enumerate(devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, number)
