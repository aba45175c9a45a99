"""What vLLM gives back of the card between two orders, so that the learner has room. Pure arithmetic, in bytes.

    nothing   context + weights + kv + learner <= card - margin     the least that makes room is chosen
    kv        context + weights      + learner <= card - margin     keys and values go, and come back empty
    weights   context                + learner <= card - margin     sleep level 1: weights wait in host memory
    stop                               learner <= card - margin     the engine ends and is built anew

Level 2 of vLLM's sleep is no choice: it loses the adapter, and the scales of NF4 codes. On a CPU there is no card to
give back.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import ModelError

GiveBack = Literal["nothing", "kv", "weights", "stop"]
MARGIN_BYTES = 400 * 2**20
"""What no plan counts on: a desktop, fragmentation."""
CONTEXT_BYTES = 550 * 2**20
"""vLLM's own: CUDA context, cuBLAS, workspaces. Estimated, to be measured on a card."""
LEARNER_CONTEXT_BYTES = 400 * 2**20
ADAPTER_BYTES = 16
"""A parameter: itself, its gradient and two moments in fp32."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an awake engine holds of the card."""

    weights: int
    """Base and room for the adapter."""
    kv: int
    """Keys and values."""


def plan_give_back(card: int, learner: int, held: Held) -> GiveBack:
    """The least that makes room for a learner of this size."""
    room = card - MARGIN_BYTES - learner
    if CONTEXT_BYTES + held.weights + held.kv <= room:
        return "nothing"
    if CONTEXT_BYTES + held.weights <= room:
        return "kv"
    if room >= CONTEXT_BYTES:
        return "weights"
    if room >= 0:
        return "stop"
    raise ModelError(
        f"The learner needs about {learner / 2**30:.1f} GiB and this card has {card / 2**30:.1f}, of which"
        f" {MARGIN_BYTES / 2**30:.1f} are kept free; lower batch.token_budget or lora.rank, or take a smaller model."
    )


def learner_bytes(model: dict[str, Any], base_file: int, adapter_parameters: int, token_budget: int) -> int:
    """At its peak, in bf16 with checkpointed activations: base, adapter with its moments, one micro-batch.

    A token keeps its input of every layer (2 bytes x H each) and, in the layer being recomputed, some 8 x I values.
    """
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    token = 2 * model["num_hidden_layers"] * hidden + 2 * 8 * inner
    return LEARNER_CONTEXT_BYTES + base_file + ADAPTER_BYTES * adapter_parameters + token_budget * token
