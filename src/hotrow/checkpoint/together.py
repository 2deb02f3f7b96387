"""Ranks that save or load one model together. What fails on one of them raises on all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import nn

from hotrow.checkpoint.parts import collections_of
from hotrow.distributed.ranks import Channel, RankError, Ranks
from hotrow.support.files import make_durable

# What others raise where one rank did; of these types, callers handle some.
_KINDS = (OSError, ValueError, TypeError)
_TOKEN = "seen-by-all-ranks"
# A network file system may show a new file late; a folder of another machine never shows it.
SECONDS_TO_SEE = 10.0


class Together:
    """Ranks that do their parts of one thing, or this process alone.

    All of them call the same methods in the same order. A rank that waits for another one, which
    has died, gets a RankError.
    """

    rank, size, is_alone = 0, 1, True
    failed_alike = False  # whether the newest failure is the same on all ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def do(self, work: Callable[[], str] = str, channel: Channel | None = None) -> list[str]:
        """Let every rank do its part; return what the parts returned, by rank.

        Raises on all ranks if one part does, when all of them have ended. `channel`: of the thread
        that calls this; by default that of training.
        """
        return self._do(work, lambda text: self._texts(text, channel))

    def _texts(self, text: str, channel: Channel | None) -> list[str]:
        """Return what each rank says."""
        raise NotImplementedError

    def _do(self, work: Callable[[], str], say: Callable[[str], list[str]]) -> list[str]:
        if self.is_alone:
            return [work()]
        error, text = None, ""
        try:
            text = work()
        except BaseException as raised:  # Ctrl-C, too: others wait for this rank
            error, text = raised, str(raised) or type(raised).__name__
        try:
            told = [json.loads(x) for x in say(json.dumps([_kind(error), text]))]
        except RankError:
            if error is None:
                raise
            raise error from None  # the first fault says why
        self.failed_alike = error is not None and all(x == told[0] for x in told)
        if error is not None:
            raise error
        for rank, (kind, why) in enumerate(told):
            if kind is not None:
                raise _error(kind, f"rank {rank} of {self.size}: {why}")
        return [said for _, said in told]

    def check_equal(self, what: str, facts: list[Any]) -> None:
        """Raise if ranks said different things, of which each is a table by name."""
        for rank, other in enumerate(facts):
            for name, value in facts[0].items():
                if other.get(name) != value:
                    raise RankError(
                        f"ranks call {what} with different arguments: {name} is {value} on rank 0 "
                        f"and {other.get(name)} on rank {rank}"
                    )

    def check_folder(self, folder: Path) -> None:
        """Raise on all ranks if one of them does not see a folder that rank 0 has made."""
        if self.is_alone:
            return
        path = folder / f"{_TOKEN}-{token_hex(8)}"

        def write() -> str:
            if not self.is_first:
                return ""
            path.write_text(path.name)
            make_durable(folder)  # so that servers of network file systems have it
            return path.name

        name = self.do(write)[0]

        def read() -> str:
            end = time.monotonic() + SECONDS_TO_SEE
            while not self.is_first and not _holds(folder / name, name):
                if time.monotonic() > end:
                    raise OSError(
                        f"{folder.absolute()} is another folder than on rank 0, or cannot be read: "
                        "all ranks must see the folder of checkpoints and models; put it on a file "
                        "system that they share"
                    )
                time.sleep(0.05)
            return ""

        try:
            self.do(read)
        finally:
            if self.is_first:
                path.unlink(missing_ok=True)


class Team(Together):
    """The ranks that share a model's rows, or this process alone."""

    def __init__(self, model: nn.Module) -> None:
        collections = list(collections_of(model).values())
        members = {None if x.ranks is None else tuple(x.ranks.members) for x in collections}
        if len(members) > 1:
            raise ValueError(
                "collections of this model are shared by different ranks: save and load those of "
                "each process group on their own"
            )
        shared = [x for x in collections if x.ranks is not None]
        self.ranks: Ranks | None = shared[0].ranks if shared else None
        self._meet = shared[0].row_access.meet if shared else None
        if self.ranks is not None:
            self.rank, self.size, self.is_alone = self.ranks.rank, self.ranks.size, False

    def begin(self, what: str, work: Callable[[], str]) -> list[str]:
        """Like `do`, as the first part of what a user calls: ranks that call something else, or
        other arguments, are refused. `what`: the name of it."""
        return self._do(work, lambda text: self._begun(what, text))

    def _texts(self, text: str, channel: Channel | None) -> list[str]:
        assert self.ranks is not None
        return self.ranks.texts(text, channel or self.ranks.training)

    def _begun(self, what: str, text: str) -> list[str]:
        assert self.ranks is not None
        assert self._meet is not None
        self.ranks.settle_grads()  # of all collections; `meet` does so for one
        texts = self._meet(json.dumps([what, text]))
        for rank, said in enumerate(texts):
            if not said:
                raise RankError(
                    f"rank {rank} has no batch left and serves the others inside hotrow.join: call "
                    f"{what} before or after that"
                )
        whats = [json.loads(said)[0] for said in texts]
        for rank, other in enumerate(whats):
            if other != whats[0]:
                raise RankError(f"rank 0 calls {whats[0]}, and rank {rank} calls {other}")
        return [json.loads(said)[1] for said in texts]

    @staticmethod
    def unlike_others(name: str) -> str:
        """Return a name with something random behind it."""
        return f"{name}.{token_hex(4)}"


def _holds(path: Path, text: str) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text() == text
    return False


def _kind(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "RuntimeError")


def _error(kind: str, text: str) -> Exception:
    of_name: dict[str, type[Exception]] = {each.__name__: each for each in _KINDS}
    return of_name.get(kind, RuntimeError)(text)
