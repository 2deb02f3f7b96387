"""SASRec with a tied output: in plain PyTorch, and once more after one line of hotrow."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hotrow

ITEMS, LENGTH, DIM, SAMPLES = 6_000, 20, 32, 3_200


class SASRec(nn.Module):
    """One block of causal attention. The item table gives inputs and scores."""

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.position = nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.item.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, seen):
        size, length = seen.shape
        places = torch.arange(length, device=seen.device).expand(size, length)
        x = self.item(seen) + self.position(places)
        future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1)
        query = self.before(x)
        x = query + self.attention(query, x, x, attn_mask=future, need_weights=False)[0]
        x = x + self.feed(self.between(x))
        return x[:, -1] @ self.item.weight.T  # scores of all items


def make_batches(batch_size=64):
    """Sessions walk through neighbouring items; short ones are padded in front."""
    draw = torch.Generator().manual_seed(1)
    start = (1 + (ITEMS - LENGTH - 2) * torch.rand(SAMPLES, 1, generator=draw) ** 3).long()
    session = start + torch.arange(LENGTH + 1)
    lengths = 5 + ((LENGTH - 4) * torch.rand(SAMPLES, 1, generator=draw)).long()
    session[:, :-1].masked_fill_(torch.arange(LENGTH) < LENGTH - lengths, 0)
    for part in session.split(batch_size):
        yield {"seen": part[:, :-1], "next": part[:, -1]}


def train(model, batches):
    """AdamW from model.parameters(): idle="frozen" lets rows rest that have no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    for batch in batches:
        loss = cross_entropy(model(batch["seen"]), batch["next"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    plain, loader = SASRec(), list(make_batches())
    model = copy.deepcopy(plain)

    # The one line. A whole table as one tensor, item.weight, takes fast memory for the table with
    # its state, the copy and its gradient. Every row has a gradient here, so no row is idle.
    hotrow.convert(model, budget="5MiB", idle="frozen")

    plain_loss = train(plain, loader)
    loss = train(model, hotrow.ahead(loader, model))  # or train(model, loader), without look-ahead

    weights, others = model.state_dict(), plain.state_dict()
    difference = max((weights[name] - others[name]).abs().max().item() for name in others)
    traffic = model.item.collection.traffic()
    print(f"plain_loss {plain_loss:.6f}  loss {loss:.6f}  difference {difference:.7f}")
    print(f"hit_rate {traffic.hit_rate:.3f}  fetched_rows {traffic.fetched_rows}")


if __name__ == "__main__":
    main()
