"""Attention as two plain products where that is faster, and attention that lets a cache do it.

    softmax(cap tanh(q K^T * scale / cap) + mask) V        without a cap: softmax(q K^T * scale + mask) V

PyTorch's fused CPU kernels are made for long sequences. Forward and backward over a few dozen columns take it one and a
half times as long as plain products, which need no copy of a key for each of the heads that share it
(`benchmarks/short_attention.py`). Long sequences, whose scores would not fit, and everything on a card go to the fused
kernels, except with a soft cap (Gemma 2), which those do not have: there all scores are held, whatever that takes.
A sliding window is applied here, layer by layer: transformers adds none to a mask that it is given. While one token a
row is decoded, the keys are more than one tensor (actor/engines/kv_cache.py) and attend by themselves.
Installed under a name of its own through the interface that transformers has for this.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shared.model.products import scaled_product

NAME = "tandem"
SHORT = 128 * 128
"""Scores of one head, queries times keys, up to which plain products are used."""


class Attends(Protocol):
    """Keys and values of one layer that a cache keeps in a form of its own."""

    def attend(self, query: torch.Tensor, scaling: float, window: int | None, cap: float | None) -> torch.Tensor:
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
    if options.get("s_aux") is not None:
        raise NotImplementedError("its attention has sinks")
    scaling, window, cap = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(key, torch.Tensor):
        return key.attend(query, scaling, window, cap), None
    if cap is not None and mask is None:
        mask = causal(query.shape[2], key.shape[2], query.device)
    if mask is not None and window is not None and window < mask.shape[-1]:
        mask = last_seen(mask, window)
    short = not query.is_cuda and query.shape[2] * key.shape[2] <= SHORT
    if mask is not None and (short or cap is not None):
        return short_attention(query, key, value, mask, scaling, cap), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[1, 1, t, L] the queries being the last of the keys."""
    return torch.ones((1, 1, queries, keys), dtype=torch.bool, device=device).tril(keys - queries)


def last_seen(mask: torch.Tensor, window: int) -> torch.Tensor:
    """[B, 1, t, L] of the columns that a query sees the last `window`: positions count, and padding has none."""
    nth_last = mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return mask & (nth_last <= window)


def capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap tanh(x / cap), or as they are."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def short_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    cap: float | None = None,
) -> torch.Tensor:
    """The heads that share a key stand side by side as its queries. mask [B, 1, t, L] bool."""
    rows, heads, length, size = query.shape
    side_by_side = (rows, key.shape[1], -1, size)
    scores = capped(scaled_product(query.reshape(side_by_side), key.transpose(2, 3), scaling), cap)
    scores = scores.unflatten(2, (-1, length)).masked_fill(~mask[:, :, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype).flatten(2, 3)
    return (weights @ value).view(rows, heads, length, -1).transpose(1, 2)
