"""Attention as two plain products where that is faster, or computed by the cache.

    softmax(cap tanh(q K^T * scale / cap) + mask) V        without a cap: softmax(q K^T * scale + mask) V

PyTorch's fused CPU kernels are made for long sequences. Over a few dozen columns, forward and backward take one and a
half times as long as plain products, which need no copy of a key for each head that shares it
(`benchmarks/short_attention.py`). Long sequences, whose scores would not fit, and everything on a card use the fused
kernels. These have no soft cap (Gemma 2): with one, all scores are computed at once, which may take much memory.
A sliding window is applied here, layer by layer, because transformers adds none to a mask that it is given. While one
token per row is decoded, the keys are more than one tensor, and the cache computes (actor/engines/kv_cache.py).
Installed under its own name through transformers' attention interface.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shared.model.layers.layer_math import TORCH_MATH, LayerMath
from shared.model.layers.products import product_fp32

NAME = "tandem"
SHORT = 128 * 128
"""Plain products are used up to this number of scores per head (queries times keys). Which completions are computed
together is decided in shared/model/layers/sequences.py."""


class CachedKeys(Protocol):
    """Keys and values of one layer, in a cache's own form."""

    def attend(self, query: torch.Tensor, scaling: float, window: int | None, cap: float | None) -> torch.Tensor:
        """query [B, heads, t, D] -> [B, t, heads, D]"""
        ...


def install_attention() -> str:
    """Register with transformers; returns the name to build a model with."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | CachedKeys,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    math: LayerMath = TORCH_MATH,
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
    short = query.is_cpu and query.shape[2] * key.shape[2] <= SHORT
    if mask is not None and (short or cap is not None):
        return short_attention(query, key, value, mask, scaling, cap, math), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[1, 1, t, L] The queries are the last of the keys."""
    return torch.ones((1, 1, queries, keys), dtype=torch.bool, device=device).tril(keys - queries)


def last_seen(mask: torch.Tensor, window: int) -> torch.Tensor:
    """[B, 1, t, L] the last `window` columns that each query sees; padding does not count."""
    nth_last = mask.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return mask & (nth_last <= window)


def capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)


def short_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    cap: float | None = None,
    math: LayerMath = TORCH_MATH,
) -> torch.Tensor:
    """Heads that share a key are put side by side as its queries. mask [B, 1, t, L] bool."""
    if cap is None:
        return ShortAttention.apply(query, key, value, mask, scaling, math)  # pyright: ignore[reportReturnType]
    scores, scale = scores_of(query, key, scaling)
    scores = capped(scores.mul_(scale), cap)
    return mixed(TORCH_MATH.attention_weights(scores, 1.0, mask, query.dtype), value)


def scores_of(query: torch.Tensor, key: torch.Tensor, scaling: float) -> tuple[torch.Tensor, float]:
    """[B, heads, t, D], [B, kv heads, L, D] -> [B, heads, t, L] fp32, and what they are still to be multiplied by. A
    factor in fp32 is scaled before the product; one in bf16 would be rounded twice."""
    exact = query.dtype == torch.float32
    scaled = query * scaling if exact else query
    side_by_side = scaled.reshape(len(query), key.shape[1], -1, query.shape[-1])
    scores = product_fp32(side_by_side, key.transpose(2, 3)).view(*query.shape[:3], -1)
    return scores, 1.0 if exact else scaling


def mixed(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, heads, t, L], [B, kv heads, L, D] -> [B, t, heads, D]"""
    side_by_side = weights.view(len(weights), value.shape[1], -1, weights.shape[-1])
    return (side_by_side @ value).view(*weights.shape[:3], -1).transpose(1, 2)


class ShortAttention(torch.autograd.Function):
    """The gradient by hand: scores S, weights P, output O. What is kept is in the query's type.

    dV = P^T dO,    dP = dO V^T,    dS = scale P (dP - rowsum(P dP)),    dQ = dS K,    dK = dS^T Q
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        math: LayerMath,
    ) -> torch.Tensor:
        weights = math.attention_weights(*scores_of(query, key, scaling), mask, query.dtype)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scaling, ctx.math = scaling, math
        return mixed(weights, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        side_by_side = (*key.shape[:2], -1, key.shape[3])
        grad, weights = grads[0].transpose(1, 2).reshape(side_by_side), weights.view(*key.shape[:2], -1, key.shape[2])
        of_scores = ctx.math.score_gradients(weights, grad @ value.transpose(2, 3), ctx.scaling)
        of_query = (of_scores @ key).view(query.shape)
        of_key = of_scores.transpose(2, 3) @ query.reshape(side_by_side)
        return of_query, of_key, weights.transpose(2, 3) @ grad, None, None, None
