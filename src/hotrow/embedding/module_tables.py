"""The tables of one or several modules, in one collection that is built when rows are needed.

Until then weights are where they were: in the module that was converted, or nowhere. So the device
may still change, and rows get the state of the optimizer that is known by then.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hotrow.distributed.ranks import count_ranks, ranks_of
from hotrow.embedding.arguments import (
    check_idle,
    drawn_seed,
    first_seed,
    idle_in_modules,
    usable_device,
)
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.group_builder import GroupBuilder
from hotrow.embedding.id_sources import IdSources
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.embedding.stand_ins import StandIns
from hotrow.embedding.torch_steps import known_rule
from hotrow.embedding.torch_steps import watch as watch_optimizers
from hotrow.embedding.wrappers import refuse_wrapped
from hotrow.engine.strategy import find_strategy
from hotrow.inputs.calls import Call
from hotrow.inputs.tables import Copied, EmbeddingBagConfig
from hotrow.kernels.rules import RowRule
from hotrow.sizing.budgets import AUTO
from hotrow.store.budget import Budget
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import did_you_mean, few
from hotrow.support.units import parse_bytes, show_bytes


class ModuleTables:
    """Tables that modules look up, and what their collection is built from."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        weights: Mapping[str, Tensor],
        *,
        device: str | torch.device = "cpu",
        budget: Any = None,
        optimizer: RowRule | None = None,
        idle: str | None = None,
        seed: int | None = None,
        zero_rows: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        """`weights` have the rows of some tables; the others start by their `init`, but `zero_rows`
        at zero. `options` are those of a collection."""
        watch_optimizers()
        refuse_unknown_options(options)
        self.device = usable_device(device)
        self.tables, self.budget = tuple(tables), budget
        strategy = find_strategy(options.get("strategy", "lookahead"))  # raises if there is none
        is_size = not isinstance(budget, Budget) and budget not in (None, AUTO)
        if is_size and strategy.needs_budget:
            parse_bytes(budget, total=1 << 40)  # raises if it is none
        check_idle(idle)
        self._weights, self._rule, self._given_idle = dict(weights), optimizer, idle
        self._zero_rows = dict(zero_rows or {})
        self._options = {**options, "seed": drawn_seed() if seed is None else seed}
        self._draws_seed = seed is None
        self.stand_ins = StandIns([table.name for table in tables], self.device)
        self.stand_ins.wait_for(self._when_asked())
        self._built: EmbeddingBagCollection | None = None
        self._checked_at: object = None  # stand-ins and wrappers
        self._lost: list[str] = []  # tables whose weights an error has taken along
        self._building = RLock()  # threads that serve may look up at the same time, at first
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._all_ids: dict[str, Tensor] = {}
        self.id_sources = IdSources({})  # how ids follow from batches of `hotrow.ahead`

    @property
    def _idle(self) -> str | None:
        return idle_in_modules(self._given_idle, self.device)

    def _when_asked(self) -> Callable[[], Any]:
        """Return what builds the collection; an optimizer that keeps it keeps no rows alive."""
        me = weakref.ref(self)

        def build() -> None:
            tables = me()
            if tables is not None:
                _ = tables.collection

        return build

    def stand_in(self, table: str) -> nn.Parameter:
        return self.stand_ins.parameters[self.stand_ins.names.index(table)]

    def serve(self, module: nn.Module) -> None:
        """Note a module that looks up rows here."""
        self._modules.add(module)

    def follow_mode(self) -> None:
        """Train rows while some module is in training mode."""
        if self._built is not None:
            self._built.training = any(module.training for module in self._modules)

    @property
    def is_built(self) -> bool:
        return self._built is not None

    @property
    def collection(self) -> EmbeddingBagCollection:
        """The collection; the first use builds it."""
        if self._built is None:
            with self._building, torch.inference_mode(False), uninterrupted():
                if self._built is None:
                    self._built = self._build()
                    self.follow_mode()
        return self._built

    def _build(self) -> EmbeddingBagCollection:
        if self._lost:
            raise RuntimeError(
                f"the rows of {few(map(repr, self._lost))} were lost when memory ran out, or by "
                "another error, while they were moved: convert the model anew"
            )
        copied = {name: Copied([weight]) for name, weight in self._weights.items()}
        self._weights.clear()  # the memory of each is free when the collection has its rows
        try:
            built = self._collection_of(copied)
        except BaseException:
            self._weights = {name: held for name, x in copied.items() for held in x.held}
            self._lost = [name for name, x in copied.items() if not x.held]
            raise
        if copied:
            built.row_access.note_loaded()
        for name, row in self._zero_rows.items():
            if name not in copied:
                dim = next(x.embedding_dim for x in self.tables if x.name == name)
                built.load_weights(name, row, torch.zeros(1, dim))
        return built

    def _all_fit(self, rule: RowRule) -> bool:
        """Whether the budget holds all rows with their state."""
        widths = [(x.num_embeddings, x.embedding_dim) for x in self.tables]
        total = sum(4 * rows * (dim + rule.state_width(dim)) for rows, dim in widths)
        is_known = not isinstance(self.budget, Budget) and self.budget not in (None, AUTO)
        return is_known and parse_bytes(self.budget, total=total) >= total

    def check_budget(self, rule: RowRule) -> None:
        """Raise if the budget cannot hold what the rows of a rule need at least."""
        strategy = find_strategy(self._options.get("strategy", "lookahead"))
        if self.budget in (None, AUTO) or not strategy.needs_budget:
            return
        if "strategy" in self._options or not self._all_fit(rule):
            profile = self._options.get("profile")
            optimizer = RowOptimizer(rule, self.tables)
            builder = GroupBuilder(self.tables, optimizer, strategy, self.device, profile)
            builder.divide(self.budget)

    def _collection_of(self, copied: Mapping[str, Copied]) -> EmbeddingBagCollection:
        options = dict(self._options)
        ranks = ranks_of(options.get("process_group"), self.device)
        if self._draws_seed:
            options["seed"] = first_seed(ranks, options["seed"])
        rule = self._rule or known_rule(self.stand_ins, self._idle)
        if "strategy" not in options and rule is not None and self._all_fit(rule):
            options["strategy"] = "all-fast"
        return EmbeddingBagCollection(
            [replace(x, init=copied[x.name]) if x.name in copied else x for x in self.tables],
            self._rule,
            self.budget,
            update="step",
            idle=self._idle if self._rule is None else self._given_idle,
            device=self.device,
            stand_ins=self.stand_ins,
            expected_rule=rule,
            **options,
        )

    def release(self, table: str) -> Tensor:
        """Return the weights of a table that is needed here no more."""
        return self._weights.pop(table) if table in self._weights else self.copy(table)

    def move_to(self, device: torch.device) -> None:
        """Let fast memory be on another device, before the first step."""
        device = usable_device(device)
        if device == self.device:
            return
        if self._built is not None:
            if max(self._built.optimizer.steps) or any(self.stand_ins.waiting()):
                raise RuntimeError(
                    f"rows of these tables were trained on {self.device}, and their fast memory "
                    f"cannot move to {device} any more. Move the model before its first step; or "
                    "hotrow.revert(model) makes plain modules of it, which can move"
                )
            access = self._built.row_access
            self._weights = {x.name: access.copy_weights(x.name) for x in self.tables}
            self._built = None
        self.device = device
        self._all_ids.clear()
        self.stand_ins.move_to(device)

    # -- lookups -----------------------------------------------------------------------

    def look_up(self, call: Call, *, trains: bool) -> Tensor:
        """Return the vectors of a call's bags, [bags, dim]; `trains`: in training mode."""
        if call.ids.device.type != self.device.type:
            raise ValueError(
                f"ids of module {call.table!r} are on {call.ids.device}, and its rows' device is "
                f"{self.device}; move the batch there, or iterate with hotrow.ahead, which does"
            )
        is_read = not torch.is_grad_enabled()
        collection = self.collection
        elsewhere = collection.pipeline.thread.is_elsewhere
        if is_read or (not trains and elsewhere):
            return collection.calls.read(call)
        moment = collection.calls.moment
        if self._checked_at != moment:  # once for all modules of a forward pass
            refuse_wrapped(self.stand_ins.parameters)
            self.stand_ins.refuse_other_values()
            self._checked_at = moment
        return collection.calls.look_up(call)

    def whole(self, table: str) -> Tensor:
        """Return all rows of a table, [rows, dim]; differentiable where gradients are on."""
        if not (torch.is_grad_enabled() and self.stand_in(table).requires_grad):
            return self.copy(table).to(self.device)
        if table not in self._all_ids:
            config = next(x for x in self.tables if x.name == table)
            self._check_whole(config)
            self._all_ids[table] = torch.arange(config.num_embeddings, device=self.device)
        return self.look_up(Call(table, self._all_ids[table], is_whole=True), trains=True)

    def _check_whole(self, table: EmbeddingBagConfig) -> None:
        """Raise if a table, a copy of its weights and their gradient do not fit fast memory."""
        if table.skipped_idx is not None:
            raise NotImplementedError(
                f"the weight of {table.name!r} as one tensor cannot be trained: it is a bag with "
                "padding_idx. Read it under torch.no_grad(), or look rows up by an hotrow.Embedding"
            )
        collection = self.collection
        ignores_budget = "strategy" in self._options and not collection.strategy.needs_budget
        if ignores_budget or isinstance(self.budget, Budget) or self.budget == AUTO:
            return
        total = parse_bytes(self.budget, total=collection.bytes_total)
        copies = 2 * 4 * table.num_embeddings * table.embedding_dim
        rows = collection.row_access.bytes_of(table.name)
        if rows + copies + collection.row_access.whole_bytes > total:
            raise RuntimeError(
                f"the weight of {table.name!r} as one tensor takes {show_bytes(rows + copies)}, "
                "with its rows and its gradient, and the budget of fast memory is "
                f"{show_bytes(total)}. Look up the rows that a loss needs, module(ids), with a "
                "sampled softmax instead of one over all rows; weights() streams all rows, and "
                "under torch.no_grad() weight can be read"
            )
        collection.row_access.take_whole(table.name, copies)

    # -- weights -----------------------------------------------------------------------

    def copy(self, table: str) -> Tensor:
        """Return a copy of a table's weights, [rows, dim], on the CPU."""
        if self._built is None and table in self._weights:
            return self._weights[table].detach().clone().cpu()
        with self.collection.row_access.reading():
            return self.collection.row_access.copy_weights(table)

    def load(self, table: str, first: int, weights: Tensor) -> None:
        """Replace rows from `first` on."""
        kept = self._weights.get(table)
        if (
            self._built is None
            and kept is not None
            and weights.shape[1:] == kept.shape[1:]
            and 0 <= first <= len(kept) - len(weights)
        ):
            with torch.no_grad():
                kept[first : first + len(weights)] = weights.to(kept)
        else:
            self.collection.load_weights(table, first, weights)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have, or will have, the rows."""
        if self._built is not None:
            return self._built.ranks is not None
        return count_ranks(self._options.get("process_group")) > 1

    @property
    def is_apart(self) -> bool:
        """Whether rows are saved on their own, so that state dicts have none."""
        return self._built is not None and self._built.row_access.is_apart

    # -- batches of hotrow.ahead ---------------------------------------------------------

    def expect(self, functions: Mapping[str, Callable[[Any], Any]] | None) -> None:
        """Prepare a pass of `hotrow.ahead`; `functions` say what tables are looked up with."""
        if functions is not None:
            self.id_sources = IdSources(functions)


def refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """Raise for names that are no options of a collection."""
    known = list(inspect.signature(EmbeddingBagCollection).parameters)
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, known)}")
