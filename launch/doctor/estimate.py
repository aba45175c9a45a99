"""How much memory a configuration will need, before anything is loaded. Good to about a factor of 1.5.

    CPU   2 processes x (runtime + 4 B a parameter held + what loading holds besides) + work
    card  2 processes x (context + 0.53 B a quantised parameter, 2 B any other) + work
    work  keys and values of the rollout, or activations and logits of a micro-batch, whichever is more

The two processes hold their weights at the same time; they compute in turns. Adapter and AdamW are left out: a few
percent of the base. Activations of one layer take about 44 values a token for each unit of the hidden size.
"""

from dataclasses import dataclass

from shared.config.tree import Config

RUNTIME_BYTES = 450 * 2**20
"""Python, torch and transformers in one process."""
CUDA_RUNTIME_BYTES = 1500 * 2**20
"""The same with CUDA's libraries, in host memory."""
CONTEXT_BYTES = 400 * 2**20
"""What one process takes of a card before its first tensor."""
LAYER_FACTOR = 44
NF4_BYTES = 0.53
"""A parameter with its share of the scales."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a checkpoint's files tell of its size."""

    linear: int
    """Parameters in the matrices of the layers: what NF4 packs."""
    rest: int
    """All others: embedding, head, norms."""
    adapter: int
    """Rows and columns of the matrices that get an adapter: its parameters for each unit of rank."""
    file_bytes: int
    """Size of its weight files."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    key_value: int
    """Width of a token's keys: heads times head size."""
    vocabulary: int
    """Tokens."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes."""

    weights: int
    """What two processes hold for as long as they live; less cannot do."""
    total: int
    """With the work of a step."""


def host_need(config: Config, shape: ModelShape, *, card: bool) -> Need:
    """Of the machine's memory, by both processes."""
    if card:
        weights = 2 * CUDA_RUNTIME_BYTES
        return Need(weights=weights, total=weights + shape.file_bytes)
    parameters = shape.linear + shape.rest
    held = parameters if config.model.dequantize != "each_call" or config.model.quantization == "none" else shape.rest
    weights = 2 * (RUNTIME_BYTES + 4 * held)
    loading = max(shape.file_bytes, int(parameters * NF4_BYTES))
    return Need(weights=weights, total=weights + loading + work(config, shape, value_bytes=4))


def card_need(config: Config, shape: ModelShape) -> Need:
    """Of the card's memory, by both processes."""
    packed = config.model.quantization == "nf4" and config.model.dequantize != "held"
    weights = 2 * int(CONTEXT_BYTES + shape.linear * (NF4_BYTES if packed else 2) + 2 * shape.rest)
    return Need(weights=weights, total=weights + work(config, shape, value_bytes=2))


def adapter_bytes(config: Config, shape: ModelShape) -> int:
    """A and B in fp32."""
    return 4 * config.lora.rank * shape.adapter


def anchor_bytes(config: Config, shape: ModelShape) -> int:
    """What a checkpoint holds of a stage's end: the adapter of then, and a weight of Fisher's in two bytes for each of
    the matrices, as if all had an adapter."""
    return adapter_bytes(config, shape) * config.curriculum.holds + 2 * shape.linear * (config.curriculum.ewc > 0.0)


def work(config: Config, shape: ModelShape, *, value_bytes: int) -> int:
    """The larger of sampling and learning; they take turns."""
    return max(rollout_values(config, shape), batch_values(config, shape)) * value_bytes


def rollout_values(config: Config, shape: ModelShape) -> int:
    """Keys and values of the groups that are decoded together."""
    groups = min(config.rollout.groups_per_order or config.most_prompts, config.most_prompts)
    tokens = groups * (config.tasks.max_prompt_tokens + config.rollout.group * config.rollout.max_new_tokens)
    return 2 * tokens * shape.layers * shape.key_value


def batch_values(config: Config, shape: ModelShape) -> int:
    """Activations of a micro-batch, and three tiles of logits."""
    tokens = config.batch.token_budget * shape.hidden
    kept = shape.layers if config.batch.checkpointing else shape.layers * LAYER_FACTOR
    return tokens * (kept + LAYER_FACTOR) + 3 * config.batch.head_rows * shape.vocabulary
