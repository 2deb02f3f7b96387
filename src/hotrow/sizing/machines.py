"""What a machine can do at best: figures by name, from a file that lies beside this one.

Knows nothing of strategies; `ceilings.py` measures the same of the machine that it runs on.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from hotrow.support.messages import did_you_mean

Points = Sequence[Sequence[float]]  # [n, 2]: x ascending, and its value
THIS = "this"


@dataclass(frozen=True)
class Machine:
    """Ceilings of one machine. On a CPU `link` is from RAM to RAM, and nothing is beside training.

    Rates of rows count each row once, wherever it goes; a move is a row in and a row out.
    """

    name: str
    device: str  # "cuda" or "cpu"
    gpu: str  # as its driver names it; "" on a CPU
    cores: int
    memory_gib: float  # of fast memory
    link_gb: float  # GB/s each way
    hbm_gb: float  # GB/s in fast memory, read and written
    rows_part: float  # of that, what lookups and updates reach
    dense_tflops: float  # what a dense part reaches
    row_rates: Points  # million rows/s over the link, by the GiB that they are spread over; a GPU's
    sorted_gain: Points  # times as many, by how many move at once
    sort_ns: float  # per lookup
    plan_ns: float  # per lookup, beyond sorting
    host_ms: float  # to launch a step
    plan_drag: float  # of a plan's time, what training beside it loses
    read_drag: float  # likewise of reading rows
    fill_drag: float  # likewise of reading and writing them
    error: float  # four in five predictions are as near as this
    forms: Mapping[str, Points] = field(default_factory=dict)  # million moves/s, by bytes of a row
    host_rows: Mapping[str, Points] = field(default_factory=dict)  # gather, scatter: by the CPU

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


def at(points: Points, x: float) -> float:
    """The value of a curve, straight in logarithms between its points; at the ends as there."""
    if x <= points[0][0]:
        return float(points[0][1])
    for (low, below), (high, above) in pairwise(points):
        if x <= high:
            part = math.log(x / low) / math.log(high / low)
            return float(below * (above / below) ** part)
    return float(points[-1][1])


@cache
def machines() -> dict[str, Machine]:
    """Those that are known by name."""
    text = resources.files("hotrow.sizing").joinpath("machines.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {name: Machine(name=name, device="cuda", **each) for name, each in found.items()}


def find_machine(name: str) -> Machine:
    known = machines()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    raise ValueError(
        f"there is no machine {name!r}{hint}; known are {', '.join(known)}, and {THIS!r}, which is "
        "measured"
    )
