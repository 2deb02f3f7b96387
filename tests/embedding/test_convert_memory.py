"""Converting a model needs the memory of one table more, not of all."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, torch, hotrow
from torch import nn

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

def train(model):
    hotrow.convert(model, "5%", show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.arange(5)).sum().backward()
    optimizer.step()

train(nn.ModuleList([nn.Embedding(10_000, 4)]))  # what torch and hotrow load at first
model = nn.ModuleList([nn.Embedding(300_000, 16) for _ in range(6)])  # 18.3 MiB each
before = peak()
train(model)
print(peak() - before)
"""


WITH_STATE = SCRIPT.replace(
    "train(model)\nprint",
    """optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
before += 6 * 18.3  # its state
hotrow.convert(model, "5%", optimizer=optimizer, show=False)
print""",
)


def test_tables_with_state_take_the_memory_of_their_state_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_STATE], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 8 * 18.3  # the state of six, a table, and what it is read by


def test_tables_are_moved_one_by_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 2 * 18.3  # all six at once would take 110
