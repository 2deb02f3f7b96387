"""The states of all random numbers of a process, as trees of numbers and tensors."""

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
        # A device that nobody has used has no state yet, and asking would make one.
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
        for number, each in enumerate(devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, number)
