"""A DeepFM on clicks: trained with plain PyTorch, then once more after one line of hotrow."""

import copy

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow

ROWS = {"user": 60_000, "item": 100_000, "shop": 2_000, "hour": 24}
NUM_TAGS, DIM, NUM_DENSE, SAMPLES = 5_000, 16, 4, 40_960


class DeepFM(nn.Module):
    """Fields with one id, and a bag of tags; each id has a vector and a first-order weight."""

    def __init__(self):
        super().__init__()
        self.fields = nn.ModuleDict({name: nn.Embedding(rows, DIM) for name, rows in ROWS.items()})
        self.first = nn.ModuleDict({name: nn.Embedding(rows, 1) for name, rows in ROWS.items()})
        self.tags = nn.EmbeddingBag(NUM_TAGS, DIM, mode="mean")
        for table in [*self.fields.values(), *self.first.values(), self.tags]:
            nn.init.normal_(table.weight, std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(NUM_DENSE + (len(ROWS) + 1) * DIM, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch):
        ids = dict(zip(ROWS, batch["ids"].unbind(1), strict=True))
        vectors = [self.fields[name](column) for name, column in ids.items()]
        vectors.append(self.tags(batch["tags"]))
        stacked = torch.stack(vectors, 1)
        pairs = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1)).sum(1)
        first = sum(self.first[name](column).squeeze(1) for name, column in ids.items())
        deep = self.deep(torch.cat([batch["dense"], *vectors], 1)).squeeze(1)
        return first + pairs + deep


def make_batches(batch_size=512):
    """A few ids are seen often and most of them rarely, as in any log of clicks."""
    draw = torch.Generator().manual_seed(1)
    ids = [(n * torch.rand(SAMPLES, generator=draw) ** 4).long() for n in ROWS.values()]
    taste = sum(torch.randn(n, generator=draw)[x] for n, x in zip(ROWS.values(), ids, strict=True))
    data = {
        "ids": torch.stack(ids, 1),
        "tags": (NUM_TAGS * torch.rand(SAMPLES, 3, generator=draw) ** 3).long(),
        "dense": torch.randn(SAMPLES, NUM_DENSE, generator=draw),
    }
    data["label"] = torch.sigmoid(data["dense"][:, 0] + taste).bernoulli(generator=draw)
    for first in range(0, SAMPLES, batch_size):
        yield {name: part[first : first + batch_size] for name, part in data.items()}


def train(model, batches):
    """An ordinary loop: the optimizer has all parameters, and all gradients are clipped."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    for batch in batches:
        loss = binary_cross_entropy_with_logits(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    plain, loader = DeepFM(), list(make_batches())
    model = copy.deepcopy(plain)

    hotrow.convert(model, budget="4MiB")  # the one line; all rows with their state take 22 MiB

    plain_loss = train(plain, loader)
    loss = train(model, hotrow.ahead(loader, model))  # or train(model, loader), without look-ahead

    weights, others = model.state_dict(), plain.state_dict()
    difference = max((weights[name] - others[name]).abs().max().item() for name in others)
    traffic = model.tags.collection.traffic()
    print(f"plain_loss {plain_loss:.6f}  loss {loss:.6f}  difference {difference:.7f}")
    print(f"hit_rate {traffic.hit_rate:.3f}  fetched_rows {traffic.fetched_rows}")


if __name__ == "__main__":
    main()
