"""No kernel is compiled in the middle of training: what may be launched is launched before it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch

import hotrow
from builders import readout
from gpu_training import Run
from hotrow.data import ClickBatch
from hotrow.engine.tuning import Tuning

pytestmark = pytest.mark.gpu

FIRST_STEPS = 12  # those of an ordinary loop; captured ones are tried a few times before
STEPS = 160
BATCH, ROWS = 2048, (5000, 300, 200_000, 40, 1000)


class Compiled:
    """Names of kernels, and in which step they were needed for the first time."""

    def __init__(self) -> None:
        self.step, self.names = 0, list[tuple[int, str]]()

    def __call__(self, *_: Any, repr: str = "", fn: Any = None, **__: Any) -> None:
        self.names.append((self.step, repr or str(fn)))

    @property
    def late(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name in self.names if step > FIRST_STEPS]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    from triton import knobs
    from triton.runtime.jit import JITFunction

    import hotrow.kernels.triton as package

    found = Compiled()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", found)
    for module in vars(package).values():  # what other tests have compiled is forgotten
        for value in vars(module).values() if isinstance(module, ModuleType) else ():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    return found


def ids(generator: torch.Generator, count: int, rows: int) -> torch.Tensor:
    return (torch.rand(count, generator=generator) ** 3 * rows).long()


def clicks(steps: int) -> Iterator[ClickBatch]:
    """Popularity that moves, so that rows leave; every fortieth batch is a short one."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        count = BATCH if step % 40 < 39 else BATCH // 3 + 1
        columns = [(ids(generator, count, rows) + 37 * step) % rows for rows in ROWS]
        yield ClickBatch(
            dense=torch.rand(count, 13, generator=generator),
            sparse=torch.stack(columns, 1),
            label=torch.randint(0, 2, (count,), generator=generator).float(),
        )


@pytest.mark.parametrize("fill", ["auto", "bulk", "zero-copy", "staged"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rule", [hotrow.SGD(lr=0.1), hotrow.Adam(lr=0.01)], ids=repr)
def test_no_step_waits_for_a_compiler(
    compiled: Compiled, fill: str, graphs: bool, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_training.ROWS", ROWS)
    tuning = Tuning(sorted_from=256, least_certain=1, most_packed=512, tombstone_part=50)
    monkeypatch.setattr("hotrow.engine.tuning.DEFAULT", tuning)
    run = Run("lookahead", "4%", rule, graphs=graphs, fill=fill)
    for compiled.step, _ in enumerate(run.trainer.run(clicks(STEPS)), start=1):
        if compiled.step % 50 == 0:
            run.embedding.row_access.flush()
    traffic = run.embedding.traffic()
    assert traffic.evicted_rows > 10_000
    assert compiled.names
    assert not compiled.late


def test_a_first_evaluation_beside_training_compiles_for_itself_alone(compiled: Compiled) -> None:
    tables = [hotrow.EmbeddingBagConfig("t", 100_000, 16, ["f"])]
    embedding = hotrow.EmbeddingBagCollection(tables, hotrow.Adagrad(), "5%", device="cuda")
    generator = torch.Generator().manual_seed(0)
    batches = [ids(generator, 512, 100_000)[:, None] for _ in range(60)]
    for compiled.step, batch in enumerate(hotrow.ahead(batches, embedding), start=1):
        readout(embedding(batch)).backward()
        if compiled.step == 30:
            before, compiled.step = compiled.step, 0
            with torch.no_grad():
                embedding(batches[0].cuda())
            compiled.step = before
    assert not compiled.late
    assert list(islice(compiled.names, 1))
