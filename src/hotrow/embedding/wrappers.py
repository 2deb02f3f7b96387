"""What torch's data-parallel wrappers leave to a collection: stand-ins, and ends of `backward()`.

The gradients of stand-ins are norms over all ranks already. DistributedDataParallel must not
average them, and FSDP2's `fully_shard` must not shard them. Rows are exchanged when `backward()`
has ended on every rank, so that no collective of a wrapper can come in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from operator import is_not
from threading import Thread, current_thread
from typing import Any

import torch
from torch import nn

from hotrow.embedding.stand_ins import stand_in_of

# Of collections that ranks share, in the order in which all ranks build them. Weak references.
_ends: list[Callable[[], Callable[[bool], None] | None]] = []
# Those in a `backward()` whose end is noticed.
threads_in_backward: set[Thread] = set()


def protect_stand_ins(module: nn.Module) -> None:
    """Let torch's wrappers of a model that holds this module leave its parameters as they are."""
    _leave_out_of_buckets()
    # `fully_shard` skips modules that are registered as replicated by torch's composable API.
    if torch.distributed.is_available():
        from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

        module.__dict__.setdefault(REGISTRY_KEY, {})["replicate"] = RegistryItem()


@cache
def _leave_out_of_buckets() -> None:
    """Let DistributedDataParallel ignore stand-ins, in whatever model it wraps.

    It takes the names of ignored parameters from the model that it is given. That is known only
    when it is built.
    """
    wrapper: Any = nn.parallel.DistributedDataParallel
    of_torch = wrapper.__init__

    @wraps(of_torch)
    def __init__(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        # Modules that share a table have a name each.
        named = list(module.named_parameters(remove_duplicate=False))
        ours = [name for name, param in named if stand_in_of(param) is not None]
        if ours:
            if not any(x.requires_grad for _, x in named if stand_in_of(x) is None):
                raise ValueError(
                    "DistributedDataParallel has nothing to do here: all parameters of the model "
                    "stand for tables, whose rows hotrow exchanges; call it without the wrapper"
                )
            others = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            names = [*others, *(name for name in ours if name not in others)]
            wrapper._set_params_and_buffers_to_ignore_for_model(module, names)
        of_torch(self, module, *args, **options)

    wrapper.__init__ = __init__


def refuse_wrapped(stand_ins: Sequence[nn.Parameter], held: Iterable[object] | None = None) -> None:
    """Raise if a wrapper changes the gradients of stand-ins; `held`: the parameters that their
    module has now."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    is_inside = wrapper._active_ddp_module is not None
    if is_inside and not all(getattr(x, "_ddp_ignored", False) for x in stand_ins):
        raise RuntimeError(
            "DistributedDataParallel replaces the gradients of parameters, and stand-ins of rows "
            "are among them, because the model was wrapped before it had them: wrap it when its "
            "tables are built or converted"
        )
    if held is not None and any(map(is_not, held, stand_ins)):
        raise RuntimeError(
            "fully_shard has sharded parameters that stand for tables; leave them whole: "
            "fully_shard(model, ignored_params=set(embedding.parameters()))"
        )


def end_backward_together(end: Callable[[bool], None]) -> None:
    """Call a method of a collection when an outermost `backward()` has ended on this rank; True: a
    collection before it has raised.

    A rank whose loss does not reach the collection takes part as well, and several collections
    come in one order. Callbacks of torch's would come for neither.
    """
    _watch_backward()
    _ends[:] = [other for other in _ends if other() is not None]
    _ends.append(weakref.WeakMethod(end))


@cache
def _watch_backward() -> None:
    of_torch = torch.autograd.backward

    @wraps(of_torch)
    def backward(*args: Any, **options: Any) -> None:
        thread = current_thread()
        is_inside = thread in threads_in_backward
        threads_in_backward.add(thread)
        try:
            of_torch(*args, **options)
        finally:
            if not is_inside:
                threads_in_backward.discard(thread)
        if torch._C._current_graph_task_id() != -1:
            return  # a part of another backward pass
        failed: Exception | None = None
        for known in [*_ends]:
            end = known()
            if end is not None:
                try:
                    end(failed is not None)
                except Exception as error:
                    failed = error
        if failed is not None:
            raise failed

    torch.autograd.backward = backward
