"""Every model trained on a GPU: captured, within a budget, compiled, in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from dense_masters import MasterWeights
from hotrow.inputs.tree import to_device
from hotrow.run.job import same_bits
from model_cases import MODEL_CASES, ModelCase

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler uses what torch deprecates, and reads what it warns others of.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

STEPS = 60
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(params=MODEL_CASES)
def case(request: pytest.FixtureRequest) -> ModelCase:
    return MODEL_CASES[request.param]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(0.1, device="cuda")
    return torch.optim.SGD(model.parameters(), lr=rate, fused=True)


def masters(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(0.1, device="cuda")
    return MasterWeights(model, lambda given: torch.optim.SGD(given, lr=rate, fused=True))


class Run:
    """A model, its trainer, and what came of it."""

    def __init__(
        self,
        case: ModelCase,
        strategy: str = "all-fast",
        *,
        rule: Any = None,
        optimizer: Optimizer = sgd,
        output_dtype: torch.dtype = torch.float32,
        pad_to: int = 1,
        **options: Any,
    ) -> None:
        budget = None if strategy == "all-fast" else "20%"
        self.embedding = case.embedding(
            rule, strategy=strategy, budget=budget, device="cuda", output_dtype=output_dtype
        )
        self.model = case.build(self.embedding, pad_to=pad_to).cuda()
        self.trainer: hotrow.Trainer[Any] = hotrow.Trainer(
            self.model,
            F.binary_cross_entropy_with_logits,
            dense_optimizer=optimizer(self.model),
            ids=lambda batch: batch.sparse,
            device="cuda",
            **options,
        )
        records = list(self.trainer.run(case.batches(STEPS)))
        self.losses = [record.loss for record in records]
        self.embedding.check()
        self.state = {key: each.cpu() for key, each in self.model.state_dict().items()}

    @property
    def num_graphs(self) -> int:
        captured = self.trainer._captured
        return 0 if captured is None else captured.num_graphs

    def is_same_as(self, other: Run) -> bool:
        same = all(same_bits(self.state[key], other.state[key]) for key in self.state)
        return same and self.losses == other.losses


@pytest.mark.parametrize("rule", [hotrow.SGD(lr=0.1), hotrow.RowWiseAdagrad(lr=0.05)], ids=repr)
def test_captured_steps_within_a_budget_give_the_bits_of_eager_ones_without(
    case: ModelCase, rule: Any
) -> None:
    reference = Run(case, rule=rule, graphs=False)
    captured = Run(case, rule=rule)
    assert captured.num_graphs > 1
    assert captured.is_same_as(reference)
    cached = Run(case, "lookahead", rule=rule)
    assert cached.num_graphs > 1
    assert cached.embedding.traffic().evicted_rows > 0
    assert cached.is_same_as(reference)


@pytest.mark.parametrize("padded", [1, 64])
def test_a_gpu_says_what_the_twin_says(case: ModelCase, padded: int) -> None:
    model = case.build(case.embedding(device="cuda"), pad_to=padded).cuda()
    twin = case.twin_of(model)
    for batch in case.batches(3):
        found = model(to_device(batch, torch.device("cuda")))
        torch.testing.assert_close(found.cpu(), twin(batch), rtol=1e-4, atol=1e-4)


def test_a_gpu_learns_what_the_twin_learns(case: ModelCase) -> None:
    run = Run(case, "lookahead")
    twin = case.twin_of(case.build())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = []
    for batch in case.batches(STEPS):
        loss = F.binary_cross_entropy_with_logits(twin(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert run.losses == pytest.approx(losses, rel=1e-2)


def test_compiled_half_precision_is_exact_too(case: ModelCase) -> None:
    """bfloat16 weights with masters, vectors half as wide, layers padded: the fastest there is."""
    options: dict[str, Any] = {
        "optimizer": masters, "output_dtype": torch.bfloat16, "pad_to": 64, "compile": True,
    }  # fmt: skip
    reference, run = Run(case, **options), Run(case, "lookahead", **options)
    assert run.num_graphs > 1
    assert run.is_same_as(reference)
    assert run.losses == pytest.approx(Run(case).losses, rel=0.1)


def test_autocast_is_exact_too(case: ModelCase) -> None:
    reference = Run(case, autocast=torch.bfloat16)
    run = Run(case, "lookahead", autocast=torch.bfloat16)
    assert run.num_graphs > 1
    assert run.is_same_as(reference)
    assert run.losses == pytest.approx(Run(case).losses, rel=0.1)


def test_the_dense_part_is_one_graph_for_a_compiler(case: ModelCase) -> None:
    torch.compiler.reset()
    model: Any = case.build(case.embedding(device="cuda")).cuda()
    if not hasattr(model, "score"):
        pytest.skip("a DLRM looks rows up in between")
    batch = to_device(case.batches(1)[0], torch.device("cuda"))
    found = model.embedding(batch.sparse)
    inputs: tuple[torch.Tensor, ...] = (batch.dense,)
    if batch.dense.dim() == 2:
        inputs += (found.values().detach(),)
    else:
        vectors = torch.cat([found[name] for name in model.features], dim=1)
        inputs += (vectors.detach(), batch.lengths)
    compiled = torch.compile(model.score, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, model.score(*inputs), rtol=1e-3, atol=1e-4)
