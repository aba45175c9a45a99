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

from shared.model.products import scaled_product

NAME = "tandem"
SHORT = 128 * 128
"""Plain products are used up to this number of scores per head (queries times keys). Which completions are computed
together is decided in shared/model/sequences.py."""


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
        return short_attention(query, key, value, mask, scaling, cap), None
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
) -> torch.Tensor:
    """Heads that share a key are put side by side as its queries. mask [B, 1, t, L] bool."""
    if cap is None:
        return ShortAttention.apply(query, key, value, mask, scaling)  # pyright: ignore[reportReturnType]
    return weighted(query, key, value, mask, scaling, cap)[0]


def weighted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, t, heads, D]; [B, kv heads, heads of each * t, L] the weights in the type of the query."""
    rows, heads, length, size = query.shape
    side_by_side = (rows, key.shape[1], -1, size)
    scores = capped(scaled_product(query.reshape(side_by_side), key.transpose(2, 3), scaling), cap)
    scores = scores.unflatten(2, (-1, length)).masked_fill_(~mask[:, :, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype).flatten(2, 3)
    return (weights @ value).view(rows, heads, length, -1).transpose(1, 2), weights


class ShortAttention(torch.autograd.Function):
    """`weighted` with its gradient by hand: scores S, weights P, output O. What is kept is in the query's type.

    dV = P^T dO,    dP = dO V^T,    dS = P (dP - rowsum(P dP)),    dQ = scale dS K,    dK = scale dS^T Q
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        mixed, weights = weighted(query, key, value, mask, scaling)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scaling = scaling
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, weights = ctx.saved_tensors
        side_by_side = (*key.shape[:2], -1, key.shape[3])
        grad = grads[0].transpose(1, 2).reshape(side_by_side)
        found = grad @ value.transpose(2, 3)
        found.sub_(torch.linalg.vecdot(found, weights)[..., None]).mul_(weights)
        query_grad = (found @ key).mul_(ctx.scaling).view(query.shape)
        key_grad = (found.transpose(2, 3) @ query.reshape(side_by_side)).mul_(ctx.scaling)
        return query_grad, key_grad, weights.transpose(2, 3) @ grad, None, None
