"""Half-precision weights with float32 masters. Knows nothing about rows, models or graphs.

        forward, backward            step()
weights (bfloat16) --> grads (bfloat16) --> float32 --> optimizer --> masters (float32)
   ^------------------------------ rounded ------------------------------'

optimizer = MasterWeights(model, lambda masters: torch.optim.SGD(masters, lr=0.1, fused=True))

Matrix products read half the bytes and run on tensor cores, yet no update is lost: one that is
too small to change a weight still moves its master, and many of them move the weight. Beside the
inner optimizer's own work a step takes two launches for all weights together and never waits for
the device, so it can be captured if the inner optimizer's step can. A learning rate that changes
between replays of a graph is a tensor: SGD then wants `fused=True`, Adam also `capturable=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterWeights(Optimizer):
    """Rounds weights to `dtype` and trains float32 masters of them with an optimizer.

    `weights` is a module, parameters, or groups of parameters as torch's optimizers take them;
    `make_optimizer` is given the masters in the same form. Of a module all parameters are
    rounded, and those that require gradients are trained. Masters start from the values before
    rounding. `param_groups` and `state` are the inner optimizer's, so a scheduler changes that one.
    """

    masters: tuple[nn.Parameter, ...] = ()

    def __init__(
        self,
        weights: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        frozen: list[Tensor] = []
        if isinstance(weights, nn.Module):
            frozen = [each for each in weights.parameters() if not each.requires_grad]
            weights = [each for each in weights.parameters() if each.requires_grad]
        super().__init__(weights, {})  # checks them, and makes one group of what is none
        groups = self.param_groups
        self.weights: tuple[Tensor, ...] = tuple(w for group in groups for w in group["params"])
        # Float32 weights hand their memory over: they get new memory when they are rounded.
        masters = {weight: nn.Parameter(weight.detach().float()) for weight in self.weights}
        self.masters = tuple(masters.values())
        # Kept, because a captured graph writes to the same memory every time.
        self._grads = [torch.zeros_like(master) for master in self.masters]
        for weight in (*self.weights, *frozen):
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        self.inner = make_optimizer(
            [{**group, "params": [masters[w] for w in group["params"]]} for group in groups]
        )
        self._share()

    def _share(self) -> None:
        self.defaults, self.state = self.inner.defaults, self.inner.state
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the masters of all weights that have a gradient, and round those weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (weight, weight.grad, master, grad)
            for weight, master, grad in zip(self.weights, self.masters, self._grads, strict=True)
            if weight.grad is not None
        ]
        for master in self.masters:
            master.grad = None  # the inner optimizer leaves alone what has none
        for _, _, master, grad in moving:
            master.grad = grad
        if moving:
            weights, halves, masters, grads = zip(*moving, strict=True)
            torch._foreach_copy_(grads, halves)
            self.inner.step()
            torch._foreach_copy_(weights, masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the weights; every step writes those of the masters anew."""
        for weight in self.weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: masters are made once."""
        if self.masters:
            raise ValueError("weights get their masters when MasterWeights is made, not later")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and the masters in the order of the weights."""
        return {
            **self.inner.state_dict(),
            "masters": [master.detach() for master in self.masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and weights in place; the inner optimizer may replace its state.

        Load before capturing a graph: it would go on with the replaced tensors.
        """
        inner = dict(state_dict)
        loaded = inner.pop("masters")
        if [each.shape for each in loaded] != [each.shape for each in self.masters]:
            raise ValueError(
                f"the {len(loaded)} masters loaded are not of the shapes of the "
                f"{len(self.masters)} weights trained here"
            )
        self.inner.load_state_dict(inner)
        self._share()
        for weight, master, value in zip(self.weights, self.masters, loaded, strict=True):
            master.copy_(value)
            weight.copy_(master)
