"""Runs a decode step of a Llama, Qwen2 or Qwen3 model without calling the modules of its layers.

    q, k, v = rotate(W_qkv norm(x)),   x += W_o attend(q),   x += W_down (silu(W_gate h) W_up h),   h = norm(x)

For one token a row, a small model spends most of its time between the operations: in module calls, in products of two
or three linears with the same input, in rotary tables for each call. Here such linears are one product where they are
folded, or where their weights are neighbours in the mapped file (shared/base/cache.py). Their A matrices are one
product too, and so are their B, as blocks on the diagonal of one matrix. A and B are cast to the compute type once for
each version, into the memory of the last one: a CUDA graph reads what it has read before. In fp32 operations are also
joined where that changes the last bit only. In bf16 each is rounded exactly as in the modules, because the learner
computes with those, and rounding changes a value by up to 0.4 % there. (On a card, norms round once less in both.)

Modules and weights are the policy's own, and the engine compares its decode loop with the model's class before it is
used (HFEngine.check). Prompts, and models of other types, go through transformers' layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from actor.engines.kv_cache import LayerCache
from actor.engines.packed import RowProduct
from shared.model.lora import Adapter, AddLowRank, DenseMatmul, FrozenLinear, LoraLinear, Matmul, add_low_rank
from shared.model.policy import Policy
from shared.model.trained_layers import Norm, covers, signed

Linear = LoraLinear | FrozenLinear
STEP = 8
"""In bf16 on a CPU the number of rows is raised to a multiple of this. oneDNN compiles a product of each shape anew,
which takes a millisecond and half a megabyte (shared/process/determinism.py), and rows leave one after the other."""


def dense_bytes(adapter: Adapter) -> int:
    """Of the linears whose values are in memory."""
    dense = [layer.base.matmul.dense for layer in adapter.layers.values()]
    return sum(weight.nbytes for weight in dense if weight is not None)


@dataclass(frozen=True, kw_only=True)
class Product:
    """Linears of a stack that are computed at once."""

    linears: tuple[Linear, ...]
    """What they are."""
    matmul: Matmul | RowProduct
    bias: torch.Tensor | None
    sizes: tuple[int, ...]
    """How many outputs each has."""
    columns: slice
    """Their part of A x."""
    high: torch.Tensor | None
    """[R, out] B of their adapters, as blocks on the diagonal; None without an adapter, or if it is in the weight."""
    scale: float
    """Of all adapters."""

    @staticmethod
    def of(
        linears: tuple[Linear, ...], matmul: Matmul | RowProduct, first: int, high: torch.Tensor | None
    ) -> "Product":
        """matmul: of all their weights. first: the column of A x where their part begins."""
        sizes, biases = tuple(outputs(linear) for linear in linears), [frozen(linear).bias for linear in linears]
        bias, found = biases[0], [one for one in biases if one is not None]
        if len(linears) > 1 and found:
            zeros = (found[0].new_zeros(size) for size in sizes)
            bias = torch.cat([zero if one is None else one for zero, one in zip(zeros, biases, strict=True)])
        columns = slice(first, first + (0 if high is None else len(high)))
        scale = next((linear.scale for linear in linears if isinstance(linear, LoraLinear)), 1.0)
        return Product(linears=linears, matmul=matmul, bias=bias, sizes=sizes, columns=columns, high=high, scale=scale)

    def __call__(self, x: torch.Tensor, low: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """[n, in], [n, R] -> [n, out] of each."""
        y = self.matmul(x, self.bias)
        if low is not None and self.high is not None:
            y.addmm_(low[:, self.columns], self.high, alpha=self.scale)
        return y.split(self.sizes, dim=1) if len(self.sizes) > 1 else [y]

    def by_kernel(self, x: torch.Tensor, low: torch.Tensor, add: AddLowRank) -> torch.Tensor:
        """[n, in], [R, in] A of the whole stack -> [n, out] of a single linear."""
        y = self.matmul(x, self.bias)
        return y if self.high is None else add(y, x, low[self.columns], self.high.t(), self.scale)

    def take_high(self) -> None:
        """B as it is now, into its blocks."""
        row = column = 0
        for linear, size in zip(self.linears, self.sizes, strict=True):
            if isinstance(linear, LoraLinear) and self.high is not None:
                rank = linear.lora_B.shape[1]
                self.high[row : row + rank, column : column + size] = linear.lora_B.detach().t()
                row += rank
            column += size


class Stack:
    """Linears that read the same input."""

    def __init__(self, *linears: Any) -> None:
        self.linears: tuple[Linear, ...] = linears
        adapted = [linear for linear in self.linears if isinstance(linear, LoraLinear)]
        self.add_low_rank = adapted[0].add_low_rank if adapted else add_low_rank
        """PyTorch's version multiplies by all A of a stack at once; a kernel has a launch for each linear."""
        self.folded: torch.Tensor | None = None
        """The sums of all linears, one below the other."""
        self.low: torch.Tensor | None = None
        self.products: list[Product] = []

    def prepare(self, dtype: torch.dtype) -> None:
        """Take the adapter as it is now. What was made for an earlier version is overwritten."""
        adapted = [linear for linear in self.linears if isinstance(linear, LoraLinear)]
        folded = [linear.folded for linear in adapted if linear.folded is not None]
        if len(folded) == len(self.linears):
            self.sum_up(self.joined(adapted, folded))
            return
        if not self.products or self.folded is not None:
            self.folded = None
            self.build(adapted, dtype)
        self.take_low(adapted)
        for product in self.products:
            product.take_high()

    def take_low(self, adapted: list[LoraLinear]) -> None:
        """A as it is now."""
        row = 0
        for linear in adapted:
            if self.low is not None:
                self.low[row : row + len(linear.lora_A)] = linear.lora_A.detach()
                row += len(linear.lora_A)

    def sum_up(self, whole: torch.Tensor) -> None:
        """Multiply by the sums from now on."""
        if whole is not self.folded:
            self.folded, self.low = whole, None
            self.products = [Product.of(self.linears, DenseMatmul(whole), 0, None)]

    def build(self, adapted: list[LoraLinear], dtype: torch.dtype) -> None:
        """Products without the adapter's values."""
        if adapted:
            first = adapted[0].lora_A
            self.low = first.new_zeros(sum(len(linear.lora_A) for linear in adapted), first.shape[1], dtype=dtype)
        whole = neighbours([frozen(linear).matmul.dense for linear in self.linears])
        at_once = [(self.linears, RowProduct(whole))] if whole is not None else None
        one_by_one = [((linear,), of_rows(frozen(linear).matmul)) for linear in self.linears]
        self.products, first = [], 0
        for linears, matmul in at_once or one_by_one:
            self.products.append(Product.of(linears, matmul, first, room_for_high(linears, dtype)))
            first = self.products[-1].columns.stop

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
        if self.low is not None and alone and self.add_low_rank is not add_low_rank:
            return [product.by_kernel(x, self.low, self.add_low_rank) for product in self.products]
        low = None if self.low is None else F.linear(x, self.low)
        return [part for product in self.products for part in product(x, low)]

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + W x + b, of a single linear."""
        if self.folded is not None and self.products[0].bias is None:
            return torch.addmm(residual, x, self.folded.t())
        return residual + self(x)[0]


def of_rows(matmul: Matmul) -> Matmul | RowProduct:
    return matmul if matmul.dense is None else RowProduct(matmul.dense)


def frozen(linear: Linear) -> FrozenLinear:
    return linear.base if isinstance(linear, LoraLinear) else linear


def outputs(linear: Linear) -> int:
    """How many a linear has; 0 if only codes are in memory, which are never joined."""
    weight = linear.lora_B if isinstance(linear, LoraLinear) else linear.matmul.dense
    return 0 if weight is None else len(weight)


def room_for_high(linears: Sequence[Linear], dtype: torch.dtype) -> torch.Tensor | None:
    """[R, out] for the B of all; zeros stay where a linear has no part of another's A x. None without an adapter."""
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
    if not adapted:
        return None
    ranks, columns = (linear.lora_B.shape[1] for linear in adapted), (outputs(linear) for linear in linears)
    return adapted[0].lora_B.new_zeros(sum(ranks), sum(columns), dtype=dtype)


def neighbours(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The matrix of weights that follow each other in a mapped file (shared/base/cache.py), or None."""
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        return None
    for one, other in pairwise(found):
        same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        if not same or other.data_ptr() != one.data_ptr() + one.nbytes:
            return None
    first = found[0]
    return first.as_strided((sum(len(weight) for weight in found), first.shape[1]), first.stride())


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention = attention
        self.norm_in, self.norm_mlp = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.norm_q, self.norm_k = (norm and Norm.of(norm) for norm in norms)
        self.qkv = Stack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up, self.activation = Stack(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.out, self.down = Stack(attention.o_proj), Stack(mlp.down_proj)

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], kept: LayerCache) -> torch.Tensor:
        """[n', H] one token of each row -> [n', H]; the rows of the cache come first."""
        attention, count = self.attention, kept.rows.count
        parts = self.qkv(self.norm_in.forward(x))
        query, key, value = (part.view(len(part), -1, attention.head_dim) for part in parts)
        heads = query.shape[1]
        if self.norm_q and self.norm_k:
            query, key = self.norm_q.forward(query), self.norm_k.forward(key)
        turned = rotated(torch.cat([query, key], dim=1), *rotation)[:count]
        kept.append(turned[:, heads:, None], value[:count, :, None])
        # Read in each call: a check of the loop makes windows narrow.
        window = getattr(attention, "sliding_window", None)
        mixed = kept.attend(turned[:, :heads, None], attention.scaling, window)
        x = self.out.added(lengthened(mixed.flatten(1), len(x)), x)
        gate, up = self.gate_up(self.norm_mlp.forward(x))
        return self.down.added(self.activation(gate) * up, x)


class Layers:
    """The decoder, for one token of each row."""

    def __init__(self, policy: Policy) -> None:
        self.backbone: Any = policy.backbone
        self.dtype = policy.dtype
        self.layers = [Layer(module) for module in self.backbone.layers]

    def prepare(self) -> None:
        """Take the adapter as it is now."""
        for stack in self.stacks():
            stack.prepare(self.dtype)

    def stacks(self) -> Iterator[Stack]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def row_products(self) -> list[RowProduct]:
        """Of all weights that are in memory as they are."""
        every = (product.matmul for stack in self.stacks() for product in stack.products)
        return [matmul for matmul in every if isinstance(matmul, RowProduct)]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, cached: Sequence[LayerCache]) -> torch.Tensor:
        """[n], [n] -> [n, H]"""
        count = len(ids)
        if self.dtype != torch.float32 and ids.is_cpu:
            ids, positions = (lengthened(rows, count + -count % STEP) for rows in (ids, positions))
        x = self.backbone.embed_tokens(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])
        rotation = cos, signed(sin)
        for layer, kept in zip(self.layers, cached, strict=True):
            x = layer(x, rotation, kept)
        return Norm.of(self.backbone.norm).forward(x[:count])


def lengthened(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[n, ...] -> [count, ...] with zeros at the end."""
    return rows if len(rows) == count else torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def layers_of(policy: Policy) -> Layers | None:
    """None if this module does not cover the model."""
    return Layers(policy) if covers(policy.backbone) else None


def rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """[n, heads, D]; the halves change places, and the sine of the first one is negative."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    if x.dtype != torch.float32:
        return x * cos + swapped * signed_sin
    return torch.addcmul(x * cos, swapped, signed_sin)
