"""Rows are locked whole or not at all, unlocked once and in time, and never forked."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.inputs.tables import Copied, EmbeddingBagConfig, group_by_width
from hotrow.kernels.triton.fill import gather, scatter
from hotrow.store import pinned
from hotrow.store.pinned import locked_group, locked_rows
from hotrow.support.host_memory import available_bytes

CHUNK = 1 << 20
WIDTH = 48  # rows do not divide a chunk: some lie in two
ROWS = 20_000  # 3.7 chunks
BYTES = ROWS * WIDTH * 4


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class System:
    """Locks up to `limit` bytes, and minds what it is asked to unlock."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.released: list[int] = []

    def register(self, address: int, num_bytes: int) -> str:
        if sum(self.held.values()) + num_bytes > self.limit:
            return "no more than that"
        self.held[address] = num_bytes
        return ""

    def unregister(self, address: int) -> None:
        assert is_mapped(address), "unlocked after it was unmapped"
        del self.held[address]
        self.released.append(address)

    def rows(self, num_rows: int = ROWS, width: int = WIDTH, **options: Any) -> pinned.LockedRows:
        return locked_rows(
            num_rows,
            width,
            **{
                "register": self.register,
                "unregister": self.unregister,
                "chunk_bytes": CHUNK,
                **options,
            },
        )


# -- locking -----------------------------------------------------------------------------


def test_chunks_cover_the_rows_side_by_side() -> None:
    system, progress = System(), []
    made = system.rows(progress=lambda done, total: progress.append((done, total)))
    assert made.locked
    assert made.rows.shape == (ROWS, WIDTH)
    assert not made.rows.any()
    address = made.rows.data_ptr()
    for first, size in sorted(system.held.items()):
        assert first == address
        assert first % mmap.PAGESIZE == 0
        assert 0 < size <= CHUNK
        address += size
    assert address == made.rows.data_ptr() + BYTES
    assert progress == [(CHUNK, BYTES), (2 * CHUNK, BYTES), (3 * CHUNK, BYTES), (BYTES, BYTES)]


def test_pages_are_there_before_they_are_locked() -> None:
    """Otherwise the driver would make them one by one, on one core."""
    system, chunk = System(), 16 << 20
    grown = []

    def register(address: int, num_bytes: int) -> str:
        grown.append(resident_bytes() - before)
        return system.register(address, num_bytes)

    before = resident_bytes()
    made = system.rows(3 * chunk // 256, 64, register=register, chunk_bytes=chunk)
    assert made.locked
    assert len(grown) == 3
    for count, bytes_grown in enumerate(grown, start=1):
        assert bytes_grown > (count - 0.1) * chunk


class Freed:
    """Weights of tables, and how many tensors are freed whenever rows are taken."""

    def __init__(self, count: int) -> None:
        freed = self

        class Watched(Copied):
            def take(self, first: int, last: int, dim: int) -> Tensor:
                freed.taken.append((int(self.held[0][first, 0]) - 1, freed.count()))
                return super().take(first, last, dim)

        held = [Watched([torch.full((CHUNK // 256, 64), k + 1.0)]) for k in range(count)]
        self.taken: list[tuple[int, int]] = []  # table, and how many were freed
        self.tables = [
            EmbeddingBagConfig(f"t{k}", CHUNK // 256, 64, [f"f{k}"], init=init)
            for k, init in enumerate(held)
        ]
        self.group = group_by_width(self.tables)[0]
        self._weights = [weakref.ref(init.held[0]) for init in held]

    def count(self) -> int:
        return sum(weights() is None for weights in self._weights)


def test_weights_are_moved_and_freed_before_rows_are_locked() -> None:
    """A table's pages are touched when the weights of those before it are freed."""
    system, weights, freed = System(), Freed(4), []

    def register(address: int, num_bytes: int) -> str:
        freed.append(weights.count())
        return system.register(address, num_bytes)

    made, left = locked_group(
        weights.group,
        66,
        [0.5, 0.5],
        seed=0,
        register=register,
        unregister=system.unregister,
        chunk_bytes=CHUNK,
    )
    assert made.locked
    assert left == []
    assert all(table == count for table, count in weights.taken)
    assert set(freed) == {4}
    for place, rows in enumerate(made.rows.split(CHUNK // 256)):
        assert bool((rows[:, :64] == place + 1).all())
        assert bool((rows[:, 64:] == 0.5).all())


MOVE = """
import resource, torch
from hotrow.inputs.tables import Copied, EmbeddingBagConfig, group_by_width
from hotrow.store.pinned import locked_group

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

tables = [
    EmbeddingBagConfig(f"t{k}", 1 << 17, 64, [f"f{k}"], init=Copied([torch.rand(1 << 17, 64)]))
    for k in range(6)
]  # 32 MiB each
group = group_by_width(tables)[0]
before, peaks = peak(), []
made, _ = locked_group(
    group, 64, [], 0, register=lambda *_: peaks.append(peak()) or "", unregister=lambda _: None
)
print(max(*peaks, peak()) - before)
"""


def test_moved_weights_take_the_memory_of_one_table_more() -> None:
    done = subprocess.run([sys.executable, "-c", MOVE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2 * 32  # all six at once would take 192


# -- when the system refuses -------------------------------------------------------------


def test_a_refusal_leaves_ordinary_rows_and_a_reason() -> None:
    system = System(limit=2 * CHUNK + 1)
    made = system.rows()
    assert not made.locked
    assert system.held == {}
    assert len(system.released) == 2
    assert "no more than that, after 2.0 MiB of 3.7 MiB" in made.reason


def test_close_unlocks_once_and_leaves_the_rows() -> None:
    for limit, chunks in ((1 << 40, 4), (2 * CHUNK, 2)):
        system = System(limit)
        made = system.rows()
        made.rows.fill_(3)
        for _ in range(2):
            made.close()
            assert not made.locked
            assert system.held == {}
            assert len(system.released) == chunks
        assert bool((made.rows == 3).all())


def test_the_reason_names_the_limit_on_locked_memory() -> None:
    resource = pytest.importorskip("resource")
    reason = System(limit=0).rows().reason
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert ("limit on locked memory is" in reason) is (limit != resource.RLIM_INFINITY)
    assert "ulimit -l" in reason


def test_an_interrupt_while_locking_leaves_nothing_locked() -> None:
    system = System()

    def register(address: int, num_bytes: int) -> str:
        if len(system.held) == 2:
            raise KeyboardInterrupt
        return system.register(address, num_bytes)

    with pytest.raises(KeyboardInterrupt):
        system.rows(register=register)
    assert system.held == {}
    assert len(system.released) == 2


def test_more_rows_than_memory_are_refused_before_anything_is_locked() -> None:
    system, have = System(), available_bytes()
    assert have is not None
    with pytest.raises(ValueError, match="of host memory"):
        system.rows(have // 4, 64)
    assert system.held == {}
    assert system.released == []


# -- unlocking ---------------------------------------------------------------------------


def test_rows_stay_locked_as_long_as_any_view_is_left() -> None:
    system = System()
    made = system.rows()
    view, address = made.rows[5:7], made.rows.data_ptr()
    del made
    gc.collect()
    assert len(system.held) == 4
    assert is_mapped(address)
    del view
    gc.collect()
    assert system.held == {}
    assert not is_mapped(address)


def test_rows_are_unlocked_when_the_interpreter_ends() -> None:
    script = """
    from hotrow.store.pinned import locked_rows
    made = locked_rows(100, 8, register=lambda a, n: "", unregister=lambda a: print("unlocked"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["unlocked"]
    assert done.stderr == ""


# -- how much memory there is ------------------------------------------------------------


MEMINFO = "MemTotal: 4000 kB\nMemAvailable:   3000 kB\n"
GROUPS: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing says it": ({}, None),
    "no container": ({"meminfo": MEMINFO, "own": "0::/user.slice\n"}, 3000 * 1024),
    "no limit": (
        {
            "meminfo": MEMINFO,
            "own": "0::/user.slice\n",
            "cgroup/user.slice/memory.max": "max\n",
            "cgroup/user.slice/memory.current": "100\n",
        },
        3000 * 1024,
    ),
    "a group around ours, and files that can be given up": (
        {
            "meminfo": MEMINFO,
            "own": "0::/outer/inner\n",
            "cgroup/outer/inner/memory.max": "max\n",
            "cgroup/outer/inner/memory.current": "50\n",
            "cgroup/outer/memory.max": "1000000\n",
            "cgroup/outer/memory.current": "400000\n",
            "cgroup/outer/memory.stat": "anon 300000\ninactive_file 30000\n",
        },
        630_000,
    ),
    "the root's, where the path is the host's": (
        {
            "meminfo": MEMINFO,
            "own": "0::/docker/abc\n",
            "cgroup/memory.max": "1000000\n",
            "cgroup/memory.current": "1500000\n",
        },
        0,
    ),
    "the older kind of group": (
        {
            "meminfo": MEMINFO,
            "own": "3:cpu:/a\n2:memory:/a\n",
            "cgroup/memory/a/memory.limit_in_bytes": "2000\n",
            "cgroup/memory/a/memory.usage_in_bytes": "500\n",
        },
        1500,
    ),
}


@pytest.mark.parametrize(("files", "available"), GROUPS.values(), ids=GROUPS)
def test_available_memory_is_what_machine_and_container_leave(
    files: dict[str, str], available: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(*(tmp_path / name for name in ("meminfo", "own", "cgroup"))) == available


# -- on a GPU ----------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    def test_kernels_read_and_write_rows_across_chunks(self) -> None:
        made = locked_rows(ROWS, WIDTH, chunk_bytes=CHUNK)
        assert made.locked, made.reason
        assert made.rows.is_pinned()
        made.rows.copy_(torch.randn(ROWS, WIDTH))
        ids = torch.randperm(ROWS, device="cuda")
        out = torch.empty(ROWS, WIDTH, device="cuda")
        gather(made.rows, ids, out)
        assert torch.equal(out.cpu(), made.rows[ids.cpu()])
        scatter(made.rows, ids, -out)
        torch.cuda.synchronize()
        assert torch.equal(made.rows[ids.cpu()], -out.cpu())
        made.close()
        assert not made.rows.is_pinned()

    def test_a_refusal_leaves_the_gpu_usable(self) -> None:
        def twice(address: int, num_bytes: int) -> str:
            return pinned._cuda_register(address, num_bytes) or pinned._cuda_register(
                address, num_bytes
            )

        made = locked_rows(ROWS, WIDTH, register=twice, chunk_bytes=CHUNK)
        assert not made.locked
        assert "already" in made.reason
        assert float(torch.ones(10, device="cuda").sum()) == 10
        pinned._cuda_unregister(made.rows.data_ptr())  # the first of the two

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_forked_children_copy_nothing(self) -> None:
        made = locked_rows(4 << 22, 64)  # 4 GiB
        assert made.locked, made.reason
        have = available_bytes()
        (go, wait), (said, say) = os.pipe(), os.pipe()
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                os.close(wait)
                os.write(say, b"x")
                os.read(go, 1)  # until the parent closes its end
                os._exit(0)
            children.append(child)
        heard = b""
        while len(heard) < 4:
            heard += os.read(said, 4)
        left = available_bytes()
        os.close(wait)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        for end in (go, said, say):
            os.close(end)
        assert have is not None
        assert left is not None
        assert have - left < 1 << 30
