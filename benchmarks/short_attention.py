"""Attention over short sequences on a CPU, forward and backward: plain products (shared/model/layers/attention.py)
against PyTorch's fused kernel over keys repeated for each head.

    python -m benchmarks.short_attention [--threads 2]
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timed_shapes import in_turn, time_shapes
from shared.model.layers.attention import short_attention

# rows, heads, key heads, head size, queries, keys
SHAPES = {
    "embedded model, completions": (23, 4, 2, 32, 38, 73),
    "embedded model, prompts": (16, 4, 2, 32, 60, 60),
    "0.5B shape, 64 tokens": (8, 14, 2, 64, 64, 128),
    "0.5B shape, 128 tokens": (8, 14, 2, 64, 128, 128),
    "0.5B shape, 256 tokens": (4, 14, 2, 64, 256, 256),
}


def measured(rows: int, heads: int, kv_heads: int, size: int, queries: int, keys: int) -> dict[str, Any]:
    """Median microseconds of both, taken alternately, and their ratio."""
    query = torch.randn(rows, heads, queries, size, requires_grad=True)
    key, value = (torch.randn(rows, kv_heads, keys, size, requires_grad=True) for _ in range(2))
    mask = torch.ones(rows, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    arriving = torch.randn(rows, queries, heads, size)

    def trained(attend: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(attend(), (query, key, value), arriving)

    def repeated(shared: torch.Tensor) -> torch.Tensor:
        return shared.repeat_interleave(heads // kv_heads, dim=1)

    plain, fused = in_turn(
        lambda: trained(lambda: short_attention(query, key, value, mask, size**-0.5)),
        lambda: trained(
            lambda: scaled_dot_product_attention(query, repeated(key), repeated(value), attn_mask=mask).transpose(1, 2)
        ),
    )
    return {"plain_us": round(plain, 1), "fused_us": round(fused, 1), "times_faster": round(fused / plain, 2)}


if __name__ == "__main__":
    time_shapes("short_attention", SHAPES, measured)
