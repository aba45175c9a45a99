"""Weights as the processor's bf16 units want them, while an order is decoded.

    plain     read a weight + rearrange it, which oneDNN does in each product
    packed    read a weight that was rearranged once, before the order

With few rows, rearranging takes as long as all the rest: with packed weights, a decode step of 8 rows of half a billion
parameters takes 0.5 of the time. The values are the same to the bit, so what is packed may depend on the machine and on
its free memory.

The copy is as large as the layers and the head of the base, and lasts for an order. Where the processes take turns it
is gone before an update, which takes the most memory. An order is packed if

    its completions may have PACKED_TOKENS    packing takes as long as some twenty token steps
    there is memory for two such copies       none is given up for it
    it helps here                             equal and faster for the largest weight; measured once in a process

Left out: fp32, whose kernels take a weight as it is, and cards.
"""

import time
from collections.abc import Sequence

import torch

from shared.config.processes import PACKED_TOKENS
from shared.model.products import weight_product
from shared.process.free_memory import free_memory

ROWS = 8
"""oneDNN chooses a layout for this number; it serves others too."""
FASTER = 0.85
"""A packed product takes at most this share of the time."""
TRIALS = 7
"""Of each kind."""


class RowProduct:
    """The product of a frozen weight with the few rows of a decode step."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense
        self.packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        if self.packed is None:
            return weight_product(x, self.dense, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, ROWS)

    def unpack(self) -> None:
        self.packed = None


class Packing:
    """Packs the weights of a decode loop, where that helps."""

    def __init__(self) -> None:
        self.helps: bool | None = None
        """None until it was measured."""

    def pack(self, products: Sequence[RowProduct], tokens: int) -> None:
        """For an order whose completions may have so many tokens."""
        if tokens >= PACKED_TOKENS and can_be_packed(products) and has_room(products) and self.is_faster(products):
            for product in products:
                product.pack()

    def is_faster(self, products: Sequence[RowProduct]) -> bool:
        if self.helps is None:
            self.helps = packed_is_faster(max(products, key=lambda product: product.dense.nbytes).dense)
        return self.helps


def can_be_packed(products: Sequence[RowProduct]) -> bool:
    return bool(products) and all(
        product.dense.is_cpu and product.dense.dtype == torch.bfloat16 for product in products
    )


def has_room(products: Sequence[RowProduct]) -> bool:
    """Unknown memory is taken for none."""
    return 2 * sum(product.dense.nbytes for product in products if product.packed is None) <= (free_memory() or 0)


def packed_is_faster(weight: torch.Tensor) -> bool:
    """Whether it is, with the same bits. The two kinds take turns, so that other load slows both."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    product = RowProduct(weight)
    x = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    times: dict[bool, list[float]] = {False: [], True: []}
    product.pack()
    whole = product.packed
    found: dict[bool, torch.Tensor] = {}
    for trial in range(2 * TRIALS):
        product.packed = whole if trial % 2 else None
        start = time.perf_counter()
        found[bool(trial % 2)] = product(x)
        times[bool(trial % 2)].append(time.perf_counter() - start)
    return torch.equal(found[True], found[False]) and min(times[True]) <= FASTER * min(times[False])
