"""How long the layers of a model take besides the products of the base, measured with layers of two sizes.

    values   of a layer, what the products of the base give for all rows
    a value  (a narrow layer - its products - a tiny layer) / (values of the narrow one - values of the tiny one)
    calls    a tiny layer - its values x a value

Calls are Python and hundreds of small operations: in a token step of the decode loop, and in forward and backward of a
micro-batch. Beside them, each value is read and written many times: in norms, activations, attention and the products
of the adapter. The measured functions are those of a run, with an adapter on every linear. Both times differ more than
twofold between machines, and timing one operation does not predict them.

Left out: the products of a tiny layer, ranks other than the default, an adapter that is packed or read as codes, and
that small prompts are copied to their rows, which takes fewer calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from actor.engines.kv_cache import KVCache
from actor.engines.prompts import PromptPass
from actor.engines.token_step.layers import Layers
from shared.base.architecture import empty_model
from shared.base.load import filled_policy
from shared.config.model import LoraConfig
from shared.model.policy import Policy
from shared.model.sequences import Sequences

SHALLOW, DEEP, TURNS = 2, 8, 3
HEADS, VOCABULARY = 4, 64
PROMPT, ROWS, TOKENS = 32, 8, 16
CPU = torch.device("cpu")
STEP_PROMPTS, UPDATE_PROMPTS = 16, 4
"""In a narrow layer. A tiny one has one prompt."""
SLOW_LAYER_S = 0.02
"""Where a tiny layer takes longer in an update, as with emulated bf16, a narrow one has one prompt too."""
SLOW_CALL_S = 0.3
"""Calls that take longer have one turn."""
Best = Callable[..., float]
"""Seconds of the fastest call."""
Work = Callable[[Policy, int], Callable[[], object]]
"""With a policy and a number of prompts."""


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Widths of a layer."""

    hidden: int
    inner: int
    """Of the MLP."""


TINY, NARROW = LayerSize(hidden=64, inner=128), LayerSize(hidden=128, inner=384)
"""A tiny layer takes little longer than its calls. A narrow one takes longer for its values than for its products."""


@dataclass(frozen=True, kw_only=True)
class OtherTimes:
    """Seconds of a layer besides the products of the base."""

    calls: float
    """Of all its operations, however small."""
    value: float
    """For each value that the products give."""

    @staticmethod
    def of(tiny_s: float, narrow_s: float, products_s: float, tiny_values: int, narrow_values: int) -> "OtherTimes":
        """tiny_s, narrow_s: of a layer. products_s: of the narrow one's. A difference of measured times can be
        negative; it counts as a tenth of the whole at least."""
        value = max(narrow_s - products_s - tiny_s, 0.1 * narrow_s) / (narrow_values - tiny_values)
        return OtherTimes(calls=max(tiny_s - value * tiny_values, 0.1 * tiny_s), value=value)


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Of a token step with the adapter beside the base, of one with the sums of both, and of a micro-batch, forward and
    backward."""

    step: OtherTimes
    folded_step: OtherTimes
    update: OtherTimes


def layer_times(dtype: torch.dtype, best: Best) -> LayerTimes:
    tiny, narrow = (TwoDepths.of(size, dtype) for size in (TINY, NARROW))
    step, update = step_times(tiny, narrow, best), update_times(tiny, narrow, best)
    if dtype != torch.float32:
        # Only fp32 weights are summed with the adapter.
        return LayerTimes(step=step, folded_step=step, update=update)
    for policy in (tiny.shallow, tiny.deep, narrow.shallow, narrow.deep):
        policy.adapter.fold()
    return LayerTimes(step=step, folded_step=step_times(tiny, narrow, best), update=update)


def step_times(tiny: "TwoDepths", narrow: "TwoDepths", best: Best) -> OtherTimes:
    tiny_s, narrow_s = tiny.layer_s(best, token_step, 1), narrow.layer_s(best, token_step, STEP_PROMPTS)
    rows = STEP_PROMPTS * ROWS
    return OtherTimes.of(tiny_s, narrow_s, narrow.forward_s(best, rows), ROWS * tiny.outputs, rows * narrow.outputs)


def update_times(tiny: "TwoDepths", narrow: "TwoDepths", best: Best) -> OtherTimes:
    tiny_s, group = tiny.layer_s(best, micro_batch, 1), PROMPT + ROWS * TOKENS
    prompts = UPDATE_PROMPTS if tiny_s < SLOW_LAYER_S else 1
    narrow_s, tokens = narrow.layer_s(best, micro_batch, prompts), prompts * group
    products_s = narrow.forward_s(best, tokens) + narrow.backward_s(best, tokens)
    return OtherTimes.of(tiny_s, narrow_s, products_s, group * tiny.outputs, tokens * narrow.outputs)


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

    def layer_s(self, best: Best, work: Work, prompts: int) -> float:
        few, many = work(self.shallow, prompts), work(self.deep, prompts)
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
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    lm = empty_model(config)
    tensors = {name: 0.05 * torch.randn(value.shape) for name, value in lm.named_parameters()}
    return filled_policy(lm, tensors, LoraConfig(), CPU, dtype, digest="")


def token_step(policy: Policy, prompts: int) -> Callable[[], object]:
    """One token of each of ROWS completions of each prompt."""
    layers, rows = Layers(policy), prompts * ROWS
    layers.prepare()
    # Prompts are not copied to rows, as in orders of some size.
    cache = KVCache(rows, TOKENS, PROMPT, CPU, copied_bytes=0)
    passed = PromptPass(torch.zeros(prompts, dtype=torch.int64), PROMPT)
    keys, values = torch.randn(2, prompts, HEADS // 2, PROMPT, policy.config.hidden_size // HEADS)
    for layer, _ in enumerate(layers.layers):
        passed.update(keys, values, layer)
    cache.add_prompts(passed)
    cache.assign(torch.arange(prompts).repeat_interleave(ROWS))
    cache.rows.step(torch.ones(rows, dtype=torch.int64))
    ids, positions = torch.arange(rows) % VOCABULARY, torch.full((rows,), PROMPT)

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
        completions=torch.arange(TOKENS).repeat(prompts * ROWS, 1),
        owner=torch.arange(prompts).repeat_interleave(ROWS),
    )

    def work() -> None:
        hidden = policy.hidden(sequences)
        hidden.backward(torch.ones_like(hidden))

    return work
