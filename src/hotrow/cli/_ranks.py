"""Commands that train run in one process."""

from __future__ import annotations

import os

import torch

_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")  # torchrun's and mpirun's


def refuse_ranks(command: str) -> None:
    """Refuse to be one of several ranks, each of which would train the whole run."""
    ranks = max([_group_size(), *(_number(os.environ.get(name, "")) for name in _COUNTS)])
    if ranks > 1:
        raise ValueError(
            f"hotrow {command} was started as {ranks} ranks, each of which would train the whole "
            f"run by itself; training on several is not supported yet: start `hotrow {command}` "
            "once, without torchrun or mpirun"
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1


def _group_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
