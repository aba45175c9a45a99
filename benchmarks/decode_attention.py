"""One token step's attention on a CPU: the cache that shares prompts (actor/engines/kv_cache.py) against PyTorch's
fused kernel over keys that were copied for each row.

    python -m benchmarks.decode_attention [--threads 2]
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from actor.engines.kv_cache import KVCache
from actor.engines.prompts import PromptPass
from benchmarks.timed_shapes import in_turn, time_shapes

# prompts, completions of each, heads, key heads, head size, prompt tokens, completion tokens so far
SHAPES = {
    "embedded model, 16 x 8": (16, 8, 4, 2, 32, 60, 20),
    "0.5B shape, 1 x 8": (1, 8, 14, 2, 64, 150, 150),
    "0.5B shape, 8 x 8": (8, 8, 14, 2, 64, 150, 150),
    "1.5B shape, 1 x 8": (1, 8, 12, 2, 128, 300, 300),
}


@torch.inference_mode()
def measured(
    prompts: int, group: int, heads: int, kv_heads: int, size: int, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Median microseconds of both, taken alternately, and their ratio."""
    rows, scaling = prompts * group, size**-0.5
    owner = torch.arange(prompts).repeat_interleave(group)
    cache = KVCache(rows, completion_tokens + 1, prompt_tokens, owner.device)
    passed = PromptPass(torch.zeros(prompts, dtype=torch.int64), prompt_tokens)
    passed.update(*torch.randn(2, prompts, kv_heads, prompt_tokens, size), layer=0)
    cache.add_prompts(passed)
    cache.assign(owner)
    for token in range(completion_tokens):
        cache.rows.step(torch.full((rows,), token + 1))
        cache.update(*torch.randn(2, rows, kv_heads, 1, size), layer=0)
    query = torch.randn(rows, heads, 1, size)
    key, value = torch.randn(2, rows, kv_heads, prompt_tokens + completion_tokens + 40, size)[
        :, :, :, : prompt_tokens + completion_tokens
    ].unbind(0)
    mask = torch.ones(rows, 1, 1, key.shape[2], dtype=torch.bool)
    grouped = query.view(rows, kv_heads, heads // kv_heads, size)
    shared, copied = in_turn(
        lambda: cache.layers[0].attend(query, scaling),
        lambda: scaled_dot_product_attention(grouped, key, value, attn_mask=mask),
    )
    return {"shared_us": round(shared, 1), "copied_us": round(copied, 1), "times_faster": round(copied / shared, 2)}


if __name__ == "__main__":
    time_shapes("decode_attention", SHAPES, measured)
