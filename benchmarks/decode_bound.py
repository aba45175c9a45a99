"""How close a token step is to the time that it takes to read the weights once.

    bound = bytes of the weights of all products / bandwidth        ratio = step / bound

Bandwidth is that of plain reading: the sum over a gigabyte of fp32 with the same threads, the fastest of all. A step is
the median time between two tokens of a real order in the real engine, adapter installed, 60 tokens of prompt, with
products, attention, head and sampling. The widths take turns, so that other load on the machine falls on all of them
alike. The folder is a Hugging Face model; the base is cached as a run caches it.

    python -m benchmarks.decode_bound MODEL_FOLDER [--threads 2] [--rows 8 32] [--rounds 5] [--packed 0.5]
        [--token-step torch]

Where PyTorch reads the base as codes, the adapter of few rows is read as codes too. Such steps take turns with steps
whose adapter is in bf16, and the result has the ratio of their times.

--packed, --weights and --token-step: as the keys of [actor]; the result says what `auto` is here. The bound is that of
bf16 weights, also where codes are read.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from actor.engines.engine import EndedCompletion
from actor.engines.forms import codes_for, compiled_for, eight_bit_head_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.coded import Codes
from actor.engines.token_step.layers import Layers
from actor.engines.token_step.packed import RowProduct
from benchmarks.machine import write_result
from benchmarks.student import ratio_interval
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.base.load import DTYPES, load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import CODED_ADAPTER_ROWS, ActorConfig, ComputeConfig
from shared.config.tree import Config, RolloutConfig
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.linears import is_decoder_linear
from shared.model.policy import Policy
from shared.model.prompt import load_prompter
from shared.process.determinism import pin_torch
from shared.process.processor import settled_config

GROUP, PROMPT, TOKENS = 8, 60, 128
Dtype = Literal["fp32", "bf16"]
Weights = Literal["auto", "dense", "nf4"]
Head = Literal["auto", "dense", "int8"]
Step = Literal["auto", "torch", "compiled"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packed", type=float, default=ActorConfig().packed)
    parser.add_argument("--weights", choices=("auto", "nf4", "dense"), default="auto")
    parser.add_argument("--token-step", choices=("auto", "torch", "compiled"), default="auto")
    args = parser.parse_args()
    pin_torch(args.threads)
    engine = opened(args.folder, args.dtype, args.packed, args.weights, token_step=args.token_step)
    reads: list[float] = []
    steps: dict[int, list[float]] = {rows: [] for rows in args.rows}
    in_bf16: dict[int, list[float]] = {
        rows: [] for rows in args.rows if isinstance(engine.codes, Codes) and rows <= CODED_ADAPTER_ROWS
    }
    for _ in range(args.rounds):
        reads.append(gigabytes_per_s())
        for rows, found in steps.items():
            found.append(step_s(engine, rows))
        with adapter_in_bf16(engine):
            for rows, found in in_bf16.items():
                found.append(step_s(engine, rows))
    weights, bandwidth = weight_bytes(engine.policy), max(reads)
    bound = weights / bandwidth / 1e9
    typical = {rows: statistics.median(found) for rows, found in steps.items()}
    figures = {
        "model": Path(args.folder).name,
        "dtype": args.dtype,
        "threads": args.threads,
        "packed": args.packed,
        "weights": "nf4" if engine.codes else "dense",
        "token_step": "compiled" if engine.compiled else "torch",
        "head": "dense" if isinstance(engine.head, RowProduct) else "int8",
        "prompt_tokens": PROMPT,
        "weights_mb": round(weights / 2**20),
        "bandwidth_gb_per_s": [round(read, 2) for read in reads],
        "bound_ms": round(1e3 * bound, 1),
        "rows": {
            rows: {
                "step_ms": [round(1e3 * step, 1) for step in found],
                "median_ms": round(1e3 * typical[rows], 1),
                "of_bound": round(typical[rows] / bound, 2),
                "tokens_per_s": round(rows / typical[rows], 1),
            }
            for rows, found in steps.items()
        },
        "adapter_as_codes_over_bf16": {rows: ratio_interval(steps[rows], found) for rows, found in in_bf16.items()},
    }
    for name, value in figures.items():
        print(name, value)
    part = ("" if args.packed == ActorConfig().packed else f"_packed_{args.packed:g}") + (
        "" if args.weights == "auto" else f"_{args.weights}"
    )
    part += "" if args.token_step == "auto" else f"_{args.token_step}"
    print(write_result(f"decode_bound_{figures['model']}_{args.dtype}{part}", figures))


def opened(
    folder: str, dtype: Dtype, packed: float, weights: Weights, head: Head = "auto", token_step: Step = "auto"
) -> HFEngine:
    """An engine whose completions never end, with an adapter that is not zero."""
    model, lora = ModelConfig(path=folder), LoraConfig()
    base = cached_base(model)
    policy = load_policy(base, model, lora, torch.device("cpu"), DTYPES[dtype])
    policy.adapter.initialise(0)
    generator = torch.Generator().manual_seed(1)
    for layer in policy.adapter.layers.values():
        layer.lora_B.data.normal_(0, 1e-3, generator=generator)
    rollout = RolloutConfig(max_new_tokens=TOKENS)
    actor = ActorConfig(packed=packed, weights=weights, head=head, token_step=token_step)
    compute = ComputeConfig(dtype=dtype, device="cpu")
    config = settled_config(Config(model=model, rollout=rollout, actor=actor, compute=compute))
    compiled = compiled_for(config, policy)
    codes = codes_for(config, base, policy, compiled)
    eight_bit = eight_bit_head_for(config, base, policy, compiled)
    engine = HFEngine(
        policy, load_prompter(base.folder), config.actor, codes=codes, eight_bit=eight_bit, compiled=compiled
    )
    engine.end_ids = engine.end_ids[:0]
    engine.install(1, adapter_bytes(policy.adapter))
    return engine


@contextmanager
def adapter_in_bf16(engine: HFEngine) -> Iterator[None]:
    """Inside the block, no factor is read as codes."""
    products = (
        [product for stack in engine.layers.stacks() for product in stack.thin_products()]
        if isinstance(engine.layers, Layers)
        else []
    )
    kept = [product.coded for product in products]
    try:
        for product in products:
            product.coded = None
        yield
    finally:
        for product, coded in zip(products, kept, strict=True):
            product.coded = coded


def weight_bytes(policy: Policy) -> int:
    """Of the decoder's linears and the head."""
    linears = {
        tensor.data_ptr(): tensor.nbytes
        for name, module in policy.backbone.named_modules()
        for part, tensor in getattr(module, "tensors", dict)().items()
        if is_decoder_linear(f"layers.0.{name}.{part}", tensor.dim())
    }
    return sum(linears.values()) + policy.head.nbytes


def gigabytes_per_s() -> float:
    """Sums of one fp32 gigabyte."""
    values = torch.ones(2**28)
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - start)
    return values.nbytes / min(times) / 1e9


def step_s(engine: HFEngine, rows: int) -> float:
    """Median seconds between two tokens."""
    rng = np.random.default_rng(rows)
    groups = tuple(
        GroupOrder(
            group_id=str(group),
            prompt_ids=rng.integers(0, len(engine.policy.head), PROMPT).astype(np.int32),
            columns={},
            seeds=tuple(range(group * GROUP, group * GROUP + GROUP)),
        )
        for group in range(rows // GROUP)
    )
    times: list[float] = []

    def told(_: Sequence[EndedCompletion]) -> None:
        times.append(time.perf_counter())

    engine.generate(groups, Sampling(temperature=1.0, max_new_tokens=TOKENS), told)
    return statistics.median(np.diff(times))


if __name__ == "__main__":
    main()
