"""Will a user click on an item? Trains on generated samples, prints loss and AUC on others."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import binary_auroc

import hotrow

ROWS = {"item": 50_000, "shop": 500, "user": 20_000}
DIM, NUM_DENSE, LR = 16, 4, 0.05


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        bags = [hotrow.EmbeddingBagConfig(name, rows, DIM, [name]) for name, rows in ROWS.items()]
        self.embedding = hotrow.EmbeddingBagCollection(bags, hotrow.Adagrad(LR), budget="10%")
        self.net = nn.Sequential(
            nn.Linear(NUM_DENSE + len(ROWS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense, ids):
        vectors = [self.embedding(ids).values()]
        return self.net(torch.cat([dense, *vectors], dim=1)).squeeze(1)


def make_clicks(num_samples):
    dense = torch.randn(num_samples, NUM_DENSE)
    # A few ids are seen often and most of them rarely, as in any log of clicks.
    ids = [(rows * torch.rand(num_samples) ** 4).long() for rows in ROWS.values()]
    taste = [torch.randn(rows)[column] for rows, column in zip(ROWS.values(), ids, strict=True)]
    label = torch.bernoulli(torch.sigmoid(dense[:, 0] + sum(taste) - 1))
    return TensorDataset(dense, torch.stack(ids, dim=1), label)


def set_weights(model):
    """Weights that depend on the shapes alone, whatever holds them."""
    torch.manual_seed(1)
    state = model.state_dict()
    for _, weight in sorted(state.items()):
        weight.copy_(0.1 * torch.randn(weight.shape))
    model.load_state_dict(state)


def main():
    torch.manual_seed(0)
    train, test = random_split(make_clicks(100_000), [80_000, 20_000])
    model = Model()
    set_weights(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)

    loader = DataLoader(train, batch_size=256, shuffle=True)
    for dense, ids, label in hotrow.ahead(loader, model, ids=lambda batch: batch[1]):
        loss = binary_cross_entropy_with_logits(model(dense, ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        dense, ids, label = test[:]
        logits = model(dense, ids)
        loss = binary_cross_entropy_with_logits(logits, label)
    print(f"loss {loss:.6f}  AUC {binary_auroc(logits, label.long()):.6f}")


if __name__ == "__main__":
    main()
