"""Models inside torch's wrappers: names without those of wrappers, and tensors cut among ranks.

DistributedDataParallel adds `module.` to names, and torch.compile `_orig_mod.`. FSDP2
(`fully_shard`) makes DTensors of parameters, of which each rank has a part. A checkpoint has plain
names and whole tensors, so it does not depend on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hotrow.embedding.in_models import part_of_wrapper


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return what takes the parts of wrappers out of a name of this model."""
    wrappers = [(name, part_of_wrapper(module)) for name, module in model.named_modules()]
    # The inner ones first, while names still have the parts of the outer ones.
    parts = [
        (f"{name}.{part}.".lstrip("."), f"{name}.".lstrip("."))
        for name, part in sorted(wrappers, key=lambda x: len(x[0]), reverse=True)
        if part is not None
    ]

    def plain(name: str) -> str:
        for prefix, without in parts:
            if f"{name}.".startswith(prefix):
                name = without + name[len(prefix) :]
        return name.rstrip(".")

    return plain


def whole_tensors(value: Any) -> Any:
    """Return a tree of values whose tensors are whole. All ranks call this together."""
    if _is_cut(value):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: whole_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole_tensors, value))
    return value


def cut_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor, if `like`, of the same shape, is such a part."""
    if not _is_cut(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Here: few programs cut tensors.
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _is_cut(tensor: object) -> bool:
    return hasattr(tensor, "full_tensor")
