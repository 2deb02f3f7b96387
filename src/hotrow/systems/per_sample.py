"""Tests whether a model treats each sample of a batch by itself: one batch, whole and in parts.

The model, the rows and the random states do not change: a copy of the dense part runs in training
mode, around the same collections and without gradients.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in
from hotrow.inputs.tree import tensors_in, to_device
from hotrow.training.trainer import Trainer, algorithms

_MOST_COPIED = 1 << 30  # bytes of a dense part
_APART = 1e-3  # share of the outputs' range: a larger difference is not rounding
_TF32 = 2.0**-10  # to which a GPU may round
_FEW = 100  # one of so many samples may differ: rounding can change a comparison in the model


def refuse_mixed_samples(
    trainer: Trainer[Any], batch: Any, size: int, take: Callable[[Tensor], Any]
) -> None:
    """Raise a ValueError if the samples of a batch get other outputs when it is split.

    The batch has `size` samples, and `take(places)` returns a batch of those at some places.
    Models that draw random numbers in training mode, other than by dropout modules, are tried in
    evaluation mode.
    """
    if size < 2:
        return
    with _nothing_changes(trainer):
        run = _runner(trainer, batch)
        whole = _outputs(run(batch), size)
        if whole is None or not bool(whole.isfinite().all()):
            return
        # Sorted by output, so that the halves, and what is computed of them, differ most.
        where = next((tensor.device for tensor in tensors_in(batch)), whole.device)
        order = whole[:, 0].argsort(stable=True).to(where)
        halves = order[: size // 2], order[size // 2 :]
        parts = [_outputs(run(take(half)), len(half)) for half in halves]
    how = _difference(whole, halves, parts, _rounding(trainer))
    if how:
        name = type(_eager(trainer.model)).__name__
        raise ValueError(
            f"Hotline trains each batch in two parts, and {name} does not treat each sample by "
            f"itself: {how}. Its forward() uses the whole batch, as x.mean(0) does, so results "
            "would not be those of whole batches. Use statistics of each sample, as LayerNorm "
            "does, or train by another strategy, such as 'lookahead'"
        )


def _difference(
    whole: Tensor, halves: Sequence[Tensor], parts: Sequence[Tensor | None], eps: float
) -> str:
    """Describe how outputs of the halves differ from those of the whole by more than rounding."""
    pairs = [
        (part, whole[half.to(whole.device)])
        for half, part in zip(halves, parts, strict=True)
        if part is not None and part.shape[1] == whole.shape[1]
    ]
    if not pairs:  # sequences padded to the longest one have the same shape in one of the halves
        return "outputs have another shape when a batch is split"
    apart = torch.cat([(part - same).abs() for part, same in pairs])
    span = whole.amax(0) - whole.amin(0)
    allowed = max(_APART, 32 * eps) * span + 2 * eps * whole.abs().amax(0)
    others, size = int((~(apart <= allowed)).any(1).sum()), len(whole)
    if others <= 1 + size // _FEW:
        return ""
    return (
        f"{others:,} of {size:,} samples get other outputs when the batch is split, by up to "
        f"{float(apart.max()):.3g} where outputs range over {float(span.max()):.3g}"
    )


@contextmanager
def _nothing_changes(trainer: Trainer[Any]) -> Iterator[None]:
    """Compute no gradients, and restore all random states afterwards."""
    cuda = [trainer.device] if trainer.device.type == "cuda" else []
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with (
            algorithms(trainer.deterministic, trainer.device),
            torch.no_grad(),
            torch.random.fork_rng(cuda),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _runner(trainer: Trainer[Any], batch: Any) -> Callable[[Any], Any]:
    """Return a function of a batch that gives equal outputs each time it gets an equal batch."""
    twin = _twin(_eager(trainer.model))
    if twin is None:
        return trainer.predict

    def run(batch: Any) -> Any:
        return twin(to_device(batch, trainer.device))

    twice = [tensors_in(run(batch)) for _ in range(2)]
    if not all(map(torch.equal, *twice)):
        for module in _dense_modules(twin):  # the collections are the trained model's own
            module.training = False
    return run


def _eager(model: nn.Module) -> nn.Module:
    """Return the model itself where torch.compile has wrapped it."""
    eager: nn.Module = getattr(model, "_orig_mod", model)
    return eager


def _twin(model: nn.Module) -> nn.Module | None:
    """Return a copy of all but the collections, without dropout; None if it cannot be copied."""
    own = [
        tensor
        for module in _dense_modules(model)
        for tensor in (*module.parameters(False), *module.buffers(False))
    ]
    if sum(tensor.nbytes for tensor in own) > _MOST_COPIED:
        return None
    try:
        twin = copy.deepcopy(model, {id(rows): rows for rows in _collections(model)})
    except Exception:  # a model may hold anything, and most things can be copied
        return None
    for module in _dense_modules(twin):
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # of attention, or of an LSTM
            module.dropout = 0.0  # type: ignore[assignment]
    return twin


def _collections(model: nn.Module) -> list[EmbeddingBagCollection]:
    return list(collections_in(model).values())


def _dense_modules(model: nn.Module) -> list[nn.Module]:
    rows = {id(part) for collection in _collections(model) for part in collection.modules()}
    return [module for module in model.modules() if id(module) not in rows]


def _outputs(result: Any, size: int) -> Tensor | None:
    """Return all outputs of `size` samples side by side, [size, n]; None if there are none."""
    parts = [
        tensor.detach().double().reshape(size, -1)
        for tensor in tensors_in(result)
        if tensor.ndim and len(tensor) == size and tensor.is_floating_point()
    ]
    outputs = torch.cat(parts, 1) if parts else None
    return outputs if outputs is not None and outputs.shape[1] else None


def _rounding(trainer: Trainer[Any]) -> float:
    """Return the coarsest relative step of the numbers that the model computes with."""
    kinds = {weight.dtype for weight in trainer.model.parameters() if weight.is_floating_point()}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)
    return max(eps, _TF32) if trainer.device.type == "cuda" else eps
