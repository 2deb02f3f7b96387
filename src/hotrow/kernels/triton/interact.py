"""Dot products of all pairs of a sample's vectors, and their gradients, each in one pass.

The plain form joins the vectors, multiplies all of them with all, selects the pairs and joins
again: five trips through memory each way, and a backward that scatters. Here a sample's vectors
are read once and its row of the result is written once. Knows nothing about models or tables.

    dense   [B, D]        D numbers per sample       result [B, width]:
    vectors [B, F * D]    F vectors per sample         D | pairs (1,0) (2,0) (2,1) (3,0) ... | 0 0 0

Vector 0 is the dense one. Products are summed in float32; a sample's bits depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, library

SMALLEST = 16  # what a matrix product wants of every side
LARGEST_BYTES = 8192  # of one sample's tile: more of them leave the registers


def width_of(num_features: int, dim: int, pad_to: int = 1) -> int:
    """Columns of the result: the dense vector and all pairs, up to a multiple of `pad_to`."""
    needed = dim + num_features * (num_features + 1) // 2
    return -(-needed // pad_to) * pad_to


def suits(num_features: int, dense: Tensor) -> bool:
    """Whether these kernels are the fast way for samples of this size and type."""
    rows, cols = _sides(num_features, dense.shape[1])
    fits = rows * cols * dense.element_size() <= LARGEST_BYTES
    return fits and dense.dtype in (torch.bfloat16, torch.float16, torch.float32)


@library.custom_op("hotrow::interact", mutates_args=())
def interact(dense: Tensor, vectors: Tensor, width: int) -> Tensor:
    """Dense vector, all dot products of two different vectors, zeros: [B, width] like `dense`.

    Vectors of another type are rounded to that of `dense`; their gradient keeps their own.
    """
    _check(dense, vectors, width)
    dense, vectors = _rows(dense), _rows(vectors)
    num_features = vectors.shape[1] // dense.shape[1]
    blocks = _blocks(num_features, dense)
    out = torch.empty(len(dense), width, dtype=dense.dtype, device=dense.device)
    padding = width - width_of(num_features, dense.shape[1])
    with torch.cuda.device_of(dense):
        _forward_kernel[(triton.cdiv(len(dense), blocks["SAMPLES"]),)](
            dense,
            vectors,
            out,
            len(dense),
            dense.stride(0),
            vectors.stride(0),
            width,
            FEATURES=num_features,
            DIM=dense.shape[1],
            PADDING=padding,
            PADDING_BLOCK=triton.next_power_of_2(padding),
            **blocks,
        )
    return out


@interact.register_fake
def _(dense: Tensor, vectors: Tensor, width: int) -> Tensor:
    return dense.new_empty(dense.shape[0], width)


@library.custom_op("hotrow::interact_backward", mutates_args=())
def interact_backward(grad: Tensor, dense: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `dense` and `vectors`, contiguous."""
    grad, dense, vectors = _rows(grad), _rows(dense), _rows(vectors)
    num_features = vectors.shape[1] // dense.shape[1]
    blocks = _blocks(num_features, dense)
    grad_dense = torch.empty_like(dense, memory_format=torch.contiguous_format)
    grad_vectors = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(dense):
        _backward_kernel[(triton.cdiv(len(dense), blocks["SAMPLES"]),)](
            grad,
            dense,
            vectors,
            grad_dense,
            grad_vectors,
            len(dense),
            grad.stride(0),
            dense.stride(0),
            vectors.stride(0),
            FEATURES=num_features,
            DIM=dense.shape[1],
            **blocks,
        )
    return grad_dense, grad_vectors


@interact_backward.register_fake
def _(grad: Tensor, dense: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), vectors.new_empty(vectors.shape)


def _save(ctx, inputs, output):
    dense, vectors, _ = inputs
    ctx.save_for_backward(dense, vectors)


def _differentiate(ctx, grad):
    grad_dense, grad_vectors = interact_backward(grad, *ctx.saved_tensors)
    return grad_dense, grad_vectors, None


interact.register_autograd(_differentiate, setup_context=_save)


def _check(dense: Tensor, vectors: Tensor, width: int) -> None:
    batch, dim = dense.shape
    if len(vectors) != batch or vectors.shape[1] % dim:
        raise ValueError(
            f"vectors of {dim} numbers for {batch} samples cannot be {list(vectors.shape)}"
        )
    needed = width_of(vectors.shape[1] // dim, dim)
    if width < needed:
        raise ValueError(f"the result has {needed} columns, more than the {width} asked for")


def _rows(matrix: Tensor) -> Tensor:
    """Any distance between rows will do, but within a row numbers are neighbours."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _blocks(num_features: int, dense: Tensor) -> dict[str, int]:
    # A warp per sample multiplies on tensor cores. Float32 has none that round like IEEE: there
    # one sample keeps eight warps busy, and fewer would run out of registers.
    samples, num_warps = (4, 4) if dense.element_size() == 2 else (1, 8)
    rows, cols = _sides(num_features, dense.shape[1])
    return {"SAMPLES": samples, "ROWS": rows, "COLS": cols, "num_warps": num_warps}


def _sides(num_features: int, dim: int) -> tuple[int, int]:
    rows = max(SMALLEST, triton.next_power_of_2(num_features + 1))
    return rows, max(SMALLEST, triton.next_power_of_2(dim))


@triton.jit
def _forward_kernel(
    dense,  # [batch, DIM]
    vectors,  # [batch, FEATURES * DIM]
    out,  # [batch, width]
    batch,
    dense_stride,
    vectors_stride,
    width,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    PADDING: tl.constexpr,
    PADDING_BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    x = _tile(
        dense, vectors, first, batch, dense_stride, vectors_stride,
        FEATURES, DIM, SAMPLES, ROWS, COLS,
    )  # fmt: skip
    products = tl.dot(x, tl.permute(x, (0, 2, 1)), input_precision="ieee")  # [S, ROWS, ROWS]

    sample = first + tl.arange(0, SAMPLES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, ROWS)[None, None, :]
    tl.store(
        out + sample * width + DIM + row * (row - 1) // 2 + col,
        products.to(out.dtype.element_ty),
        mask=(sample < batch) & (row <= FEATURES) & (col < row),
    )

    sample = first + tl.arange(0, SAMPLES)[:, None]
    col = tl.arange(0, COLS)[None, :]
    mask = (sample < batch) & (col < DIM)
    copied = tl.load(dense + sample * dense_stride + col, mask=mask)
    tl.store(out + sample * width + col, copied, mask=mask)
    if PADDING > 0:
        col = tl.arange(0, PADDING_BLOCK)[None, :]
        tl.store(
            out + sample * width + (width - PADDING) + col,
            tl.zeros([SAMPLES, PADDING_BLOCK], out.dtype.element_ty),
            mask=(sample < batch) & (col < PADDING),
        )


@triton.jit
def _backward_kernel(
    grad,  # [batch, width]
    dense,  # [batch, DIM]
    vectors,  # [batch, FEATURES * DIM]
    grad_dense,  # [batch, DIM] contiguous
    grad_vectors,  # [batch, FEATURES * DIM] contiguous
    batch,
    grad_stride,
    dense_stride,
    vectors_stride,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    x = _tile(
        dense, vectors, first, batch, dense_stride, vectors_stride,
        FEATURES, DIM, SAMPLES, ROWS, COLS,
    )  # fmt: skip

    # Product (i, j) gives j to the gradient of i and i to that of j: a symmetric matrix.
    sample = first + tl.arange(0, SAMPLES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, ROWS)[None, None, :]
    lower = tl.maximum(row, col)
    place = DIM + lower * (lower - 1) // 2 + tl.minimum(row, col)
    weights = tl.load(
        grad + sample * grad_stride + place,
        mask=(sample < batch) & (lower <= FEATURES) & (row != col),
        other=0.0,
    )  # [S, ROWS, ROWS]
    grads = tl.dot(weights.to(x.dtype), x, input_precision="ieee")  # [S, ROWS, COLS]

    col = tl.arange(0, COLS)[None, None, :]
    inside = (sample < batch) & (col < DIM)
    is_dense = inside & (row == 0)
    copied = tl.load(grad + sample * grad_stride + col + row * 0, mask=is_dense, other=0.0)
    grads += copied.to(tl.float32)
    tl.store(
        grad_dense + sample * DIM + col + row * 0,
        grads.to(grad_dense.dtype.element_ty),
        mask=is_dense,
    )
    tl.store(
        grad_vectors + sample * (FEATURES * DIM) + (row - 1) * DIM + col,
        grads.to(grad_vectors.dtype.element_ty),
        mask=inside & (row > 0) & (row <= FEATURES),
    )


@triton.jit
def _tile(
    dense,
    vectors,
    first,
    batch,
    dense_stride,
    vectors_stride,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The vectors of some samples, [S, ROWS, COLS] in the type of `dense`, zeros at the edges."""
    sample = first + tl.arange(0, SAMPLES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, COLS)[None, None, :]
    inside = (sample < batch) & (col < DIM)
    from_dense = tl.load(
        dense + sample * dense_stride + col + row * 0, mask=inside & (row == 0), other=0.0
    )
    from_vectors = tl.load(
        vectors + sample * vectors_stride + (row - 1) * DIM + col,
        mask=inside & (row > 0) & (row <= FEATURES),
        other=0.0,
    )
    return tl.where(row == 0, from_dense, from_vectors.to(dense.dtype.element_ty))
