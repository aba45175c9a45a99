"""NF4 weights: 4-bit codes in blocks of 64 with doubly quantised scales, by bitsandbytes.

    W ~ code[q] * absmax,  absmax ~ code8[q2] * absmax2 + offset

Tensors carry the names of Hugging Face's bitsandbytes checkpoints, so that any engine that reads those loads our bits.
Left out on purpose: bitsandbytes' own `Linear4bit`. It repacks weights in place on some CPUs and then has no input
gradient, and `Params4bit.to()` mutates shared state; plain buffers have neither trap.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

BLOCK = 64
STATE_KEY = "quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, kw_only=True)
class NF4Weight:
    """One frozen weight matrix."""

    packed: torch.Tensor
    """[out * in / 2, 1] uint8, two codes a byte."""
    state: QuantState
    """Scales, code book and shape."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] the values the codes stand for."""
        return dequantize_4bit(self.packed, self.state).to(dtype)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The checkpoint entries of this weight under `name`."""
        parts = self.state.as_dict(packed=True)
        return {name: self.packed} | {f"{name}.{key}": value for key, value in parts.items()}


def quantize(weight: torch.Tensor) -> NF4Weight:
    """[out, in] -> NF4 with double quantisation."""
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return NF4Weight(packed=packed, state=state)


def from_tensors(name: str, tensors: dict[str, torch.Tensor], device: torch.device) -> NF4Weight:
    """The inverse of `NF4Weight.tensors`."""
    prefix = f"{name}."
    parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return NF4Weight(packed=tensors[name].to(device), state=QuantState.from_dict(parts, device=device))


class NF4Matmul(torch.autograd.Function):
    """y = x W^T with W dequantised for the call and again for the backward pass; only the codes stay in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: NF4Weight) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """dx = dy W; the base is frozen, so there is no dW."""
        (grad,) = grads
        return grad @ ctx.weight.dequantize(grad.dtype), None
