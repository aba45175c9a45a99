"""Each Triton kernel against PyTorch's own operations on a card, and both against the card's memory.

    floor = bytes that must be read or written once / bandwidth of a copy        roofline = floor / measured time

The shapes are those of a model with this vocabulary, width and rank (by default Qwen2.5-1.5B); the values are random,
and nothing is downloaded. The bandwidth is measured first. `calls` are timed as a process makes them, one after the
other, so the host may be what they wait for; `graph` is the same work as one CUDA graph, as it is decoded. The update's
head computes two products besides, which the floor does not count, so its roofline is low by nature.

    python -m benchmarks.kernels [--vocabulary 151936] [--hidden 1536] [--inner 8960] [--rank 16] [--dtype bf16]
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.machine import write_result
from shared.base.load import DTYPES
from shared.model.kernels.toolchain import look_at_toolchain, missing
from shared.model.kernels.trial import TRIALS, Tensors, Trial, card_seconds, difference
from shared.model.layers.lora import Adapter, DenseMatmul, FrozenLinear, LoraLinear
from shared.model.policy import Policy

COPIED_BYTES = 2**28


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=8960)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    refuse_without_card()
    policy = random_policy(args, torch.device("cuda"))
    bandwidth = copied_per_s(policy.device)
    figures = {
        "card": torch.cuda.get_device_name(policy.device),
        **vars(args),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "kernels": {name: measured(make(policy), bandwidth) for name, make in TRIALS.items()},
    }
    print(json.dumps(figures, indent=2))
    print(write_result("kernels", figures))


def refuse_without_card() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("These kernels are measured on a card, and PyTorch sees none here; tests run them on a CPU.")
    if lacks := missing(look_at_toolchain()):
        raise SystemExit("; ".join(f"{lack.found}: {lack.remedy}" for lack in lacks))


def random_policy(args: argparse.Namespace, device: torch.device) -> Policy:
    """A head and one linear with an adapter; there is nothing else to run."""
    dtype = DTYPES[args.dtype]
    weight = torch.zeros(args.inner, args.hidden, device=device, dtype=dtype)
    linear = LoraLinear(FrozenLinear(DenseMatmul(weight), None), (args.inner, args.hidden), args.rank, 2.0)
    generator = torch.Generator(device).manual_seed(0)
    head = torch.randn(args.vocabulary, args.hidden, device=device, generator=generator)
    return Policy(
        backbone=nn.Module(),
        head=(head / args.hidden**0.5).to(dtype),
        adapter=Adapter({"linear": linear}),
        device=device,
        dtype=dtype,
        base_digest="",
        config=None,
        lm=None,
    )


def copied_per_s(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a second."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / card_seconds(lambda: target.copy_(source))


def measured(trial: Trial, bandwidth: float) -> dict[str, Any]:
    """One kernel and its torch version."""
    floor = trial.bytes_moved / bandwidth
    return {
        "mb_moved": round(trial.bytes_moved / 1e6, 3),
        "floor_us": round(floor * 1e6, 2),
        "difference": difference(trial),
        "triton": times(trial.by_triton, trial.example(), floor),
        "torch": times(trial.by_torch, trial.example(), floor),
    }


def times(run: Callable[..., Tensors], example: Tensors, floor: float) -> dict[str, float]:
    def once() -> None:
        run(*example)

    calls = card_seconds(once)
    graph = card_seconds(once, in_graph=True)
    return {
        "calls_us": round(calls * 1e6, 2),
        "graph_us": round(graph * 1e6, 2),
        "roofline": round(floor / graph, 3),
    }


if __name__ == "__main__":
    main()
