"""Attention for one new token on a CPU, as plain products.

    softmax(q K^T * scale + mask) V

PyTorch's fused CPU kernel is made for long queries; for a single one over many short rows it takes three times as long
(`benchmarks/decode_attention.py`). Longer queries, and everything on a card, go to the fused kernel as usual.
Installed under a name of its own through the interface that transformers has for this.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "tandem"


def install_attention() -> str:
    """Make it known to transformers; returns the name to build a model with."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """query [B, heads, t, D], key and value [B, kv heads, L, D] -> [B, t, heads, D]"""
    if query.shape[2] > 1 or query.is_cuda or mask is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    return decode_attention(query, key, value, mask, options["scaling"]), None


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One query a head; the heads that share a key stand side by side. mask [B, 1, 1, L] bool."""
    rows, kv_heads, _, size = key.shape
    grouped = query.view(rows, kv_heads, -1, size) * scaling
    scores = (grouped @ key.transpose(2, 3)).masked_fill_(~mask, float("-inf"))
    mixed = torch.softmax(scores, dim=-1) @ value
    return mixed.view(rows, 1, -1, size)
