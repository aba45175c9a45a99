"""How much of a card vLLM needs as the actor's engine: by formulas, since its code cannot be run without a card.

    values     in the run's number type, or bf16 beside NF4 codes
    weights    nf4: 4 bits and an fp32 scale for each block of 64; all others are values
    adapter    room for one of the rank that it is served under, as values
    KV         as it is told to take (actor/engines/vllm_options.py)
    a pass     activations of one layer for all its tokens, and the logits of all rows with copies: estimated

What it keeps while the learner has its turn follows from `actor.give_back`. The sizes that are given are exact; context
and passes are estimates, to be measured on a card.
"""

from collections.abc import Mapping
from typing import Any

from actor.engines.vllm_options import (
    BATCHED_TOKENS,
    BLOCK,
    MOST_SEQUENCES,
    RANKS,
    VLLM_CONTEXT_BYTES,
    kv_bytes,
    token_bytes,
)
from launch.card.items import CONTEXT, ENGINE, KV, LORA, TEMPORARIES, WAITING, Peak
from launch.card.work import VALUE_BYTES, CardWork
from launch.plan.memory import Items, size_of

NF4_PLUGIN_BYTES = 0.5625
"""A value: its code, and its share of an fp32 scale."""
LOGIT_COPIES = 3
"""In fp32: logits, what is drawn from, log-probs."""


def vllm_peaks(held: Items, work: CardWork, facts: Mapping[str, Any]) -> list[Peak]:
    """held: what an actor of our own holds. facts: the model's config.json."""
    served = {CONTEXT: VLLM_CONTEXT_BYTES, ENGINE: weights(held, work), LORA: adapter(held, work)}
    kv = {KV: keys_and_values(work, facts)}
    parts = {
        "load": served | kv,
        "rollout": served | kv | {TEMPORARIES: a_pass(work, facts)},
        WAITING: kept(served, kv, work.actor.give_back),
    }
    return [Peak(name=name, items=items, reserved=size_of(items)) for name, items in parts.items()]


def run_bytes(work: CardWork) -> int:
    """Of a value in the run's number type."""
    return VALUE_BYTES.get(work.compute.dtype, 2)


def value_bytes(work: CardWork) -> int:
    """Of a value that vLLM has: the plugin for codes computes in bf16, whatever it is told."""
    return 2 if work.actor.weights == "nf4" else run_bytes(work)


def weights(held: Items, work: CardWork) -> int:
    ours, served = run_bytes(work), value_bytes(work)
    values = 2 * held.get("NF4", 0) + held.get("weights", 0) // ours
    rest = sum(held.get(name, 0) for name in ("embedding", "head", "norms and biases")) // ours * served
    return round(values * (NF4_PLUGIN_BYTES if work.actor.weights == "nf4" else served)) + rest


def adapter(held: Items, work: CardWork) -> int:
    rank = next(rank for rank in RANKS if rank >= work.lora.rank)
    # Ours is fp32.
    return held["LoRA"] * value_bytes(work) // 4 * rank // work.lora.rank


def sequences(work: CardWork) -> int:
    return work.actor.max_sequences or min(work.rollout.prompts * work.rollout.group, MOST_SEQUENCES)


def longest(work: CardWork) -> int:
    """Tokens of a sequence."""
    cap = work.rollout.max_new_tokens
    return work.prompt + max(cap, work.eval.longest_completion(cap))


def keys_and_values(work: CardWork, facts: Mapping[str, Any]) -> int:
    token = token_bytes(dict(facts), value_bytes(work))
    return kv_bytes(work.actor.kv_mb, sequences(work), longest(work), BLOCK["cuda"], token)


def a_pass(work: CardWork, facts: Mapping[str, Any]) -> int:
    values = max(BATCHED_TOKENS, longest(work)) * (2 * facts["intermediate_size"] + 4 * facts["hidden_size"])
    return values * value_bytes(work) + sequences(work) * facts["vocab_size"] * 4 * LOGIT_COPIES


def kept(served: Items, kv: Items, give_back: str) -> Items:
    """While it waits."""
    match give_back:
        case "nothing" | "auto":
            return served | kv
        case "kv":
            return served
        case "weights":
            return {CONTEXT: served[CONTEXT]}
        case _:
            return {CONTEXT: 0}
