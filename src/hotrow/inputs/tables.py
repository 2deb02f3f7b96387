"""Tables as the user names them, and the space of ids they form. Does not know where rows are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotrow.support.numbers import plain_fields

POOLINGS = ("sum", "mean", "none")


@dataclass(frozen=True)
class Uniform:
    """Every weight uniform between low and high."""

    low: float
    high: float


@dataclass(frozen=True)
class Normal:
    """Every weight from a normal distribution; `Normal()` is nn.EmbeddingBag's own start."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Constant:
    """Every weight the same."""

    value: float = 0.0


@dataclass(frozen=True)
class InPlace:
    """Every chunk as a function fills it: `init_fn` of a table."""

    function: Callable[[Tensor], Any]
    num_rows: int  # of the table


@dataclass(frozen=True, eq=False)
class Copied:
    """The rows of a tensor, which is let go when the table has them."""

    held: list[Tensor]

    def take(self, first: int, last: int, dim: int) -> Tensor:
        """Return some rows; zeros after the tensor was let go."""
        if not self.held:
            return torch.zeros(last - first, dim)
        return self.held[0][first:last].detach().to("cpu", torch.float32)


# A function gets the rows' numbers within their table, [n] int64, and returns [n, dim] float32.
Init = Uniform | Normal | Constant | InPlace | Copied | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """One embedding table and the features that look things up in it.

    `init` defaults to uniform in ±1/sqrt(num_embeddings), as TorchRec and the DLRM reference do.
    `padding_idx` is as in torch: its row starts at zero and is never updated. Bags skip it; without
    pooling a lookup reads the stored row.

    TorchRec's fields are understood. `weight_init_min` and `weight_init_max` are the bounds of a
    uniform start. `init_fn` fills a tensor in place, such as `torch.nn.init.normal_`. It is called
    for each chunk of the table: rows n * k to n * (k + 1), [n, embedding_dim] float32 on the CPU,
    with n = 2**20 // embedding_dim, the last chunk with fewer. torch's default generator is seeded
    by (the collection's seed, table name, chunk) for the call, and restored after it. `data_type`
    must be float32.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    padding_idx: int | None = None
    init: Init | None = None
    init_fn: Callable[[Tensor], Any] | None = None
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    data_type: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain_fields(self)
        if not isinstance(self.name, str):
            raise TypeError(
                f"a table's name must be text, not {self.name!r}; positional arguments are name, "
                "num_embeddings, embedding_dim and feature_names. TorchRec has them in another "
                "order: give them by keyword"
            )
        where = f"table {self.name!r}"
        self._check_start(where)
        if not self.name or "." in self.name:
            raise ValueError(f"{where}: a table's name must be non-empty and hold no '.'")
        for key in ("num_embeddings", "embedding_dim"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{where}: {key} must be a whole number of at least 1, not {value!r}"
                )
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise ValueError(
                f"{where}: feature_names must be a non-empty list, not {self.feature_names!r}"
            )
        # TorchRec's PoolingType is an enum whose value is "SUM" or "MEAN".
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()
        if pooling not in POOLINGS or self.pooling is None:
            raise ValueError(
                f"{where}: pooling must be one of {', '.join(POOLINGS)}, not {self.pooling!r}"
            )
        object.__setattr__(self, "pooling", pooling)
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        padding, rows = self.padding_idx, self.num_embeddings
        if padding is not None:
            if not -rows <= padding < rows:
                raise ValueError(f"{where}: padding_idx {padding} is outside its {rows:,} rows")
            object.__setattr__(self, "padding_idx", padding % rows)

    def _check_start(self, where: str) -> None:
        bounds = (self.weight_init_min, self.weight_init_max)
        given = [self.init, self.init_fn, None if bounds == (None, None) else bounds]
        if sum(part is not None for part in given) > 1:
            raise ValueError(
                f"{where}: give one of init, init_fn, and weight_init_min with weight_init_max"
            )
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(f"{where}: init_fn must be a function, not {self.init_fn!r}")
        kind = str(getattr(self.data_type, "value", self.data_type)).removeprefix("torch.").lower()
        if kind not in ("none", "fp32", "float32"):
            raise ValueError(f"{where}: rows are float32; data_type={kind!r} is not supported")

    @property
    def skipped_idx(self) -> int | None:
        """Return the row that bags skip; None without pooling."""
        return None if self.pooling == "none" else self.padding_idx

    @property
    def untrained_idx(self) -> int | None:
        """Return the row that is read and never updated; None with pooling."""
        return self.padding_idx if self.pooling == "none" else None

    @property
    def start(self) -> Init:
        """Return how rows are initialized."""
        if self.init is not None:
            return self.init
        if self.init_fn is not None:
            return InPlace(self.init_fn, self.num_embeddings)
        bound = 1 / math.sqrt(self.num_embeddings)
        low, high = self.weight_init_min, self.weight_init_max
        return Uniform(-bound if low is None else low, bound if high is None else high)


@dataclass(frozen=True)
class EmbeddingConfig(EmbeddingBagConfig):
    """A table that gives one vector per lookup, for `EmbeddingCollection`."""

    pooling: str = "none"


@dataclass(frozen=True)
class Feature:
    """A column of ids and a table that reads it."""

    name: str  # of its vectors: `key`, or "key@table" if several tables read the column
    table: int  # position among the tables of its width group
    column: int  # position among all columns of the collection
    pooling: str
    key: str  # of its ids


@dataclass(frozen=True)
class FeatureNumbers:
    """Numbers of each feature of a width group, [F] int64 each."""

    column: Tensor  # position among all features of the collection
    base: Tensor  # first id of its table
    first: Tensor  # index that its table has: 0
    last: Tensor
    skipped: Tensor | None  # index that bags skip, -1 for none; None: no feature has one


@dataclass(frozen=True)
class WidthGroup:
    """Tables of one width. They share a space of ids: id = base of the table + index."""

    dim: int
    tables: tuple[EmbeddingBagConfig, ...]
    features: tuple[Feature, ...]
    bases: tuple[int, ...] = field(init=False)  # first id of each table
    num_rows: int = field(init=False)
    keys: tuple[str, ...] = field(init=False)  # of each feature's ids
    # What `feature_numbers` has built so far.
    _numbers: dict[torch.device, FeatureNumbers] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        bases, total = [], 0
        for table in self.tables:
            bases.append(total)
            total += table.num_embeddings
        object.__setattr__(self, "bases", tuple(bases))
        object.__setattr__(self, "num_rows", total)
        object.__setattr__(self, "keys", tuple(feature.key for feature in self.features))

    def feature_numbers(self, device: torch.device) -> FeatureNumbers:
        """Return numbers of each feature as tensors on a device. They are built once."""
        if device in self._numbers:
            return self._numbers[device]
        tables = [self.tables[feature.table] for feature in self.features]
        skipped = [table.skipped_idx for table in tables]
        columns = [
            [feature.column for feature in self.features],
            [self.bases[feature.table] for feature in self.features],
            [table.num_embeddings - 1 for table in tables],
            [-1 if row is None else row for row in skipped],
        ]
        with torch.inference_mode(False):  # they serve training, too
            column, base, last, skip = torch.tensor(columns, device=device)
            zero = torch.zeros_like(base)
        skips = any(row is not None for row in skipped)
        numbers = FeatureNumbers(column, base, zero, last, skip if skips else None)
        return self._numbers.setdefault(device, numbers)

    @property
    def skipped(self) -> list[int]:
        """Return the ids of padding rows that bags skip."""
        return self._ids_of([table.skipped_idx for table in self.tables])

    @property
    def untrained(self) -> list[int]:
        """Return the ids of padding rows that are read and never updated."""
        return self._ids_of([table.untrained_idx for table in self.tables])

    def _ids_of(self, rows: Sequence[int | None]) -> list[int]:
        pairs = zip(self.bases, rows, strict=True)
        return [base + row for base, row in pairs if row is not None]

    def table_of(self, ids: Tensor) -> Tensor:
        """Return the position of each id's table."""
        inner = torch.tensor(self.bases[1:], dtype=torch.int64, device=ids.device)
        return torch.bucketize(ids, inner, right=True)

    def describe(self, row_id: int) -> str:
        """Return an id in the user's terms."""
        position = int(self.table_of(torch.tensor(row_id)))
        return f"row {row_id - self.bases[position]:,} of table {self.tables[position].name!r}"


def group_by_width(tables: Sequence[EmbeddingBagConfig]) -> list[WidthGroup]:
    """Group tables by width, in the order they were given."""
    _refuse_repeats("table", [table.name for table in tables])
    for table in tables:
        _refuse_repeats("feature", table.feature_names)
    columns = {key: i for i, key in enumerate(feature_order(tables))}
    names = output_names(tables)
    groups = []
    for dim in dict.fromkeys(table.embedding_dim for table in tables):
        members = tuple(table for table in tables if table.embedding_dim == dim)
        features = tuple(
            Feature(names[table.name, key], position, columns[key], table.pooling, key)
            for position, table in enumerate(members)
            for key in table.feature_names
        )
        groups.append(WidthGroup(dim, members, features))
    return groups


def feature_order(tables: Sequence[EmbeddingBagConfig]) -> tuple[str, ...]:
    """Return the order of columns in a dense input: a feature of several tables has one."""
    if not tables:
        raise ValueError("a collection needs at least one table")
    return tuple(dict.fromkeys(key for table in tables for key in table.feature_names))


def output_names(tables: Sequence[EmbeddingBagConfig]) -> dict[tuple[str, str], str]:
    """Return the names of vectors in their order, by table and feature.

    They are the features' own, or as in TorchRec "feature@table" where several tables read it.
    """
    every = [key for table in tables for key in table.feature_names]
    names = {
        (table.name, key): key if every.count(key) == 1 else f"{key}@{table.name}"
        for table in tables
        for key in table.feature_names
    }
    _refuse_repeats("feature", list(names.values()))
    return names


@dataclass(frozen=True)
class Outputs:
    """The vectors that a lookup returns."""

    names: tuple[str, ...]
    keys: dict[str, str]  # by name: the feature whose ids were looked up
    unpooled: frozenset[str]  # names with one vector per lookup


def outputs_of(tables: Sequence[EmbeddingBagConfig]) -> Outputs:
    names = output_names(tables)
    unpooled = {table.name for table in tables if table.pooling == "none"}
    return Outputs(
        tuple(names.values()),
        {name: key for (_, key), name in names.items()},
        frozenset(name for (table, _), name in names.items() if table in unpooled),
    )


def refuse_shared_features(tables: Sequence[EmbeddingBagConfig], what: str) -> None:
    """Raise if a feature feeds several tables."""
    for table, key in output_names(tables):
        readers = [other.name for other in tables if key in other.feature_names]
        if len(readers) > 1:
            raise ValueError(
                f"{what} need features of one table each, and {key!r} feeds {', '.join(readers)}; "
                f"give table {table!r} a feature of its own with the same ids"
            )


def _refuse_repeats(kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name!r} is named twice; {kind} names must be unique")
        seen.add(name)
