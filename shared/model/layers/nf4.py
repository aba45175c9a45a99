"""NF4 weights: 4-bit codes in blocks of 64 with doubly quantised scales, quantised by bitsandbytes.

    W[i] = code[q[i]] * absmax[i / 64],      absmax[j] = code8[q8[j]] * absmax8[j / 256] + offset

Tensors have the names of Hugging Face's bitsandbytes models, so any engine that reads those can load ours.
`dequantize` is the formula above in fp32, rounded to the model's own type. It gives the same bits as the kernels
of bitsandbytes, which `NF4Matmul` uses (a test compares them). bitsandbytes is imported only where it is used: that
costs seconds and 120 MB, and a process with dequantised values on a CPU does not need it.
Left out on purpose: bitsandbytes' own `Linear4bit`. It repacks weights in place on some CPUs and then has no input
gradient, and `Params4bit.to()` changes shared state. Plain tensors have neither problem.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 64
SLICE_BLOCKS = 4096
"""Blocks that are dequantised at once."""
WEIGHTS = "model.safetensors"
"""File name of the weights in the folder of a base."""
STATE_KEY = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE_KEY)


@dataclass(frozen=True, kw_only=True)
class NF4Weight:
    """One frozen weight matrix, as in the files of a model."""

    packed: torch.Tensor
    """[out * in / 2, 1] uint8, two codes a byte, the earlier one in the high bits."""
    absmax: torch.Tensor
    """[out * in / 64] uint8 quantised scales."""
    quant_map: torch.Tensor
    """[16] fp32 the values of the codes."""
    nested_absmax: torch.Tensor
    """[blocks of scales] fp32 scale of each block of scales."""
    nested_quant_map: torch.Tensor
    """[256] fp32 the values of the scales' codes."""
    facts: torch.Tensor
    """JSON as uint8: shape, block sizes, dtype, offset."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] the values of the codes. In slices, because intermediate results are three times as large, and
        memory that is freed between weights that stay is not returned to the system."""
        facts = read_facts(self.facts)
        absmax = block_scales(self)
        blocks = self.packed.view(-1, facts["blocksize"] // 2)
        values = torch.empty(len(blocks), facts["blocksize"], dtype=dtype, device=self.packed.device)
        for start in range(0, len(blocks), SLICE_BLOCKS):
            part = slice(start, start + SLICE_BLOCKS)
            codes = torch.stack([blocks[part] >> 4, blocks[part] & 15], dim=2).flatten(1)
            exact = self.quant_map[codes.int()] * absmax[part, None]
            values[part] = exact.to(getattr(torch, facts["dtype"]))
        return values.view(facts["shape"])

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The file entries of this weight under `name`."""
        values = (self.absmax, self.quant_map, self.nested_absmax, self.nested_quant_map, self.facts)
        return {name: self.packed} | {f"{name}.{part}": value for part, value in zip(PARTS, values, strict=True)}


def block_scales(weight: NF4Weight) -> torch.Tensor:
    """[out * in / 64] fp32 the scale of each block."""
    facts = read_facts(weight.facts)
    scales = weight.nested_absmax.repeat_interleave(facts["nested_blocksize"])[: len(weight.absmax)]
    return weight.nested_quant_map[weight.absmax.long()] * scales + facts["nested_offset"]


def from_tensors(name: str, tensors: dict[str, torch.Tensor], device: torch.device) -> NF4Weight:
    absmax, quant_map, nested_absmax, nested_quant_map, facts = (tensors[f"{name}.{part}"] for part in PARTS)
    return NF4Weight(
        packed=tensors[name].to(device),
        absmax=absmax.to(device),
        quant_map=quant_map.to(device),
        nested_absmax=nested_absmax.to(device),
        nested_quant_map=nested_quant_map.to(device),
        facts=facts,
    )


def read_facts(facts: torch.Tensor) -> dict[str, Any]:
    """The quantisation state, which a model's file holds as JSON in a tensor."""
    return json.loads(bytes(facts.cpu().numpy()))


def quantize(weight: torch.Tensor) -> NF4Weight:
    """[out, in] -> NF4 with double quantisation."""
    quantize_4bit = bitsandbytes().quantize_4bit
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    parts = state.as_dict(packed=True)
    return from_tensors("w", {"w": packed} | {f"w.{part}": parts[part] for part in PARTS}, weight.device)


def kernel_state(weight: NF4Weight) -> Any:
    """The scales in the form that bitsandbytes' kernels need."""
    parts = {part: value for part, value in weight.tensors("w").items() if part != "w"}
    parts = {part.removeprefix("w."): value for part, value in parts.items()}
    state = bitsandbytes().QuantState.from_dict(parts, device=weight.packed.device)
    # Its CPU kernel works by rows and is wrong if a row is not a whole number of blocks, so each block is a row here.
    state.shape = torch.Size((state.shape.numel() // BLOCK, BLOCK))
    return state


def kernel_values(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    return bitsandbytes().dequantize_4bit(packed, state).to(dtype).flatten()


@cache
def bitsandbytes() -> Any:
    """Its functions, without its warning that there is no kernel to download. Cached: to set a level clears what all
    loggers remember, which takes longer than a product's launch."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def fused_product(
    x: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], state: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    """[..., in] -> [..., out] W x + b by bitsandbytes' own product; shape and state are W's. On a card, one kernel
    reads codes and scales where the rows are few. For many it makes dense values, as NF4Matmul does."""
    inner = state.state2
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x,
        packed,
        shape,
        inner.absmax,
        state.blocksize,
        state.quant_type,
        bias=bias,
        absmax_8bit=state.absmax,
        absmax_code=inner.code,
        absmax_offset=state.offset,
    )


def input_gradient(grad: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """[..., out] -> [..., in] dx = dy W, W dequantised for the product."""
    return grad @ kernel_values(packed, state, grad.dtype).view(grad.shape[-1], -1)


class NF4Matmul(torch.autograd.Function):
    """y = x W^T with W dequantised for the call and again for the backward pass; only the codes stay in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        return F.linear(x, kernel_values(packed, state, x.dtype).view(-1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """dx = dy W. The base is frozen, so there is no dW."""
        return input_gradient(grads[0], ctx.packed, ctx.state), None, None
