"""Frozen linears, each with a trainable low-rank adapter.

    y = W x + b + s B (A x),    A: [R, in] fp32, B: [out, R] fp32, B = 0 at the start
    s = alpha / R, or alpha / sqrt(R) with lora.rslora (2312.03732); R may differ between layers

The base is never merged with the adapter: with B = 0 the numbers are the base's bit for bit, and switching the adapter
off gives the reference policy without a second model. A and B are trained in fp32, because bf16 would round small
updates away, and cast to the type of the input in each call; a process that only samples keeps them in that type. A run
may start from an adapter that was trained before (given_adapter.py). Left out on purpose: dropout, which would make the
numbers of actor and learner differ.

    folded:  y = (W + s B A) x + b

A process that only samples may fold: the sum is computed once for each installed version, beside W, if W is in memory
in fp32. This takes one product instead of three. The numbers agree up to rounding, and B = 0 still
gives the base's.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from shared.model.layers.nf4 import NF4Matmul, NF4Weight, fused_product, input_gradient, kernel_state, read_facts
from shared.model.layers.products import gradient_product, product_in_two, weight_product

PAIR = ("lora_A", "lora_B")
FUSED_SCALES = 256
"""How many scales of blocks share a scale, in what bitsandbytes' product reads."""
DRAWN = 0.1
"""Size of A and B where they are drawn. The adapter then changes log-probs by a tenth. Three times as much made a model
of half a billion parameters so sensitive that rounding in bf16 changed them by four."""


class Matmul(Protocol):
    """Multiplies by a frozen weight."""

    @property
    def dense(self) -> torch.Tensor | None:
        """[out, in] the weight, or None if only its codes are in memory."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the weight is made of, by name."""
        ...

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        ...

    def input_gradient(self, grad: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        """[..., out] -> [..., in] dx = dy W, added to `total` in place if there is one."""
        ...


class DenseMatmul:
    """A dense weight in memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.dense = weight

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.dense}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return weight_product(x, self.dense, bias)

    def input_gradient(self, grad: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        return gradient_product(grad, self.dense, total)


class DequantizingMatmul:
    """An NF4 weight that is dequantised in each call; only its codes stay in memory.

    On a card bitsandbytes multiplies by the codes. On a CPU it would dequantise as well, in a slower way."""

    dense = None

    def __init__(self, weight: NF4Weight) -> None:
        self.packed = weight.packed
        self.state = kernel_state(weight)
        self.shape: list[int] = read_facts(weight.facts)["shape"]
        self.fuses = self.shape[1] % self.state.blocksize == 0 and self.state.state2.blocksize == FUSED_SCALES
        """Whether rows and scales have the blocks that its kernel wants."""

    def tensors(self) -> dict[str, torch.Tensor]:
        inner, outer = self.state.state2, self.state
        scales = {"absmax": outer.absmax, "code": outer.code, "offset": outer.offset}
        return {"packed": self.packed, **scales, "absmax2": inner.absmax, "code2": inner.code}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The dense values exist only during the product."""
        if self.fuses and not x.is_cpu and not (torch.is_grad_enabled() and x.requires_grad):
            return fused_product(x, self.packed, self.shape, self.state, bias)
        y: Any = NF4Matmul.apply(x, self.packed, self.state)
        return y if bias is None else y + bias

    def input_gradient(self, grad: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        found = input_gradient(grad, self.packed, self.state)
        return found if total is None else total.add_(found)


class AddLowRank(Protocol):
    """y + s B (A x), into y: [n, out], [n, in], [R, in], [out, R], s -> [n, out]."""

    def __call__(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


def add_low_rank(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """In PyTorch's own operations; shared/model/kernels/lora.py does it in one launch."""
    return y.addmm_(F.linear(x, a), b.t(), alpha=scale)


class FrozenLinear(nn.Module):
    """y = W x + b, nothing to train."""

    def __init__(self, matmul: Matmul, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.matmul = matmul
        self.bias = bias

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.matmul.tensors() | ({} if self.bias is None else {"bias": self.bias})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, self.bias)


class LoraLinear(nn.Module):
    """A frozen linear and its adapter."""

    def __init__(self, base: FrozenLinear, shape: tuple[int, int], rank: int, scale: float) -> None:
        super().__init__()
        out_features, in_features = shape
        self.base = base
        self.lora_A = nn.Parameter(torch.zeros(rank, in_features), requires_grad=False)
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank), requires_grad=False)
        self.scale = scale
        self.enabled = True
        self.folded: torch.Tensor | None = None
        self.add_low_rank: AddLowRank = add_low_rank
        """Where no gradient is needed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The sum carries no gradient.
        if self.folded is not None and self.enabled and not torch.is_grad_enabled():
            return F.linear(x, self.folded, self.base.bias)
        if not self.enabled:
            return self.base(x)
        # Column by column, as some products give it (products.py), A x would be rounded in another way.
        rows = x.flatten(0, -2).contiguous()
        if torch.is_grad_enabled():
            y: Any = LoraProduct.apply(rows, self.lora_A, self.lora_B, self.base, self.scale)
        else:
            y = self.without_gradient(rows)
        return y.view(*x.shape[:-1], -1)

    def without_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """The bits of LoraProduct, without what autograd costs in each call."""
        a, b = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        return self.add_low_rank(self.base(x), x, a, b, self.scale)

    def fold(self) -> None:
        """Compute W + s B A [out, in] with the current adapter, unless W is not in memory in full precision. The sum of
        an earlier version is overwritten, so that two are never in memory."""
        dense = self.base.matmul.dense
        if dense is not None and dense.dtype == torch.float32:
            a, b = self.lora_A.detach(), self.lora_B.detach()
            self.folded = torch.addmm(dense, b, a, alpha=self.scale, out=self.folded)


class LoraProduct(torch.autograd.Function):
    """y = W x + b + s B (A x), by hand: terms are added in place that autograd would keep as separate tensors.

    g = s dy B,    dx = dy W + g A,    dA = g^T x,    dB = s dy^T (A x)
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, base: FrozenLinear, scale: float
    ) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        a, b = a.to(x.dtype), b.to(x.dtype)
        low = F.linear(x, a)
        y = base(x).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.base, ctx.scale = base, scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, None, None]:
        """dA and dB in fp32; no dx if nothing below is trained."""
        (grad,) = grads
        x, low, a, b = ctx.saved_tensors
        low_grad = (grad @ b).mul_(ctx.scale)
        x_grad = ctx.base.matmul.input_gradient(grad).addmm_(low_grad, a) if ctx.needs_input_grad[0] else None
        b_grad = product_in_two(low.t(), grad).mul_(ctx.scale).t()
        return x_grad, product_in_two(low_grad.t(), x), b_grad, None, None


class Adapter:
    """All LoRA pairs of a model, by the name of the linear that each belongs to."""

    def __init__(self, layers: dict[str, LoraLinear]) -> None:
        self.layers = layers

    def parameters(self) -> dict[str, nn.Parameter]:
        """`layer.lora_A` and `layer.lora_B` of every layer, in a fixed order."""
        return {f"{layer}.{name}": getattr(self.layers[layer], name) for layer in sorted(self.layers) for name in PAIR}

    def initialise(self, seed: int) -> None:
        """A ~ U(-1/sqrt(in), 1/sqrt(in)) from the run's seed on the CPU, the same bits on every device; B = 0."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in sorted(self.layers):
                layer = self.layers[name]
                bound = 1 / math.sqrt(layer.lora_A.shape[1])
                layer.lora_A.copy_((torch.rand(layer.lora_A.shape, generator=generator) * 2 - 1) * bound)
                layer.lora_B.zero_()

    @property
    def moved(self) -> bool:
        """Whether it changes the base."""
        return any(bool(layer.lora_B.any()) for layer in self.layers.values())

    def requires_grad(self) -> None:
        """Make it trainable. It is built frozen, because an actor only samples."""
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)

    def fold(self) -> None:
        """For a process that only samples. Call it again after each change of the values."""
        with torch.no_grad():
            for layer in self.layers.values():
                layer.fold()

    def cast_to(self, dtype: torch.dtype) -> None:
        """Keep the values in the type that is computed with, for a process that only samples."""
        for layer in self.layers.values():
            layer.lora_A.data, layer.lora_B.data = layer.lora_A.data.to(dtype), layer.lora_B.data.to(dtype)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Inside the block, all values are the nearest that bf16 has."""
        before = {name: value.detach().clone() for name, value in self.parameters().items()}
        with torch.no_grad():
            for value in self.parameters().values():
                value.copy_(value.to(torch.bfloat16))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self.parameters().items():
                    value.copy_(before[name])

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Inside the block, A and B are random: for a check of what computes with them, since B = 0 hides faults."""
        generator, before = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
        for name, value in self.parameters().items():
            before[name] = value.data
            found = torch.randn(value.shape, generator=generator) * DRAWN / math.sqrt(value.shape[1])
            value.data = found.to(value.device)
        try:
            yield
        finally:
            for name, value in self.parameters().items():
                value.data = before[name]

    def values(self) -> dict[str, torch.Tensor]:
        """A copy of A and B on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.parameters().items()}

    @contextmanager
    def holding(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside the block, A and B have these values."""
        parameters = self.parameters()
        now = {name: value.detach().clone() for name, value in parameters.items()}
        put(parameters, values)
        try:
            yield
        finally:
            put(parameters, now)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside the block, the model is the base."""
        for layer in self.layers.values():
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enabled = True


@torch.no_grad()
def put(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the one by the other."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
