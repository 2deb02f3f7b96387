"""Each kernel against the bytes it must move, at the target's shape.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only 'pool*'

The least time a kernel can take is its fewest bytes (each input read once, each output written
once; rows counted once each) over the rate of a large copy: inside the GPU, or over the link for
rows in host memory.
To add one: write a function that returns a Case, and name it in KERNELS.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

import torch
from ceilings import seconds
from harness import Deadline, need_gpu, parser, quantiles_of, results_for, say
from hostmem import HostMemory
from terabyte import SETTINGS
from torch import Tensor
from traces import Trace

from hotrow.optim import RowRule

GIB = 2**30
TARGET = SETTINGS[0]
FEATURES = len(TARGET.rows)
MISSES = 10_000  # of a batch at the target's budget
HOST_ROWS = 1 << 24


class Shape:
    """Inputs as the target has them, made once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def ids(self) -> Tensor:
        """[L] int32, of all tables together."""
        trace = Trace(TARGET.rows, steps=1, batch=TARGET.batch, skew=TARGET.skew, lock=False)
        bases = torch.tensor([0, *TARGET.rows[:-1]]).cumsum(0)
        return (trace.ids[0] + bases).view(-1).int().to(self.device)

    @cached_property
    def num_unique(self) -> int:
        return len(self.ids.unique())

    @cached_property
    def num_slots(self) -> int:
        return int(TARGET.budget * sum(TARGET.rows))

    @cached_property
    def row_slots(self) -> Tensor:
        """[L] int32: a slot for each unique row, at random; only the first are used."""
        slots = torch.randperm(self.num_slots, device=self.device)[: self.ids.numel()]
        return slots.int()

    @cached_property
    def lookup_slots(self) -> Tensor:
        """[L] int32: the slot of each lookup."""
        inverse = self.ids.unique(return_inverse=True)[1]
        return self.row_slots[inverse]

    def slots(self, width: int) -> Tensor:
        return torch.rand(self.num_slots + 1, width, device=self.device)

    @cached_property
    def bag_grads(self) -> Tensor:
        return torch.randn(self.ids.numel(), TARGET.dim, device=self.device).bfloat16()

    @cached_property
    def store(self) -> Tensor:
        self._memory = HostMemory(HOST_ROWS * TARGET.dim * 4)
        self._memory.touch()
        self._memory.lock()
        return self._memory.tensor((HOST_ROWS, TARGET.dim), torch.float32)


@dataclass(frozen=True)
class Case:
    """A kernel ready to run, and the fewest bytes it moves."""

    run: Callable[[], object]
    num_bytes: int
    over_link: bool = False


# -- the kernels -----------------------------------------------------------------------


def sort_ids(shape: Shape) -> Case:
    return Case(lambda: torch.sort(shape.ids, stable=True), shape.ids.numel() * (4 + 4 + 8))


def pool(shape: Shape) -> Case:
    from hotrow.kernels.triton.lookup import pool as kernel

    rows, lookups = shape.slots(TARGET.dim), shape.ids.numel()
    return Case(
        lambda: kernel(rows, shape.lookup_slots, None, None, None, TARGET.dim, torch.bfloat16),
        4 * lookups + 4 * TARGET.dim * shape.num_unique + 2 * TARGET.dim * lookups,
    )


def update_sgd(shape: Shape) -> Case:
    from hotrow import SGD

    return _update(shape, SGD(lr=0.01), state_width=0)


def update_adam(shape: Shape) -> Case:
    from hotrow import Adam

    return _update(shape, Adam(lr=0.01), state_width=2 * TARGET.dim)


def _update(shape: Shape, rule: RowRule, *, state_width: int) -> Case:
    from hotrow.kernels.triton.segments import segments_of
    from hotrow.kernels.triton.update import NUM_SCALARS, update_slots

    width, lookups = TARGET.dim + state_width, shape.ids.numel()
    rows, segments = shape.slots(width), segments_of(shape.ids)
    scalars = torch.full((1, NUM_SCALARS[type(rule).__name__]), 0.01, device=shape.device)
    terms = (shape.bag_grads, None, None, None)
    return Case(
        lambda: update_slots(
            rows,
            shape.row_slots,
            segments,
            *terms,
            rule,
            scalars,
            None,
            shape.num_slots,
            TARGET.dim,
        ),
        2 * TARGET.dim * lookups + 8 * lookups + 2 * 4 * width * shape.num_unique,
    )


def interact(shape: Shape) -> Case:
    from hotrow.kernels.triton.interact import interact as kernel

    dense, vectors, width = _interaction_inputs(shape)
    written = 2 * TARGET.batch * width
    return Case(lambda: kernel(dense, vectors, width), _bytes(dense, vectors) + written)


def interact_backward(shape: Shape) -> Case:
    from hotrow.kernels.triton.interact import interact_backward as kernel

    dense, vectors, width = _interaction_inputs(shape)
    grad = torch.randn(TARGET.batch, width, device=shape.device).bfloat16()
    num_bytes = _bytes(grad) + 2 * _bytes(dense, vectors)
    return Case(lambda: kernel(grad, dense, vectors), num_bytes)


def _interaction_inputs(shape: Shape) -> tuple[Tensor, Tensor, int]:
    from hotrow.kernels.triton.interact import width_of

    dense = torch.randn(TARGET.batch, TARGET.dim, device=shape.device).bfloat16()
    vectors = torch.randn(TARGET.batch, FEATURES * TARGET.dim, device=shape.device).bfloat16()
    return dense, vectors, width_of(FEATURES, TARGET.dim, pad_to=64)


def fetch_rows(shape: Shape) -> Case:
    from hotrow.kernels.triton.fill import gather

    ids = torch.randint(HOST_ROWS, (MISSES,), device=shape.device)
    out = torch.zeros(MISSES, TARGET.dim, device=shape.device)
    return Case(lambda: gather(shape.store, ids, out), _bytes(out), over_link=True)


def evict_rows(shape: Shape) -> Case:
    from hotrow.kernels.triton.fill import scatter

    ids = torch.randperm(HOST_ROWS, device=shape.device)[:MISSES]
    rows = torch.randn(MISSES, TARGET.dim, device=shape.device)
    return Case(lambda: scatter(shape.store, ids, rows), _bytes(rows), over_link=True)


def _bytes(*tensors: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


KERNELS: dict[str, Callable[[Shape], Case]] = {
    "sort-ids": sort_ids,
    "pool": pool,
    "update-sgd": update_sgd,
    "update-adam": update_adam,
    "interact": interact,
    "interact-backward": interact_backward,
    "fetch-rows": fetch_rows,
    "evict-rows": evict_rows,
}


# -- the command -----------------------------------------------------------------------


def copy_rates() -> dict[bool, float]:
    """Bytes per second of a large copy: over the link, and inside the GPU (read + written)."""
    here, there = (torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    memory = HostMemory(GIB)
    memory.touch()
    memory.lock()
    inside = 4 * GIB / seconds(lambda: here.copy_(there))
    link = GIB / seconds(lambda: here[:GIB].copy_(memory.bytes, non_blocking=True))
    memory.close()
    return {True: link, False: inside}


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    arguments = made.parse_args()
    names = [name for name in KERNELS if any(fnmatch(name, each) for each in arguments.only)]
    if arguments.list:
        print("\n".join(names))
        return
    shape, deadline = Shape(need_gpu()), Deadline(arguments.minutes)
    results, rates, failed = results_for("kernels", arguments), copy_rates(), False
    lines = []
    for name in names:
        if deadline.minutes_left <= 0:
            break
        try:
            case = KERNELS[name](shape)
            p20, p50, p80 = quantiles_of(case.run)
        except Exception as error:
            failed = True
            traceback.print_exc()
            lines.append(f"{name:20} FAILED: {error}")
            continue
        least = 1000 * case.num_bytes / rates[case.over_link]
        measured = {
            "step_ms": {"p20": p20, "p50": p50, "p80": p80},
            "bytes": case.num_bytes,
            "copy_rate": rates[case.over_link],
            "over_link": case.over_link,
            "least_ms": least,
            "share_of_copy_rate": least / p50,
        }
        results.write(name, "hotrow", measured)
        lines.append(
            f"{name:20} {1000 * p50:8.1f} us, {case.num_bytes / 1e6:7.1f} MB take "
            f"{1000 * least:7.1f} us at copy rate: {least / p50:.0%}"
        )
        say(lines[-1])
        del case
        torch.cuda.empty_cache()
    print("\n" + "\n".join(lines), flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
