"""The ranks that train one run: how they start, agree, fail and end. Knows no rows, no screens."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hotrow.checkpoint.together import Together
from hotrow.distributed.ranks import Channel, RankError, Ranks, first_sentence
from hotrow.support.version import __version__

TORCHRUN = "torchrun --nproc-per-node"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
_SECONDS_TO_MEET = 900
_FAILED = "failed"  # a key of the store: how many ranks have failed
# Set by `hotrow train --ranks`: the folder in which ranks leave how they have ended.
REPORTS = "HOTROW_RANK_REPORTS"


@dataclass(frozen=True)
class Place:
    """Where a process stands among ranks, as torchrun's variables say."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of this machine
    local_size: int = 1
    restarts: int = 0  # of all ranks, after one of them had failed
    launch: str | None = None  # what all restarts have in common
    is_started: bool = False  # by torchrun, perhaps as the only one
    is_of_option: bool = False  # started by --ranks


def find_place(variables: Mapping[str, str] = os.environ) -> Place:
    """Return where this process stands; raise if it is a rank that torchrun has not started."""
    size = _number(variables, "WORLD_SIZE", 1)
    for name, launcher in _OF_OTHERS.items():
        count = _number(variables, name, 1)
        if count > 1 and "RANK" not in variables:
            raise ValueError(
                f"{launcher} has started {count} processes, each of which would train the whole "
                f"run: start ranks by `{TORCHRUN} {count} -m hotrow train ...`, or by "
                f"`hotrow train ... --ranks {count}`"
            )
    if size > 1 and (missing := [name for name in _NEEDED if name not in variables]):
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} {are} not set: start ranks by "
            f"`{TORCHRUN} {size} -m hotrow train ...`, which sets them, or by `hotrow train ... "
            f"--ranks {size}`"
        )
    rank = _number(variables, "RANK", 0)
    return Place(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", rank),
        local_size=_number(variables, "LOCAL_WORLD_SIZE", size),
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
        launch=_launch(variables),
        is_started="RANK" in variables and "WORLD_SIZE" in variables,
        is_of_option=REPORTS in variables,
    )


def _has_store_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else default


def _launch(variables: Mapping[str, str]) -> str | None:
    """Return what names a launch of torchrun. Without a name of its own, its process does. Another
    launch may have the same name: see `_name_of_launch`."""
    name = variables.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()}:{os.getppid()}" if name == "none" else name


def _agreed_name(store: Any, rank: int, size: int) -> str:
    """Return a name that the ranks of this start have in common, and those before a restart had
    not. The first rank draws it, and answers the others until each has it."""
    own = token_hex(8)
    deadline = time.monotonic() + _SECONDS_TO_MEET
    if rank:
        store.set(f"hotrow/asks/{rank}", own)
        store.wait([f"hotrow/answer/{own}"], timedelta(seconds=_SECONDS_TO_MEET))
        name = str(store.get(f"hotrow/answer/{own}").decode())
        store.set(f"hotrow/has/{name}/{rank}", "")
        return name
    waiting = set(range(1, size))
    while waiting := {x for x in waiting if not store.check([f"hotrow/has/{own}/{x}"])}:
        for other in waiting:
            if store.check([f"hotrow/asks/{other}"]):  # perhaps of before a restart
                store.set(f"hotrow/answer/{store.get(f'hotrow/asks/{other}').decode()}", own)
        if time.monotonic() > deadline:
            raise RankError(f"rank {min(waiting)} did not start within {_SECONDS_TO_MEET:,} s")
        time.sleep(0.02)
    return own


def _name_of_launch(store: Any, given: str) -> str:
    """Return a name that all restarts of one launch have in common, and no other launch has. The
    first attempt puts it into the store, which stays when torchrun restarts ranks."""
    drawn = store.compare_set("hotrow/launch", "", f"{given}/{token_hex(8)}")
    return str(drawn.decode())


class RunRanks(Together):
    """The ranks that train one run, or this process alone.

    `connect` comes first: from then on one failing rank is known to be the first. `open` opens the
    process group, unless the program has done so.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()
        self.rank, self.size = self.place.rank, self.place.size
        self._store: Any = None
        self._ranks: Ranks | None = None
        self._is_owner = False  # of the process group
        self._failed_first: bool | None = None
        self.restarts, self.launch = self.place.restarts, self.place.launch
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        elif self.size > 1:
            self._is_owner = True

    def connect(self) -> None:
        """Connect to the store of torchrun's ranks; so does a single one that may be restarted."""
        is_restarted = self.launch is not None and _has_store_of_torchrun()
        if not self._is_owner and not (self.size == 1 and is_restarted):
            return
        with self._meeting():
            store, _, _ = next(iter(rendezvous("env://")))
            # It is the same one after a restart, and has what ranks said before.
            name = _agreed_name(store, self.rank, self.size)
            self._store = dist.distributed_c10d.PrefixStore(f"hotrow/{name}", store)
            if self.launch is not None:
                self.launch = _name_of_launch(store, self.launch)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Inside, errors of torch are of ranks that do not come."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"rank {self.rank} of {self.size} cannot reach the others: check that all are "
                "started, and that MASTER_ADDR, or the endpoint of torchrun, can be reached from "
                f"each machine. torch says: {first_sentence(error)}"
            ) from error

    def open(self, device: str) -> None:
        """Open the process group; every rank gets its GPU. NCCL is used if each has its own."""
        if self.size == 1:
            return
        if self._is_owner:
            has_own = self._take_gpu(device)
            with self._meeting():
                owners = self._compare("gpu", str(int(has_own)))
            backend = "nccl" if all(x == "1" for x in owners) else "gloo"
            with self._meeting():
                dist.init_process_group(
                    backend, store=self._store, rank=self.rank, world_size=self.size
                )
        world = dist.group.WORLD
        assert world is not None
        # Groups of their own: rows of the run cross in others.
        self._ranks, self.is_alone = Ranks(world, torch.device("cpu")), False
        # Launchers of other machines may not count a restart.
        self.restarts = max(int(x) for x in self.do(lambda: str(self.place.restarts)))

    def _take_gpu(self, device: str) -> bool:
        """Make one GPU the current one; return whether no other rank uses it."""
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return False
        count, place = torch.cuda.device_count(), self.place
        if device != "cuda":
            return place.local_size == 1
        torch.cuda.set_device(place.local_rank % count)
        return count >= place.local_size

    def _compare(self, what: str, text: str) -> list[str]:
        """Return what ranks say before there is a process group."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], text)
        return [self._store.get(key).decode() for key in keys]

    def _texts(self, text: str, channel: Channel | None) -> list[str]:
        assert self._ranks is not None
        return self._ranks.texts(text, channel or self._ranks.training)

    def from_first(self, work: Callable[[], str]) -> str:
        """Return what the first rank finds; the others do not look."""
        return self.do(lambda: work() if self.is_first else "")[0]

    def check_versions(self) -> None:
        """Raise on all ranks if they have different versions."""
        every = self.do(lambda: f"hotrow {__version__} and torch {torch.__version__}")
        for rank, version in enumerate(every):
            if version != every[0]:
                raise RankError(
                    f"ranks have different versions: rank 0 has {every[0]}, and rank {rank} has "
                    f"{version}; install the same on all machines"
                )

    def facts(self) -> dict[str, Any]:
        """Return what records say of the ranks; of one process nothing."""
        facts: dict[str, Any] = {} if self.size == 1 else {"ranks": self.size}
        return facts if self.launch is None else facts | {"launch": self.launch}

    @property
    def option(self) -> str:
        """The words with which `hotrow train` starts as many ranks; empty: something else did."""
        return f" --ranks {self.size}" if self.place.is_of_option else ""

    @property
    def failed_first(self) -> bool:
        """Whether no other rank has failed before this one asks. It has to say why it failed."""
        if self._failed_first is None:
            self._failed_first = self._store is None or self._is_first_in_store()
        return self._failed_first

    def _is_first_in_store(self) -> bool:
        try:
            return bool(self._store.add(_FAILED, 1) == 1)
        except RuntimeError:  # it was that of rank 0, which has ended
            return self.rank == 1

    def described(self, error: BaseException) -> str:
        """Return the text of an error with the rank that raised it, where that matters: settings
        are the same for all ranks."""
        text = str(error) or type(error).__name__
        is_named = self.is_alone or self.failed_alike or text.startswith(("rank ", "ranks "))
        return text if is_named else f"rank {self.rank}: {text}"

    def close(self, *, has_failed: bool = False) -> None:
        """Wait until all ranks have come here, unless one has failed; destroy the process group."""
        try:
            if not (has_failed or self.is_alone):
                self.do()
        finally:
            self._ranks, self.is_alone = None, True
            if self._is_owner and dist.is_initialized():
                dist.destroy_process_group()
