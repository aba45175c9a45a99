"""Attention that lets a cache do it: what the cache returned as keys may attend by itself.

While one token a row is decoded, the keys are more than one tensor (actor/kv_cache.py); everything else goes to
PyTorch's fused kernels as usual. Installed under a name of its own through the interface that transformers has for
this.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "tandem"


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
    if isinstance(key, torch.Tensor):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    return key.attend(query, options["scaling"]), None
