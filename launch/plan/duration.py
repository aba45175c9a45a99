"""How long a step takes on this machine, from its measured speed.

    rollout   tokens of the longest completion x (weights x product(rows) + sampler + keys and values + what
              layers do besides products) x orders / actors that compute at once; nothing in a warm start
    update    sum over micro-batches of (passes with gradient x weights x (product forward, once more if recomputed,
              gradient backward) + passes without it x weights x product forward, each with head and what layers do
              besides) / ranks of the learner, as if there were cores for all, + updates x optimizer + publishing
    publish   sha256 of the adapter and the canary; an actor installs it with the canary, in bf16 with two

Times per weight and row are those of launch/plan/machine.py. Decoding a few rows takes little longer than decoding one;
an update costs its arithmetic. What layers do besides products takes a time for each layer, and one for each value that
their products give.
`benchmarks/predicted.py` compares predictions with runs.
Lengths are assumed: every completion has the largest length, except for the embedded model, whose lengths are known.

Left out: idle groups, which teach nothing and cost no update unless the loss has a KL; groups that replace them; the
pass of [constraint] over the completions that it penalises; the longer prompts of a teacher; time that a user's reward
takes; a `lora.rank` other than the default; and that layers which are computed by transformers' modules take longer.
"""

from dataclasses import dataclass

from launch.plan.machine import SAMPLER_ROWS, OtherTimes, Speed, between
from launch.plan.memory import (
    decoded_at_once,
    micro_batch_tokens,
    packed_bytes,
    size_of,
    update_items,
    used_tokens,
)
from launch.plan.shape import FP32_BYTES, Lengths, ModelShape, adapter_bytes
from launch.plan.work import Work

TOKEN_STEP_CALLS = 500
"""Small operations that take as long as one token step outside the layers: sampler, bookkeeping, scoring."""
COMPILED_STEP_CALLS = 200
"""The same where C code computes layers and sampler."""
NEARLY_ALL = 0.99
"""A head of which this share is packed counts as packed: sizes are rounded to whole bytes."""
OPTIMIZER_PASSES = 16
"""How often clipping and AdamW read and write a value of the adapter."""
ORDER_S = 0.02
"""Messages, journal and scoring of an order."""
BETWEEN_S = 0.03
"""Messages, journal and metrics of a step."""
IN_A_RUN = 1.1
"""What is measured again and again finds the caches of the processor as it left them. After the turn of another process
it takes up to a seventh longer, a tenth on average (two pretrained models, decoding and updates)."""
HASHED_BYTE_S = 1e-9
"""To copy a byte of the adapter and take it into a sha256."""
START_S = 6.0
"""Until the first step begins: imports, base, checks."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds."""

    rollout: float
    """Decoding all orders of a step."""
    update: float
    """The learner's part."""
    overlaps: bool
    """Whether both are at the same time."""
    install: float = 0.0
    """Until an actor has the new adapter."""

    @property
    def step(self) -> float:
        parts = (self.install + self.rollout, self.update)
        return BETWEEN_S + (max(parts) if self.overlaps else sum(parts))


def step_time(shape: ModelShape, work: Work, actor: Speed, learner: Speed) -> StepTime:
    """actor, learner: what this machine does with the threads of each."""
    orders = -(-work.groups // work.order_groups)
    rounds = -(-orders // max(1, work.at_once))
    rows = work.order_groups * work.rollout.group
    rollout = rounds * decode_s(shape, work, actor, groups=work.order_groups, rows=rows, lengths=work.lengths)
    return StepTime(
        rollout=IN_A_RUN * rollout + orders * ORDER_S if work.samples else 0.0,
        update=IN_A_RUN * update_s(shape, work, learner),
        overlaps=work.overlaps,
        install=install_s(shape, work, actor),
    )


def decode_s(shape: ModelShape, work: Work, speed: Speed, *, groups: int, rows: int, lengths: Lengths) -> float:
    """One order: its prompts once, then one token of each row at a time; rows that have ended cost nothing."""
    tokens = groups * lengths.prompt
    prefill = shape.linear * speed.product_s(tokens) + other_layer_s(shape, in_token_step(shape, work, speed), tokens)
    width = min(rows, decoded_at_once(shape, work, lengths.longest))
    rates, longest = speed.rates, lengths.longest
    if work.packs_for(shape, longest):
        prefill += rates.packing * packed_bytes(shape, work, width) / work.value_bytes
    # A row that has ended is taken over by the next completion; the last ones end one after the other.
    steps = lengths.longest + max(0.0, rows / width - 1) * lengths.completion
    active = rows * lengths.completion / steps
    groups_in_step = groups * width / rows
    share = Packed.of(shape, work, width, lengths.longest)
    one = token_step_s(shape, work, speed, share, groups=groups_in_step, rows=active, lengths=lengths)
    return prefill + steps * one


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Which share of the weights is packed while an order is decoded, and whether the head is in 8 bits."""

    layers: float
    head: float
    eight_bit: bool

    @staticmethod
    def of(shape: ModelShape, work: Work, rows: int, cap: int) -> "Packed":
        """The layers come first, unless they are read as codes."""
        packed = packed_bytes(shape, work, rows) / work.value_bytes if work.packs_for(shape, cap) else 0.0
        layers = 0.0 if work.codes_for(shape, rows) or not shape.own_layers else min(1.0, packed / shape.linear)
        head = (packed - layers * shape.linear) / (shape.vocabulary * shape.hidden)
        return Packed(layers=layers, head=float(head > NEARLY_ALL), eight_bit=work.has_eight_bit_head(shape))


def token_step_s(
    shape: ModelShape, work: Work, speed: Speed, packed: Packed, *, groups: float, rows: float, lengths: Lengths
) -> float:
    """One token of each row."""
    rates, plain = speed.rates, speed.product_s(rows)
    of_layers = packed.layers * speed.packed_s(rows) + (1.0 - packed.layers) * plain
    if work.codes_for(shape, rows) and not work.is_compiled:
        of_layers = speed.coded_s(rows)
    products = shape.linear * of_layers
    times = rates.packed if packed.head else rates.product
    if packed.eight_bit and rates.eight_bit:
        times = rates.eight_bit
    of_head = rates.head_token_step + between(times, rows) - speed.product_s(SAMPLER_ROWS)
    head = shape.vocabulary * shape.hidden * max(of_head, times[0])
    sampler, calls = rows * shape.vocabulary * speed.sampler, TOKEN_STEP_CALLS
    beside = other_layer_s(shape, in_token_step(shape, work, speed), rows)
    if work.is_compiled and work.uses_own_layers(shape) and (compiled := rates.compiled):
        reads_codes = compiled.coded and work.codes_for(shape, rows)
        products = shape.linear * between(compiled.coded if reads_codes else compiled.product, rows)
        if packed.eight_bit and compiled.head:
            head = shape.vocabulary * shape.hidden * between(compiled.head, rows)
        sampler, calls = rows * shape.vocabulary * compiled.sampler, COMPILED_STEP_CALLS
        times = compiled.folded_token_step if work.folds(shape) else compiled.token_step
        beside = other_layer_s(shape, times, rows)
    seen = groups * lengths.prompt + rows * lengths.longest / 2
    cache = 2 * seen * shape.layers * shape.key_value * work.value_bytes * speed.byte
    return products + head + sampler + cache + beside + calls * speed.operation


def in_token_step(shape: ModelShape, work: Work, speed: Speed) -> OtherTimes:
    """What a layer takes in a token step besides its products with the base, or with its sum with the adapter."""
    layer = speed.rates.layer
    return layer.folded_token_step if work.folds(shape) else layer.token_step


def other_layer_s(shape: ModelShape, times: OtherTimes, tokens: float) -> float:
    """Seconds of all layers besides their products with the base."""
    return shape.layers * times.calls + tokens * shape.outputs * times.per_value


def update_s(shape: ModelShape, work: Work, speed: Speed) -> float:
    """All passes over a step, and the optimizer."""
    lengths, group = work.lengths, work.rollout.group
    tokens = work.groups * (lengths.prompt + group * lengths.completion)
    largest = min(tokens, micro_batch_tokens(work))
    whole, rest = divmod(tokens, largest)
    computed = whole * micro_batch_s(shape, work, speed, largest)
    if rest >= 1:
        computed += micro_batch_s(shape, work, speed, rest)
    optimizer = OPTIMIZER_PASSES * adapter_bytes(work.lora_rank, shape) * speed.byte
    fresh = speed.fresh * size_of(update_items(shape, work))
    return computed / work.ranks + work.passes.updates * optimizer + fresh + publish_s(shape, work, speed)


def micro_batch_s(shape: ModelShape, work: Work, speed: Speed, tokens: float) -> float:
    """All passes over so many tokens."""
    rates, passes = speed.rates, work.passes
    compiled = rates.compiled.update if rates.compiled and work.compiles else None
    used = used_tokens(work, tokens)
    # Through modules, prompts and completions go one after the other.
    runs = (tokens,) if shape.own_layers else (used, tokens - used)
    products = shape.linear * sum(speed.product_s(rows) for rows in runs)
    # Half of it counts as forward, half as backward.
    between_products = compiled.layer if compiled and shape.own_layers else rates.layer.update
    beside = other_layer_s(shape, between_products, tokens) / 2
    forward, backward = products + beside, products * rates.gradient / rates.product[-1] + beside
    head = shape.vocabulary * shape.hidden * (compiled.head if compiled else rates.head) * used
    with_gradient = (2 if work.batch.recomputes else 1) * forward + backward + head
    return passes.gradient * with_gradient + passes.forward * (forward + head / 2)


def publish_s(shape: ModelShape, work: Work, speed: Speed) -> float:
    """A checkpoint's file is made and hashed, and so is what the actors get."""
    value_bytes = FP32_BYTES + work.sent_value_bytes[work.dtype]
    hashed = HASHED_BYTE_S * value_bytes * work.lora_rank * shape.adapter
    return hashed + canary_s(shape, work, speed)


def install_s(shape: ModelShape, work: Work, speed: Speed) -> float:
    if not work.samples:
        return 0.0
    hashed = HASHED_BYTE_S * work.sent_value_bytes[work.dtype] * work.lora_rank * shape.adapter
    return hashed + (2 if work.dtype == "bf16" else 1) * canary_s(shape, work, speed)


def canary_s(shape: ModelShape, work: Work, speed: Speed) -> float:
    """Log-probs of a few tokens through the modules: nearly all of it is calls, of which there are about as many as in
    PyTorch's own layers, and reading the weights."""
    if not work.canary_tokens:
        return 0.0
    weights = shape.linear + shape.vocabulary * shape.hidden
    return weights * speed.product_s(work.canary_tokens) + shape.layers * speed.rates.layer.update.calls / 2


def evaluation_s(shape: ModelShape, work: Work, speed: Speed) -> float:
    """One evaluation: a greedy completion of each problem and the sampled ones, at each of its caps."""
    evaluation, usual = work.eval, work.lengths
    if not evaluation.problems:
        return 0.0
    seconds = 0.0
    for cap in filter(None, (evaluation.max_new_tokens or usual.longest, evaluation.long_cap)):
        mean = cap if usual.completion == usual.longest else min(usual.completion, cap)
        lengths = Lengths(prompt=usual.prompt, completion=mean, longest=cap)
        for count, samples in evaluation.largest_orders(work.rollout.prompts * work.rollout.group):
            orders = max(1.0, evaluation.problems / count / max(1, work.at_once))
            rows = count * samples
            seconds += orders * decode_s(shape, work, speed, groups=count, rows=rows, lengths=lengths)
    return seconds


def total_s(step: StepTime, evaluation: float, *, steps: int, evaluations: int) -> float:
    return START_S + steps * step.step + evaluations * evaluation
