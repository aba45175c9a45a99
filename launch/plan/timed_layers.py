"""Small models whose layers are timed (measuring.py, timed_compiled.py), as the processes of a run compute them.

    tiny, narrow    of a few layers; what they take besides products is solved from the two sizes
    wide            one whose weights come from memory

A layer's time is the difference between a deep and a shallow model, divided by the layers between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from transformers import LlamaConfig

from actor.engines.kv_cache import KVCache
from actor.engines.prompts import PromptPass
from actor.engines.token_step.compiled.step import CompiledLayers
from actor.engines.token_step.layers import Layers
from launch.plan.machine import OtherTimes
from shared.base.architecture import empty_model
from shared.base.load import filled_policy
from shared.config.model import LoraConfig
from shared.model.head import Sums, SumsOf, token_stats
from shared.model.layers.sequences import Sequences
from shared.model.policy import Kernels, Policy

SHALLOW, DEEP, TURNS = 2, 8, 3
HEADS, SMALL_VOCABULARY = 4, 64
PROMPT, GROUP, TOKENS = 32, 8, 16
CPU = torch.device("cpu")
WEIGHTS_BYTES = 64 * 2**20
"""So many bytes of weights are read in turn, so that they come from memory."""
VOCABULARY = 4096
"""Of the heads and logits that are timed."""
TOKEN_STEP_PROMPTS = 16
"""In a narrow layer. A tiny one has one prompt."""
USUAL = 64
"""Tokens of a prompt and of a completion in the narrow layer of an update, whose values then cost what they do in
attention over sequences of some length."""
UPDATE_PROMPTS = 2
"""In a narrow layer. A tiny one has one prompt."""
SLOW_LAYER_S = 0.02
"""Where a tiny layer takes longer in an update, as with emulated bf16, a narrow one has one prompt too."""
HEAD_ROWS = 512
SLOW_CALL_S = 0.3
"""Calls that take longer have one turn."""
Timed = Callable[..., float]
"""Seconds of a call."""
MakeCall = Callable[[Policy, int], Callable[[], object]]
"""From a policy and a number of prompts, the call that is timed."""
MakeLayers = Callable[[Policy], Layers | CompiledLayers]
"""From a policy, its layers in a token step."""


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


@dataclass(frozen=True, kw_only=True)
class TwoDepths:
    """Two models whose difference is some layers."""

    shallow: Policy
    deep: Policy

    @staticmethod
    def of(size: LayerSize, dtype: torch.dtype) -> "TwoDepths":
        return TwoDepths(shallow=small_policy(size, SHALLOW, dtype), deep=small_policy(size, DEEP, dtype))

    def with_kernels(self, kernels: Kernels) -> "TwoDepths":
        return TwoDepths(shallow=self.shallow.with_kernels(kernels), deep=self.deep.with_kernels(kernels))

    @property
    def outputs(self) -> int:
        """Of a layer's products, for one row."""
        return sum(len(linear.lora_B) for linear in self.deep.adapter.layers.values()) // DEEP

    def layer_s(self, timed: Timed, make: MakeCall, prompts: int) -> float:
        few, many = make(self.shallow, prompts), make(self.deep, prompts)
        # In turns, since a machine is slower for a while, and the difference is small.
        turns = [(timed(few), timed(many))]
        turns += [(timed(few), timed(many)) for _ in range(TURNS - 1 if turns[0][1] < SLOW_CALL_S else 0)]
        short, long = (median(times) for times in zip(*turns, strict=True))
        return max(long - short, 0.1 * long) / (DEEP - SHALLOW)

    def forward_s(self, timed: Timed, rows: int) -> float:
        """Of a layer's products with the base."""
        linears = self.deep.adapter.layers.values()
        pairs = [(one.base.matmul, self.random(rows, one.lora_A.shape[1])) for one in linears]
        return timed(torch.inference_mode()(lambda: [matmul(x, None) for matmul, x in pairs])) / DEEP

    def backward_s(self, timed: Timed, rows: int) -> float:
        """Of the products that give the gradients of their inputs."""
        linears = self.deep.adapter.layers.values()
        pairs = [(one.base.matmul, self.random(rows, len(one.lora_B))) for one in linears]
        return timed(torch.inference_mode()(lambda: [matmul.input_gradient(grad) for matmul, grad in pairs])) / DEEP

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
    values = {shape: 0.05 * torch.randn(shape) for shape in {value.shape for value in lm.parameters()}}
    # The same values in other memory.
    tensors = {name: values[value.shape].to(dtype, copy=True) for name, value in lm.named_parameters()}
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


def micro_batch(policy: Policy, prompts: int, prompt: int = PROMPT, tokens: int = TOKENS) -> Callable[[], object]:
    """Groups that share a prompt each."""
    policy.adapter.requires_grad()
    sequences = Sequences(
        prompts=torch.arange(prompt).repeat(prompts, 1),
        lengths=torch.full((prompts,), prompt),
        completions=torch.arange(tokens).repeat(prompts * GROUP, 1),
        owner=torch.arange(prompts).repeat_interleave(GROUP),
    )

    def work() -> None:
        hidden = policy.hidden(sequences)
        hidden.backward(torch.ones_like(hidden))

    return work


def solved(tiny_s: float, narrow_s: float, products_s: float, tiny_values: int, narrow_values: int) -> OtherTimes:
    """tiny_s, narrow_s: of a layer. products_s: of the narrow one's. A difference of measured times can be negative; it
    counts as a tenth of the whole at least."""
    per_value = max(narrow_s - products_s - tiny_s, 0.1 * narrow_s) / (narrow_values - tiny_values)
    return OtherTimes(calls=max(tiny_s - per_value * tiny_values, 0.1 * tiny_s), per_value=per_value)


def update_times(tiny: TwoDepths, narrow: TwoDepths, timed: Timed) -> OtherTimes:
    tiny_s = tiny.layer_s(timed, micro_batch, 1)
    prompts = UPDATE_PROMPTS if tiny_s < SLOW_LAYER_S else 1
    narrow_s = narrow.layer_s(timed, partial(micro_batch, prompt=USUAL, tokens=USUAL), prompts)
    tokens = prompts * (USUAL + GROUP * USUAL)
    products_s = narrow.forward_s(timed, tokens) + narrow.backward_s(timed, tokens)
    return solved(tiny_s, narrow_s, products_s, (PROMPT + GROUP * TOKENS) * tiny.outputs, tokens * narrow.outputs)


def head_values(width: int, dtype: torch.dtype) -> torch.Tensor:
    """[VOCABULARY, width] Logits are as a model has them: probabilities so small that they are denormal would take many
    times as long."""
    return (0.1 * torch.randn(VOCABULARY, width)).to(dtype)


def head_s(head: torch.Tensor, timed: Timed, sums: SumsOf = Sums) -> float:
    """Seconds per weight and row of logits with log-probs, forward and backward."""
    hidden = torch.randn(HEAD_ROWS, head.shape[1]).to(head.dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (HEAD_ROWS,))

    def both_ways() -> None:
        token_stats(hidden, head, targets, temperature=1.0, rows=HEAD_ROWS, sums=sums).logprobs.sum().backward()

    return timed(both_ways) / (head.numel() * HEAD_ROWS)
