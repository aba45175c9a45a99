"""One decode step's attention on a CPU: plain products (shared/attention.py) against PyTorch's fused kernel.

python -m benchmarks.decode_attention [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import write_result
from shared.attention import decode_attention

SHAPES = {
    "embedded model, 128 rows": (128, 4, 2, 32, 60),
    "0.5B shape, 8 rows": (8, 14, 2, 64, 300),
    "0.5B shape, 64 rows": (64, 14, 2, 64, 300),
    "1.5B shape, 8 rows": (8, 12, 2, 128, 600),
}
REPEATS = 100


def main() -> None:
    """Time every shape, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    threads: int = parser.parse_args().threads
    torch.set_num_threads(threads)
    rows = {name: measured(*shape) for name, shape in SHAPES.items()}
    for name, row in rows.items():
        print(f"{name:28s} {row}")
    print(write_result("decode_attention", {"threads": threads, "shapes": rows}))


@torch.inference_mode()
def measured(rows: int, heads: int, kv_heads: int, size: int, length: int) -> dict[str, Any]:
    """Median microseconds of both, taken in turn, and their ratio."""
    query = torch.randn(rows, heads, 1, size)
    key, value = torch.randn(2, rows, kv_heads, length + 40, size)[:, :, :, :length].unbind(0)
    mask = torch.ones(rows, 1, 1, length, dtype=torch.bool)
    grouped = query.view(rows, kv_heads, heads // kv_heads, size)
    ours, fused = in_turn(
        lambda: decode_attention(query, key, value, mask, size**-0.5),
        lambda: scaled_dot_product_attention(grouped, key, value, attn_mask=mask),
    )
    return {"products_us": round(ours, 1), "fused_us": round(fused, 1), "times_faster": round(fused / ours, 2)}


def in_turn(*works: Callable[[], object]) -> list[float]:
    """Median microseconds of each."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            found.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(found[REPEATS // 10 :]) for found in times]


if __name__ == "__main__":
    main()
