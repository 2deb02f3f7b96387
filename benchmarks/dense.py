"""The dense part of the DLRM that every system trains, the same arithmetic for all of them.

    dense [B, 13]                         vectors [B, F * D] of the embedding
          |                                      |
    bottom 512-256-D                             |
          |------ dot products of all pairs of the F + 1 vectors
          |                                      |
          '------------- joined, padded ---------'
                             |
                 top 1024-1024-512-256-1 -> logit [B]

Weights are bfloat16 with float32 masters. Widths are padded to multiples of 64 with zeros that stay
zero, because matrix units want it. Knows nothing about where embedding rows live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.models import DCNv2

BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)
PAD_TO = 64
PAD_VECTORS_TO = 32
LR = 0.01


@dataclass(frozen=True)
class DenseOptions:
    """How the dense part runs; the same for every system."""

    compile: bool = True
    graphs: bool = True
    interaction: str = "plain"  # or "fused": hotrow's kernel
    masters: str = "plain"  # or "hotrow": hotrow's optimizer


class DenseModule(nn.Module):
    """`forward(dense, vectors)` gives log-odds, [B] float32."""

    def __init__(
        self, num_dense: int, num_features: int, dim: int, *, interaction: str = "plain"
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        num_pairs = num_features * (num_features + 1) // 2
        self.num_dense, self.joined = num_dense, dim + num_pairs
        self.bottom = _mlp([num_dense, *BOTTOM, dim], generator)
        self.top = _mlp([self.joined, *TOP], generator)
        self.out = _linear(TOP[-1], 1, generator)
        self.interact = _INTERACTIONS[interaction](num_features, dim, _padded(self.joined))
        self.to(torch.bfloat16)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        dtype = self.out.weight.dtype
        x = F.pad(dense.to(dtype), (0, _padded(self.num_dense) - self.num_dense))
        hidden = self.top(self.interact(self.bottom(x), vectors.to(dtype)))
        # One output is no work for a matrix unit.
        logits = (hidden.float() * self.out.weight.float()).sum(dim=1) + self.out.bias.float()
        return logits


class CrossModule(nn.Module):
    """The same face for the dense part of MLPerf's DLRM-DCNv2, which `hotrow.models` has."""

    def __init__(self, num_dense: int, num_features: int, dim: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width, bottom = num_features * dim, (*BOTTOM, dim)
        self.model = DCNv2(
            nn.Identity(), num_dense, bottom, embedding_width=width, generator=generator,
            pad_to=PAD_TO,
        )  # fmt: skip
        self.to(torch.bfloat16)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.model.score(dense.bfloat16(), vectors.bfloat16()).float()


def dense_module(
    model: str, num_dense: int, num_features: int, dim: int, options: DenseOptions
) -> nn.Module:
    if model == "dcnv2":
        return CrossModule(num_dense, num_features, dim)
    return DenseModule(num_dense, num_features, dim, interaction=options.interaction)


def _mlp(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [_linear(width_in, width_out, generator), nn.ReLU()]
    return nn.Sequential(*layers)


def _linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """As the DLRM reference starts it; columns for padding are zero."""
    linear = nn.Linear(_padded(width_in), width_out)
    nn.init.normal_(linear.weight, std=math.sqrt(2 / (width_in + width_out)), generator=generator)
    nn.init.normal_(linear.bias, std=math.sqrt(1 / width_out), generator=generator)
    with torch.no_grad():
        linear.weight[:, width_in:] = 0
    return linear


def _padded(width: int) -> int:
    return -(-width // PAD_TO) * PAD_TO


# -- interaction -----------------------------------------------------------------------


class PlainInteraction(nn.Module):
    """One batched matrix product of all vectors with all, of which the pairs are picked."""

    pairs: Tensor
    places: Tensor

    def __init__(self, num_features: int, dim: int, width: int) -> None:
        super().__init__()
        self.dim, self.width = dim, width
        self.num_vectors = -(-(num_features + 1) // PAD_VECTORS_TO) * PAD_VECTORS_TO
        lower, left = torch.tril_indices(num_features + 1, num_features + 1, offset=-1)
        pairs = lower * self.num_vectors + left
        places = torch.full((self.num_vectors**2,), len(pairs))  # the zero after the last pair
        places[pairs] = torch.arange(len(pairs))
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("places", places, persistent=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        joined = torch.cat([dense, vectors], dim=1)
        joined = F.pad(joined, (0, self.num_vectors * self.dim - joined.shape[1]))
        stacked = joined.view(len(dense), self.num_vectors, self.dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        picked = _Pick.apply(products, self.pairs, self.places)
        out = torch.cat([dense, picked], dim=1)
        return F.pad(out, (0, self.width - out.shape[1]))


class _Pick(torch.autograd.Function):
    """Columns of a matrix, each at most once: its backward reads where index_select's scatters."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return products.index_select(1, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return F.pad(grads[0], (0, 1)).index_select(1, places), None, None


class FusedInteraction(nn.Module):
    """hotrow's kernel, in one pass each way."""

    def __init__(self, num_features: int, dim: int, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        from hotrow.kernels.triton.interact import interact

        return interact(dense, vectors, self.width)


_INTERACTIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "plain": PlainInteraction,
    "fused": FusedInteraction,
}


# -- optimizer -------------------------------------------------------------------------


class MasterSGD(torch.optim.Optimizer):
    """SGD on float32 copies of bfloat16 weights, all of them in one compiled kernel or two."""

    def __init__(self, weights: Sequence[nn.Parameter], lr: float, *, compile: bool) -> None:
        super().__init__(weights, {"lr": lr})
        self.weights = list(weights)
        self.masters = [weight.detach().float() for weight in weights]
        self._update = torch.compile(_update, dynamic=False) if compile else _update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        grads = [weight.grad for weight in self.weights]
        self._update(self.weights, self.masters, grads, self.param_groups[0]["lr"])


def _update(
    weights: Sequence[Tensor], masters: Sequence[Tensor], grads: Sequence[Any], lr: float
) -> None:
    for weight, master, grad in zip(weights, masters, grads, strict=True):
        master.sub_(grad.float() * lr)
        weight.copy_(master)


def dense_optimizer(module: nn.Module, options: DenseOptions) -> torch.optim.Optimizer:
    if options.masters == "hotrow":
        from masters import MasterWeights

        return MasterWeights(module, lambda masters: torch.optim.SGD(masters, lr=LR, fused=True))
    return MasterSGD(list(module.parameters()), LR, compile=options.compile)


# -- the form for systems that have no trainer -----------------------------------------


class Dense:
    """The dense part with inputs at fixed places, captured as one CUDA graph.

    `step(vectors, dense, label)` trains it and returns the gradient of `vectors`, valid until the
    next call.
    """

    def __init__(
        self,
        batch: int,
        num_dense: int,
        num_features: int,
        dim: int,
        *,
        device: torch.device,
        options: DenseOptions,
        model: str = "dlrm",
    ) -> None:
        self.module = dense_module(model, num_dense, num_features, dim, options).to(device)
        self.optimizer = dense_optimizer(self.module, options)
        self._loss = (
            torch.compile(self._forward, dynamic=False) if options.compile else self._forward
        )
        self.vectors = (0.01 * torch.randn(batch, num_features * dim, device=device)).bfloat16()
        self.vectors.requires_grad_()
        self.dense = torch.randn(batch, num_dense, device=device)
        self.label = torch.zeros(batch, device=device)
        self._graph = self._capture() if options.graphs and device.type == "cuda" else None
        if self._graph is None:
            self._train()

    def step(self, vectors: Tensor, dense: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            self.vectors.copy_(vectors)
            self.dense.copy_(dense)
            self.label.copy_(label)
        if self._graph is None:
            self._train()
        else:
            self._graph.replay()
        assert self.vectors.grad is not None
        return self.vectors.grad

    def _forward(self, dense: Tensor, vectors: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.module(dense, vectors), label)

    def _train(self) -> None:
        loss = self._loss(self.dense, self.vectors, self.label)
        self.optimizer.zero_grad()
        self.vectors.grad = None
        loss.backward()
        self.optimizer.step()

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train()
        return graph
