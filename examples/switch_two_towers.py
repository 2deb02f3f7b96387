"""Two towers with in-batch negatives: in plain PyTorch, and once more after one line of hotrow."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import hotrow

USERS, ITEMS, BRANDS, DIM, SAMPLES = 80_000, 120_000, 3_000, 16, 40_960


class TwoTowers(nn.Module):
    """A user is an id and a history of items; an item is an id and a brand. Both towers look items
    up in one table."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.brand = nn.Embedding(BRANDS, DIM)
        for table in (self.user, self.item, self.brand):
            nn.init.normal_(table.weight, std=0.5)
        self.left = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 32))
        self.right = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, batch):
        seen = self.item(batch["history"]).mean(1)
        left = self.left(torch.cat([self.user(batch["user"]), seen], 1))
        wanted = torch.cat([self.item(batch["item"]), self.brand(batch["brand"])], 1)
        return normalize(left) @ normalize(self.right(wanted)).T / 0.1  # [B, B]


def make_batches(batch_size=256):
    """Users like items beside the ones they have seen; a few items are seen often."""
    draw = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.rand(*shape, generator=draw)

    item = (1 + (ITEMS - 10) * rand(SAMPLES) ** 7).long()
    history = item[:, None] + (10 * rand(SAMPLES, 6)).long()
    lengths = (7 * rand(SAMPLES)).long()
    data = {
        "user": (USERS * rand(SAMPLES) ** 3).long(),
        "history": history.masked_fill(torch.arange(6) >= lengths[:, None], 0),
        "item": item,
        "brand": item * 7 % BRANDS,
    }
    for first in range(0, SAMPLES, batch_size):
        yield {name: part[first : first + batch_size] for name, part in data.items()}


def train(model, batches):
    """Two batches make a step, and the learning rate falls, as in any loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for number, batch in enumerate(batches):
        scores = model(batch)
        loss = cross_entropy(scores, torch.arange(len(scores)))
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    plain, loader = TwoTowers(), list(make_batches())
    model = copy.deepcopy(plain)

    hotrow.convert(model, budget="2MiB")  # the one line; all rows take 12.4 MiB

    plain_loss = train(plain, loader)
    loss = train(model, hotrow.ahead(loader, model))  # or train(model, loader), without look-ahead

    weights, others = model.state_dict(), plain.state_dict()
    difference = max((weights[name] - others[name]).abs().max().item() for name in others)
    traffic = model.item.collection.traffic()
    print(f"plain_loss {plain_loss:.6f}  loss {loss:.6f}  difference {difference:.7f}")
    print(f"hit_rate {traffic.hit_rate:.3f}  fetched_rows {traffic.fetched_rows}")


if __name__ == "__main__":
    main()
