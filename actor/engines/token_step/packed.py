"""Copies of weights in oneDNN's bf16 layout, for the time of an order.

    plain     read a weight + rearrange it, which oneDNN does in each product
    packed    read a weight that was rearranged once, before the order

With few rows, rearranging takes as long as all the rest: with all weights packed, a token step of 8 rows of half a
billion parameters takes half the time.

`HFEngine.sleep` frees the copies after the order. Where the processes take turns, they are gone before an update, which
usually takes more memory than decoding: then a copy of half of the base does not raise the peak of a run. That share is
`actor.packed`. Weights are packed one after the other, up to it, if

    completions may have PACKED_TOKENS or more    packing takes as long as some twenty token steps
    twice that memory is free                     so packing never takes what something else needs
    it helps here                                 it is faster, measured once in a process on large weights

The thin products of the adapter are packed as well, beside the share.

In `x W^T`, oneDNN rearranges W, the right factor; in `W x^T`, where the weight is the left one, x. For weights that are
not packed, which of the two is faster with few rows is measured, too: with AMX, rearranging W takes longer than the
product.

Times and free memory differ from run to run, and completions must not. So another kind of product is used only in
shapes in which it adds in the same order, which sums of terms that cancel show: nearly every bit of them is rounding.

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
COMPARED_ROWS = (8, 16, 64)
"""Numbers of rows with which kinds of product are compared."""
COMPARED_VALUES = 2**23
"""Limit for the values of a weight that is made for it."""
DRAWN_ROWS = 64
"""Of such a weight; then they are repeated."""
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

    def like(self) -> "Packable":
        """One with a weight of the same shape, whose terms cancel; not packed."""
        ...

    def sample(self, rows: int) -> torch.Tensor:
        """The product with such rows."""
        ...


class RowProduct:
    """The product of a frozen weight with the few rows of a token step."""

    def __init__(self, dense: torch.Tensor, coded: CodedWeight | None = None, right_rows: int = 0) -> None:
        """coded: the same weight. right_rows: up to so many rows, it is the right factor while it is not packed."""
        self.dense, self.coded, self.right_rows = dense, coded, right_rows
        self.packed: torch.Tensor | None = None
        self.reads_columns = False
        """Whether the rows may lie in memory column by column; else they are copied."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        if self.coded is not None and len(x) <= CODED_ROWS:
            return self.coded.product(x, bias)
        if not x.is_contiguous():
            if self.reads_columns:
                return weight_product(x, self.dense, bias)
            x = x.contiguous()
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return F.linear(x, self.dense, bias) if len(x) <= self.right_rows else weight_product(x, self.dense, bias)

    def reads_codes(self, rows: int) -> bool:
        return self.coded is not None and rows <= CODED_ROWS

    def choose_side(self, is_right: bool) -> None:
        self.right_rows = FEW if is_right else 0

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, ROWS)

    def unpack(self) -> None:
        self.packed = None

    def like(self) -> "RowProduct":
        return RowProduct(cancelling_weight(*self.dense.shape), right_rows=self.right_rows)

    def sample(self, rows: int) -> torch.Tensor:
        return self(cancelling_rows(rows, self.dense.shape[1]))

    def sample_of_columns(self, rows: int) -> torch.Tensor:
        x = cancelling_rows(rows, self.dense.shape[1]).t().contiguous().t()
        return weight_product(x, self.dense)


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

    def like(self) -> "AddedProduct":
        size, out = self.dense.shape
        return AddedProduct(cancelling_weight(out, size).t().contiguous(), self.scale)

    def sample(self, rows: int) -> torch.Tensor:
        # About as large as the rounding of the product.
        y = torch.full((rows, self.dense.shape[1]), 2.0**-22, dtype=self.dense.dtype)
        return self(y, cancelling_rows(rows, len(self.dense)))


@dataclass(frozen=True, kw_only=True)
class FasterKinds:
    """Which kinds of product are faster on this machine."""

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
        self.same_bits: dict[tuple[object, ...], bool] = {}
        """By kind and shape, for what was compared."""

    def prepare(self, products: Sequence[RowProduct], thin: Sequence[Packable], tokens: int, rows: int) -> None:
        """Measure if that was not done yet, and pack if it helps an order whose completions may have so many tokens.

        thin: of the adapter. rows: of the order's steps."""
        if not can_be_packed(products):
            return
        if self.kinds is None:
            self.kinds = faster_kinds(weights_to_measure(products))
        for product in products:
            product.choose_side(self.kinds.right and self.may_be_right(product))
        for product in (*products, *thin):
            if isinstance(product, RowProduct):
                product.reads_columns = self.may_read_columns(product)
        if self.share and tokens >= PACKED_TOKENS and self.kinds.packed:
            used = [product for product in products if not product.reads_codes(rows) and self.may_be_packed(product)]
            self.pack(used, thin, products)

    def may_be_right(self, product: RowProduct) -> bool:
        """With more outputs than inputs, if the bits are the same."""
        out, size = product.dense.shape
        if out <= size:
            return False
        key = "right", out, size
        if key not in self.same_bits:
            left, right = product.like(), product.like()
            left.choose_side(False)
            right.choose_side(True)
            self.same_bits[key] = are_same(left.sample, right.sample)
        return self.same_bits[key]

    def may_be_packed(self, product: Packable) -> bool:
        """If the bits are the same."""
        key = type(product), *product.dense.shape
        if key not in self.same_bits:
            plain, packed = product.like(), product.like()
            packed.pack()
            self.same_bits[key] = are_same(plain.sample, packed.sample)
        return self.same_bits[key]

    def may_read_columns(self, product: RowProduct) -> bool:
        """If the bits are the same."""
        key = "columns", *product.dense.shape
        if key not in self.same_bits:
            plain = product.like()
            self.same_bits[key] = are_same(plain.sample, plain.sample_of_columns)
        return self.same_bits[key]

    def pack(self, used: Sequence[RowProduct], thin: Sequence[Packable], products: Sequence[RowProduct]) -> None:
        """Pack what is used up to the share of all; nothing if less than twice that memory is free, or nobody knows."""
        room = int(self.share * size_of(products)) - size_of(
            product for product in products if product.packed is not None
        )
        room = min(room, size_of(product for product in used if product.packed is None))
        if 2 * room > (free_memory() or 0):
            return
        for product in filter(self.may_be_packed, thin):
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
    """With some weights of one shape."""
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not weights or weights[0].dtype != torch.bfloat16 or not supported:
        return FasterKinds(packed=False, right=False)
    x = torch.randn(ROWS, weights[0].shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = [RowProduct(weight) for weight in weights]
    for product in packed:
        product.pack()
    left_s, right_s, packed_s = seconds_in_turn(
        lambda: [weight_product(x, weight) for weight in weights],
        lambda: [F.linear(x, weight) for weight in weights],
        lambda: [product(x) for product in packed],
    )
    is_right = right_s <= FASTER * left_s
    return FasterKinds(packed=packed_s <= FASTER * (right_s if is_right else left_s), right=is_right)


def are_same(one: Callable[[int], torch.Tensor], other: Callable[[int], torch.Tensor]) -> bool:
    return all(torch.equal(one(rows), other(rows)) for rows in COMPARED_ROWS)


def cancelling_rows(rows: int, size: int) -> torch.Tensor:
    """[rows, size] (u, u), in another order of columns."""
    half = drawn(rows, size // 2)
    return torch.cat([half, half, half.new_zeros(rows, size % 2)], dim=1).index_select(1, mixed(size))


def cancelling_weight(out: int, size: int) -> torch.Tensor:
    """[out, size] (v, -v), in the same order; fewer outputs where that would be more than COMPARED_VALUES."""
    out = min(out, max(1, COMPARED_VALUES // size))
    half = drawn(min(out, DRAWN_ROWS), size // 2).repeat(-(-out // DRAWN_ROWS), 1)[:out]
    return torch.cat([half, -half, half.new_zeros(out, size % 2)], dim=1).index_select(1, mixed(size))


def mixed(size: int) -> torch.Tensor:
    """[size] column numbers."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()


def seconds_in_turn(*works: Callable[[], object]) -> list[float]:
    """Of each, at best. They take turns, so that other load slows all of them."""
    best = [math.inf] * len(works)
    for _ in range(TRIALS):
        for place, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[place] = min(best[place], time.perf_counter() - start)
    return best
