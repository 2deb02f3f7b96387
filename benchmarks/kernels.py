"""Each kernel against the bytes it must move, at the target's shape.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only 'pool*'

The least time a kernel can take is its fewest bytes (each input read once, each output written
once; rows counted once each) over the rate of a large copy: inside the GPU, or over the link for
rows in host memory.
To add one: write a function that returns a Case, and name it in KERNELS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from ceilings import seconds
from harness import Session, device_for, parser, quantiles_of
from hostmem import HostMemory
from suite import Setting, tiny
from terabyte import SETTINGS
from torch import Tensor
from traces import Trace

from hotrow.kernels.rules import RowRule

GIB = 2**30
MISSES = 8_000  # of a batch at the target's budget
FILL_BLOCKS, MOST_FILL_BLOCKS = 2, 16  # beside training, and while it waits
PLANNED_BATCHES = 300
START_GIB = 4
HOTNESS = 10


class Shape:
    """Inputs as the target has them, made once."""

    def __init__(self, device: torch.device, *, smoke: bool) -> None:
        self.device, self.smoke = device, smoke
        self.target: Setting = SETTINGS[0]
        if smoke:
            self.target = replace(tiny(self.target), rows=(300, 4, 90), batch=20)
        self.features, self.dim = len(self.target.rows), self.target.dim
        self.num_rows = sum(self.target.rows)
        self.misses = 30 if smoke else MISSES
        self.host_rows = 1000 if smoke else 1 << 24
        # Triton's interpreter cannot multiply bfloat16.
        self.half = torch.float16 if smoke else torch.bfloat16

    def batches(self, count: int) -> list[Tensor]:
        """[L] int32 each, of all tables together."""
        target = self.target
        trace = Trace(target.rows, steps=count, batch=target.batch, skew=target.skew, lock=False)
        bases = torch.tensor([0, *target.rows[:-1]]).cumsum(0)
        found = [(ids + bases).view(-1).int().to(self.device) for ids in trace.ids]
        trace.close()
        return found

    @cached_property
    def ids(self) -> Tensor:
        return self.batches(1)[0]

    @cached_property
    def num_unique(self) -> int:
        return len(self.ids.unique())

    @cached_property
    def num_slots(self) -> int:
        return int(self.target.budget * self.num_rows) if not self.smoke else 200

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
        return torch.randn(self.ids.numel(), self.dim, device=self.device).to(self.half)

    @cached_property
    def memory(self) -> HostMemory:
        memory = HostMemory(max(self.host_rows * self.dim * 4, START_GIB * GIB * (not self.smoke)))
        memory.touch()
        if self.device.type == "cuda":
            memory.lock()
        return memory

    @cached_property
    def store(self) -> Tensor:
        return self.memory.tensor((self.host_rows, self.dim), torch.float32)

    def store_ids(self) -> Tensor:
        """[2, misses] int32: rows of the store, none twice."""
        ids = torch.randperm(self.host_rows, device=self.device)[: 2 * self.misses]
        return ids.int().view(2, -1)


@dataclass(frozen=True)
class Case:
    """A kernel ready to run, and the fewest bytes it moves."""

    run: Callable[[], object]
    num_bytes: int
    over_link: bool = False


# -- the kernels -----------------------------------------------------------------------


def sort_ids(shape: Shape) -> Case:
    return Case(lambda: torch.sort(shape.ids, stable=True), shape.ids.numel() * (4 + 4 + 8))


def plan(shape: Shape) -> Case:
    """A whole plan, sort included, of one new batch after another, from empty slots on."""
    from hotrow.engine.evict import EVICTIONS
    from hotrow.engine.gpu.plan_buffers import PlanBuffers
    from hotrow.engine.gpu.planner import DevicePlanner
    from hotrow.engine.gpu.scratchpad import DeviceScratchpad
    from hotrow.engine.rules import Hold
    from hotrow.support.streams import lanes_of

    pad = DeviceScratchpad(shape.num_slots, 0, shape.num_rows, shape.device, dense_map=False)
    planner = DevicePlanner(
        pad, hold=Hold(1, 0), eviction=EVICTIONS["farthest-next-use"], window_bytes=1 << 20
    )
    lookups = shape.ids.numel()
    planner.reserve(lookups)
    buffers = PlanBuffers(lookups, pad.id_type, shape.device)
    batches = cycle(shape.batches(3 if shape.smoke else PLANNED_BATCHES))
    unread = deque[Any]()

    def run() -> None:
        expected = planner.admit(lookups, announced=False)
        planner.window_ids[expected.row, :lookups] = next(batches)
        planner.counts_of(expected).copy_(planner.fresh_counts)
        made = planner.plan(expected, buffers)
        made.ready = lanes_of(shape.device).mark("train")
        unread.append(made)
        if len(unread) > 2:  # as training does, which then knows how many victims are left
            planner.read(unread.popleft())

    # Of a lookup: its id read, its place, rank and slot written. Of a row: id and start written,
    # its place in the map and its row read, two counters read and written, its slot written.
    return Case(run, lookups * (4 + 4 + 4 + 4) + shape.num_unique * (8 + 8 + 12 + 4))


def rank(shape: Shape) -> Case:
    """Keys of all slots, of which the smallest are chosen; once for many batches."""
    from hotrow.kernels.triton import ranking, words

    facts = (
        torch.randint(100, (shape.num_slots,), dtype=torch.int32, device=shape.device),
        torch.full((shape.num_slots,), words.NEVER, dtype=torch.int32, device=shape.device),
        torch.ones(shape.num_slots, dtype=torch.int16, device=shape.device),
    )
    rows = torch.arange(shape.num_slots, dtype=torch.int32, device=shape.device)
    state = torch.full((words.STATE_WORDS,), 200, dtype=torch.int32, device=shape.device)

    def run() -> None:
        keys = ranking.rank_keys(facts, rows, state, 1, "least-frequent")
        torch.topk(keys, max(1, shape.num_slots // 8), largest=False)

    return Case(run, shape.num_slots * (4 + 2 + 4))


def pool(shape: Shape) -> Case:
    from hotrow.kernels.triton.lookup import pool as kernel

    rows, lookups = shape.slots(shape.dim), shape.ids.numel()
    return Case(
        lambda: kernel(rows, shape.lookup_slots, None, None, None, shape.dim, shape.half),
        4 * lookups + 4 * shape.dim * shape.num_unique + 2 * shape.dim * lookups,
    )


def pool_bags(shape: Shape) -> Case:
    """The same lookups in bags of ten, summed in float32."""
    from hotrow.kernels.triton.lookup import pool as kernel

    rows, bags = shape.slots(shape.dim), shape.ids.numel() // HOTNESS
    slots = shape.lookup_slots[: bags * HOTNESS]
    offsets = HOTNESS * torch.arange(bags + 1, device=shape.device)
    return Case(
        lambda: kernel(rows, slots, offsets, None, None, shape.dim),
        4 * slots.numel() + 8 * bags + 4 * shape.dim * (len(slots.unique()) + bags),
    )


def update_sgd(shape: Shape) -> Case:
    from hotrow import SGD

    return _update(shape, SGD(lr=0.01), state_width=0)


def update_rowwise(shape: Shape) -> Case:
    from hotrow import RowWiseAdagrad

    return _update(shape, RowWiseAdagrad(lr=0.01), state_width=1)


def update_adam(shape: Shape) -> Case:
    from hotrow import Adam

    return _update(shape, Adam(lr=0.01), state_width=2 * shape.dim)


def _update(shape: Shape, rule: RowRule, *, state_width: int) -> Case:
    from hotrow.kernels.triton.segments import segments_of
    from hotrow.kernels.triton.update import NUM_SCALARS, update_slots

    width, lookups = shape.dim + state_width, shape.ids.numel()
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
            shape.dim,
        ),
        2 * shape.dim * lookups + 8 * lookups + 2 * 4 * width * shape.num_unique,
    )


def interact(shape: Shape) -> Case:
    from hotrow.kernels.triton.interact import interact as kernel

    dense, vectors, width = _interaction_inputs(shape)
    written = 2 * len(dense) * width
    return Case(lambda: kernel(dense, vectors, width), _bytes(dense, vectors) + written)


def interact_backward(shape: Shape) -> Case:
    from hotrow.kernels.triton.interact import interact_backward as kernel

    dense, vectors, width = _interaction_inputs(shape)
    grad = torch.randn(len(dense), width, device=shape.device).to(shape.half)
    num_bytes = _bytes(grad) + 2 * _bytes(dense, vectors)
    return Case(lambda: kernel(grad, dense, vectors), num_bytes)


def _interaction_inputs(shape: Shape) -> tuple[Tensor, Tensor, int]:
    from hotrow.kernels.triton.interact import width_of

    batch, features = shape.target.batch, shape.features
    dense = torch.randn(batch, shape.dim, device=shape.device).to(shape.half)
    vectors = torch.randn(batch, features * shape.dim, device=shape.device).to(shape.half)
    return dense, vectors, width_of(features, shape.dim, pad_to=64)


def started_rows(shape: Shape) -> Case:
    """Rows of a new table, written to host memory."""
    from hotrow.kernels.triton.start import Beginning, start_rows

    state = torch.zeros(0, device=shape.device)
    return Case(
        lambda: start_rows(shape.store, state, Beginning("uniform", (-1.0, 2.0)), (1, 2, 3)),
        _bytes(shape.store),
        over_link=True,
    )


def fetch_rows(shape: Shape) -> Case:
    from hotrow.kernels.triton.fill import gather

    ids, out = shape.store_ids()[0], torch.zeros(shape.misses, shape.dim, device=shape.device)
    return Case(lambda: gather(shape.store, ids, out), _bytes(out), over_link=True)


def evict_rows(shape: Shape) -> Case:
    from hotrow.kernels.triton.fill import scatter

    ids, rows = shape.store_ids()[0], torch.randn(shape.misses, shape.dim, device=shape.device)
    return Case(lambda: scatter(shape.store, ids, rows), _bytes(rows), over_link=True)


def fill(shape: Shape) -> Case:
    """Rows of a batch's moves out and in, with the few blocks that training can spare."""
    return _fill(shape, FILL_BLOCKS)


def fill_alone(shape: Shape) -> Case:
    """The same with as many blocks as it gets while training waits for rows."""
    return _fill(shape, MOST_FILL_BLOCKS)


def _fill(shape: Shape, blocks: int) -> Case:
    from hotrow.kernels.triton.fill import fill as kernel

    leaving, entering = shape.store_ids()
    rows = shape.slots(shape.dim)
    slots = torch.randperm(shape.num_slots, device=shape.device)[: shape.misses].int()
    count = torch.tensor([shape.misses], dtype=torch.int32, device=shape.device)
    return Case(
        lambda: kernel(rows, shape.store, slots, leaving, entering, count, blocks),
        4 * shape.dim * shape.misses,  # each way, and both ways run at once
        over_link=True,
    )


def _bytes(*tensors: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


KERNELS: dict[str, Callable[[Shape], Case]] = {
    "sort-ids": sort_ids,
    "plan": plan,
    "rank": rank,
    "pool": pool,
    "pool-bags": pool_bags,
    "update-sgd": update_sgd,
    "update-rowwise-adagrad": update_rowwise,
    "update-adam": update_adam,
    "interact": interact,
    "interact-backward": interact_backward,
    "fetch-rows": fetch_rows,
    "evict-rows": evict_rows,
    "fill": fill,
    "fill-alone": fill_alone,
    "start-rows": started_rows,
}


# -- the command -----------------------------------------------------------------------


def copy_rates(shape: Shape) -> dict[bool, float]:
    """Bytes per second of a large copy: over the link, and inside the GPU (read + written)."""
    size = 1 << 16 if shape.smoke else GIB
    here, there = (torch.zeros(2 * size, dtype=torch.uint8, device=shape.device) for _ in range(2))
    host = shape.memory.bytes[:size]
    inside = 4 * size / seconds(lambda: here.copy_(there), device=shape.device)
    over_link = lambda: here[:size].copy_(host, non_blocking=True)  # noqa: E731
    return {True: size / seconds(over_link, device=shape.device), False: inside}


def measure(shape: Shape, name: str, rates: dict[bool, float]) -> dict[str, Any]:
    case = KERNELS[name](shape)
    p20, p50, p80 = quantiles_of(case.run, shape.device)
    least = 1000 * case.num_bytes / rates[case.over_link]
    return {
        "step_ms": {"p20": p20, "p50": p50, "p80": p80},
        "bytes": case.num_bytes,
        "copy_rate": rates[case.over_link],
        "over_link": case.over_link,
        "least_ms": least,
        "share_of_copy_rate": least / p50,
    }


def one_line(measured: dict[str, Any]) -> str:
    return (
        f"{1000 * measured['step_ms']['p50']:8.1f} us, {measured['bytes'] / 1e6:7.1f} MB take "
        f"{1000 * measured['least_ms']:7.1f} us at copy rate: {measured['share_of_copy_rate']:.0%}"
    )


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    arguments = made.parse_args()
    names = [name for name in KERNELS if any(fnmatch(name, each) for each in arguments.only)]
    if arguments.list:
        print("\n".join(names))
        return
    shape = Shape(device_for(arguments), smoke=arguments.smoke)
    session, rates = Session("kernels", arguments), copy_rates(shape)
    for name in names:
        session.attempt(name, "hotrow", lambda name=name: measure(shape, name, rates), one_line)
        if shape.device.type == "cuda":
            torch.cuda.empty_cache()
    session.print_again()
    raise SystemExit(int(session.failed > 0))


if __name__ == "__main__":
    main()
