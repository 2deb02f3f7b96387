"""Ranks with different numbers of batches: those that are done go on serving their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import Any

from torch import nn

from hotrow.distributed.ranks import Ranks
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Inside, every rank may train or evaluate another number of batches, none included.

    A rank whose loop has ended waits at the end of the block. Until all loops have ended it sends
    its rows to the others and updates them, with the settings of the ranks that train. What of the
    model is wrapped in `DistributedDataParallel` is joined by torch's own `Join`, with its rules:
    gradients are divided by the number of all ranks. With one rank nothing changes. Rows with
    update="step" can be evaluated so, not trained: they wait for the step of an optimizer, which a
    rank without batches does not make.

        with hotrow.join(model):
            for batch in hotrow.ahead(loader, model):
                ...
    """
    shared = [c for c in collections_in(model).values() if c.ranks is not None]
    if not shared:
        yield
        return
    exchanges = [(c.exchange, c.update == "backward") for c in shared if c.exchange is not None]
    for exchange, joins in exchanges:
        exchange.join(joins)
    try:
        with _joined_by_torch(model) as is_wrapped:
            yield
            # torch serves its own part in this thread, when the block inside ends. Process groups
            # end in any order, so each one has a thread.
            groups = {c.ranks: None for c in shared if c.ranks is not None}
            servers = [_Server(shared, ranks) for ranks in groups]
            own = servers[-1:] if not is_wrapped else []
            others = servers[: len(servers) - len(own)]
            for server in others:
                server.start()
        for server in own:
            server.run()
        for server in others:
            server.join()
        for server in servers:
            if server.error is not None:
                raise server.error
    finally:
        for exchange, _ in exchanges:
            exchange.join(False)


@contextmanager
def _joined_by_torch(model: nn.Module) -> Iterator[bool]:
    """Join the parts of a model that are wrapped in DistributedDataParallel; give whether there
    are any."""
    # Here: these imports take a while, and few programs have several ranks.
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    wrapped: list[Any] = [x for x in model.modules() if isinstance(x, DistributedDataParallel)]
    joined: AbstractContextManager[Any] = Join(wrapped) if wrapped else nullcontext()
    with joined:
        yield bool(wrapped)


class _Server(Thread):
    """Serves the other ranks of a process group until none has a batch left."""

    def __init__(self, collections: list[EmbeddingBagCollection], ranks: Ranks) -> None:
        super().__init__(name="hotrow-join", daemon=True)
        self._pipelines = [c.pipeline for c in collections if c.ranks is ranks]
        self._ranks = ranks
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for pipeline in self._pipelines:
                pipeline.settle_grads()
            self._ranks.serve()
        except BaseException as error:  # raised in the thread that waits
            self.error = error
