"""How long the layers of a model take besides their products, measured with layers too small for these to count.

    a layer's calls = (time with DEEP layers - time with SHALLOW layers) / (DEEP - SHALLOW)

This is Python and hundreds of small operations: in a token step of the decode loop, and in forward and backward of a
micro-batch. The measured functions are those of a run, with an adapter on every linear. How long they take differs more
than twofold between machines, and timing one operation does not predict it.
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

SHALLOW, DEEP = 2, 8
HIDDEN, HEADS, INNER, VOCABULARY = 64, 4, 128, 64
PROMPT, ROWS, TOKENS = 32, 8, 16
CPU = torch.device("cpu")
Best = Callable[..., float]
"""Seconds of the fastest call."""


@dataclass(frozen=True, kw_only=True)
class LayerCalls:
    """Seconds of one layer."""

    step: float
    """Of a token step, with the adapter beside the base."""
    folded_step: float
    """With the sum of both; in bf16 as long as `step`."""
    update: float
    """Of a micro-batch, forward and backward."""


def layer_calls(dtype: torch.dtype, best: Best) -> LayerCalls:
    shallow, deep = (small_policy(layers, dtype) for layers in (SHALLOW, DEEP))

    def of_one(work: Callable[[Policy], Callable[[], object]]) -> float:
        short, long = best(work(shallow)), best(work(deep))
        return max(long - short, 0.1 * long) / (DEEP - SHALLOW)

    step, update = of_one(token_step), of_one(micro_batch)
    for policy in (shallow, deep):
        policy.adapter.fold()
    return LayerCalls(step=step, folded_step=of_one(token_step), update=update)


def small_policy(layers: int, dtype: torch.dtype) -> Policy:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    lm = empty_model(config)
    tensors = {name: 0.05 * torch.randn(value.shape) for name, value in lm.named_parameters()}
    return filled_policy(lm, tensors, LoraConfig(), CPU, dtype, digest="")


def token_step(policy: Policy) -> Callable[[], object]:
    """One token of each of some rows that continue a prompt."""
    layers = Layers(policy)
    layers.prepare()
    cache, passed = KVCache(ROWS, TOKENS, PROMPT, CPU), PromptPass(torch.zeros(1, dtype=torch.int64), PROMPT)
    keys, values = torch.randn(2, 1, HEADS // 2, PROMPT, HIDDEN // HEADS)
    for layer, _ in enumerate(layers.layers):
        passed.update(keys, values, layer)
    cache.add_prompts(passed)
    cache.assign(torch.zeros(ROWS, dtype=torch.int64))
    cache.rows.step(torch.ones(ROWS, dtype=torch.int64))
    ids, positions = torch.arange(ROWS), torch.full((ROWS,), PROMPT)

    @torch.inference_mode()
    def work() -> torch.Tensor:
        return layers(ids, positions, cache.layers)

    return work


def micro_batch(policy: Policy) -> Callable[[], object]:
    """A group that shares its prompt."""
    policy.adapter.requires_grad()
    sequences = Sequences(
        prompts=torch.arange(PROMPT)[None],
        lengths=torch.tensor([PROMPT]),
        completions=torch.arange(TOKENS).repeat(ROWS, 1),
        owner=torch.zeros(ROWS, dtype=torch.int64),
    )

    def work() -> None:
        hidden = policy.hidden(sequences)
        hidden.backward(torch.ones_like(hidden))

    return work
