"""Collections: embedding tables that look like torch modules.

A collection faces users. What `hotrow.ahead` and captured steps need stands in `pipeline`, what
checkpoints need in `row_access`, and what published systems need in `pins`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from hotrow.distributed.exchange import Exchange
from hotrow.distributed.ranks import ranks_of
from hotrow.embedding import dense_steps
from hotrow.embedding.arguments import (
    check_alike,
    check_arguments,
    check_replicas,
    describe_profile,
    drawn_seed,
    first_seed,
    listed_tables,
    refuse_state_dict,
    usable_device,
)
from hotrow.embedding.call_lookups import CallLookups
from hotrow.embedding.embedded import Embedded
from hotrow.embedding.group_builder import build_rows
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.embedding.pins import Pins
from hotrow.embedding.pipeline import Pipeline
from hotrow.embedding.row_access import RowAccess
from hotrow.embedding.row_groups import Engine, Group, engine_for
from hotrow.embedding.stand_ins import StandIns
from hotrow.embedding.step import Lookup, PendingStep, by_feature
from hotrow.embedding.torch_steps import TorchSteps
from hotrow.embedding.torch_surface import (
    TorchSurface,
    outside_graphs,
    refuse_transforms,
    weights_count,
)
from hotrow.embedding.wrappers import protect_stand_ins, refuse_wrapped
from hotrow.engine.profile import Profile, check_profile
from hotrow.engine.rows import cpu_rows
from hotrow.engine.strategy import STRATEGIES, Strategy, find_strategy
from hotrow.inputs.batch import Batch, count_ids, lookups_of, parse, weights_of
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.tables import EmbeddingBagConfig, feature_order, outputs_of
from hotrow.kernels.dense_rules import moving
from hotrow.kernels.rules import SGD, RowRule
from hotrow.store.budget import Budget
from hotrow.store.traffic import Traffic
from hotrow.support.numbers import plain
from hotrow.support.streams import lanes_of
from hotrow.support.threads import RowLock, TrainingThread
from hotrow.support.units import parse_bytes
from hotrow.support.version import __version__

_UPDATES = "row_updates"  # in a state dict's metadata: the number of updates so far


class EmbeddingBagCollection(TorchSurface):
    """Embedding tables larger than fast memory, trained with `budget` bytes of it.

    `budget` is "4GiB", "512MB", a number of bytes, or "10%" of the rows with their optimizer
    state; "auto" takes what is enough by `profile`, and at most 70 % of the free memory of a GPU.
    Strategies that keep every row in fast memory, or none, ignore it. The README lists the
    strategies and their contracts. Rows are updated in `backward()`, by `optimizer`;
    `embedding.optimizer.param_groups` has the settings of each table. On a GPU,
    `output_dtype=torch.bfloat16` returns vectors half as wide, summed in float32.

    A row starts as a function of (`seed`, name of its table, row). Without `seed` one is drawn from
    torch's default generator, so `torch.manual_seed` fixes it and two collections differ;
    `embedding.seed` has it. `engine` is for tests: the class of row groups, by default chosen by
    device and strategy. `stand_ins` and `expected_rule` are for modules, whose
    parameters were perhaps given to an optimizer before there are rows.

    With `update="step"` rows are updated when a torch optimizer steps, and everything between
    `backward()` and that step works as for any parameter: `embedding.parameters()` has a small
    stand-in for each table, so give those to the optimizer. `optimizer` may then be None: rows
    take the rule of the torch optimizer. Where torch would move rows that no batch has looked up
    (Adam, momentum, weight decay), `idle="decay"` moves them alike, when they are read next, and
    `idle="frozen"` lets them rest; rules of hotrow let them rest by default.

    Under a process group of several ranks (torch.distributed) each rank owns a share of the rows,
    and `budget` is that of one rank; `process_group` selects another group than the default one.
    `replicate="64MiB"` keeps rows on every rank beside the budget, the smallest tables first and
    then what `profile` counts most: their lookups exchange nothing, and no bit changes.

    Per-sample weights are used where a batch has them. With `is_weighted=True` every batch must
    have them; with `is_weighted=False` they are ignored, as TorchRec does.
    """

    _prefix = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowRule | None,
        budget: str | float | Budget | None = None,
        *,
        update: str = "backward",
        idle: str | None = None,
        strategy: str | Strategy = "lookahead",
        device: str | torch.device = "cpu",
        seed: int | None = None,
        profile: Profile | None = None,
        on_nonfinite: str = "propagate",
        output_dtype: torch.dtype = torch.float32,
        fill: str = "auto",
        is_weighted: bool | None = None,
        engine: Engine | None = None,
        stand_ins: StandIns | None = None,
        expected_rule: RowRule | None = None,
        process_group: Any = None,
        replicate: str | int = 0,
    ) -> None:
        self._thread = TrainingThread()
        super().__init__()
        _leave_out_of_graphs()
        _hear_of_freezing()
        dense_steps.watch()
        self.device = usable_device(device)
        self.ranks = ranks_of(process_group, self.device)
        self.seed = drawn_seed() if seed is None else plain(seed)
        check_arguments(self.seed, optimizer, on_nonfinite, output_dtype, fill, update, idle)
        self.tables, self.update = listed_tables(tables), update
        self._is_weighted = is_weighted
        chosen = find_strategy(strategy)
        if self.ranks is not None:
            self._thread.begin_here()  # others read in process groups of their own from the start
            check_replicas(update, replicate)
            settings = (self.update, idle, on_nonfinite, output_dtype, is_weighted, replicate)
            facts = {
                "hotrow": __version__, "torch": torch.__version__, "tables": self.tables,
                "optimizer": optimizer, "strategy": chosen.name, "settings": settings,
                "seed": "drawn" if seed is None else self.seed,
                "profile": describe_profile(profile) if replicate else "any",
            }  # fmt: skip
            check_alike(self.ranks, facts)
            self.seed = first_seed(self.ranks, self.seed)
        if chosen.on_cpu_alone and self.device.type != "cpu":
            raise ValueError(
                f"strategy {chosen.name!r} trains on the CPU alone; give device='cpu', or "
                f"take 'hybrid', whose dense part is on {self.device}"
            )
        self.features = feature_order(self.tables)
        self._outputs = outputs_of(self.tables)
        if profile is not None:
            check_profile(profile, self.tables)
        self._stand_ins = None
        if update == "step":
            self._stand_ins = stand_ins or StandIns([x.name for x in self.tables], self.device)
            for table, parameter in zip(self.tables, self._stand_ins.parameters, strict=True):
                self._parameters[self.key_of(table.name)] = parameter
            protect_stand_ins(self)
        params = None if self._stand_ins is None else self._stand_ins.parameters
        rule = optimizer or expected_rule or SGD()
        if idle == "decay" and optimizer is not None:
            rule = moving(optimizer)
        self.optimizer = RowOptimizer(rule, self.tables, params)
        if engine is None:
            engine = engine_for(self.device, chosen) if chosen.on_host else _engine(self.device)
        if engine is cpu_rows and output_dtype != torch.float32:
            raise ValueError(
                f"output_dtype={output_dtype} needs a GPU; on a CPU vectors are float32"
            )
        self.lanes = lanes_of(self.device)
        # On a GPU the host only launches: there threads take turns.
        self.lock = RowLock(shared=self.device.type == "cpu")
        self._rows = build_rows(
            self.tables, self.optimizer, chosen, self.device, profile, budget, engine,
            lanes=self.lanes, lock=self.lock, seed=self.seed, output_dtype=output_dtype, fill=fill,
            ranks=self.ranks, replicate=parse_bytes(replicate) if replicate else 0,
        )  # fmt: skip
        self._rows.share(self.ranks, process_group)
        self._step = PendingStep(self._rows, on_nonfinite, self._thread)
        self.pipeline = Pipeline(self._rows, self._step, self._thread, self.features)
        self.pipeline.is_weighted = is_weighted
        self.row_access = RowAccess(self._rows, self.pipeline)
        self.pins = Pins(self._rows, self.pipeline)
        self.optimizer.belongs_to(self.row_access)
        self._anchor = torch.empty(0, requires_grad=True)  # makes autograd call us back
        self._leaves = partial(_leaves_of, self._stand_ins, self._anchor)
        self.torch_steps: TorchSteps | None = None
        if self._stand_ins is not None:
            self.torch_steps = TorchSteps(
                self._rows, self._stand_ins, self._step, self.pipeline,
                idle=idle, is_known=optimizer is not None,
            )  # fmt: skip
        self._evaluations = dense_steps.EvaluationWatch()
        self.calls = CallLookups(self._rows, self._step, self.pipeline, self.features, self._leaves)

    # As torch's attribute, but `eval()` in a thread that does not train holds for that thread.
    @property
    def training(self) -> bool:
        return self._thread.mode

    @training.setter
    def training(self, mode: bool) -> None:
        self._thread.mode = mode

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def bytes_total(self) -> int:
        """The bytes of all rows with their optimizer state."""
        return self._rows.bytes_total

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of rows that are trained, one per width; the engine's own."""
        return self._rows.groups

    @property
    def every_group(self) -> list[Group]:
        """The groups of both engines, if there are two."""
        return self._rows.every_group

    @property
    def exchange(self) -> Exchange | None:
        """What this collection exchanges with its copies on other ranks; None: there are none."""
        return self._rows.exchange

    @property
    def strategy(self) -> Strategy:
        return self._rows.strategy

    # -- lookup ------------------------------------------------------------------------

    def forward(self, features: Any) -> Embedded:
        """Look up a batch; in training mode `backward()` will update its rows."""
        trains = self.training and torch.is_grad_enabled()
        refuse_transforms(features, trains=trains)
        if not trains:
            return self._evaluate(features)
        self.pipeline.finish_abandoned()
        self._thread.look_up()
        self._evaluations.end()
        if self._stand_ins is not None:
            refuse_wrapped(self._stand_ins.parameters, self._parameters.values())
            self._stand_ins.refuse_other_values()
        planned, vectors = self.pipeline.find_or_plan(features), []
        self.pipeline.fetch(planned)
        is_weighted = weights_count(self._is_weighted, features)
        for work in planned.works:
            weights = None
            if is_weighted:
                weights = weights_of(features, work.lookups, work.group.layout)
            leaves = self._leaves(work.group)
            vectors.append(Lookup.apply(weights, work, self._step, *leaves))  # type: ignore[no-untyped-call]
        return self._embedded(planned.batch, vectors)

    def _evaluate(self, features: Any) -> Embedded:
        """Read rows where they are, from any thread; change no map, hold or counter. All vectors
        are of one finished step."""
        if torch.is_grad_enabled() and not self._thread.is_elsewhere:
            self._evaluations.note(warns=self.requires_grad)
        turn = self._rows.turn(count_ids(features), beside_training=self._thread.is_elsewhere)
        with turn, torch.no_grad():
            batch = parse(features, self.features, self.device)
            layouts = [group.layout for group in self._rows.lookup_groups]
            lookups = [lookups_of(batch, layout) for layout in layouts]
            if weights_count(self._is_weighted, features):
                lookups = [
                    replace(x, weights=weights_of(features, x, layout))
                    for layout, x in zip(layouts, lookups, strict=True)
                ]
            bags = self._rows.read_vectors(lookups, aside=self._thread.is_elsewhere)
            vectors = zip(bags, lookups, strict=True)
            split = [by_feature(bags, x) for bags, x in vectors]
        return self._embedded(batch, split)

    def _embedded(self, batch: Batch, vectors: Sequence[tuple[Any, ...]]) -> Embedded:
        """`vectors` of each group, as `by_feature` returns them."""
        named: dict[str, Tensor] = {}
        for group, (_, *parts) in zip(self._rows.lookup_groups, vectors, strict=True):
            names = [feature.name for feature in group.layout.features]
            named.update(zip(names, parts, strict=True))
        whole = vectors[0][0] if len(vectors) == 1 else None
        return Embedded(self._outputs.names, named, batch, whole, outputs=self._outputs)

    def reserve(self, batch_size: int, lookups: Mapping[str, int] | None = None) -> None:
        """Announce batches of so many samples; `lookups` per sample of a feature, by default 1.

        This is optional: the first batch says it as well. Before that, `num_slots` and `memory()`
        do not know what plans will take of the budget on a GPU. Where many lookups are of the same
        rows, the first batch returns some of that to slots.
        """
        self.pipeline.reserve(batch_size, lookups)

    def reserve_like(self, features: Any) -> None:
        """Announce batches about as large as this one, which is read and not trained."""
        self.pipeline.reserve_like(features)

    # -- training ----------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all rows and their state (False), or train them again (True), from the next
        forward pass on.

        `requires_grad_` of any module that holds this one does the same. A loop over
        `parameters()` does not: there are no parameters here. Rows that `freeze_rows` names stay
        frozen in either case.
        """
        self._anchor.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def requires_grad(self) -> bool:
        """Whether rows are trained, as `requires_grad_` has set it."""
        if self._stand_ins is not None:
            return any(parameter.requires_grad for parameter in self._stand_ins.parameters)
        return self._anchor.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`. Remembers the module whose `train()` or `eval()` was called."""
        self._evaluations.mode_set_by(self, sys._getframe(1))
        if mode:
            self._evaluations.end()
        return super().train(mode)

    def accumulate(self) -> AbstractContextManager[None]:
        """`with embedding.accumulate():` joins all backward passes inside into one step."""
        return self._step.accumulate()

    @property
    def is_accumulating(self) -> bool:
        """Whether backward passes are being joined into one step."""
        return self._step.is_accumulating

    @property
    def grad_scale(self) -> Any:
        """What losses were multiplied by: a number, a tensor or the torch GradScaler itself.

        Gradients are divided by it. With a GradScaler, an update that is not finite is skipped,
        as the scaler does for the dense part.
        """
        return self._step.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        if scale is not None and self.update == "step":
            raise ValueError(
                "with update='step' a GradScaler unscales the stand-ins' gradients, and so the "
                "rows'; there is no grad_scale to set"
            )
        self._step.grad_scale = scale

    def freeze_rows(self, rows: Mapping[str, Tensor] | None) -> None:
        """From the next step on, do not update some rows and their state; None: update all.

        By table: row numbers, or a mask with a bool for each row. Rows frozen before are no longer
        frozen. An empty dict freezes no row but keeps the bits, so that a captured step need not be
        captured again when rows are frozen later. Lookups read frozen rows as before, gradients of
        other rows keep their bits, and steps are counted alike.
        """
        self._rows.freeze(rows)

    # -- pinned rows, and two engines over one store -------------------------------------

    def pin_rows(self, rows: Mapping[str, Tensor]) -> HotSet:
        """Empty fast memory and pin these rows alone, by table, hottest first, until the next call.

        No `hotrow.ahead` may be running. Rows that are not pinned pass through the remaining slots,
        which must hold a batch: `room_for_pins()` says how many rows can be pinned. If there are
        more, every table of the width keeps the same share of its rows, the first ones. Padding
        rows of tables without pooling are also pinned, since most samples read them. Returns the
        pinned rows. Several ranks call it together with the same rows, which each of them has then,
        instead of those that `replicate=` has chosen; its bytes, beside the budget, are the room.
        """
        return self.pins.pin_rows(rows)

    def room_for_pins(self) -> dict[int, int]:
        """Return how many rows `pin_rows` can pin, by width, once the size of batches is known."""
        return self.pins.room_for_pins()

    @property
    def pins_version(self) -> int:
        """A number that changes when other rows are pinned, or fewer: a larger batch than was
        expected releases pins."""
        return self.pins.version

    def train_on_host(self) -> int:
        """From the next batch on the CPU reads and updates rows, as with strategy 'hybrid'.

        No `hotrow.ahead` may be running. Rows in fast memory go to the store first, with their
        state, and stay in their slots until `train_in_slots()`. Returns their bytes. On several
        ranks, which call this together, owners alone have all rows then.
        """
        return self.pins.train_on_host()

    def train_in_slots(self) -> int:
        """After `train_on_host()`: train rows in fast memory again, from the next batch on.

        No `hotrow.ahead` may be running. All rows that have slots are read once more, with their
        state. Returns their bytes. Several ranks call this together.
        """
        return self.pins.train_in_slots()

    # -- rows in and out ---------------------------------------------------------------

    def rows(self, table: str, dst: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Iterate over a table's rows with their state, in chunks: (first row, [n, dim + state]).

        Several ranks iterate together, each to the end, and all get the chunks; with `dst`, that
        rank alone.

        Each chunk is of one finished step. If another thread trains meanwhile, later chunks may be
        of later steps; `state_dict()` reads a whole table, and all tables, between two steps.
        """
        return self.row_access.rows(table, dst)

    def weights(self, table: str, dst: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Iterate over a table's weights in chunks, (first row, [n, dim]); on ranks as `rows`."""
        return self.row_access.weights(table, dst)

    def weights_at(self, table: str, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over the weights of some rows, each listed once, in chunks: (places, [n, dim]).

        Rows are read where they are: no map, hold or counter changes.
        """
        return self.row_access.weights_at(table, rows)

    def load_weights(self, table: str, first: int, weights: Tensor) -> None:
        """Replace the weights of rows `first`, `first + 1`, ...; their state stays. All ranks call
        it, with the same weights."""
        self.row_access.load_weights(table, first, weights)

    def key_of(self, table: str) -> str:
        """Return the name of a table's weights in the state dict."""
        return f"{self._prefix}.{table}.weight"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.ranks is not None and not self.row_access.is_apart:
            refuse_state_dict()
        with self._rows.reading():  # all of one finished step
            for table in () if self.row_access.is_apart else self.tables:
                weights = self.row_access.copy_weights(table.name)
                destination[prefix + self.key_of(table.name)] = weights
        has_rows = self.tables and not self.row_access.is_apart
        if has_rows and hasattr(destination, "_metadata"):
            # Weights that no update has changed can be loaded without row state.
            destination._metadata[prefix[:-1]][_UPDATES] = max(self.optimizer.steps)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tables = () if self.row_access.is_apart else self.tables
        names = {prefix + self.key_of(table.name): table for table in tables}
        for key, table in names.items():
            shape = (table.num_embeddings, table.embedding_dim)
            if key not in state_dict:
                missing_keys.append(key)
            elif tuple(state_dict[key].shape) != shape:
                error_msgs.append(
                    f"{key}: its shape is {list(state_dict[key].shape)}, the table's {list(shape)}"
                )
            else:
                self.load_weights(table.name, 0, state_dict[key])
                if local_metadata.get(_UPDATES) != 0:
                    self.optimizer.weights_loaded()
        unexpected_keys.extend(
            key for key in state_dict if key.startswith(prefix) and key not in names
        )

    # -- what it is, and what it did ---------------------------------------------------

    @property
    def num_slots(self) -> int:
        """The number of rows that fit into fast memory, beside replicas of several ranks."""
        return self._rows.num_slots

    def memory(self) -> dict[str, int]:
        """Return the bytes of fast memory by part."""
        return self._rows.memory()

    def fills(self) -> dict[int, Any]:
        """Return how rows move on a GPU, by width: the form, why, and what was measured."""
        choices = {group.dim: group.fill_choice for group in self._rows.slot_groups}
        return {dim: choice for dim, choice in choices.items() if choice is not None}

    def traffic(self) -> Traffic:
        """Return what was looked up and moved so far, in training; waits for the device."""
        return self._rows.traffic()

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has sent to others so far: "ids" that it looks up, and
        marks of rows that are late; "rows" that others look up, "early rows" of these, while the
        batch before trained; "grads" of rows that others own; and "pins", rows that others pin."""
        return self._rows.sent_bytes()

    def chunk_seconds(self) -> float:
        """Return the host's seconds for lookups and updates of batches that passed in chunks."""
        return sum(group.counters.chunk_time.seconds for group in self.every_group)

    def remedy_for_chunks(self) -> str:
        """Return the setting that holds the batches that passed in chunks; empty if none did."""
        short = [group for group in self.every_group if group.overflow.needed_slots]
        if not short:
            return ""
        worst = max(short, key=lambda group: group.overflow.needed_slots / group.num_slots)
        return worst.overflow.remedy("them", worst.num_slots)

    def check(self) -> None:
        """Check that the maps are consistent; for tests and long runs."""
        with self.lock.writing():  # rows of a host are brought up to date first
            for group in self.every_group:
                group.check()

    def extra_repr(self) -> str:
        return (
            f"tables={[table.name for table in self.tables]}, rows={self.num_rows:,}, "
            f"slots={self.num_slots:,}, strategy={self.strategy.name!r}"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "a collection cannot be copied: its tables may fill the machine's memory, and the "
            "copy would train on its own. Build a second one, or pass weights by state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a collection cannot be pickled; save state_dict() or stream weights(table)"
        )


class EmbeddingCollection(EmbeddingBagCollection):
    """One vector per lookup, without pooling: what sequence models need."""

    _prefix = "embeddings"

    def __init__(self, tables: Sequence[EmbeddingBagConfig], *args: Any, **kwargs: Any) -> None:
        unpooled = [replace(table, pooling="none") for table in listed_tables(tables)]
        super().__init__(unpooled, *args, **kwargs)


def _leaves_of(stand_ins: StandIns | None, anchor: Tensor, group: Group) -> Sequence[Tensor]:
    """Return what makes autograd call back for the rows of a group."""
    if stand_ins is None:
        return (anchor,)
    return stand_ins.of_tables(tuple(table.name for table in group.layout.tables))


def _engine(device: torch.device) -> Engine:
    """Return the engine of strategies with slots."""
    return engine_for(device, STRATEGIES["lookahead"])


@cache
def _hear_of_freezing() -> None:
    """Let `requires_grad_` of any module reach the collections in it.

    torch's own reaches parameters only, and a collection has none, so that
    `model.requires_grad_(False)` would silently leave the rows unfrozen. Other modules are
    handled as before.
    """
    of_torch = nn.Module.requires_grad_

    @wraps(of_torch)
    def requires_grad_(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        for module in self.modules():
            if isinstance(module, EmbeddingBagCollection) and module is not self:
                module.requires_grad_(requires_grad)
        return of_torch(self, requires_grad)

    nn.Module.requires_grad_ = requires_grad_  # type: ignore[assignment, method-assign]


@cache
def _leave_out_of_graphs() -> None:
    """torch.compile runs lookups as they are. Not at import: it would double the time of that."""
    untraced = outside_graphs(EmbeddingBagCollection.forward)
    EmbeddingBagCollection.forward = untraced  # type: ignore[method-assign]
    # What torch imports here leaves a cycle of frames, up to the caller who builds the first
    # collection. It would keep that collection and its rows until the next garbage collection.
    gc.collect()
