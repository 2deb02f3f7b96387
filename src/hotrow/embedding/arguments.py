"""Checks of what users give to a collection. Knows no rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from hotrow.distributed.ranks import RankError, Ranks
from hotrow.engine.profile import Profile
from hotrow.inputs.tables import Copied, EmbeddingBagConfig
from hotrow.kernels.rules import RowRule

IDLE = (None, "decay", "frozen")
UPDATES = ("backward", "step")
ON_NONFINITE = ("propagate", "error", "skip")
# How a GPU moves rows: it reads and writes them itself; leaving rows take the copy engine and the
# CPU; or rows take these in both directions. "auto" measures.
FILLS = ("auto", "zero-copy", "bulk", "staged")
OLDEST_CAPABILITY = (8, 0)


def listed_tables(tables: Any) -> tuple[EmbeddingBagConfig, ...]:
    """Return the tables as a tuple; raise if they are not a list of table configurations."""
    listed = tuple(tables) if isinstance(tables, Iterable) else (tables,)
    wrong = [table for table in listed if not isinstance(table, EmbeddingBagConfig)]
    if wrong or not isinstance(tables, Iterable):
        kind = type(wrong[0] if wrong else tables).__name__
        raise TypeError(
            "tables must be a list of hotrow.EmbeddingBagConfig, such as "
            f"tables=[hotrow.EmbeddingBagConfig(...)]; got {'' if wrong else 'one '}{kind}"
        )
    return listed


def check_arguments(
    seed: object,
    optimizer: object,
    on_nonfinite: str,
    output_dtype: torch.dtype,
    fill: str,
    update: str,
    idle: object,
) -> None:
    if output_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"output_dtype must be torch.float32 or torch.bfloat16, not {output_dtype}"
        )
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
    check_idle(idle)
    if not isinstance(optimizer, RowRule) and (update != "step" or optimizer is not None):
        is_class = isinstance(optimizer, type)
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(
            "optimizer must be one of hotrow's, such as hotrow.Adam(lr=0.001); got "
            f"{'the class ' if is_class else ''}{kind.__module__}.{kind.__qualname__}"
        )
    for name, value, allowed in (
        ("on_nonfinite", on_nonfinite, ON_NONFINITE),
        ("fill", fill, FILLS),
        ("update", update, UPDATES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def check_idle(idle: object) -> None:
    if idle not in IDLE:
        raise ValueError(f"idle must be 'decay', 'frozen' or None, not {idle!r}")


def idle_in_modules(idle: str | None, device: str | torch.device) -> str | None:
    """Return what happens to rows of modules that no batch looks up: by default what torch does to
    them, where that can be."""
    return "decay" if idle is None and torch.device(device).type == "cpu" else idle


def drawn_seed() -> int:
    """Draw a seed from torch's default generator, as nn.Embedding draws its weights."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def first_seed(ranks: Ranks | None, seed: int) -> int:
    """Return the seed that the first of several ranks has drawn."""
    return seed if ranks is None else int(ranks.compared(str(seed))[0])


def check_replicas(update: str, replicate: str | int) -> None:
    """Raise if rows that every rank has cannot be updated as the others are."""
    if replicate and update == "step":
        raise ValueError(
            "replicate= needs update='backward': with update='step' torch sees the norms of rows "
            "that have one owner each"
        )


def check_alike(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Raise on all ranks if they build different collections."""
    mine = {name: described(value) for name, value in facts.items()}
    every = [json.loads(text) for text in ranks.compared(json.dumps(mine))]
    for rank, other in enumerate(every):
        for name in mine:
            if other[name] != every[0][name]:
                raise RankError(
                    f"ranks build different collections: {name} is {every[0][name]} on rank 0 and "
                    f"{other[name]} on rank {rank}"
                )


def described(value: object) -> str:
    """Return a text that is the same in every process, without addresses."""
    if isinstance(value, EmbeddingBagConfig):
        parts = [f"{x.name}={described(getattr(value, x.name))}" for x in fields(value) if x.repr]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, Copied):
        return f"weights with checksum {', '.join(_checksum(x) for x in value.held)}"
    if isinstance(value, partial):
        return f"partial of {described(value.func)}"
    if callable(value) and not is_dataclass(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    return str(value)


def describe_profile(profile: Profile | None) -> str:
    """Return a text that differs between profiles: they choose the rows that every rank has."""
    parts = []
    for name, counts in sorted((profile or {}).items()):
        both = (counts,) if isinstance(counts, Tensor) else counts
        sums = [_checksum(x.float().view(-1, 1)) for x in both]
        parts.append(f"{name} with checksum {', '.join(sums)}")
    return "; ".join(parts) or "none"


def _checksum(weights: Tensor) -> str:
    """Return a number that differs for other weights; fast, as tables are large."""
    words = weights.detach().to("cpu", torch.float32).contiguous().view(torch.int32)
    rows = words.sum(1, dtype=torch.int64)
    return f"{int((rows * (torch.arange(len(rows)) % 1021 + 1)).sum()) % 2**64:016x}"


def read_device(device: str | torch.device) -> torch.device:
    """Return a device by its name; torch's own error has no remedy and takes several lines."""
    try:
        return torch.device(device)
    except RuntimeError:
        hint = "did you mean 'cuda'?" if str(device).startswith("gpu") else "use 'cuda' or 'cpu'"
        raise ValueError(f"device {device!r} is not known to torch; {hint}") from None


def usable_device(device: str | torch.device) -> torch.device:
    """Return the device with its number; raise if rows cannot live there."""
    device = read_device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device '{device}' is not supported; use 'cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device '{device}': torch {torch.__version__} sees no CUDA device; `hotrow doctor` "
            "says what this machine has. device='cpu' works anywhere"
        )
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}': there are {torch.cuda.device_count()} CUDA devices, from 0 on"
        )
    capability = torch.cuda.get_device_capability(number)
    if capability < OLDEST_CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(number)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or later. device='cpu' works anywhere"
        )
    return torch.device("cuda", number)


def row_numbers(table: str, rows: Tensor, size: int) -> Tensor:
    """Return row numbers, from numbers or a mask; raise if a table of `size` rows lacks one."""
    if rows.dtype == torch.bool and rows.shape == (size,):
        return rows.nonzero().squeeze(1)
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"table {table!r}: rows must be row numbers (one dimension, int64) or a mask with a "
            f"bool for each of its {size:,} rows; got {rows.dtype} of shape {list(rows.shape)}"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        bad = rows[(rows < 0) | (rows >= size)][0]
        raise ValueError(f"table {table!r} has rows 0 to {size - 1:,}, and no row {int(bad):,}")
    return rows.long()


def refuse_state_dict(weights: str = "weights(table)") -> NoReturn:
    """Refuse to gather the rows of all ranks on each of them."""
    raise RuntimeError(
        "state_dict() would need the rows of all ranks on each of them: use "
        "hotrow.save_checkpoint, which every rank calls, or iterate on every rank over "
        f"{weights[:-1]}{', ' * (not weights.endswith('()'))}dst=0)"
    )


def refuse_replicas(is_meant: bool = False) -> None:
    """Raise in a process group of several ranks, unless they exchange rows, or each rank is meant
    to have rows of its own."""
    distributed = torch.distributed
    if not is_meant and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"a process group of {size} ranks is running, and this collection was built "
                "before, so each rank would train a copy of its own and they would silently "
                "diverge: call torch.distributed.init_process_group() first, and build it then"
            )
