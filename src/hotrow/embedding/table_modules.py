"""`Embedding` and `EmbeddingBag`: torch's modules, with rows that may exceed fast memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotrow.embedding.arguments import refuse_state_dict
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.module_tables import ModuleTables
from hotrow.embedding.torch_surface import OutsideGraphs, refuse_transforms
from hotrow.embedding.whole_table import Source, WholeTable
from hotrow.embedding.wrappers import protect_stand_ins
from hotrow.inputs.calls import Call
from hotrow.inputs.jagged_tensor import check_integers
from hotrow.inputs.tables import EmbeddingBagConfig, Init, Normal

_NOT_REPLACED = (
    "the weight of this module is not one tensor that could be replaced: use "
    "load_weights(0, weights), or hotrow.revert(model) to tie it to another module"
)
_POOLINGS = {"sum": "sum", "mean": "mean", "max": "sum"}  # of tables, by a module's mode


class TableModule(OutsideGraphs):
    """What both modules have: a table among those of a collection, perhaps a shared one."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    _tables: ModuleTables
    _table: str

    def use_tables(self, tables: ModuleTables, table: str) -> None:
        """Look up rows of a table from now on."""
        _leave_out_of_graphs()
        protect_stand_ins(self)
        self._tables, self._table = tables, table
        self._parameters["weight"] = tables.stand_in(table)
        tables.serve(self)

    def forget_tables(self) -> None:
        """Look up rows here no more."""
        del self._tables, self._table

    @property
    def collection(self) -> EmbeddingBagCollection:
        """The collection of the rows, which other modules may share."""
        return self._tables.collection

    @property
    def tables(self) -> ModuleTables:
        """What serves this module, and others that share its budget."""
        return self._tables

    @property
    def table(self) -> str:
        """The name of the table in the collection."""
        return self._table

    @property
    def weight(self) -> Tensor:
        """The whole table as one tensor, read when it is used; differentiable, if that fits fast
        memory.

        What is read is a copy: to change rows use `init=` or `load_weights()`.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._whole()  # a graph has no place for what is read when it is used
        tables, table = self._tables, self._table
        self._refuse_other_weight()
        source = Source(partial(tables.whole, table), self._functional, tables.stand_in(table))
        return WholeTable.of((self.num_embeddings, self.embedding_dim), tables.device, source)

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise AttributeError(_NOT_REPLACED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":  # torch does not ask the property when it is given a parameter
            raise AttributeError(_NOT_REPLACED)
        super().register_parameter(name, param)

    def _whole(self) -> Tensor:
        """Return all rows now."""
        self._refuse_other_weight()
        return self._tables.whole(self._table)

    def _refuse_other_weight(self) -> None:
        """Raise if something else was put in the place of the stand-in, which lookups ignore."""
        if self._parameters.get("weight") is not self._tables.stand_in(self._table):
            raise RuntimeError(
                f"the weight of module {self._table!r} was replaced by another tensor, as "
                "torch.func.functional_call does, but lookups read rows, which are not in it. Use "
                "load_weights(0, weights), or hotrow.revert(model)"
            )

    def weights(self, dst: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the weights in chunks: (first row, [n, dim]). Several ranks iterate
        together, each to the end; with `dst`, that rank alone gets the chunks."""
        return self.collection.weights(self._table, dst)

    def load_weights(self, first: int, weights: Tensor) -> None:
        """Replace the weights of rows `first`, `first + 1`, ...; their state stays."""
        self._tables.load(self._table, first, weights)

    def reset_parameters(self) -> NoReturn:
        raise RuntimeError("rows start by init=; load_weights() replaces them")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._tables.follow_mode()
        return self

    def _plain_lookup(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Return one vector per id; that of `padding_idx` gets no gradient."""
        # No view for autograd: a change in place would go past the hook.
        shape = (*ids.shape, self.embedding_dim)
        vectors: Tensor = torch.ops.aten._unsafe_view(self._look_up(ids), shape)
        if padding_idx is not None and vectors.requires_grad:
            # The stored row is read; only its gradient is dropped, and only that of lookups.
            is_padding = (ids == padding_idx).unsqueeze(-1)
            vectors.register_hook(lambda grad: grad.masked_fill(is_padding, 0.0))
        return vectors

    def _functional(self, ids: Tensor, padding_idx: int | None) -> Tensor | None:
        """Return what `functional.embedding` does of the weight; None: it needs the whole table."""
        if isinstance(self, nn.EmbeddingBag) and self.padding_idx is not None:
            return None  # lookups skip that row
        if padding_idx is not None:
            padding_idx %= self.num_embeddings
        return self._plain_lookup(ids, padding_idx)

    def _look_up(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        *,
        has_end: bool = False,
        by_row: bool = False,
    ) -> Tensor:
        self._refuse_other_weight()
        check_integers(ids, "ids")
        if ids.dtype not in (torch.int64, torch.int32):
            ids = ids.long()
        call = Call(self._table, ids, offsets, has_end, by_row)
        return self._tables.look_up(call, trains=self.training)

    # -- what torch does to modules ----------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move fast memory if the device changes; rows stay float32."""
        changed = fn(torch.empty(0, device=self._tables.device))
        if changed.dtype != torch.float32:
            raise RuntimeError(
                f"rows are float32 and cannot become {changed.dtype}; for arithmetic in half "
                "precision use torch.autocast, or change the other modules' types alone"
            )
        with self._without_weight():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tables.move_to(changed.device)
        return self

    @contextmanager
    def _without_weight(self) -> Iterator[None]:
        """Inside, the parameters are those that a subclass has added."""
        every = self._parameters
        others = {name: x for name, x in every.items() if name != "weight"}
        try:
            vars(self)["_parameters"] = others
            yield
        finally:
            every.update(others)
            vars(self)["_parameters"] = every

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        key = prefix + "weight"
        if not self._tables.is_apart:
            if self._tables.is_shared:
                refuse_state_dict("weights()")
            destination[key] = self._tables.copy(self._table)
        with self._without_weight():
            super()._save_to_state_dict(destination, prefix, keep_vars)

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
        key, shape = prefix + "weight", (self.num_embeddings, self.embedding_dim)
        with self._without_weight():
            super()._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        if key in unexpected_keys and not self._tables.is_apart:
            unexpected_keys.remove(key)
        if self._tables.is_apart:
            return
        if key not in state_dict:
            missing_keys.append(key)
        elif tuple(state_dict[key].shape) != shape:
            given = list(state_dict[key].shape)
            error_msgs.append(f"{key}: its shape is {given}, the table's {list(shape)}")
        else:
            self.load_weights(0, state_dict[key])

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "a module with hotrow's rows cannot be copied: its tables may fill the machine's "
            "memory. Copy the plain model before hotrow.convert(), or pass weights by state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a module with hotrow's rows cannot be pickled; save state_dict(), or make it plain "
            "again with hotrow.revert(model)"
        )


@cache
def _leave_out_of_graphs() -> None:
    """torch.compile runs lookups as they are, and reads of whole tables. Not at import: it would
    double the time of that."""
    for kind in (Embedding, EmbeddingBag):
        kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[method-assign]
    TableModule._whole = torch.compiler.disable(TableModule._whole)  # type: ignore[method-assign]


def refuse_unsupported(max_norm: Any, scale_grad_by_freq: bool, dtype: Any) -> None:
    """Raise for arguments of torch's modules that rows have no rule for."""
    reason = why_unsupported(max_norm, scale_grad_by_freq, dtype)
    if reason is not None:
        raise ValueError(reason)


def why_unsupported(max_norm: Any, scale_grad_by_freq: bool, dtype: Any) -> str | None:
    """Return why arguments of torch's modules cannot be met; None: they can."""
    if max_norm is not None:
        return "max_norm changes rows when they are looked up, which hotrow does not do"
    if scale_grad_by_freq:
        return "scale_grad_by_freq is not supported; divide the loss of frequent ids instead"
    if dtype not in (None, torch.float32):
        return f"rows are float32, not {dtype}"
    return None


class Embedding(TableModule, nn.Embedding):
    """`torch.nn.Embedding` with `budget` bytes of fast memory instead of all rows.

    Constructor and calls are torch's, and so are the keys of its state dict. Options after them are
    those of `hotrow.EmbeddingBagCollection`; `init` may be a function of row numbers. Rows are
    updated when a torch optimizer of `parameters()` steps.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        budget: Any = "10%",
        init: Init | None = None,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        refuse_unsupported(max_norm, scale_grad_by_freq, dtype)
        table = config_of(
            "embedding", num_embeddings, embedding_dim, "none", padding_idx, init or Normal()
        )
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = None, norm_type
        self.scale_grad_by_freq, self.sparse = False, sparse
        tables = _tables_of(table, _weight, device, budget, options, self.padding_idx)
        self.use_tables(tables, table.name)
        self.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, **options: Any
    ) -> Self:
        """Return a module with these weights, [rows, dim], frozen if `freeze`."""
        rows, dim = embeddings.shape
        return cls(rows, dim, _weight=embeddings, _freeze=freeze, **options)

    def forward(self, input: Tensor) -> Tensor:
        refuse_transforms(input, trains=torch.is_grad_enabled())
        return self._plain_lookup(input, self.padding_idx)


class EmbeddingBag(TableModule, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` with `budget` bytes of fast memory instead of all rows.

    As `hotrow.Embedding`. Bags of `mode="max"`, and those with per-sample weights, are pooled by
    torch from one vector per id.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        budget: Any = "10%",
        init: Init | None = None,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        refuse_unsupported(max_norm, scale_grad_by_freq, dtype)
        if mode not in _POOLINGS:
            raise ValueError(f"mode must be one of {', '.join(_POOLINGS)}, not {mode!r}")
        table = config_of(
            "embedding", num_embeddings, embedding_dim, mode, padding_idx, init or Normal()
        )
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = None, norm_type
        self.scale_grad_by_freq, self.sparse, self.mode = False, sparse, mode
        self.include_last_offset = include_last_offset
        self.use_tables(_tables_of(table, _weight, device, budget, options), table.name)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, **options: Any
    ) -> Self:
        """Return a module with these weights, [rows, dim], frozen if `freeze`."""
        rows, dim = embeddings.shape
        return cls(rows, dim, _weight=embeddings, **options).requires_grad_(not freeze)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        refuse_transforms(input, trains=torch.is_grad_enabled())
        self._check_form(input, offsets, per_sample_weights)
        if self.mode != "max" and per_sample_weights is None:
            if offsets is None:
                return self._look_up(input, by_row=True)
            return self._look_up(input, offsets, has_end=self.include_last_offset)
        if offsets is None:
            width = input.shape[1]
            offsets = torch.arange(len(input) + 1, device=input.device) * width
        elif not self.include_last_offset:
            offsets = functional.pad(offsets, (0, 1), value=input.numel())
        ids = input.reshape(-1)
        vectors = self._look_up(ids)
        is_max = self.mode == "max"
        if is_max and self.padding_idx is not None:
            is_padding = (ids == self.padding_idx).unsqueeze(1)
            vectors = vectors.masked_fill(is_padding, -torch.inf)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
        bags = functional.embedding_bag(
            torch.arange(len(ids), device=ids.device),
            vectors,
            offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=True,
        )
        return bags.masked_fill(bags == -torch.inf, 0.0) if is_max else bags

    def _check_form(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> None:
        if input.dim() == 2 and offsets is not None:
            raise ValueError("with ids [B, n] every row is a bag, and offsets must be None")
        if input.dim() == 1 and offsets is None:
            raise ValueError("with ids of one dimension offsets say where bags begin")
        if input.dim() not in (1, 2):
            raise ValueError(f"ids must have one or two dimensions, got {list(input.shape)}")
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(
                    f"per_sample_weights work with mode='sum' only, and this one has {self.mode!r}"
                )
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights has shape {list(per_sample_weights.shape)}, and ids "
                    f"{list(input.shape)}: there must be one for each id"
                )


def config_of(
    name: str, rows: int, dim: int, mode: str, padding_idx: int | None, init: Init | None
) -> EmbeddingBagConfig:
    """Return the table of a module; `mode` is a bag's, or "none"."""
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx {padding_idx} is outside the {rows:,} rows")
    # A module without bags reads the padding row, and may train it through `weight`.
    skipped = None if mode == "none" else padding_idx
    return EmbeddingBagConfig(name, rows, dim, [name], _POOLINGS.get(mode, "none"), skipped, init)


def _tables_of(
    table: EmbeddingBagConfig,
    weight: Tensor | None,
    device: Any,
    budget: Any,
    options: Any,
    zero_row: int | None = None,
) -> ModuleTables:
    weights, zero_rows = {}, {} if zero_row is None else {table.name: zero_row}
    if weight is not None:
        shape = [table.num_embeddings, table.embedding_dim]
        if list(weight.shape) != shape:
            raise ValueError(f"weights have shape {list(weight.shape)}, and the table {shape}")
        weights[table.name] = weight.detach().clone()
    device = torch.get_default_device() if device is None else device
    return ModuleTables(
        [table], weights, device=device, budget=budget, zero_rows=zero_rows, **options
    )
