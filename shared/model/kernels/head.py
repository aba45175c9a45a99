"""Add a tile of the vocabulary to the sums of log-prob, entropy and gradient, in one launch that reads it once.

    y = W h of these columns,   z = cap tanh(scale (y + b) / cap) / temperature,     most models: z = y / temperature
    m' = max(m, max z),   f = exp(m - m'),   e = exp(z - m')
    s' = f s + sum e,     u' = f (u + s (m - m')) + sum e (z - m'),     z_t is noted if the target is in the tile
    shares = e dz / dy without the target,   D' = f D + shares W

The torch version is `Sums` of shared/model/head.py, which has the meaning of every sum and what follows from them: the
products with W, the loop over the tiles, log-prob, entropy and gradient are the same code for both. That version goes
over a tile in about fifteen operations. Here one program has a row of the tile in registers, from the product to the
sums, and writes the shares in the type of W for the product that follows. Both products stay with cuBLAS. The backward
pass needs no kernel: it is the known gradient times what arrives.
"""

import torch
import triton.language as tl  # pyright: ignore[reportMissingImports]

from shared.model.head import Head, columns_at_once
from shared.model.kernels.toolchain import jit
from shared.model.layers.products import product_fp32


def warps(block: int) -> int:
    """Sixteen columns a thread: its registers hold the four values of each."""
    return block // 512


class FoldedSums:
    """The sums of n rows, to which a tile is added in one launch."""

    def __init__(
        self, head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, entropies: bool, directions: bool
    ) -> None:
        self.head, self.targets, self.has_entropies = head, targets, entropies
        self.sums = torch.zeros((5, len(hidden)), device=hidden.device)
        """m, s, u, the target's logit, and f of the last tile"""
        self.largest, self.total, self.spread, self.target, self.fade = self.sums
        self.largest.fill_(-3.0e38)
        self.weighted = torch.zeros_like(hidden, dtype=torch.float32) if directions else None
        """[n, H] D"""

    def add(self, product: torch.Tensor, columns: slice, center: torch.Tensor | None) -> None:
        # On a card there is none.
        product = product if center is None else product.float().add_(center)
        rows, width = product.shape
        form, weight = self.head.form, self.head.weight[columns]
        shares = product if self.weighted is None else weight.new_empty((rows, width))
        add_tile[(rows,)](
            product,
            product if form.bias is None else form.bias,
            shares,
            self.targets,
            self.sums,
            rows,
            columns.start,
            width,
            product.stride(0),
            self.head.temperature,
            float(form.scale),
            form.cap or 1.0,
            HAS_BIAS=form.bias is not None,
            HAS_CAP=form.cap is not None,
            ENTROPIES=self.has_entropies,
            DIRECTIONS=self.weighted is not None,
            BLOCK=(block := columns_at_once(product.device)),
            num_warps=warps(block),
        )
        if self.weighted is not None:
            self.weighted.mul_(self.fade[:, None]).add_(product_fp32(shares, weight))

    def entropies(self) -> torch.Tensor:
        return self.total.log() - self.spread / self.total if self.has_entropies else self.largest[:0]

    def mean(self) -> torch.Tensor:
        assert self.weighted is not None
        return self.weighted / self.total[:, None]


@jit
def add_tile(
    product: tl.tensor,
    bias: tl.tensor,
    shares: tl.tensor,
    targets: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ENTROPIES: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of the tile."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < width
    z = tl.load(product + row * stride + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + first + places, mask=inside, other=0.0).to(tl.float32)
    z = z * scale
    slope = scale
    if HAS_CAP:
        # tanh, which cannot overflow in this form
        small = tl.exp(-2.0 * tl.abs(z / cap))
        bent = tl.where(z < 0.0, small - 1.0, 1.0 - small) / (1.0 + small)
        slope = scale * (1.0 - bent * bent)
        z = cap * bent
    z = tl.where(inside, z / temperature, -3.0e38)
    before = tl.load(sums + row)
    total = tl.load(sums + rows + row)
    top = tl.maximum(before, tl.max(z, axis=0))
    fade = tl.exp(before - top)
    share = tl.where(inside, tl.exp(z - top), 0.0)
    if ENTROPIES:
        spread = tl.load(sums + 2 * rows + row)
        moved = fade * (spread + total * (before - top))
        tl.store(sums + 2 * rows + row, moved + tl.sum(share * (z - top), axis=0))
    tl.store(sums + row, top)
    tl.store(sums + rows + row, fade * total + tl.sum(share, axis=0))
    tl.store(sums + 4 * rows + row, fade)
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < width)
    tl.store(sums + 3 * rows + row, tl.sum(tl.where(places == target, z, 0.0), axis=0), mask=here)
    if DIRECTIONS:
        share = tl.where(places == target, 0.0, share * slope)
        tl.store(shares + row * width + places, share.to(shares.dtype.element_ty), mask=inside)
