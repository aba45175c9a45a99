"""What the host takes for one token step of 28 layers: Python, dispatcher and launches, whatever the card.

The layers are so narrow that their arithmetic takes no time, so a CPU measures what a fast card would wait for: the
processor time of one thread, which other load on the machine changes little. All linears have an adapter and stand
behind a function of Python, as bitsandbytes' NF4 product does on a card; what it does inside of that is not counted.
`fixed` is the step of a card (actor/engines/fixed_rows.py), which a CUDA graph makes one launch of; `follows` is a step
of the loop whose shapes follow the tokens.

    python -m benchmarks.host_time [--rows 8] [--rounds 7]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from actor.engines.engine import EndedCompletion
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.fixed_rows import TokenStep
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers
from benchmarks.machine import write_result
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.model.layers.lora import DenseMatmul, LoraLinear
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.process.determinism import pin_torch

STEPS, CAP = 20, 60
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


class CalledMatmul(DenseMatmul):
    """A weight behind a function of Python; never one with its neighbours."""

    def __init__(self, weight: torch.Tensor, product: Any) -> None:
        super().__init__(weight.clone())
        self.product = product

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.product(x, self.dense, bias)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pin_torch(1)
    # What it defines lasts as long as it does.
    library = torch.library.Library("tandem_host_time", "DEF")
    library.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("product", F.linear, "CompositeExplicitAutograd")
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(Path(folder), torch.ops.tandem_host_time.product.default)
        found: dict[str, list[float]] = {"fixed": [], "follows": []}
        for _ in range(args.rounds):
            found["fixed"].append(fixed_step_s(engine, args.rows))
            found["follows"].append(following_step_s(engine, args.rows))
    figures = {
        "layers": SHAPE["num_hidden_layers"],
        "rows": args.rows,
        "step_ms": {name: [round(1e3 * one, 1) for one in times] for name, times in found.items()},
        "median_ms": {name: round(1e3 * statistics.median(times), 1) for name, times in found.items()},
    }
    print(figures)
    print(write_result("host_time", figures))


def opened(folder: Path, product: Any) -> HFEngine:
    """An engine whose completions never end."""
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE)).save_pretrained(folder / "model")
    model = ModelConfig(path=str(folder / "model"), cache_dir=str(folder / "cache"))
    policy = load_policy(cached_base(model), model, LoraConfig(), torch.device("cpu"), torch.float32)
    for layer in policy.adapter.layers.values():
        call_from_python(layer, product)
    return HFEngine(policy, nobody(), ActorConfig(fold="never"))


def call_from_python(layer: LoraLinear, product: Any) -> None:
    dense = layer.base.matmul.dense
    assert dense is not None
    layer.base.matmul = CalledMatmul(dense, product)


def nobody() -> Prompter:
    """Ids without a tokenizer, and none that ends."""
    return Prompter(tokenizer=None, end_ids=(), silent_ids=frozenset(), digest="0" * 64)


def order(rows: int) -> tuple[GroupOrder, ...]:
    ids = np.arange(1, 9, dtype=np.int32)
    return (GroupOrder(group_id="g", prompt_ids=ids, columns={}, seeds=tuple(range(rows))),)


def unheard(ended: Sequence[EndedCompletion]) -> None:
    """Nobody waits for them."""


def fixed_step_s(engine: HFEngine, rows: int) -> float:
    """Mean of steps that follow each other."""
    policy: Policy = engine.policy
    assert isinstance(engine.layers, Layers)
    loop = FixedLoop(policy, engine.layers, engine.end_ids, Grain())
    with torch.inference_mode():
        loop.decode(order(rows), Sampling(temperature=1.0, max_new_tokens=CAP), rows, unheard)
        assert loop.buffers is not None
        loop.buffers.state.tokens.fill_(1)
        step = TokenStep(policy, engine.layers, loop.buffers, engine.end_ids, 1.0)
        start = time.process_time()
        for _ in range(STEPS):
            step()
        return (time.process_time() - start) / STEPS


def following_step_s(engine: HFEngine, rows: int) -> float:
    """Median time between two tokens."""
    times: list[float] = []
    engine.generate(
        order(rows), Sampling(temperature=1.0, max_new_tokens=STEPS), lambda ended: times.append(time.process_time())
    )
    return float(statistics.median(np.diff(times)))


if __name__ == "__main__":
    main()
