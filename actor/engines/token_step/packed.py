"""Copies of weights in a layout of oneDNN, for the time of an order.

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

The thin products of the adapter are packed as well, beside the share, unless codes are read instead.

In `x W^T`, oneDNN rearranges W, the right factor; in `W x^T`, where the weight is the left one, x. For weights that are
not packed, which of the two is faster with few rows is measured, too: with AMX, rearranging W takes longer than the
product.

In fp32, MKL rearranges W as well. Where `is_for_onednn`, oneDNN multiplies several rows by large weights, packed or
not. One row takes MKL, which then reads W as it is.

Times and free memory differ from run to run, and completions must not. So before another kind of product is used for a
shape, both multiply made-up factors. In half of the rows the terms cancel, u v and -u v: what is left of such a sum is
rounding, which shows the order in which the terms were added. A large weight is compared with fewer outputs.

Left out: fp32 with AVX-512 and compute.blas = "fast", where MKL reads a weight about as fast as memory gives it; thin
products in fp32; cards.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from shared.config.processes import PACKED_TOKENS
from shared.model.layers.products import is_for_onednn, weight_product
from shared.process.free_memory import free_memory

ROWS = 8
"""oneDNN chooses a layout for this number; it serves others too."""
FEW = 24
"""Up to this number of rows, what was measured with ROWS decides which factor a weight is."""
FASTER = 0.85
"""A kind of product is preferred if it takes at most this share of the other's time."""
COMPARED_ROWS = (1, ROWS, FEW, 8 * ROWS)
"""Numbers of rows with which kinds of product are compared."""
COMPARED_VALUES = 2**23
"""Limit for the values of a weight that is made up for it."""
DRAWN_OUTPUTS = 64
"""Distinct rows of such a weight; they are repeated to fill it."""
DRAWN_EXPONENTS = 16
"""Terms differ by factors of two, up to the power of this, so that few of them show their order too."""
TRIALS = 7
"""Of each kind."""
MEASURED_BYTES = 64 * 2**20
"""Limit for the weights that are measured: few enough to pack them anywhere, and too many for most caches."""


class Coded(Protocol):
    """A weight as codes."""

    @property
    def most_rows(self) -> int:
        """Up to so many rows, reading the codes is faster."""
        ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[n, in], [out] -> [n, out]"""
        ...


def codes_if_few(coded: Coded | None, rows: int) -> Coded | None:
    """The codes, if so many rows are multiplied by them."""
    return coded if coded is not None and rows <= coded.most_rows else None


class Packable(Protocol):
    """A product with a weight that may be packed."""

    dense: torch.Tensor
    """The weight."""
    packed: torch.Tensor | None
    """Its copy."""

    def reads_codes(self, rows: int) -> bool:
        """Whether so many rows are multiplied by codes instead."""
        ...

    def pack(self) -> None: ...

    def unpack(self) -> None: ...

    def form(self) -> tuple[object, ...]:
        """What decides how it is computed: its kind, and the shape of its weight."""
        ...

    def stand_in(self) -> "Packable":
        """One of the same form, with a made-up weight; not packed."""
        ...

    def sample(self, rows: int) -> torch.Tensor:
        """The product with so many made-up rows."""
        ...


class RowProduct:
    """The product of a weight with the rows of a token step: of the base, of the head, or of the A of a stack."""

    def __init__(self, dense: torch.Tensor, coded: Coded | None = None, right_rows: int = 0) -> None:
        """coded: the same weight, rounded to codes. right_rows: up to so many rows, it is the right factor while it is
        not packed."""
        self.dense, self.coded, self.right_rows = dense, coded, right_rows
        self.packed: torch.Tensor | None = None
        self.uses_onednn = is_for_onednn(dense)
        """Whether oneDNN also multiplies while the weight is not packed, if there is more than one row."""
        self.reads_columns = False
        """Whether the rows may lie in memory column by column; else they are copied."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        if coded := codes_if_few(self.coded, len(x)):
            return coded.product(x, bias)
        if not x.is_contiguous():
            if self.reads_columns:
                return weight_product(x, self.dense, bias)
            x = x.contiguous()
        if (weight := self.onednn_weight(len(x))) is not None:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, self.dense, bias) if len(x) <= self.right_rows else weight_product(x, self.dense, bias)

    def onednn_weight(self, rows: int) -> torch.Tensor | None:
        """The weight, if oneDNN's own function multiplies so many rows by it."""
        if not self.uses_onednn:
            return self.packed
        if rows == 1:
            return None
        return self.dense if self.packed is None else self.packed

    def reads_codes(self, rows: int) -> bool:
        return codes_if_few(self.coded, rows) is not None

    def choose_side(self, is_right: bool) -> None:
        self.right_rows = FEW if is_right else 0

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, ROWS)

    def unpack(self) -> None:
        self.packed = None

    def form(self) -> tuple[object, ...]:
        return "rows", *self.dense.shape, self.right_rows

    def stand_in(self) -> "RowProduct":
        return RowProduct(made_up_weight(*self.dense.shape).to(self.dense.dtype), right_rows=self.right_rows)

    def sample(self, rows: int) -> torch.Tensor:
        return self(made_up_rows(rows, self.dense.shape[1]).to(self.dense.dtype))

    def sample_of_columns(self, rows: int) -> torch.Tensor:
        return self(made_up_rows(rows, self.dense.shape[1]).t().contiguous().t())


class AddedProduct:
    """y + s x W, into y unless W is packed. Read as codes, s x W is rounded to bf16 before it is added."""

    def __init__(self, dense: torch.Tensor, scale: float, coded: Coded | None = None) -> None:
        """dense: [in, out]. coded: s W, [out, in], rounded to codes"""
        self.dense, self.scale, self.coded = dense, scale, coded
        self.packed: torch.Tensor | None = None

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[n, out], [n, in] -> [n, out]"""
        if coded := codes_if_few(self.coded, len(x)):
            return y.add_(coded.product(x, None))
        if self.packed is None:
            return y.addmm_(x, self.dense, alpha=self.scale)
        return torch.ops.mkldnn._linear_pointwise.binary(x, y, self.packed, None, "add")

    def reads_codes(self, rows: int) -> bool:
        return codes_if_few(self.coded, rows) is not None

    def pack(self) -> None:
        """The scale goes into W, if that rounds nothing."""
        if self.packed is None and math.frexp(self.scale)[0] == 0.5:
            scaled = (self.dense * self.scale).t().contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(scaled, ROWS)

    def unpack(self) -> None:
        self.packed = None

    def form(self) -> tuple[object, ...]:
        return "added", *self.dense.shape, self.scale

    def stand_in(self) -> "AddedProduct":
        size, out = self.dense.shape
        return AddedProduct(made_up_weight(out, size).t().contiguous(), self.scale)

    def sample(self, rows: int) -> torch.Tensor:
        """With y row by row and column by column, which a packed product does not tell apart."""
        size, out = self.dense.shape
        x, y = made_up_rows(rows, size), drawn(rows, out)
        return torch.stack([self(y.clone(), x), self(y.t().contiguous().t(), x)])


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
        self.compared: dict[tuple[object, ...], bool] = {}
        """Whether the bits were the same, for each kind and form."""

    def prepare(self, products: Sequence[RowProduct], thin: Sequence[Packable], tokens: int, rows: int) -> None:
        """Measure if that was not done yet, and pack if it helps an order whose completions may have so many tokens.

        thin: of the adapter. rows: of the order's steps."""
        in_fp32 = [product for product in products if product.uses_onednn]
        packs = self.share > 0.0 and tokens >= PACKED_TOKENS
        if not (packs if in_fp32 else use_bf16_units(products)):
            return
        if self.kinds is None:
            self.kinds = faster_kinds(weights_to_measure(in_fp32 or products))
        if not in_fp32:
            self.choose_factors(products, thin, self.kinds)
        if packs and self.kinds.packed:
            used = [product for product in in_fp32 or products if not product.reads_codes(rows)]
            thin = [] if in_fp32 else [product for product in thin if not product.reads_codes(rows)]
            self.pack(used, thin, products)

    def choose_factors(self, products: Sequence[RowProduct], thin: Sequence[Packable], kinds: FasterKinds) -> None:
        """Which factor a weight in bf16 is, and how its rows may lie."""
        for product in products:
            product.choose_side(kinds.right and self.may_be_right_factor(product))
        for product in (*products, *thin):
            if isinstance(product, RowProduct):
                product.reads_columns = self.may_read_columns(product)

    def may_be_right_factor(self, product: RowProduct) -> bool:
        """With more outputs than inputs, if the bits are the same."""
        out, size = product.dense.shape
        return out > size and self.same_bits(("right", out, size), lambda: right_factor_has_same_bits(product))

    def may_be_packed(self, product: Packable) -> bool:
        """If the bits are the same."""
        return self.same_bits(("packed", *product.form()), lambda: packed_has_same_bits(product))

    def may_read_columns(self, product: RowProduct) -> bool:
        """If the bits are the same. Only where outputs are fewer than inputs, as in down_proj, whose input may lie
        column by column, and in the A of an adapter."""
        out, size = product.dense.shape
        return out < size and self.same_bits(("columns", *product.form()), lambda: columns_have_same_bits(product))

    def same_bits(self, key: tuple[object, ...], compare: Callable[[], bool]) -> bool:
        if key not in self.compared:
            self.compared[key] = compare()
        return self.compared[key]

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
        for product in filter(self.may_be_packed, used):
            if product.packed is None and product.dense.nbytes <= room:
                product.pack()
                room -= product.dense.nbytes


def size_of(products: Iterable[RowProduct]) -> int:
    return sum(product.dense.nbytes for product in products)


def use_bf16_units(products: Sequence[RowProduct]) -> bool:
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    in_bf16 = (product.dense.is_cpu and product.dense.dtype == torch.bfloat16 for product in products)
    return bool(products) and supported and all(in_bf16)


def weights_to_measure(products: Sequence[RowProduct]) -> list[torch.Tensor]:
    """Weights of the largest shape that fits MEASURED_BYTES and has more outputs than inputs."""
    wide = [product.dense for product in products if len(product.dense) > product.dense.shape[1]]
    largest = max((dense.nbytes for dense in wide if dense.nbytes <= MEASURED_BYTES), default=0)
    return [dense for dense in wide if dense.nbytes == largest][: MEASURED_BYTES // max(1, largest)]


def faster_kinds(weights: Sequence[torch.Tensor]) -> FasterKinds:
    """By the times of products with some weights of one shape."""
    plain, right, packed = ([RowProduct(weight) for weight in weights] for _ in range(3))
    in_bf16 = use_bf16_units(plain)
    if not (in_bf16 or any(product.uses_onednn for product in plain)):
        return FasterKinds(packed=False, right=False)
    x = torch.randn(ROWS, weights[0].shape[1], generator=torch.Generator().manual_seed(0)).to(weights[0].dtype)
    for product in right:
        product.choose_side(in_bf16)
    for product in packed:
        product.pack()
    plain_s, right_s, packed_s = seconds_in_turn(
        lambda: [product(x) for product in plain],
        lambda: [product(x) for product in right],
        lambda: [product(x) for product in packed],
    )
    is_right = in_bf16 and right_s <= FASTER * plain_s
    return FasterKinds(packed=packed_s <= FASTER * (right_s if is_right else plain_s), right=is_right)


def right_factor_has_same_bits(product: RowProduct) -> bool:
    one = product.stand_in()
    one.choose_side(False)
    on_left = results(one.sample)
    one.choose_side(True)
    return are_equal(on_left, results(one.sample))


def packed_has_same_bits(product: Packable) -> bool:
    one = product.stand_in()
    plain = results(one.sample)
    one.pack()
    return are_equal(plain, results(one.sample))


def columns_have_same_bits(product: RowProduct) -> bool:
    one = product.stand_in()
    one.reads_columns = True
    return are_equal(results(one.sample), results(one.sample_of_columns))


def results(sample: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    return [sample(rows) for rows in COMPARED_ROWS]


def are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def made_up_rows(rows: int, size: int) -> torch.Tensor:
    """[rows, size] Even rows are (u, u), odd ones random; the columns are mixed."""
    half = drawn(rows, size // 2)
    found = torch.cat([half, half, half.new_zeros(rows, size % 2)], dim=1)
    found[1::2] = drawn(rows, size)[1::2]
    return found.index_select(1, column_order(size))


def made_up_weight(out: int, size: int) -> torch.Tensor:
    """[out, size] (v, -v), the columns mixed in the same way; fewer outputs where there would be more than
    COMPARED_VALUES."""
    out = min(out, max(1, COMPARED_VALUES // size))
    half = drawn(min(out, DRAWN_OUTPUTS), size // 2)
    exponents = torch.randint(DRAWN_EXPONENTS, half.shape[1:], generator=torch.Generator().manual_seed(size))
    half = half * 2.0**exponents
    found = torch.cat([half, -half, half.new_zeros(len(half), size % 2)], dim=1).bfloat16()
    return found.index_select(1, column_order(size)).repeat(-(-out // DRAWN_OUTPUTS), 1)[:out]


def column_order(size: int) -> torch.Tensor:
    """[size] The same permutation each time."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()


def seconds_in_turn(*works: Callable[[], object]) -> list[float]:
    """The best time of each. They take turns, so that other load slows all of them."""
    best = [math.inf] * len(works)
    for _ in range(TRIALS):
        for place, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[place] = min(best[place], time.perf_counter() - start)
    return best
