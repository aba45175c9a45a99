"""The part of a configuration from which memory and time of a step are predicted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.plan.shape import FP32_BYTES, Lengths, ModelShape, Passes
from shared.config.model import ModelConfig
from shared.config.processes import CODED_ROWS, PACKED_TOKENS, ActorConfig, EvalConfig, is_folded
from shared.config.training import BatchConfig
from shared.config.tree import RolloutConfig

Dtype = Literal["fp32", "bf16"]
VALUE_BYTES: Mapping[Dtype, int] = {"fp32": FP32_BYTES, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes, and with what."""

    model: ModelConfig
    """How the base is kept."""
    actor: ActorConfig
    """How it decodes."""
    rollout: RolloutConfig
    """What is sampled."""
    batch: BatchConfig
    """How the learner cuts its batch."""
    passes: Passes
    eval: EvalConfig
    """What is evaluated."""
    lora_rank: int
    """Of the adapter."""
    groups: int
    """Largest number of groups in a step."""
    workers: int
    """Processes that score."""
    dtype: Dtype
    """Of the base and the activations."""
    sent_value_bytes: Mapping[Dtype, int]
    """Size of one value of the adapter as it is sent, for each type that the base may have; a remedy may change it."""
    orders_ahead: bool
    """Whether steps are ordered ahead and may name older versions, so that the learner keeps these as files."""
    overlaps: bool
    """Whether learner and actors compute at the same time."""
    lengths: Lengths
    """Of its samples."""
    samples: bool
    """Whether a step samples. A warm start has its answers."""
    actors: int
    """Beside the learner: a warm start has some for its evaluations only."""
    at_once: int
    """Actors that compute at the same time."""
    ranks: int = 1
    """Processes of the learner, which all compute at the same time."""
    divides: bool = False
    """Whether each rank has a part of the base besides the mapped file."""
    divides_moments: bool = False
    """Whether each rank has AdamW's moments of a part of the adapter, and the sum of its gradients."""
    in_turns: bool = False
    """Whether a completion is a conversation, whose keys and values are kept between its turns."""
    canary_tokens: int = 0
    """That both processes compute log-probs of for each new adapter."""
    compiles: bool = True
    """Whether C code computes what an update needs between its products, where it can be compiled."""
    packs: bool = True
    """Whether weights may be packed while an order is decoded (actor/engines/token_step/packed.py)."""

    @property
    def order_groups(self) -> int:
        """Groups that are decoded together."""
        return min(self.rollout.groups_per_order or self.groups, self.groups)

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def is_dense(self) -> bool:
        """Whether the dense base is mapped."""
        return self.model.quantization == "none" or self.model.dequantize != "each_call"

    def packs_for(self, shape: ModelShape, cap: int) -> bool:
        """Whether weights are packed for an order whose completions may have so many tokens."""
        return self.packs and self.is_dense and cap >= PACKED_TOKENS and (self.dtype == "bf16" or shape.fits_onednn)

    def codes_for(self, shape: ModelShape, rows: float) -> bool:
        """Whether a token step of so many rows reads codes."""
        reads = self.actor.weights == "nf4" and self.model.quantization == "nf4" and self.dtype == "bf16"
        return reads and self.uses_own_layers(shape) and (self.is_compiled or rows <= CODED_ROWS)

    @property
    def is_compiled(self) -> bool:
        """Whether C code computes a token step of a model with our own layers. Sizes that it does not cover are left
        out."""
        return self.actor.token_step == "compiled"

    def has_eight_bit_head(self, shape: ModelShape) -> bool:
        """Whether logits come from the head in 8 bits."""
        return self.actor.head == "int8" and self.uses_own_layers(shape) and self.dtype == "bf16"

    def uses_own_layers(self, shape: ModelShape) -> bool:
        """Whether `hf` decodes with our own layers."""
        return self.actor.engine == "hf" and shape.own_layers and self.is_dense

    def folds(self, shape: ModelShape) -> bool:
        """Whether the actor has sums of weights and adapter."""
        return self.is_dense and self.dtype == "fp32" and is_folded(self.actor.fold, FP32_BYTES * shape.linear)
