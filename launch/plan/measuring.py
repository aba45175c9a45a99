"""Measures how fast this machine computes, in a process of its own (launch/plan/machine.py starts it).

Products, head and sampler are measured by calling the functions of a run. What layers take besides the products of the
base is solved from layers of two sizes:

    values      how many values a layer's products with the base give, over all rows
    per value   (time of a narrow layer, less its products, less the time of a tiny layer)
                / (values of the narrow layer, less those of the tiny one)
    calls       time of a tiny layer, less its values x per value

Calls are Python and hundreds of small operations: in a token step of the decode loop, and in forward and backward of a
micro-batch. Beside them, each value is read and written many times: in norms, activations, attention and the products
of the adapter. The measured functions are those of a run, with an adapter on every linear. Both times differ more than
twofold between machines, and timing one operation does not predict them.

Left out: the products of a tiny layer, ranks other than the default, an adapter that is packed or read as codes, and
that small prompts are copied to their rows, which takes fewer calls.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import LlamaConfig

from actor.engines.kv_cache import KVCache
from actor.engines.prompts import PromptPass
from actor.engines.token_step.coded import CodedWeight, reads_codes
from actor.engines.token_step.compiled.library import library_for
from actor.engines.token_step.compiled.step import CompiledDraw, CompiledLayers
from actor.engines.token_step.eight_bit import EightBitHead, multiplies_eight_bits
from actor.engines.token_step.layers import Layers
from actor.engines.token_step.packed import (
    RowProduct,
    faster_kinds,
    packed_has_same_bits,
    right_factor_has_same_bits,
)
from launch.plan.machine import ROWS, SAMPLER_ROWS, CompiledTimes, LayerTimes, OtherTimes, Rates, Speed
from shared.base.architecture import empty_model
from shared.base.load import filled_policy
from shared.config.model import LoraConfig
from shared.config.processes import CODED_ROWS
from shared.model.head import token_stats
from shared.model.policy import Policy
from shared.model.products import product_of_largest
from shared.model.sampler import draw
from shared.model.sequences import Sequences
from shared.process.determinism import pin_torch

WEIGHTS_BYTES = 64 * 2**20
OUT, IN, BLOCK = 2048, 1024, 64
VOCABULARY, HEAD_ROWS = 4096, 512
ENOUGH_S = 0.08
"""Each measurement is repeated for about this long."""
TRIED_ROWS, SLOW_S = 8, 0.02
"""A product of so few rows that takes longer is not measured with more."""
SHALLOW, DEEP, TURNS = 2, 8, 3
HEADS, SMALL_VOCABULARY = 4, 64
PROMPT, GROUP, TOKENS = 32, 8, 16
CPU = torch.device("cpu")
TOKEN_STEP_PROMPTS, UPDATE_PROMPTS = 16, 4
"""In a narrow layer. A tiny one has one prompt."""
SLOW_LAYER_S = 0.02
"""Where a tiny layer takes longer in an update, as with emulated bf16, a narrow one has one prompt too."""
SLOW_CALL_S = 0.3
"""Calls that take longer have one turn."""
Best = Callable[..., float]
"""Seconds of the fastest call."""
MakeCall = Callable[[Policy, int], Callable[[], object]]
"""From a policy and a number of prompts, the call that is timed."""
MakeLayers = Callable[[Policy], Layers | CompiledLayers]


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Widths of a layer."""

    hidden: int
    inner: int
    """Of the MLP."""

    @property
    def weights(self) -> int:
        """Of a layer, which has half as many heads of keys as of queries."""
        return 3 * self.hidden * (self.hidden + self.inner)


TINY, NARROW = LayerSize(hidden=64, inner=128), LayerSize(hidden=128, inner=384)
"""A tiny layer takes little longer than its calls. A narrow one takes longer for its values than for its products."""
WIDE = LayerSize(hidden=1024, inner=2816)
"""A layer whose weights come from memory."""


def best_time(*work: Callable[[], object]) -> float:
    """Seconds of the fastest call, so that other programs disturb little. All are called in turn for a while; the
    first round does not count. Of calls that take longer than that, two are made."""
    until = time.perf_counter() + ENOUGH_S
    for call in work:
        call()
        if time.perf_counter() >= until:
            break
    best, until = math.inf, time.perf_counter() + ENOUGH_S
    for call in cycle(work):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        best = min(best, end - start)
        if end >= until:
            break
    return best


def measure(threads: int, dtype: str) -> Speed:
    """In this process, which must have been started for it."""
    pin_torch(threads)
    torch.manual_seed(0)
    logits = torch.randn(SAMPLER_ROWS, VOCABULARY)
    uniforms = torch.rand(SAMPLER_ROWS, dtype=torch.float64)
    small, large = torch.randn(8, 8), torch.randn(4 * 2**20)
    with torch.inference_mode():
        sampler = best_time(lambda: draw(logits, uniforms)) / logits.numel()
        operation = best_time(lambda: [small + small for _ in range(100)]) / 100
        byte = best_time(lambda: large * 2.0) / (2 * 4 * large.numel())
    rates = measure_rates({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    return Speed(rates=rates, sampler=sampler, operation=operation, byte=byte)


def measure_rates(dtype: Any) -> Rates:
    count = WEIGHTS_BYTES // (OUT * IN * dtype.itemsize)
    weights = [torch.randn(OUT, IN).to(dtype) for _ in range(count)]
    kinds, every = faster_kinds(weights), [RowProduct(weight) for weight in weights]
    packs = kinds.packed and packed_has_same_bits(every[0])
    is_right = kinds.right and right_factor_has_same_bits(every[0])
    for one in every:
        one.choose_side(is_right)
    xs = [torch.randn(rows, IN).to(dtype) for rows in ROWS]
    grad = torch.randn(ROWS[-1], OUT).to(dtype)
    with torch.inference_mode():
        product = tuple(best_time(*(partial(one, x) for one in every)) / (OUT * IN) for x in xs)
        gradient = gradient_time(grad, weights[:4]) / (OUT * IN)
    # Logits as a model has them: probabilities so small that they are denormal would take many times as long.
    head = (0.1 * torch.randn(VOCABULARY, IN)).to(dtype)
    hidden = torch.randn(HEAD_ROWS, IN).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (HEAD_ROWS,))

    def both_ways() -> None:
        token_stats(hidden, head, targets, temperature=1.0, rows=HEAD_ROWS).logprobs.sum().backward()

    whole = best_time(both_ways) / (head.numel() * HEAD_ROWS)
    of_head = RowProduct(head)
    of_head.choose_side(is_right)
    with torch.inference_mode():
        head_token_step = best_time(lambda: product_of_largest(hidden[:SAMPLER_ROWS], head, of_head)) / head.numel()
        packing = time_to_pack(every) if packs else 0.0
        packed = tuple(best_time(*(partial(one, x) for one in every)) / (OUT * IN) for x in xs) if packs else product
    return Rates(
        product=product,
        gradient=gradient,
        head=whole,
        head_token_step=head_token_step,
        packed=packed,
        packing=packing,
        coded=coded_times(dtype, xs),
        eight_bit=eight_bit_times(dtype, xs),
        compiled=compiled_times(dtype, best_time),
        layer=layer_times(dtype, best_time),
    )


def coded_times(dtype: Any, xs: Sequence[Any]) -> tuple[float, ...]:
    """Seconds per weight, up to CODED_ROWS."""
    if dtype != torch.bfloat16 or not reads_codes():
        return ()
    count = WEIGHTS_BYTES // (OUT * IN // 2)
    scales = torch.full((IN // BLOCK, OUT), 0.01, dtype=dtype)
    weights = [
        CodedWeight(codes=torch.randint(256, (OUT, IN // 2), dtype=torch.uint8), scales=scales) for _ in range(count)
    ]
    few = [x for x in xs if len(x) <= CODED_ROWS]
    return tuple(best_time(*(partial(one.product, x, None) for one in weights)) / (OUT * IN) for x in few)


def eight_bit_times(dtype: Any, xs: Sequence[Any]) -> tuple[float, ...]:
    """Seconds per weight for all numbers of rows."""
    if dtype != torch.bfloat16 or not multiplies_eight_bits():
        return ()
    heads = [EightBitHead.of(torch.randn(OUT, IN)) for _ in range(WEIGHTS_BYTES // (OUT * IN))]
    return tuple(best_time(*(partial(one, x) for one in heads)) / (OUT * IN) for x in xs)


def compiled_times(dtype: torch.dtype, best: Best) -> CompiledTimes | None:
    """None where it cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = library_for(dtype, Path(folder))
    if library is None:
        return None
    make = partial(CompiledLayers, library=library)
    tiny, narrow = (TwoDepths.of(size, dtype) for size in (TINY, NARROW))
    plain = folded = compiled_layer_times(tiny, narrow, make, best)
    logits, uniforms = torch.randn(SAMPLER_ROWS, VOCABULARY), torch.rand(SAMPLER_ROWS, dtype=torch.float64)
    drawn_s = best(partial(CompiledDraw(library), logits, uniforms)) / logits.numel()
    wide = small_policy(WIDE, max(1, WEIGHTS_BYTES // (WIDE.weights * dtype.itemsize)), dtype)
    # Fewer rows take as long.
    few = wide_product_s(wide, make, 1, plain, best)
    product = (few, *(wide_product_s(wide, make, rows // GROUP, plain, best) for rows in ROWS[1:]))
    if dtype == torch.float32:
        for policy in (tiny.shallow, tiny.deep, narrow.shallow, narrow.deep):
            policy.adapter.fold()
        folded = compiled_layer_times(tiny, narrow, make, best)
    return CompiledTimes(product=product, token_step=plain, folded_token_step=folded, sampler=drawn_s)


def compiled_layer_times(tiny: "TwoDepths", narrow: "TwoDepths", make: MakeLayers, best: Best) -> OtherTimes:
    """Of so small layers, the products count as the rest."""
    call = partial(token_step, make=make)
    tiny_s, narrow_s = tiny.layer_s(best, call, 1), narrow.layer_s(best, call, TOKEN_STEP_PROMPTS)
    return solved(tiny_s, narrow_s, 0.0, GROUP * tiny.outputs, TOKEN_STEP_PROMPTS * GROUP * narrow.outputs)


def wide_product_s(policy: Policy, make: MakeLayers, prompts: int, other: OtherTimes, best: Best) -> float:
    """Seconds per weight: what a step takes beyond the other times, a third of it at least."""
    step_s, linears = best(token_step(policy, prompts, make=make)), policy.adapter.layers.values()
    weights = sum(one.base.matmul.dense.numel() for one in linears if one.base.matmul.dense is not None)
    values = prompts * GROUP * sum(len(one.lora_B) for one in linears)
    beside = policy.config.num_hidden_layers * other.calls + values * other.per_value
    return max(step_s - beside, step_s / 3) / weights


def gradient_time(grad: Any, weights: Sequence[Any]) -> float:
    """Seconds of `dy W`. Processors without units for bf16 take seconds for 512 rows, and 64 times as long as for 8."""
    few = best_time(partial(grad[:TRIED_ROWS].matmul, weights[0]))
    if few > SLOW_S:
        return few * len(grad) / TRIED_ROWS
    return best_time(*(partial(grad.matmul, weight) for weight in weights))


def time_to_pack(products: Sequence[Any]) -> float:
    """Seconds per weight."""
    start = time.perf_counter()
    for product in products:
        product.pack()
    return (time.perf_counter() - start) / sum(product.dense.numel() for product in products)


def layer_times(dtype: torch.dtype, best: Best) -> LayerTimes:
    tiny, narrow = (TwoDepths.of(size, dtype) for size in (TINY, NARROW))
    plain, update = token_step_times(tiny, narrow, best), update_times(tiny, narrow, best)
    if dtype != torch.float32:
        # Only fp32 weights are summed with the adapter.
        return LayerTimes(token_step=plain, folded_token_step=plain, update=update)
    for policy in (tiny.shallow, tiny.deep, narrow.shallow, narrow.deep):
        policy.adapter.fold()
    return LayerTimes(token_step=plain, folded_token_step=token_step_times(tiny, narrow, best), update=update)


def solved(tiny_s: float, narrow_s: float, products_s: float, tiny_values: int, narrow_values: int) -> OtherTimes:
    """tiny_s, narrow_s: of a layer. products_s: of the narrow one's. A difference of measured times can be negative; it
    counts as a tenth of the whole at least."""
    per_value = max(narrow_s - products_s - tiny_s, 0.1 * narrow_s) / (narrow_values - tiny_values)
    return OtherTimes(calls=max(tiny_s - per_value * tiny_values, 0.1 * tiny_s), per_value=per_value)


def token_step_times(tiny: "TwoDepths", narrow: "TwoDepths", best: Best) -> OtherTimes:
    tiny_s, narrow_s = tiny.layer_s(best, token_step, 1), narrow.layer_s(best, token_step, TOKEN_STEP_PROMPTS)
    rows = TOKEN_STEP_PROMPTS * GROUP
    return solved(tiny_s, narrow_s, narrow.forward_s(best, rows), GROUP * tiny.outputs, rows * narrow.outputs)


def update_times(tiny: "TwoDepths", narrow: "TwoDepths", best: Best) -> OtherTimes:
    tiny_s, group = tiny.layer_s(best, micro_batch, 1), PROMPT + GROUP * TOKENS
    prompts = UPDATE_PROMPTS if tiny_s < SLOW_LAYER_S else 1
    narrow_s, tokens = narrow.layer_s(best, micro_batch, prompts), prompts * group
    products_s = narrow.forward_s(best, tokens) + narrow.backward_s(best, tokens)
    return solved(tiny_s, narrow_s, products_s, group * tiny.outputs, tokens * narrow.outputs)


@dataclass(frozen=True, kw_only=True)
class TwoDepths:
    """Two models whose difference is some layers."""

    shallow: Policy
    deep: Policy

    @staticmethod
    def of(size: LayerSize, dtype: torch.dtype) -> "TwoDepths":
        return TwoDepths(shallow=small_policy(size, SHALLOW, dtype), deep=small_policy(size, DEEP, dtype))

    @property
    def outputs(self) -> int:
        """Of a layer's products, for one row."""
        return sum(len(linear.lora_B) for linear in self.deep.adapter.layers.values()) // DEEP

    def layer_s(self, best: Best, make: MakeCall, prompts: int) -> float:
        few, many = make(self.shallow, prompts), make(self.deep, prompts)
        short, long = best(few), best(many)
        # In turns, since a machine is slower for a while, and the difference is small.
        for _ in range(TURNS - 1 if long < SLOW_CALL_S else 0):
            short, long = min(short, best(few)), min(long, best(many))
        return max(long - short, 0.1 * long) / (DEEP - SHALLOW)

    def forward_s(self, best: Best, rows: int) -> float:
        """Of a layer's products with the base."""
        linears = self.deep.adapter.layers.values()
        pairs = [(one.base.matmul, self.random(rows, one.lora_A.shape[1])) for one in linears]
        return best(torch.inference_mode()(lambda: [matmul(x, None) for matmul, x in pairs])) / DEEP

    def backward_s(self, best: Best, rows: int) -> float:
        """Of the products that give the gradients of their inputs."""
        linears = self.deep.adapter.layers.values()
        pairs = [(one.base.matmul, self.random(rows, len(one.lora_B))) for one in linears]
        return best(torch.inference_mode()(lambda: [matmul.input_gradient(grad) for matmul, grad in pairs])) / DEEP

    def random(self, rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width).to(self.deep.dtype)


def small_policy(size: LayerSize, layers: int, dtype: torch.dtype) -> Policy:
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=SMALL_VOCABULARY,
        tie_word_embeddings=True,
    )
    lm = empty_model(config)
    tensors = {name: 0.05 * torch.randn(value.shape) for name, value in lm.named_parameters()}
    return filled_policy(lm, tensors, LoraConfig(), CPU, dtype, digest="")


def token_step(policy: Policy, prompts: int, make: MakeLayers = Layers) -> Callable[[], object]:
    """One token of each of GROUP completions of each prompt."""
    layers, rows = make(policy), prompts * GROUP
    layers.prepare()
    # Prompts are not copied to rows, as in orders of some size.
    cache = KVCache(rows, TOKENS, PROMPT, CPU, copied_bytes=0, compiled=make is not Layers)
    passed = PromptPass(torch.zeros(prompts, dtype=torch.int64), PROMPT)
    size = policy.config.hidden_size // HEADS
    keys, values = torch.randn(2, prompts, HEADS // 2, PROMPT, size).to(policy.dtype)
    for layer in range(policy.config.num_hidden_layers):
        passed.update(keys, values, layer)
    cache.add_prompts(passed)
    cache.assign(torch.arange(prompts).repeat_interleave(GROUP))
    cache.rows.step(torch.ones(rows, dtype=torch.int64))
    ids, positions = torch.arange(rows) % SMALL_VOCABULARY, torch.full((rows,), PROMPT)

    @torch.inference_mode()
    def work() -> torch.Tensor:
        return layers(ids, positions, cache.layers)

    return work


def micro_batch(policy: Policy, prompts: int) -> Callable[[], object]:
    """Groups that share a prompt each."""
    policy.adapter.requires_grad()
    sequences = Sequences(
        prompts=torch.arange(PROMPT).repeat(prompts, 1),
        lengths=torch.full((prompts,), PROMPT),
        completions=torch.arange(TOKENS).repeat(prompts * GROUP, 1),
        owner=torch.arange(prompts).repeat_interleave(GROUP),
    )

    def work() -> None:
        hidden = policy.hidden(sequences)
        hidden.backward(torch.ones_like(hidden))

    return work


if __name__ == "__main__":
    print(msgspec.json.encode(measure(int(sys.argv[1]), sys.argv[2])).decode())
