"""How close an update comes to its arithmetic: its time against that of exactly its matrix products.

    update     learner.update.update.Update.apply: one prompt, G completions, forward, loss, backward, clipping, AdamW
    in torch   the same where PyTorch's operations compute what is between the products (compute.kernels = "torch")
    products   forward, input gradients, LoRA and its gradients, attention, head and its gradient, each once, as plain
               products of PyTorch in bf16 with the model's own weights; nothing is read, written or summed besides

All in one process, in turn, so that what else the machine does meets all. With `--recompute` the update computes
its layers twice, and the products stay the same.

`--lengths` gives the tokens of each completion; the products of attention are those without padding.

    python -m benchmarks.update_bound MODEL_FOLDER [--threads 2] [--rounds 12] [--prompt 60] [--lengths 64 ...]
        [--recompute] [--name NAME]
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.machine import write_result
from benchmarks.student import ratio_interval
from learner.objective.batch import Sample, StepBatch, step_batch
from learner.wiring import build_trainer, load_trained_policy
from shared.config.load import resolve
from shared.config.tree import Config
from shared.model.layers.lora import FrozenLinear
from shared.model.policy import Kernels, Policy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64] * 8, help="tokens of each completion")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--name", default="update_bound", help="of the result")
    parser.add_argument("--cache", help="folder of the quantised base (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        config = config_for(args, args.cache or temporary)
        policy = load_trained_policy(config, "cpu")
        plain = policy.with_kernels(Kernels())
        works = update_of(policy, config, args), update_of(plain, config, args), products_of(policy, args)
        updates, in_torch, products = in_turn(args.rounds, *works)
    figures = {
        "model": args.model.name,
        "threads": args.threads,
        "prompt_tokens": args.prompt,
        "lengths": args.lengths,
        "recompute": args.recompute,
        "update_s": round(float(np.median(updates)), 3),
        "in_torch_s": round(float(np.median(in_torch)), 3),
        "products_s": round(float(np.median(products)), 3),
        "update_over_products": ratio_interval(updates, products),
        "update_over_in_torch": ratio_interval(updates, in_torch),
    }
    print(json.dumps(figures, indent=2))
    print(write_result(args.name, figures))


def config_for(args: argparse.Namespace, cache: str) -> Config:
    return resolve(
        {
            "model": {"path": str(args.model), "cache_dir": cache},
            "compute": {"device": "cpu", "dtype": "bf16", "learner_threads": args.threads},
            "loss": {"entropy_fraction": 1.0},
            "rollout": {"prompts": 1, "group": len(args.lengths), "max_new_tokens": max(args.lengths)},
            "batch": {"recompute": "always" if args.recompute else "never"},
        }
    )


def in_turn(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Seconds of each in every round; a first round is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return [found[1:] for found in times]


def update_of(policy: Policy, config: Config, args: argparse.Namespace) -> Callable[[], object]:
    """One step after the other on the same batch."""
    update = build_trainer(policy, config, lambda: None).update
    batch = drawn_batch(config, len(policy.head), args)
    return lambda: update.apply(0, batch)


def drawn_batch(config: Config, vocabulary: int, args: argparse.Namespace) -> StepBatch:
    """Random tokens; the advantages differ."""
    random = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return random.integers(0, vocabulary, count, dtype=np.int32)

    prompt = ids(args.prompt)
    samples = [
        Sample(
            name=f"group[{index}]",
            prompt_ids=prompt,
            completion_ids=ids(length),
            trained=np.ones(length, bool),
            actor_logprobs=np.full(length, -float(np.log(vocabulary)), np.float32),
            entropies=np.ones(length, np.float32),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(args.lengths)
    ]
    return step_batch(
        samples,
        (),
        idle_groups=0,
        replaced=0,
        on_policy=False,
        loss=config.objective,
        constraint=config.constraint,
        max_new_tokens=max(args.lengths),
        most_updates=1,
    )


def products_of(policy: Policy, args: argparse.Namespace) -> Callable[[], object]:
    """All products of such an update. The prompt is computed once, and a completion's last token is never fed."""
    fed = args.prompt + sum(length - 1 for length in args.lengths)
    linears = [
        (module.matmul.dense, rank_of(policy, name))
        for name, module in policy.backbone.named_modules()
        if isinstance(module, FrozenLinear) and module.matmul.dense is not None
    ]
    sizes = {size for weight, _ in linears for size in weight.shape}
    rows = {size: torch.randn(fed, size).bfloat16() for size in sizes}
    thin = {(size, rank): torch.randn(size, rank).bfloat16() for size in sizes for _, rank in linears if rank}
    attention = attention_products(policy, args)
    hidden = torch.randn(sum(args.lengths), policy.head.shape[1]).bfloat16()
    shares = torch.rand(len(hidden), len(policy.head)).bfloat16()

    def once() -> None:
        for weight, rank in linears:
            outputs, inputs = weight.shape
            x, grad = rows[inputs], rows[outputs]
            F.linear(x, weight)
            torch.mm(grad, weight)
            if rank:
                adapter_products(x, grad, thin[inputs, rank], thin[outputs, rank])
        attention()
        F.linear(hidden, policy.head)
        torch.mm(shares, policy.head)

    return once


def rank_of(policy: Policy, name: str) -> int:
    """Of the adapter beside a frozen linear; 0 if there is none."""
    layer = next((one for key, one in policy.adapter.layers.items() if f"{key}.base".endswith(name)), None)
    return len(layer.lora_A) if layer else 0


def adapter_products(x: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """x [n, in], grad [n, out], A^T [in, R], B [out, R]"""
    low, low_grad = x @ a, grad @ b
    torch.mm(low, b.t())
    torch.mm(low_grad, a.t())
    torch.mm(low_grad.t(), x)
    torch.mm(low.t(), grad)


def attention_products(policy: Policy, args: argparse.Namespace) -> Callable[[], None]:
    """Scores and values, and two gradients of each, in every layer; heads that share a key side by side."""
    config = policy.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads
    by_length = Counter(args.lengths).items()
    completions = [(count, length - 1, args.prompt + length - 1) for length, count in by_length]
    shapes = [(1, args.prompt, args.prompt), *completions]
    tensors = [
        (
            torch.randn(count * config.num_key_value_heads, shared * queries, size).bfloat16(),
            torch.randn(count * config.num_key_value_heads, keys, size).bfloat16(),
            torch.rand(count * config.num_key_value_heads, shared * queries, keys).bfloat16(),
        )
        for count, queries, keys in shapes
    ]

    def once() -> None:
        for query, key, weights in tensors * config.num_hidden_layers:
            for _ in range(2):
                torch.bmm(query, key.transpose(1, 2))
                torch.bmm(weights, key)
                torch.bmm(weights.transpose(1, 2), query)

    return once


if __name__ == "__main__":
    main()
