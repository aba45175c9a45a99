"""Attention as two plain products where that is faster, and attention that lets a cache do it.

    softmax(q K^T * scale + mask) V

PyTorch's fused CPU kernels are made for long sequences. Forward and backward over a few dozen columns take it one and a
half times as long as plain products, which need no copy of a key for each of the heads that share it
(`benchmarks/short_attention.py`). Long sequences, whose scores would not fit, and everything on a card go to the fused
kernels. While one token a row is decoded, the keys are more than one tensor (actor/kv_cache.py) and attend by
themselves. Installed under a name of its own through the interface that transformers has for this.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shared.products import product_fp32

NAME = "tandem"
SHORT = 128 * 128
"""Scores of one head, queries times keys, up to which plain products are used."""


class Attends(Protocol):
    """Keys and values of one layer that a cache keeps in a form of its own."""

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [B, heads, t, D] -> [B, t, heads, D]"""
        ...


def install_attention() -> str:
    """Make it known to transformers; returns the name to build a model with."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | Attends,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, t, D], key and value [B, kv heads, L, D] -> [B, t, heads, D]"""
    if not isinstance(key, torch.Tensor):
        return key.attend(query, options["scaling"]), None
    if mask is not None and not query.is_cuda and query.shape[2] * key.shape[2] <= SHORT:
        return short_attention(query, key, value, mask, options["scaling"]), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The heads that share a key stand side by side as its queries. mask [B, 1, t, L] bool."""
    rows, heads, length, size = query.shape
    side_by_side = (rows, key.shape[1], -1, size)
    scores = product_fp32((query * scaling).reshape(side_by_side), key.transpose(2, 3))
    scores = scores.unflatten(2, (-1, length)).masked_fill(~mask[:, :, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype).flatten(2, 3)
    return (weights @ value).view(rows, heads, length, size).transpose(1, 2)
