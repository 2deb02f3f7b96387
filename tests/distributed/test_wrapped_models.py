"""torch's wrappers of the dense part train what one process trains on the batches of all ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from rank_processes import run

ROWS, WORLD, SIZE = (3_000, 1_500), 2, 8  # samples of a rank
Batch = tuple[Tensor, Tensor]


def batches(count: int = 8) -> list[Batch]:
    """Batches of all ranks."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = [(torch.rand(WORLD * SIZE, generator=draw) ** 3 * n).long() for n in ROWS]
        label = torch.rand(WORLD * SIZE, generator=draw).round()
        found.append((torch.stack(ids, 1), label))
    return found


def tables(names: str = "ab") -> list[hotrow.EmbeddingBagConfig]:
    sizes = dict(zip("ab", ROWS, strict=True))
    return [hotrow.EmbeddingBagConfig(name, sizes[name], 4, [name]) for name in names]


class Model(nn.Module):
    """Two tables, in one collection or in two."""

    def __init__(self, kind: str, norm: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        optimizer = None if options.get("update") == "step" else hotrow.Adagrad(lr=0.1)
        options = {"optimizer": optimizer, "budget": "24KiB", "seed": 0, **options}
        make = hotrow.EmbeddingBagCollection
        if kind == "modules":
            self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 4, mode="sum") for rows in ROWS)
        elif kind == "two":
            self.first, self.second = make(tables("a"), **options), make(tables("b"), **options)
        else:
            self.rows = make(tables(), **options)
        self.kind = kind
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.hidden, self.top = nn.Linear(8, 6), nn.Linear(6, 1)
        if kind == "modules":
            hotrow.convert(self, budget=options["budget"])

    def forward(self, ids: Tensor, only: str = "") -> Tensor:
        """Use the rows of all tables for the output, or `only` those of the second, or, with
        "dense", none. All are looked up, as on the other ranks."""
        if only == "dense":
            vectors = torch.cat([ids / 1_000] * 4, 1) + 0 * self.rows(ids).values().detach()
        elif self.kind == "modules":
            columns = zip(self.bags, ids.unbind(1), strict=True)
            vectors = torch.cat([bag(x.unsqueeze(1)) for bag, x in columns], 1)
        elif self.kind == "two":
            first, second = self.first(ids[:, :1]).values(), self.second(ids[:, 1:]).values()
            vectors = torch.cat([first.detach() if only else first, second], 1)
        else:
            vectors = self.rows(ids).values()
        return self.top(self.hidden(self.norm(vectors)).relu()).sum(1)

    def bits(self) -> dict[str, Tensor]:
        """Weights and buffers by name, those of other ranks included."""
        found = {}
        for part in (self.hidden, self.top):
            found |= {f"{part}.{name}": whole(x) for name, x in part.named_parameters()}
        found |= {name: x.clone() for name, x in self.named_buffers()}
        for name, module in self.named_modules():
            collection = getattr(module, "collection", module)
            if isinstance(collection, hotrow.EmbeddingBagCollection):
                for table in collection.tables:
                    chunks = [chunk.clone() for _, chunk in collection.weights(table.name)]
                    found[f"{name}/{table.name}"] = torch.cat(chunks)
        return found


def whole(weight: Any) -> Tensor:
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.detach().clone()


@dataclass(frozen=True)
class Case:
    """How a model is built, wrapped and trained."""

    wrapper: str = "ddp"
    kind: str = "one"
    norm: bool = False
    model: dict[str, Any] = field(default_factory=dict)  # options of a collection
    wrapping: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    passes: int = 1  # backward passes of a step
    scaler: bool = False
    bad: int | None = None  # the step in which the loss of the last rank is infinite
    # What the loss of the last rank is of in every second step: see `Model.forward`.
    only: str = ""
    steps: int = 6


def wrap(case: Case, model: nn.Module) -> Any:
    if case.wrapper == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return DistributedDataParallel(model, **case.wrapping)


def ids_of(case: Case) -> Any:
    if case.kind == "modules":
        return None  # learned
    if case.kind == "two":
        return lambda batch: {"first": batch[0][:, :1], "second": batch[0][:, 1:]}
    return lambda batch: batch[0]


def train(case: Case, rank: int, world: int) -> dict[str, Any]:
    """Train the part of a rank; one process trains the mean of the losses of all ranks."""
    model = Model(case.kind, case.norm, **case.model)
    wrapped = wrap(case, model) if world > 1 else model
    weights = list(wrapped.parameters())
    optimizer = torch.optim.Adagrad(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=case.scaler, growth_interval=3)
    collections = [x for x in model.modules() if isinstance(x, hotrow.EmbeddingBagCollection)]
    collections = [x for x in collections if x.update == "backward"]
    for collection in collections if case.scaler else ():
        collection.grad_scale = scaler
    loader: Any = batches(case.steps * case.passes)
    if world > 1:
        loader = [part_of(batch, rank) for batch in loader]
        loader = hotrow.ahead(loader, wrapped, ids_of(case))
    losses, source = [], iter(loader)
    for step in range(case.steps):
        optimizer.zero_grad()
        with ExitStack() as joined:
            for collection in collections if case.passes > 1 else ():
                joined.enter_context(collection.accumulate())
            for left in reversed(range(case.passes)):
                batch = next(source)
                with no_sync(case, wrapped, world > 1 and left > 0):
                    if world > 1:
                        loss = loss_of(case, wrapped, batch, step, rank)
                    else:
                        of_ranks = [
                            loss_of(case, model, part_of(batch, other), step, other)
                            for other in range(WORLD)
                        ]
                        loss = torch.stack(of_ranks).mean()
                    scaler.scale(loss / case.passes).backward()
                losses.append(loss.item())
        if case.clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, case.clip)
        scaler.step(optimizer)
        scaler.update()
    if world > 1:
        loader.close()
    return {"losses": losses, "bits": model.bits()}


def no_sync(case: Case, wrapped: Any, skips: bool) -> Any:
    if case.wrapper == "fsdp" and hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(not skips)
    return wrapped.no_sync() if skips and case.wrapper == "ddp" else nullcontext()


def part_of(batch: Batch, rank: int) -> Batch:
    part = slice(rank * SIZE, (rank + 1) * SIZE)
    return batch[0][part], batch[1][part]


def loss_of(case: Case, model: Any, batch: Batch, step: int, rank: int) -> Tensor:
    is_last = rank == WORLD - 1
    only = case.only if is_last and step % 2 else ""
    predictions = model(batch[0], only)
    loss = F.binary_cross_entropy_with_logits(predictions, batch[1])
    return loss * float("inf") if case.bad == step and is_last else loss


STEP: dict[str, Any] = {"update": "step"}
CASES = {
    "all-fast": Case(model={"strategy": "all-fast"}),
    "lookahead": Case(),
    "many steps": Case(steps=80, kind="two"),
    "step": Case(model=STEP, clip=0.2),
    "norm": Case(norm=True, model={"update": "step"}),
    "static graph": Case(wrapping={"static_graph": True}),
    "static graph, step": Case(wrapping={"static_graph": True}, model=STEP),
    "unused": Case(wrapping={"find_unused_parameters": True}, only="dense"),
    "views": Case(wrapping={"gradient_as_bucket_view": True}, model=STEP, clip=0.2),
    "no sync": Case(passes=3),
    "no sync, step": Case(passes=3, model=STEP, clip=0.2),
    "dense loss": Case(only="dense"),
    "dense loss, step": Case(only="dense", model=STEP, clip=0.2),
    "one of two": Case(kind="two", only="second"),
    "one of two, step": Case(kind="two", only="second", model=STEP, clip=0.2),
    "modules": Case(kind="modules", clip=0.2),
    "scaler": Case(scaler=True, bad=2),
    "scaler, step": Case(scaler=True, bad=2, model=STEP, clip=0.2),
    "skip": Case(scaler=True, bad=2, model={"on_nonfinite": "skip"}),
    "sharded": Case(wrapper="fsdp"),
    "sharded, no sync": Case(wrapper="fsdp", passes=2),
    "sharded, step": Case(wrapper="fsdp", model=STEP, clip=0.2),
    "sharded modules": Case(wrapper="fsdp", kind="modules", clip=0.2),
}


def train_all(rank: int, world: int) -> dict[str, Any]:
    return {name: train(case, rank, world) for name, case in CASES.items()}


def test_wrapped_models_train_as_one_process() -> None:
    results = run(WORLD, train_all, timeout=120)
    for name, case in CASES.items():
        alone, ranks = train(case, 0, 1), [result[name] for result in results]
        means = torch.tensor([x["losses"] for x in ranks]).mean(0)
        if case.norm:  # ranks have statistics of their own parts
            keys = [key for key in alone["bits"] if not key.startswith("norm.running")]
            assert all(torch.equal(ranks[0]["bits"][x], ranks[1]["bits"][x]) for x in keys)
            continue
        torch.testing.assert_close(means, torch.tensor(alone["losses"]), rtol=0, atol=2e-5)
        for key, expected in alone["bits"].items():
            found = ranks[0]["bits"][key]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
            assert all(torch.equal(found, x["bits"][key]) for x in ranks), (name, key)
    for result in results:
        assert_equal(result["all-fast"], result["lookahead"])
        assert_equal(result["lookahead"], result["static graph"])


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert all(torch.equal(x, other["bits"][key]) for key, x in one["bits"].items())


def skips_backward(rank: int, world: int) -> None:
    model = Model("one", norm=False, **STEP)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for number, batch in enumerate(hotrow.ahead(batches(4), model, ids_of(Case()))):
        loss = loss_of(Case(), model, batch, number, rank)
        if rank == 0 or number != 1:
            loss.backward()
        optimizer.step()


def test_a_step_that_one_rank_skips_is_an_error() -> None:
    for failed in run(WORLD, skips_backward, expect_errors=True, group_timeout=20):
        assert "rank 1 did not call backward() for a batch, and other ranks did" in failed.message
