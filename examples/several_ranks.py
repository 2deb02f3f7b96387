"""Clicks on one process or on several: the same program, the same batches, the same losses.

python several_ranks.py
torchrun --nproc-per-node 2 several_ranks.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow.data import SyntheticClicks, SyntheticConfig

ROWS = (20_000, 5_000, 1_000)
DIM, NUM_DENSE, BATCH_SIZE, STEPS = 8, 4, 256, 60
FEATURES = [f"cat_{number}" for number in range(len(ROWS))]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = zip(FEATURES, ROWS, strict=True)
        tables = [hotrow.EmbeddingBagConfig(name, rows, DIM, [name]) for name, rows in sizes]
        # Each rank owns a share of the rows, and the budget is that of one rank.
        self.embedding = hotrow.EmbeddingBagCollection(tables, hotrow.Adagrad(0.05), budget="10%")
        width = NUM_DENSE + len(ROWS) * DIM
        self.net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch):
        vectors = self.embedding(batch.sparse).values()
        return self.net(torch.cat([batch.dense, vectors], dim=1)).sum(1)


def main(folder=None):
    on_ranks = "WORLD_SIZE" in os.environ  # torchrun sets it
    if on_ranks:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if on_ranks else (0, 1)

    torch.manual_seed(0)
    model = Model()
    # Rows are hotrow's to exchange, everything else is DistributedDataParallel's.
    trained = DistributedDataParallel(model) if on_ranks else model
    optimizer = torch.optim.Adagrad(trained.parameters(), lr=0.05)

    # A batch is that of all ranks, and each rank gets its part: BATCH_SIZE is global.
    clicks = SyntheticClicks(SyntheticConfig(rows=ROWS, num_dense=NUM_DENSE, batch_size=BATCH_SIZE))
    loader = clicks.batches(0, STEPS)
    for batch in hotrow.ahead(loader, trained, ids=lambda b: b.sparse):
        loss = binary_cross_entropy_with_logits(trained(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in clicks.batches(STEPS, STEPS + 10):
            logits = model(batch)  # reads rows of all ranks
            right = ((logits > 0) == (batch.label > 0.5)).sum()
            loss = binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
            total += torch.stack([loss.double(), right.double()])
    if on_ranks:
        dist.all_reduce(total)
    loss, right = (total / (10 * BATCH_SIZE)).tolist()
    if rank == 0:
        print(f"ranks {ranks}  loss {loss:.7f}  accuracy {right:.4f}")

    if folder is not None:  # every rank calls it
        hotrow.save_checkpoint(folder, trained, step=STEPS, optimizer=optimizer)
    if on_ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
