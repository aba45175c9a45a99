"""A policy without values: every tensor has its shape and type, and no memory (PyTorch's device "meta").

    NF4      n / 2 bytes of codes, n / 64 of scales, 4 n / 16384 of their scales, two tables, an offset
    adapter  fp32, until an actor keeps it in the compute type; all else in that type

The policy is made by the code that fills a real one, from tensors with the names of a cached base, so the code of both
processes runs over it as over a real one, in milliseconds and on any machine. The planner counts what that code
allocates (launch/card). A meta tensor counts as one on a card wherever code asks `is_cpu`.
"""

import json
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from shared.base.architecture import empty_model
from shared.base.load import filled_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.model.layers.linears import is_decoder_linear
from shared.model.layers.nf4 import BLOCK, NF4Weight
from shared.model.policy import Policy

META = torch.device("meta")
NESTED_BLOCK = 256
"""Scales that share a scale, as bitsandbytes makes them."""


def meta_policy(config: Any, model: ModelConfig, lora: LoraConfig, dtype: torch.dtype) -> Policy:
    """config: the model's transformers configuration. On a card, `auto` keeps the codes."""
    install_attention_of_a_card()
    lm = empty_model(config)
    nf4 = model.quantization == "nf4" and model.dequantize != "once"
    tensors = {
        name: tensor
        for key, value in lm.named_parameters()
        for name, tensor in stored(key, value, dtype, nf4=nf4).items()
    }
    # The adapter is made on the default device.
    with META:
        return filled_policy(lm, tensors, lora, META, dtype, digest="")


def stored(name: str, value: torch.Tensor, dtype: torch.dtype, *, nf4: bool) -> dict[str, torch.Tensor]:
    """The entries of a parameter in the file of a base."""
    if nf4 and is_decoder_linear(name, value.dim()):
        return meta_nf4(value.shape, dtype).tensors(name)
    return {name: torch.empty(value.shape, dtype=dtype, device=META)}


def meta_nf4(shape: torch.Size, dtype: torch.dtype) -> NF4Weight:
    blocks = shape.numel() // BLOCK
    facts = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": 0.0,
    }
    return NF4Weight(
        packed=torch.empty((shape.numel() // 2, 1), dtype=torch.uint8, device=META),
        absmax=torch.empty(blocks, dtype=torch.uint8, device=META),
        quant_map=torch.empty(16, device=META),
        nested_absmax=torch.empty(-(-blocks // NESTED_BLOCK), device=META),
        nested_quant_map=torch.empty(256, device=META),
        facts=torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
    )


EFFICIENT_ALIGNMENT = 8
"""Columns of a mask are a multiple of this in memory, for the kernel that takes masks."""


@cache
def install_attention_of_a_card() -> torch.library.Library:
    """On the meta device, PyTorch would compute all scores; from now on it takes the kernels that a card takes. What is
    returned must stay alive."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention_of_a_card, "AutogradMeta")
    return library


def attention_of_a_card(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As `scaled_dot_product_attention` does there: flash attention, or with a mask the memory-efficient kernel, for
    which the mask becomes numbers."""
    if mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if enable_gqa:
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    bias = None
    if mask is not None:
        columns = mask.shape[-1]
        bias = torch.empty_like(mask, dtype=query.dtype)
        if columns % EFFICIENT_ALIGNMENT:
            bias = F.pad(bias, (0, -columns % EFFICIENT_ALIGNMENT))[..., :columns]
        bias = bias.expand(*query.shape[:3], columns)
    kept = torch.is_grad_enabled() and query.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, kept, 0.0, is_causal, scale=scale
    )[0]
