"""Products of linears that read the same input, with their adapter.

    y = W x + b + s B (A x)        q, k, v;  o;  gate, up;  down

Such linears are one product where they are folded, or where their weights are neighbours in the mapped file
(shared/base/cache.py) and their adapters have one s. Their A matrices are one product too, and so are their B, as
blocks on the diagonal of one matrix. A and B are cast to the compute type once for each version, into the memory of the
last one: a CUDA graph reads what it has read before. With few rows, a weight may be read as its codes, and its adapter
with it (coded.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actor.engines.token_step.coded import CodedFactor, CodedWeight
from actor.engines.token_step.packed import AddedProduct, RowProduct
from shared.model.layers.lora import Adapter, AddLowRank, DenseMatmul, FrozenLinear, LoraLinear, Matmul, add_low_rank
from shared.tensor_file import neighbours

Linear = LoraLinear | FrozenLinear
FindCodes = Callable[[Sequence[Linear]], CodedWeight | None]
"""Of linears that are computed at once; None where they are not read as codes."""
ALL_ROWS = 2**31


@dataclass(frozen=True, kw_only=True)
class Product:
    """Linears of a stack that are computed at once."""

    linears: tuple[Linear, ...]
    matmul: Matmul | RowProduct
    bias: torch.Tensor | None
    sizes: tuple[int, ...]
    """How many outputs each has."""
    columns: slice
    """Their part of A x."""
    by_b: AddedProduct | None
    """By B of their adapters, as blocks on the diagonal; None without an adapter, or if it is in the weight."""

    @staticmethod
    def of(
        linears: tuple[Linear, ...], matmul: Matmul | RowProduct, first: int, by_b: AddedProduct | None
    ) -> "Product":
        """matmul: of all their weights. first: the column of A x where their part begins."""
        sizes, biases = tuple(outputs(linear) for linear in linears), [frozen(linear).bias for linear in linears]
        bias, found = biases[0], [one for one in biases if one is not None]
        if len(linears) > 1 and found:
            zeros = (found[0].new_zeros(size) for size in sizes)
            bias = torch.cat([zero if one is None else one for zero, one in zip(zeros, biases, strict=True)])
        columns = slice(first, first + (0 if by_b is None else len(by_b.dense)))
        return Product(linears=linears, matmul=matmul, bias=bias, sizes=sizes, columns=columns, by_b=by_b)

    def __call__(self, x: torch.Tensor, low: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """[n, in], [n, R] -> [n, out] of each."""
        y = self.matmul(x, self.bias)
        if low is not None and self.by_b is not None:
            y = self.by_b(y, low[:, self.columns])
        return y.split(self.sizes, dim=1) if len(self.sizes) > 1 else [y]

    def by_kernel(self, x: torch.Tensor, a: torch.Tensor, add: AddLowRank) -> torch.Tensor:
        """[n, in], [R, in] A of the whole stack -> [n, out] of a single linear."""
        y = self.matmul(x, self.bias)
        return y if self.by_b is None else add(y, x, a[self.columns], self.by_b.dense.t(), self.by_b.scale)

    def copy_b(self) -> None:
        """Copy the B of all linears into their blocks of `by_b`, whose packed copy is dropped."""
        if self.by_b is None:
            return
        self.by_b.unpack()
        row = column = 0
        for linear, size in zip(self.linears, self.sizes, strict=True):
            if isinstance(linear, LoraLinear):
                rank = linear.lora_B.shape[1]
                self.by_b.dense[row : row + rank, column : column + size] = linear.lora_B.detach().t()
                row += rank
            column += size


class Stack:
    """Linears that read the same input."""

    def __init__(self, linears: Sequence[Any], find_codes: FindCodes) -> None:
        self.linears: tuple[Linear, ...] = tuple(linears)
        self.find_codes = find_codes
        adapted = [linear for linear in self.linears if isinstance(linear, LoraLinear)]
        self.add_low_rank = adapted[0].add_low_rank if adapted else add_low_rank
        """PyTorch's version multiplies by all A of a stack at once; a kernel has a launch for each linear."""
        self.folded: torch.Tensor | None = None
        """W + s B A of each linear, one below the other."""
        self.by_a: RowProduct | None = None
        """By all A."""
        self.factors: list[CodedFactor] = []
        """A and B as codes, if the base is read as codes."""
        self.products: list[Product] = []

    def prepare(self, dtype: torch.dtype) -> None:
        """Take the adapter as it is now. What was made for an earlier version is overwritten."""
        adapted = [linear for linear in self.linears if isinstance(linear, LoraLinear)]
        folded = [linear.folded for linear in adapted if linear.folded is not None]
        if len(folded) == len(self.linears):
            self.use_folded(self.joined(adapted, folded))
            return
        if not self.products or self.folded is not None:
            self.folded = None
            self.build(adapted, dtype)
        self.copy_a(adapted)
        for product in self.products:
            product.copy_b()
        for factor in self.factors:
            factor.encode()

    def copy_a(self, adapted: list[LoraLinear]) -> None:
        """Copy the A of all linears into `by_a`, whose packed copy is dropped."""
        if self.by_a is None:
            return
        self.by_a.unpack()
        row = 0
        for linear in adapted:
            self.by_a.dense[row : row + len(linear.lora_A)] = linear.lora_A.detach()
            row += len(linear.lora_A)

    def use_folded(self, whole: torch.Tensor) -> None:
        """Multiply by these sums of base and adapter from now on."""
        if whole is not self.folded:
            self.folded, self.by_a, self.factors = whole, None, []
            self.products = [Product.of(self.linears, DenseMatmul(whole), 0, None)]

    def build(self, adapted: list[LoraLinear], dtype: torch.dtype) -> None:
        """Products without the adapter's values."""
        parts = self.at_once() or [((linear,), self.single_product(linear)) for linear in self.linears]
        as_codes = all(isinstance(matmul, RowProduct) and matmul.coded is not None for _, matmul in parts)
        self.factors, self.products, first = [], [], 0
        if adapted:
            size = adapted[0].lora_A.shape[1]
            low = adapted[0].lora_A.new_zeros(sum(len(linear.lora_A) for linear in adapted), size, dtype=dtype)
            self.by_a = RowProduct(low, self.factor(low) if as_codes else None, right_rows=ALL_ROWS)
        for linears, matmul in parts:
            self.products.append(Product.of(linears, matmul, first, self.added_by_b(linears, dtype, as_codes)))
            first = self.products[-1].columns.stop

    def factor(self, weight: torch.Tensor, scale: float = 1.0) -> CodedFactor:
        """As codes, which follow each version."""
        self.factors.append(CodedFactor(weight, scale))
        return self.factors[-1]

    def added_by_b(self, linears: Sequence[Linear], dtype: torch.dtype, as_codes: bool) -> AddedProduct | None:
        """Without B's values; None without an adapter."""
        adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
        if not adapted:
            return None
        ranks, columns = (linear.lora_B.shape[1] for linear in adapted), (outputs(linear) for linear in linears)
        # Zeros stay where a linear has no part of another's A x.
        b, scale = adapted[0].lora_B.new_zeros(sum(ranks), sum(columns), dtype=dtype), adapted[0].scale
        return AddedProduct(b, scale, self.factor(b.t(), scale) if as_codes else None)

    def at_once(self) -> list[tuple[tuple[Linear, ...], RowProduct]]:
        """All as one product; empty if their weights are not neighbours, or their adapters' scales differ."""
        if len({linear.scale for linear in self.linears if isinstance(linear, LoraLinear)}) > 1:
            return []
        whole = neighbours([frozen(linear).matmul.dense for linear in self.linears])
        return [] if whole is None else [(self.linears, RowProduct(whole, self.find_codes(self.linears)))]

    def single_product(self, linear: Linear) -> Matmul | RowProduct:
        matmul = frozen(linear).matmul
        return matmul if matmul.dense is None else RowProduct(matmul.dense, self.find_codes([linear]))

    def joined(self, linears: list[LoraLinear], folded: list[torch.Tensor]) -> torch.Tensor:
        """One weight, of which the folded ones become views, so that nothing is in memory twice. Later versions are
        computed into these views."""
        if self.folded is not None and all(
            part.untyped_storage().data_ptr() == self.folded.data_ptr() for part in folded
        ):
            return self.folded
        whole = torch.cat(folded)
        for linear, part in zip(linears, whole.split([len(part) for part in folded]), strict=True):
            linear.folded = part
        return whole

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[n, in] -> [n, out] of each."""
        alone = len(self.products) == len(self.linears)
        if self.by_a is not None and alone and self.add_low_rank is not add_low_rank:
            return [product.by_kernel(x, self.by_a.dense, self.add_low_rank) for product in self.products]
        low = None if self.by_a is None else self.by_a(x).contiguous()
        return [part for product in self.products for part in product(x, low)]

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[n, out] residual + y, of a stack of one linear."""
        if self.folded is not None and self.products[0].bias is None:
            return torch.addmm(residual, x, self.folded.t())
        return residual + self(x)[0]

    def row_products(self) -> list[RowProduct]:
        """By dense weights of the base."""
        return [product.matmul for product in self.products if isinstance(product.matmul, RowProduct)]

    def thin_products(self) -> Iterator[RowProduct | AddedProduct]:
        """Of the adapter."""
        if self.by_a is not None:
            yield self.by_a
        yield from (product.by_b for product in self.products if product.by_b is not None)


def dense_bytes(adapter: Adapter) -> int:
    """Of the linears whose values are in memory."""
    dense = [layer.base.matmul.dense for layer in adapter.layers.values()]
    return sum(weight.nbytes for weight in dense if weight is not None)


def frozen(linear: Linear) -> FrozenLinear:
    return linear.base if isinstance(linear, LoraLinear) else linear


def outputs(linear: Linear) -> int:
    """How many a linear has; 0 if it has no adapter and no dense weight in memory. Such linears are never joined."""
    weight = linear.lora_B if isinstance(linear, LoraLinear) else linear.matmul.dense
    return 0 if weight is None else len(weight)
