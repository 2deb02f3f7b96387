"""The models that run a program: torch's own modules, and a collection.

Both have a dense weight for every feature, the same loss, and the same verbs for what a loop does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from builders import Case, tight_budget, update_rows, variant
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tree import to_device
from programs import (
    Buffers,
    Program,
    Raw,
    Samples,
    Step,
    change_ids,
    changed,
    features_of,
    raw_of,
    samples_of,
)

Vectors = dict[str, Tensor]


def scheduler_of(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    """What changes the learning rates of a torch optimizer's param groups after each step."""
    if program.scheduler == "exponential":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if program.scheduler == "lambda":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return SimpleNamespace(step=lambda: None)


class Model(nn.Module):
    """A dense weight for every feature, and the loss.

    Subclasses have the rows: `look_up` a batch, `whole` for its values(), and `tables` for all
    weights and row state with their names.
    """

    def __init__(self, program: Program, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.program, self.dtype, self.device = program, dtype, device
        self.slopes = nn.ParameterDict(
            {
                name: torch.linspace(-1, 1, table.embedding_dim, dtype=dtype) + 0.3 * place
                for place, (name, table) in enumerate(program.table_of.items())
            }
        ).to(device)
        self.optimizer = torch.optim.SGD(self.slopes.parameters(), lr=0.05)
        self.scale = program.grad_scale or 1.0
        self._saved: list[Any] = []

    def step_of_slopes(self) -> None:
        for slope in self.slopes.values():
            if slope.grad is not None:
                slope.grad /= self.scale
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, step: Step, batch: Any, samples: Samples) -> Tensor:
        program = self.program
        if not step.used:
            whole = self.whole(batch)
            if step.in_place:
                whole *= 0.9
            slope = torch.cat([self.slopes[name] for name in program.features])
            return self._loss(whole, slope, samples.label)
        total: Any = 0
        vectors = self.look_up(batch)
        for name in step.used:
            mine, label = vectors[name], samples.label
            if step.in_place:
                mine *= 0.9
            if program.table_of[name].pooling == "none":
                label = label.repeat_interleave(samples.lengths[name].to(label.device))
            total = total + self._loss(mine, self.slopes[name], label)
        return total

    def save(self, how: str) -> None:
        """Keep the tables as they are now."""
        self._saved.append([(label, value.clone()) for label, value in self.tables()])

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """The tables as they were saved."""
        for number, tables in enumerate(self._saved):
            for label, value in tables:
                yield f"checkpoint {number}: {label}", value

    def _loss(self, vectors: Tensor, slope: Tensor, label: Tensor) -> Tensor:
        label = label.to(vectors).unsqueeze(1)
        return ((vectors * slope).tanh() * label).sum() + 0.1 * vectors.square().sum()


class Reference:
    """Updates of the rows that have gradients, in float64."""

    def __init__(self, program: Program, weights: nn.ParameterDict) -> None:
        self.rule, self.weights = program.rule, weights
        self.steps = dict.fromkeys(weights, 0)
        start = self.rule.start_of_state()
        self.state = {
            table.name: [
                torch.full((table.num_embeddings, width), start, dtype=torch.float64)
                for width in [1 if self.rule.row_wise else table.embedding_dim]
                for _ in self.rule.state_names
            ]
            for table in program.tables
        }
        self.frozen = {
            table.name: torch.zeros(table.num_embeddings, dtype=torch.bool)
            for table in program.tables
        }

    @torch.no_grad()
    def step(self, rates: dict[str, float], scale: float) -> None:
        grads = {name: w.grad.coalesce() for name, w in self.weights.items() if w.grad is not None}
        for name, grad in grads.items():
            self.steps[name] += 1
            rows = grad.indices()[0]
            kept, values = ~self.frozen[name][rows], grad.values() / scale
            update_rows(
                self.rule,
                self.weights[name],
                self.state[name],
                rows[kept],
                values[kept],
                rate=rates[name],
                step=self.steps[name],
            )
            self.weights[name].grad = None


class Plain(Model):
    """torch's own modules. A batch is `Samples`."""

    def __init__(self, program: Program, start: dict[str, Tensor]) -> None:
        super().__init__(program, torch.float64, torch.device("cpu"))
        self.bags = nn.ModuleDict(
            {table.name: self._module(table, start[table.name]) for table in program.tables}
        )
        weights = nn.ParameterDict({name: bag.weight for name, bag in self.bags.items()})
        self.reference = Reference(program, weights)
        rates = program.rates or [program.rule.lr] * len(program.tables)
        self._schedule(rates)

    def _schedule(self, rates: Sequence[float]) -> None:
        groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates]
        self.row_optimizer = torch.optim.SGD(groups)
        self.row_optimizer._opt_called = True  # its step() would be another optimizer's step
        self.scheduled = scheduler_of(self.program, self.row_optimizer)

    @staticmethod
    def _module(table: hotrow.EmbeddingBagConfig, start: Tensor) -> nn.Module:
        padding = table.padding_idx
        if table.pooling == "none":
            return nn.Embedding(
                *start.shape, padding_idx=padding, sparse=True, _weight=start.double()
            )
        return nn.EmbeddingBag(
            *start.shape, mode=table.pooling, padding_idx=padding, sparse=True,
            include_last_offset=True, _weight=start.double(),
        )  # fmt: skip

    def look_up(self, batch: Samples) -> Vectors:
        vectors = {}
        for name, table in self.program.table_of.items():
            module, ids = self.bags[table.name], batch.ids[name]
            if table.pooling == "none":
                vectors[name] = module(ids)
                continue
            offsets = torch.nn.functional.pad(batch.lengths[name].cumsum(0), (1, 0))
            weights = None if batch.weights is None else batch.weights[name]
            vectors[name] = module(ids, offsets, per_sample_weights=weights)
        return vectors

    def whole(self, batch: Samples) -> Tensor:
        return torch.cat(list(self.look_up(batch).values()), dim=1)

    # -- what a loop asks for --

    def batches(self, numbers: Sequence[int]) -> Iterator[tuple[Samples, Samples]]:
        """A batch, and what is known of it beside its ids."""
        for number in numbers:
            samples = self.at(number)
            yield samples, samples

    def at(self, number: int) -> Samples:
        samples = samples_of(self.program, number)
        weights = samples.weights
        if weights is not None:
            learned = self.program.weights == "learned"
            weights = {k: v.double().requires_grad_(learned) for k, v in weights.items()}
        return replace(samples, weights=weights, label=samples.label.double())

    def change(self, batch: Samples, how: str) -> Samples:
        return changed(self.program, batch)

    def weight_grads(self, batch: Samples) -> Tensor | None:
        assert batch.weights is not None
        grads = [(batch.weights[n].grad, batch.weights[n]) for n in self.program.columns]
        return torch.cat([torch.zeros_like(w) if grad is None else grad for grad, w in grads])

    def accumulate(self) -> Any:
        return nullcontext()

    def update(self) -> None:
        names = self.program.tables
        groups = self.row_optimizer.param_groups
        rates = {t.name: g["lr"] for t, g in zip(names, groups, strict=True)}
        self.reference.step(rates, self.scale)

    def evaluate(self, number: int, how: str) -> Vectors:
        with torch.no_grad():
            return self.look_up(self.at(number))

    def freeze(self, rows: dict[str, Tensor] | None) -> None:
        for name, mask in self.reference.frozen.items():
            mask.zero_()
            if rows and name in rows:
                mask[rows[name]] = True

    def require_grad(self, on: bool) -> None:
        for bag in self.bags.values():
            bag.requires_grad_(on)

    def load_weights(self, table: str, first: int, weights: Tensor) -> None:
        with torch.no_grad():
            self.reference.weights[table][first : first + len(weights)] = weights.double()

    def round_trip(self, how: str) -> Model:
        """The collection that is loaded into knows nothing of frozen rows."""
        if how != "itself":
            self.freeze(None)
            self.require_grad(True)
            self._schedule([group["lr"] for group in self.row_optimizer.param_groups])
        return self

    def change_engine(self) -> None:
        pass

    def pin_rows(self, rows: dict[str, Tensor]) -> None:
        pass

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        for table in self.program.tables:
            yield f"weights of table {table.name!r}", self.reference.weights[table.name].detach()
            yield (
                f"step of table {table.name!r}",
                torch.tensor(float(self.reference.steps[table.name])),
            )
            names = self.program.rule.state_names
            for name, value in zip(names, self.reference.state[table.name], strict=True):
                yield f"{name!r} of table {table.name!r}", value


class Rows(Model):
    """A collection. A batch is a dict with ids and a label, or ids alone."""

    def __init__(self, program: Program, device: torch.device, *, plainly: bool) -> None:
        """`plainly`: all-fast, and batches of their own without hotrow.ahead."""
        super().__init__(program, torch.float32, device)
        self.plainly = plainly
        self.embedding = self._collection()
        if program.rates is not None:
            groups = self.embedding.optimizer.param_groups
            for group, rate in zip(groups, program.rates, strict=True):
                group["lr"] = rate
        self.scheduled = scheduler_of(program, self.embedding.optimizer)

    def _collection(self, seed: int = 3) -> hotrow.EmbeddingBagCollection:
        program = self.program
        kind: Any = hotrow.EmbeddingBagCollection
        if all(table.pooling == "none" for table in program.tables):
            kind = hotrow.EmbeddingCollection
        options: dict[str, Any] = {
            "seed": seed, "device": self.device, "on_nonfinite": program.on_nonfinite
        }  # fmt: skip
        if self.plainly:
            embedding = kind(program.tables, program.rule, strategy="all-fast", **options)
            embedding.grad_scale = program.grad_scale
            return embedding
        strategy = STRATEGIES[program.strategy]
        if strategy.has_slots:
            strategy = variant(program.strategy, program.schedule, program.victims)
        if program.profile:
            rows = {table.name: table.num_embeddings for table in program.tables}
            options["profile"] = {name: torch.arange(n, 0, -1) for name, n in rows.items()}
        budget = _budget_of(program, strategy)
        embedding = kind(program.tables, program.rule, budget, strategy=strategy, **options)
        # Behind a link, ids are compared later, and a change that torch does not see raises.
        has_link = program.late and "untracked ids" not in program.ingredients
        for group in embedding.groups if strategy.on_host and self.device.type == "cpu" else ():
            group.link.exists = has_link
        embedding.grad_scale = program.grad_scale
        return embedding

    def look_up(self, batch: Any) -> Vectors:
        return self.embedding(batch["features"]).to_dict()

    def whole(self, batch: Any) -> Tensor:
        return self.embedding(batch["features"]).values()

    # -- what a loop asks for --

    def batches(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Samples]]:
        if self.plainly or self.program.loader == "direct":
            buffers = Buffers("tensor" if self.plainly else self.program.buffers, False)
            refills = not self.plainly and self.program.buffers != "fresh"
            for number in numbers:
                raw = raw_of(self.program, samples_of(self.program, number))
                yield self._batch(number, buffers.fill(raw) if refills else raw)
            return
        known = iter(numbers)
        # Nothing closes it: leaving the loop has to, by dropping the last reference.
        batches = iter(
            hotrow.ahead(
                self._loader(numbers), self, lambda batch: batch["features"],
                depth=self.program.depth,
            )
        )  # fmt: skip
        # CPython 3.12.2 and 3.12.3 keep the locals of a closed generator (python/cpython#118272)
        # unless it was closed inside a `try`, so there the iterator would not be dropped.
        try:
            for batch in batches:
                samples = samples_of(self.program, next(known))
                yield batch, replace(samples, label=batch["raw"]["label"])
        finally:
            pass

    def _loader(self, numbers: Sequence[int]) -> Iterator[Any]:
        buffers = Buffers(self.program.buffers, self.device.type == "cuda")
        for number in numbers:
            raw = raw_of(self.program, samples_of(self.program, number))
            if self.program.buffers != "fresh":
                raw = buffers.fill(raw)
            yield {"raw": raw, "features": features_of(self.program, raw)}

    def _batch(self, number: int, raw: Raw) -> tuple[Any, Samples]:
        samples = samples_of(self.program, number)
        batch = {"raw": raw, "features": features_of(self.program, raw)}
        if self.device.type != "cpu":
            batch = to_device(batch, self.device)
        return batch, replace(samples, label=batch["raw"]["label"])

    def at(self, number: int) -> Any:
        return self._batch(number, raw_of(self.program, samples_of(self.program, number)))[0]

    def change(self, batch: Any, how: str) -> Any:
        features = batch["features"]
        if isinstance(features, Tensor):
            values = features
        else:
            values = features[0] if isinstance(features, tuple) else features.values()
        change_ids(self.program, values, "data" if values.is_cuda and how == "numpy" else how)
        return batch

    def weight_grads(self, batch: Any) -> Tensor:
        weights = batch["raw"]["weights"]
        return torch.zeros_like(weights) if weights.grad is None else weights.grad

    def accumulate(self) -> Any:
        return self.embedding.accumulate()

    def update(self) -> None:
        self.embedding.optimizer.step()  # as a torch loop does; rows are updated in backward()

    def evaluate(self, number: int, how: str) -> Vectors:
        batch = self.at(number)
        if how == "eval":
            self.eval()
            vectors = self.look_up(batch)
            self.train()
            return vectors
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            return self.look_up(batch)

    def freeze(self, rows: dict[str, Tensor] | None) -> None:
        self.embedding.freeze_rows(rows)

    def require_grad(self, on: bool) -> None:
        self.embedding.requires_grad_(on)

    def load_weights(self, table: str, first: int, weights: Tensor) -> None:
        self.embedding.load_weights(table, first, weights)

    def round_trip(self, how: str) -> Model:
        old = self.embedding
        if how == "itself":
            old.load_state_dict(old.state_dict())
            old.optimizer.load_state_dict(old.optimizer.state_dict())
            return self
        self.embedding = self._collection(seed=4)
        if how == "checkpoint":
            with tempfile.TemporaryDirectory() as folder:
                hotrow.save_checkpoint(folder, old, step=1)
                hotrow.load_checkpoint(folder, self.embedding)
        else:
            self.embedding.load_state_dict(old.state_dict())
            self.embedding.optimizer.load_state_dict(old.optimizer.state_dict())
        for group in self.embedding.optimizer.param_groups:
            group.pop("initial_lr", None)
        self.scheduled = scheduler_of(self.program, self.embedding.optimizer)
        return self

    def save(self, how: str) -> None:
        if self.plainly:
            super().save(how)
            return
        if not self._saved:
            self._folder = tempfile.TemporaryDirectory()
        save = hotrow.begin_checkpoint if how == "background" else hotrow.save_checkpoint
        self._saved.append(
            save(self._folder.name, self.embedding, step=len(self._saved), full_every=4)
        )

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        if self.plainly:
            yield from super().saved()
            return
        try:
            yield from self._load_saved()
        finally:
            if self._saved:
                self._folder.cleanup()

    def _load_saved(self) -> Iterator[tuple[str, Tensor]]:
        for number, save in enumerate(self._saved):
            path = save if isinstance(save, Path) else save.wait()
            loaded = Rows(self.program, self.device, plainly=True)
            hotrow.load_checkpoint(path, loaded.embedding)
            for label, value in loaded.tables():
                yield f"checkpoint {number}: {label}", value

    def change_engine(self) -> None:
        if self.plainly:
            return
        if self.embedding.pins.is_on_host:
            self.embedding.train_in_slots()
        else:
            self.embedding.train_on_host()

    def pin_rows(self, rows: dict[str, Tensor]) -> None:
        if not self.plainly and not self.embedding.pins.is_on_host:
            numbers = self.program.numbers
            largest = max(numbers, key=lambda n: len(samples_of(self.program, n).label))
            self.embedding.reserve_like(self.at(largest)["features"])
            self.embedding.pin_rows(rows)

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        self.embedding.check()
        state = self.embedding.optimizer.state_dict()["state"]
        for table in self.program.tables:
            weights = self.embedding.state_dict()[self.embedding.key_of(table.name)]
            yield f"weights of table {table.name!r}", weights
            names = ("step", *self.program.rule.state_names)
            for name in names:
                value = torch.as_tensor(state[table.name][name], dtype=torch.float32)
                label = "step" if name == "step" else repr(name)
                yield f"{label} of table {table.name!r}", value


def _budget_of(program: Program, strategy: Any) -> hotrow.Budget | None:
    if not strategy.needs_budget:
        return None
    case = Case(list(program.tables), lambda generator: None)
    batches = [
        features_of(program, raw_of(program, samples_of(program, number)))
        for number in program.numbers
    ]
    part = 0.6 if program.room == "chunked" else 1.0
    budget = tight_budget(case, batches, strategy.hold, part=part, dense_map=program.dense_map)
    if program.room == "roomy":
        shares = [replace(share, slots=3 * share.slots) for share in budget.shares]
        budget = replace(budget, shares=tuple(shares))
    return budget
