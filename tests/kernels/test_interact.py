"""The interaction in Triton is the plain one to its edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional

from hotrow.kernels.triton.interact import interact, interact_backward, suits, width_of
from hotrow.models.layers import PaddedLinear

# Triton's interpreter multiplies bfloat16 as if it were integers, so there float16 stands for it.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# (samples, features, dim, multiple of columns): the benchmark's, odd ones, one of everything
SHAPES = [(5, 26, 64, 64), (6, 5, 7, 1), (4, 16, 20, 8), (1, 1, 1, 1), (9, 2, 33, 32)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
TYPES = [(torch.float32, torch.float32), (HALF, HALF), (HALF, torch.float32)]
every_type = pytest.mark.parametrize("types", TYPES, ids=["float32", "half", "half, vectors not"])


def plain(dense: Tensor, vectors: Tensor, width: int) -> Tensor:
    """What models/layers.py says, padded; in double precision."""
    dense, vectors = dense.double(), vectors.to(dense.dtype).double()
    stacked = torch.cat([dense, vectors], dim=1).view(len(dense), -1, dense.shape[1])
    products = stacked @ stacked.transpose(1, 2)
    lower, left = torch.tril_indices(stacked.shape[1], stacked.shape[1], offset=-1)
    joined = torch.cat([dense, products[:, lower, left]], dim=1)
    return functional.pad(joined, (0, width - joined.shape[1]))


def make(
    shape: tuple[int, int, int, int], types: tuple[torch.dtype, torch.dtype], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    batch, features, dim, multiple = shape
    dense = torch.randn(batch, dim).to(device, types[0]).requires_grad_()
    vectors = torch.randn(batch, features * dim).to(device, types[1]).requires_grad_()
    return dense, vectors, width_of(features, dim, multiple)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the type's rounding of the largest number: sums may cancel."""
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=scale * TOLERANCE[dtype]
    )


@every_type
@every_shape
def test_values_and_gradients_are_those_of_the_plain_form(
    shape: Any, types: Any, device: torch.device
) -> None:
    dense, vectors, width = make(shape, types, device)
    found, expected = interact(dense, vectors, width), plain(dense, vectors, width)
    assert found.shape == (shape[0], width)
    assert found.dtype == types[0]
    assert_near(found, expected, types[0])
    dim, pairs = shape[2], shape[1] * (shape[1] + 1) // 2
    assert torch.equal(found[:, :dim], dense)
    assert not found[:, dim + pairs :].any()
    grad = torch.randn(shape[0], width).to(device, types[0])
    inputs = (dense, vectors)
    grads = torch.autograd.grad(found, inputs, grad)
    right = torch.autograd.grad(expected, inputs, grad.double())
    for own, other, given in zip(grads, right, inputs, strict=True):
        assert own.dtype == given.dtype
        assert_near(own, other, types[0])


@every_type
def test_rows_may_lie_apart(types: Any, device: torch.device) -> None:
    width = width_of(5, 16, 8)
    wide = torch.randn(6, 300).to(device)
    spaced = (wide.to(types[0])[:, 3:19], wide.to(types[1])[:, 100:180])
    together = tuple(each.contiguous() for each in spaced)
    assert torch.equal(interact(*spaced, width), interact(*together, width))
    grad = torch.randn(width, 6).to(device, types[0]).t()
    for mine, right in zip(
        interact_backward(grad, *spaced), interact_backward(grad.contiguous(), *together),
        strict=True,
    ):  # fmt: skip
        assert mine.is_contiguous()
        assert torch.equal(mine, right)


@every_type
def test_a_samples_bits_depend_on_it_alone(types: Any, device: torch.device) -> None:
    dense, vectors, width = make((11, 6, 24, 1), types, device)
    whole = interact(dense, vectors, width)
    grad = torch.randn(11, width).to(device, types[0])
    grads = interact_backward(grad, dense, vectors)
    for at in (0, 3, 10):
        one = slice(at, at + 1)
        assert torch.equal(interact(dense[one], vectors[one], width), whole[one])
        alone = interact_backward(grad[one], dense[one], vectors[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, grads, strict=True))


def test_torch_accepts_the_operation(device: torch.device) -> None:
    dense, vectors, width = make((3, 2, 16, 8), (torch.float32, torch.float32), device)
    library.opcheck(interact, (dense, vectors, width))


def test_a_compiled_graph_keeps_it_whole(device: torch.device) -> None:
    def loss(dense: Tensor, vectors: Tensor) -> Tensor:
        return interact(dense * 2, vectors, width).square().sum()

    dense, vectors, width = make((3, 4, 16, 8), (torch.float32, torch.float32), device)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(dense, vectors), (dense, vectors))
    expected = torch.autograd.grad(loss(dense, vectors), (dense, vectors))
    assert all(map(torch.equal, found, expected))


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    dense = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match=r"vectors of 4 numbers for 2 samples cannot be \[2, 10\]"):
        interact(dense, torch.ones(2, 10, device=device), 64)
    with pytest.raises(ValueError, match="has 7 columns, more than the 6 asked for"):
        interact(dense, torch.ones(2, 8, device=device), 6)


@pytest.mark.parametrize(
    ("num_features", "dim", "dtype", "expected"),
    [
        (26, 64, torch.bfloat16, True),
        (26, 128, torch.bfloat16, True),
        (26, 64, torch.float32, True),
        (26, 128, torch.float32, False),
        (100, 64, torch.bfloat16, False),
        (2, 16, torch.float64, False),
    ],
)
def test_it_knows_what_suits_it(
    num_features: int, dim: int, dtype: torch.dtype, expected: bool
) -> None:
    assert suits(num_features, torch.ones(1, dim, dtype=dtype)) is expected


def test_a_padded_layer_refuses_a_state_of_another_width() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        PaddedLinear(13, 4, pad_to=64).load_state_dict(nn.Linear(9, 4).state_dict())
