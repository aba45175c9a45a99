"""Copies of weights in oneDNN's bf16 layout, for the time of an order.

    plain     read a weight + rearrange it, which oneDNN does in each product
    packed    read a weight that was rearranged once, before the order

With few rows, rearranging takes as long as all the rest: with all weights packed, a token step of 8 rows of half a
billion parameters takes half the time. The values are the same to the bit, so what is packed may depend on the machine
and on its free memory.

`HFEngine.sleep` frees the copies after the order. Where the processes take turns, they are gone before an update, which
usually takes more memory than decoding: then a copy of half of the base does not raise the peak of a run. That share is
`actor.packed`. Weights are packed one after the other, up to it, if

    completions may have PACKED_TOKENS or more    packing takes as long as some twenty token steps
    twice that memory is free                     so packing never takes what something else needs
    it helps here                                 same bits and faster, measured once in a process on large weights

The thin products of the adapter are packed as well, beside the share, if those of a layer give the same bits.

In `x W^T`, oneDNN rearranges W, the right factor; in `W x^T`, where the weight is the left one, x. For weights that are
not packed, which of the two is faster with few rows is measured, too: with AMX, rearranging W takes longer than the
product.

Left out: fp32, whose kernels take a weight as it is, and cards.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from actor.engines.token_step.coded import CodedWeight
from shared.config.processes import CODED_ROWS, PACKED_TOKENS
from shared.model.products import weight_product
from shared.process.free_memory import free_memory

ROWS = 8
"""oneDNN chooses a layout for this number; it serves others too."""
FEW = 24
"""Up to this number of rows, what was measured with ROWS decides which factor a weight is."""
FASTER = 0.85
"""A kind of product is preferred if it takes at most this share of the other's time."""
FEW_THIN = 8
"""Products of the adapter that are looked at: those of a layer."""
TRIALS = 7
"""Of each kind."""
MEASURED_BYTES = 64 * 2**20
"""Limit for the weights that are measured: few enough to pack them anywhere, and too many for most caches."""


class Packable(Protocol):
    """A product with a weight that may be packed."""

    dense: torch.Tensor
    """The weight."""
    packed: torch.Tensor | None
    """Its copy."""

    def pack(self) -> None: ...

    def unpack(self) -> None: ...

    def sample(self) -> torch.Tensor:
        """With rows of random numbers."""
        ...


class RowProduct:
    """The product of a frozen weight with the few rows of a token step."""

    def __init__(self, dense: torch.Tensor, coded: CodedWeight | None = None, right_rows: int = 0) -> None:
        """coded: the same weight. right_rows: up to so many rows, it is the right factor while it is not packed."""
        self.dense, self.coded, self.right_rows = dense, coded, right_rows
        self.packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        if self.coded is not None and len(x) <= CODED_ROWS:
            return self.coded.product(x, bias)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return F.linear(x, self.dense, bias) if len(x) <= self.right_rows else weight_product(x, self.dense, bias)

    def reads_codes(self, rows: int) -> bool:
        return self.coded is not None and rows <= CODED_ROWS

    def choose_side(self, kinds: "FasterKinds") -> None:
        """Have the weight on the left, unless it has more outputs than inputs and the right is faster here."""
        self.right_rows = FEW if kinds.right and len(self.dense) > self.dense.shape[1] else 0

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, ROWS)

    def unpack(self) -> None:
        self.packed = None

    def sample(self) -> torch.Tensor:
        return self(drawn(ROWS, self.dense.shape[1]))


class AddedProduct:
    """y + s x W, into y unless W is packed."""

    def __init__(self, dense: torch.Tensor, scale: float) -> None:
        """[in, out]"""
        self.dense, self.scale = dense, scale
        self.packed: torch.Tensor | None = None

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[n, out], [n, in] -> [n, out]"""
        if self.packed is None:
            return y.addmm_(x, self.dense, alpha=self.scale)
        return torch.ops.mkldnn._linear_pointwise.binary(x, y, self.packed, None, "add")

    def pack(self) -> None:
        """The scale goes into W, if that rounds nothing."""
        if self.packed is None and math.frexp(self.scale)[0] == 0.5:
            scaled = (self.dense * self.scale).t().contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(scaled, ROWS)

    def unpack(self) -> None:
        self.packed = None

    def sample(self) -> torch.Tensor:
        return self(drawn(ROWS, self.dense.shape[1]), drawn(ROWS, len(self.dense)))


@dataclass(frozen=True, kw_only=True)
class FasterKinds:
    """Which kinds of product are faster on this machine, with the same bits."""

    packed: bool
    right: bool
    """Whether a weight that is not packed should be the right factor."""


class Packing:
    """Prepares the weights of a decode loop for an order."""

    def __init__(self, share: float) -> None:
        """share: of the weights' bytes, how much may be packed."""
        self.share = share
        self.kinds: FasterKinds | None = None
        """None until it was measured."""
        self.thin: bool | None = None
        """The same: whether the products of the adapter have the same bits when they are packed."""

    def prepare(self, products: Sequence[RowProduct], thin: Sequence[Packable], tokens: int, rows: int) -> None:
        """Measure if that was not done yet, and pack if it helps an order whose completions may have so many tokens.

        thin: of the adapter. rows: of the order's steps."""
        if not can_be_packed(products):
            return
        if self.kinds is None:
            self.kinds = faster_kinds(weights_to_measure(products))
        for product in products:
            product.choose_side(self.kinds)
        if self.share and tokens >= PACKED_TOKENS and self.kinds.packed:
            self.pack([product for product in products if not product.reads_codes(rows)], thin, products)

    def packs_thin(self, thin: Sequence[Packable]) -> bool:
        """Whether the first few give the same bits, packed and as they are; known after the first call."""
        if self.thin is None and thin:
            self.thin = all(has_same_bits(product) for product in thin[:FEW_THIN])
        return bool(self.thin)

    def pack(self, used: Sequence[RowProduct], thin: Sequence[Packable], products: Sequence[RowProduct]) -> None:
        """Pack what is used up to the share of all; nothing if less than twice that memory is free, or nobody knows."""
        room = int(self.share * size_of(products)) - size_of(
            product for product in products if product.packed is not None
        )
        room = min(room, size_of(product for product in used if product.packed is None))
        if 2 * room > (free_memory() or 0):
            return
        for product in thin if self.packs_thin(thin) else ():
            product.pack()
        for product in used:
            if product.packed is None and product.dense.nbytes <= room:
                product.pack()
                room -= product.dense.nbytes


def size_of(products: Iterable[RowProduct]) -> int:
    return sum(product.dense.nbytes for product in products)


def can_be_packed(products: Sequence[RowProduct]) -> bool:
    return bool(products) and all(
        product.dense.is_cpu and product.dense.dtype == torch.bfloat16 for product in products
    )


def weights_to_measure(products: Sequence[RowProduct]) -> list[torch.Tensor]:
    """Weights of the largest shape that fits MEASURED_BYTES and has more outputs than inputs."""
    wide = [product.dense for product in products if len(product.dense) > product.dense.shape[1]]
    largest = max((dense.nbytes for dense in wide if dense.nbytes <= MEASURED_BYTES), default=0)
    return [dense for dense in wide if dense.nbytes == largest][: MEASURED_BYTES // max(1, largest)]


def faster_kinds(weights: Sequence[torch.Tensor]) -> FasterKinds:
    """With some weights of one shape: a kind is worth using if it is faster and gives the same bits."""
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not weights or weights[0].dtype != torch.bfloat16 or not supported:
        return FasterKinds(packed=False, right=False)
    x = torch.randn(ROWS, weights[0].shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = [RowProduct(weight) for weight in weights]
    for product in packed:
        product.pack()
    (by_left, left_s), (by_right, right_s), (by_packed, packed_s) = results_in_turn(
        lambda: [weight_product(x, weight) for weight in weights],
        lambda: [F.linear(x, weight) for weight in weights],
        lambda: [product(x) for product in packed],
    )
    is_right = all(map(torch.equal, by_right, by_left)) and right_s <= FASTER * left_s
    is_packed = all(map(torch.equal, by_packed, by_left)) and packed_s <= FASTER * (right_s if is_right else left_s)
    return FasterKinds(packed=is_packed, right=is_right)


def has_same_bits(product: Packable) -> bool:
    """Packed and as it is; it is not packed afterwards."""
    plain = product.sample()
    product.pack()
    packed = product.sample()
    product.unpack()
    return torch.equal(plain, packed)


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()


def results_in_turn(*works: Callable[[], list[torch.Tensor]]) -> list[tuple[list[torch.Tensor], float]]:
    """What each gives, and its seconds at best. They take turns, so that other load slows all of them."""
    found: list[tuple[list[torch.Tensor], float]] = [([], math.inf) for _ in works]
    for _ in range(TRIALS):
        for place, work in enumerate(works):
            start = time.perf_counter()
            result = work()
            found[place] = result, min(found[place][1], time.perf_counter() - start)
    return found
