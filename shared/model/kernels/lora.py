"""Add the adapter's part to the product of a frozen weight, for few rows, in one launch.

    y += s B (A x),     x: [n, in], A: [R, in], B: [out, R], y: [n, out]

The torch version is `add_low_rank` of shared/model/layers/lora.py: two launches, and A x goes through memory between.
Here each program has a block of the outputs and computes all of A x for itself. That work is repeated, but A and x are
small and stay in the card's cache, and a launch costs more. In a CUDA graph it does not: on an H200 the torch version
is quicker there, and is chosen (choice.py). With more than ROWS rows or RANKS ranks the torch version always computes.
A x is rounded to the type of x as there, because the learner computes with that.

The base's product, NF4 or dense, comes first and is y: bitsandbytes has a kernel for it that needs no other.
"""

import torch
import triton.language as tl  # pyright: ignore[reportMissingImports]

from shared.model.kernels.toolchain import jit, power_of_two
from shared.model.layers.lora import add_low_rank as in_torch

ROWS, RANKS = 64, 64
INPUTS, OUTPUTS = 64, 64
"""Of x that are read at once, and of y that a program has."""
STAGES = 2
"""Blocks of x and A that are read ahead. With these sizes a program has at most 48 KiB, which every card gives."""
SMALLEST = 16
"""Side of a block that the card can multiply."""


def add_low_rank(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """In place. The last dimension of x and y has no gaps; a and b may be of any type and layout."""
    (rows, inputs), (outputs, rank) = x.shape, b.shape
    if rows > ROWS or rank > RANKS:
        return in_torch(y, x, a.to(x.dtype), b.to(x.dtype), scale)
    add_product[(-(-outputs // OUTPUTS),)](
        y,
        x,
        a,
        b,
        rows,
        inputs,
        outputs,
        rank,
        scale,
        y.stride(0),
        x.stride(0),
        *a.stride(),
        *b.stride(),
        ROWS=max(SMALLEST, power_of_two(rows)),
        RANKS=max(SMALLEST, power_of_two(rank)),
        INPUTS=INPUTS,
        OUTPUTS=OUTPUTS,
        # tf32 has all bits of bf16 and fp16.
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_stages=STAGES,
    )
    return y


@jit
def add_product(
    y: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    y_stride: tl.tensor,
    x_stride: tl.tensor,
    a_stride: tl.tensor,
    a_step: tl.tensor,
    b_stride: tl.tensor,
    b_step: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A block of the outputs, for all rows. Factors are rounded to the type of x and multiplied in fp32."""
    kind = x.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    row = tl.arange(0, ROWS)[:, None]
    across = tl.arange(0, RANKS)[None, :]
    down = tl.arange(0, RANKS)[:, None]
    low = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        right = start + tl.arange(0, INPUTS)[None, :]
        below = start + tl.arange(0, INPUTS)[:, None]
        values = tl.load(x + row * x_stride + right, mask=(row < rows) & (right < inputs), other=0.0)
        factor = tl.load(a + across * a_stride + below * a_step, mask=(across < rank) & (below < inputs), other=0.0)
        low = tl.dot(values.to(tl.float32), factor.to(kind).to(tl.float32), low, input_precision=PRECISION)
    low = low.to(kind).to(tl.float32)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    factor = tl.load(b + column * b_stride + down * b_step, mask=(column < outputs) & (down < rank), other=0.0)
    part = tl.dot(low, factor.to(kind).to(tl.float32), input_precision=PRECISION)
    place, here = y + row * y_stride + column, (row < rows) & (column < outputs)
    before = tl.load(place, mask=here, other=0.0).to(tl.float32)
    tl.store(place, (before + scale * part).to(y.dtype.element_ty), mask=here)
