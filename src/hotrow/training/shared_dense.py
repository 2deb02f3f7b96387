"""The dense part of a model on several ranks: it starts alike, and its gradients are averaged.

Each rank trains a part of every batch. Gradients of all weights travel in one tensor for each
type, in the order of the weights, so that sums do not depend on when gradients come.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.distributed.exchange import Exchange
from hotrow.distributed.ranks import Channel, Header, Op
from hotrow.distributed.whole_batches import check_equal
from hotrow.distributed.wire import BatchCounts
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import named_modules
from hotrow.embedding.stand_ins import stand_in_of
from hotrow.inputs.rank_part import RankPart


@dataclass(frozen=True)
class Part:
    """What this rank trains of a batch."""

    samples: int  # of all ranks
    scale: float  # of the mean loss of this rank's samples, so that averages are those of all
    first: int  # the first rank that has samples
    requests: int = 0  # bits that ranks have sent with the step; see `Trainer.hear`


@dataclass
class OwnCounts:
    """What one rank has trained, of the steps that all have made."""

    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0  # of `seconds`, for other ranks


class SharedDense:
    """What ranks share of a model beside its rows."""

    def __init__(self, model: nn.Module, collections: Mapping[str, EmbeddingBagCollection]) -> None:
        shared = [c for c in collections.values() if c.exchange is not None]
        exchanges: list[Exchange] = [c.exchange for c in shared if c.exchange is not None]
        self._ranks = exchanges[0].ranks
        if any(x.ranks is not self._ranks for x in exchanges) or len(shared) < len(collections):
            raise ValueError(
                "a step of several ranks needs the same ranks for all collections of a model; give "
                "them one process_group= and one device"
            )
        _refuse_wrapped(model)
        self._model, self._exchange = model, exchanges[0]
        self.checksum = 0  # of the next batch, where every rank has read all of it
        self._collections = sorted(shared, key=lambda c: c.exchange.number)  # type: ignore[union-attr]
        self.own = OwnCounts()

    def start_alike(self, others: Iterable[Tensor]) -> None:
        """Give all ranks the weights and buffers of the first one; `others` are weights that the
        model does not have."""
        weights = {id(x): x for x in (*self._model.parameters(), *others)}
        if any(isinstance(x, nn.parameter.UninitializedParameter) for x in weights.values()):
            raise ValueError(
                "a weight of the model has no shape yet, as of nn.LazyLinear, so ranks cannot "
                "start alike: call the model once before it is given to hotrow.Trainer"
            )
        dense = [x for x in weights.values() if stand_in_of(x) is None]
        self._follow([*dense, *self._model.buffers()], 0)

    def follow_buffers(self, source: int) -> None:
        """Give all ranks the buffers of one that had samples, such as those of BatchNorm."""
        self._follow(list(self._model.buffers()), source)

    @torch.no_grad()
    def _follow(self, tensors: Sequence[Tensor], source: int) -> None:
        for group in _by_kind(tensors).values():
            flat = torch.cat([x.reshape(-1) for x in group])
            self._ranks.follow(flat, source, self._ranks.training)
            if self._ranks.rank != source:
                for tensor, part in zip(group, _parts(flat, group), strict=True):
                    tensor.copy_(part)

    def part(self, samples: int, step: int, requests: int = 0) -> Part:
        """Return what a rank trains of a batch, of which it has so many samples, and the requests
        of all ranks. Raises on all ranks if they have other checksums of the whole batch."""
        words = [samples, self.checksum]
        header = Header(Op.PART, self._exchange.number, step, status=requests, words=words)
        counts: list[int]
        counts, sent = self._ranks.run(header, None)
        self.own.samples += samples
        total = sum(counts)
        scale = samples * self._ranks.size / total if total else 0.0
        first = next((r for r, count in enumerate(counts) if count), 0)
        return Part(total, scale, first, reduce(or_, sent))

    def place_of(self, collection: EmbeddingBagCollection) -> int:
        """Return where a collection stands in the order in which ranks exchange gradients."""
        return self._collections.index(collection)

    def tell(self, error: Exception) -> None:
        """Let other ranks raise, which may wait for this one: a system has an error here."""
        with suppress(Exception):  # this error, once it is known, or one that follows from it
            self._collections[0].pipeline.end_batches(error)

    @property
    def device(self) -> torch.device:
        return self._collections[0].device

    def zero(self) -> Tensor:
        """Return the loss of no samples."""
        return torch.zeros((), device=self.device)

    def counters(self) -> dict[str, int]:
        """Return what this rank has looked up and sent to others so far, named as in a StepRecord.
        Counters of its rows are of the lookups that all ranks ask of it."""
        sent = Counter[str]()
        for collection in self._collections:
            sent.update(collection.sent_bytes())
        batches = self._batches
        return {
            "lookups": sum(x.lookups for x in batches),
            "unique_rows": sum(x.unique_rows for x in batches),
            **{f"bytes_of_{kind}": sent[kind] for kind in ("ids", "rows", "grads")},
        }

    @property
    def _batches(self) -> list[BatchCounts]:
        return [c.exchange.wire.batches for c in self._collections if c.exchange is not None]

    def lookups_by_table(self) -> Counter[str]:
        """Return how many rows of each table this rank has looked up in training so far."""
        return sum((x.by_table for x in self._batches), start=Counter())

    def served_rows(self) -> int:
        """Return how many rows ranks have asked of this one in training so far."""
        return sum(x.served_rows for x in self._batches)

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def wait_seconds(self) -> float:
        """See Ranks."""
        return self._ranks.wait_seconds

    def looks_up(self) -> bool:
        """Whether a batch was looked up since gradients were exchanged."""
        return any(c.exchange is not None and c.exchange.owes_grads for c in self._collections)

    def settle(self) -> None:
        """Take part where other ranks have gradients of rows, and this one has none."""
        for collection in self._collections:
            collection.pipeline.end_backward()

    @torch.no_grad()
    def average(self, weights: Sequence[Tensor], loss: Tensor, *, is_empty: bool) -> Tensor:
        """Average the gradients of weights over all ranks; return the average of losses.

        A weight has a gradient if it has one on some rank. Where a rank has no samples, gradients
        count as zero, whatever became of them.
        """
        groups = _by_kind([x for x in weights if x.requires_grad and stand_in_of(x) is None])
        groups.setdefault((torch.float32, loss.device), [])
        averaged = loss
        for (dtype, device), group in groups.items():
            grads = [_grad_of(x, is_empty=is_empty) for x in group]
            has_grad = [x.grad is not None for x in group]
            ends = [torch.tensor(has_grad, dtype=dtype, device=device)]
            has_loss = (dtype, device) == (torch.float32, loss.device)
            if has_loss:
                ends.append(loss.reshape(1).float())
            flat = torch.cat([*grads, *ends])
            self._ranks.add_up(flat, self._ranks.training)
            flat /= self._ranks.size
            if has_loss:
                averaged = flat[-1]
            if not all(has_grad):
                first = sum(map(torch.numel, group))
                has_grad = (flat[first : first + len(group)] > 0).tolist()
            for weight, part, has in zip(group, _parts(flat, group), has_grad, strict=True):
                if has and weight.grad is None:
                    weight.grad = torch.empty_like(weight)
                if has and weight.grad is not None:
                    weight.grad.copy_(part)
        return averaged

    # -- evaluation --------------------------------------------------------------------

    def gathered(self, *pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces of all ranks as one tensor for each sequence, in the order that one
        process has: first by batch, then by rank. Ranks may have different numbers of batches."""
        mine = [[[len(x) for x in each], [list(x.shape[1:]) for x in each][:1]] for each in pieces]
        said = [json.loads(text) for text in self.texts(json.dumps(mine))]
        found = []
        for place, each in enumerate(pieces):
            sizes = [of_rank[place][0] for of_rank in said]
            shapes = [shape for of_rank in said for shape in of_rank[place][1]]
            found.append(self._joined(each, sizes, shapes[0] if shapes else []))
        return found

    def _joined(
        self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> Tensor:
        device = self._collections[0].device
        by_rank = []
        for rank, of_rank in enumerate(sizes):
            if rank == self._ranks.rank and pieces:
                values = torch.cat(list(pieces)).to(device)
            else:
                values = torch.empty(sum(of_rank), *shape, dtype=torch.float64, device=device)
            if len(values):
                self._ranks.follow(values, rank, self._channel)
            by_rank.append(values.split(list(of_rank)))
        most = max(map(len, by_rank))
        return torch.cat(
            [of_rank[k] for k in range(most) for of_rank in by_rank if k < len(of_rank)]
            or [torch.empty(0, dtype=torch.float64, device=device)]
        )

    def sums(self, *values: float) -> list[float]:
        """Return sums over all ranks, added in rank order."""
        said = [json.loads(text) for text in self.texts(json.dumps(values))]
        return [sum(of_rank[place] for of_rank in said) for place in range(len(values))]

    @property
    def rank_part(self) -> RankPart:
        """The part of whole batches that this rank trains."""
        return RankPart(self._ranks.rank, self._ranks.size)

    def check_equal(self, text: str, what: str) -> None:
        """Raise on all ranks if they do not say the same; `what` they have."""
        check_equal(self.texts(text), what)

    def texts(self, text: str) -> list[str]:
        """Return what all ranks say, once all have come here: until then this one answers those
        that read."""
        header = Header(Op.CHECK, self._exchange.number)
        said: list[str] = self._ranks.run(header, text, self._channel)
        return said

    @property
    def _channel(self) -> Channel:
        is_aside = self._collections[0].pipeline.thread.is_elsewhere
        return self._ranks.aside if is_aside else self._ranks.training


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor, in the shapes of others."""
    ends = list(accumulate((x.numel() for x in tensors), initial=0))
    return [flat[a:b].view(x.shape) for a, b, x in zip(ends, ends[1:], tensors, strict=False)]


def _grad_of(weight: Tensor, *, is_empty: bool) -> Tensor:
    grad = weight.grad
    if grad is None or is_empty:
        return weight.new_zeros(weight.numel())
    if grad.is_sparse:
        raise ValueError(
            "gradients of dense weights are averaged, and a weight has a sparse one, as of "
            "nn.Embedding(sparse=True): let hotrow keep its rows, or build it with sparse=False"
        )
    return grad.reshape(-1)


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in named_modules(model):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"hotrow.Trainer averages gradients over ranks itself, and {name or 'the model'} "
                "is wrapped in DistributedDataParallel: give it the model without the wrapper"
            )
    if any(hasattr(x, "full_tensor") for x in model.parameters()):
        raise ValueError(
            "hotrow.Trainer keeps the whole dense part on every rank, and this model has sharded "
            "parameters: write the loop yourself to use fully_shard"
        )
