"""Weights as the processor's bf16 units want them, while an order is decoded.

    plain     read a weight + rearrange it, which oneDNN does in each product
    packed    read a weight that was rearranged once, before the order

With few rows, rearranging takes as long as all the rest: with all weights packed, a decode step of 8 rows of half a
billion parameters takes half the time. The values are the same to the bit, so what is packed may depend on the machine
and on its free memory.

The copy lasts for an order. Where the processes take turns it is gone before an update, which takes more memory than
decoding: a copy of half of the base leaves the peak of a usual run where it is, and `actor.packed` may allow more.
Weights are packed, one after the other, as far as that and free memory allow, if

    the completions may have PACKED_TOKENS    packing takes as long as some twenty token steps
    it helps here                             equal and faster for a large weight; measured once in a process

oneDNN rearranges the right factor. Whether a weight that is not packed is rather the left or the right one of a product
with few rows is measured, too: with AMX, rearranging takes longer than the product.

Left out: fp32, whose kernels take a weight as it is, and cards.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.config.processes import PACKED_TOKENS
from shared.model.products import weight_product
from shared.process.free_memory import free_memory

ROWS = 8
"""oneDNN chooses a layout for this number; it serves others too."""
FEW = 24
"""Up to this number of rows, what was measured with ROWS decides which factor a weight is."""
FASTER = 0.85
"""A kind of product that is preferred takes at most this share of the time of the other."""
TRIALS = 7
"""Of each kind."""
MEASURED, MEASURED_BYTES = 6, 64 * 2**20
"""How many weights to measure with, so that they come from memory as in a step, and the largest size."""


class RowProduct:
    """The product of a frozen weight with the few rows of a decode step."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense
        self.packed: torch.Tensor | None = None
        self.right_rows = 0
        """Up to so many rows, the weight is the right factor while it is not packed."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return F.linear(x, self.dense, bias) if len(x) <= self.right_rows else weight_product(x, self.dense, bias)

    def prefer(self, kinds: "Kinds") -> None:
        """Of weights with more inputs than outputs, whose sums are long, the left factor is faster everywhere."""
        self.right_rows = FEW if kinds.right and len(self.dense) > self.dense.shape[1] else 0

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, ROWS)

    def unpack(self) -> None:
        self.packed = None


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Which products are worth using on this machine."""

    packed: bool
    right: bool
    """Of a weight that is not packed, as the right factor."""


class Packing:
    """Prepares the weights of a decode loop for an order."""

    def __init__(self, share: float) -> None:
        """share: of their bytes that may be packed."""
        self.share = share
        self.kinds: Kinds | None = None
        """None until it was measured."""

    def prepare(self, products: Sequence[RowProduct], tokens: int) -> None:
        """For an order whose completions may have so many tokens."""
        if not can_be_packed(products):
            return
        if self.kinds is None:
            self.kinds = measured(typical(products))
            for product in products:
                product.prefer(self.kinds)
        if tokens >= PACKED_TOKENS and self.kinds.packed:
            self.pack(products)

    def pack(self, products: Sequence[RowProduct]) -> None:
        """As many as are allowed. Half of the free memory stays free; if it is unknown, none is packed."""
        kept = sum(product.dense.nbytes for product in products if product.packed is not None)
        allowed = int(self.share * sum(product.dense.nbytes for product in products))
        room = min(allowed - kept, (free_memory() or 0) // 2)
        for product in products:
            if product.packed is None and product.dense.nbytes <= room:
                product.pack()
                room -= product.dense.nbytes


def can_be_packed(products: Sequence[RowProduct]) -> bool:
    return bool(products) and all(
        product.dense.is_cpu and product.dense.dtype == torch.bfloat16 for product in products
    )


def typical(products: Sequence[RowProduct]) -> list[torch.Tensor]:
    """The weights to measure with: of the size of the largest that is not too large."""
    by_size = sorted((product.dense for product in products), key=lambda dense: dense.nbytes)
    shape = [by_size[0], *(dense for dense in by_size if dense.nbytes <= MEASURED_BYTES)][-1].shape
    return [dense for dense in by_size if dense.shape == shape][:MEASURED]


def measured(weights: Sequence[torch.Tensor]) -> Kinds:
    """With some weights of one shape. A kind is worth using if it is faster and gives the same bits. All take turns, so
    that other load slows each."""
    weight = weights[0]
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype != torch.bfloat16 or not supported:
        return Kinds(packed=False, right=False)
    x = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    packed = [RowProduct(weight) for weight in weights]
    for product in packed:
        product.pack()
    kinds: dict[str, Callable[[], list[torch.Tensor]]] = {
        "left": lambda: [weight_product(x, weight) for weight in weights],
        "right": lambda: [F.linear(x, weight) for weight in weights],
        "packed": lambda: [product(x) for product in packed],
    }
    times, found = dict.fromkeys(kinds, math.inf), {}
    for _ in range(TRIALS):
        for name, compute in kinds.items():
            start = time.perf_counter()
            found[name] = compute()
            times[name] = min(times[name], time.perf_counter() - start)
    same = {name: all(map(torch.equal, found[name], found["left"])) for name in kinds}
    right = same["right"] and times["right"] <= FASTER * times["left"]
    plain = times["right"] if right else times["left"]
    return Kinds(packed=same["packed"] and times["packed"] <= FASTER * plain, right=right)
