"""Frozen linears with a trainable low-rank adapter beside each.

    y = W x + b + (alpha / R) B (A x),    A: [R, in] fp32, B: [out, R] fp32, B = 0 at the start

The base is never merged with the adapter, so B = 0 gives the base's numbers bit for bit and switching the adapter off
gives the reference policy without a second model. A and B stay fp32 (bf16 would round small updates away) and are
cast to the input's type in the call. Dropout is left out: it would make the actor's and the learner's numbers differ.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from shared.nf4 import NF4Matmul, NF4Weight, kernel_state

Matmul = Callable[[torch.Tensor], torch.Tensor]

PAIR = ("lora_A", "lora_B")


def held_matmul(weight: torch.Tensor) -> Matmul:
    """Multiply by a dense frozen weight that stays in memory."""
    return lambda x: F.linear(x, weight)


def nf4_matmul(weight: NF4Weight) -> Matmul:
    """Multiply by a weight that is dequantised anew in each call."""
    state = kernel_state(weight)
    return lambda x: NF4Matmul.apply(x, weight.packed, state)  # pyright: ignore[reportReturnType]


class FrozenLinear(nn.Module):
    """y = W x + b, nothing to train."""

    def __init__(self, matmul: Matmul, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.matmul = matmul
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        y = self.matmul(x)
        return y if self.bias is None else y + self.bias


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        y = self.base(x)
        if not self.enabled:
            return y
        inner = F.linear(x, self.lora_A.to(x.dtype)).flatten(0, -2)
        flat = torch.addmm(y.flatten(0, -2), inner, self.lora_B.to(x.dtype).t(), alpha=self.scale)
        return flat.view_as(y)


class Adapter:
    """All LoRA pairs of a model, by the name of the linear they stand beside."""

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

    def requires_grad(self) -> None:
        """Make it trainable; built frozen, since an actor only samples."""
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, the model is the base."""
        for layer in self.layers.values():
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enabled = True
