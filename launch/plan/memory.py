"""How much memory a run on a CPU needs, item by item, before anything is loaded.

    total    shared + launcher + learner x ranks + actors + evaluator
             + the larger of rollout and update x ranks (their sum if both compute at once)

    shared   libraries, tokenizer, and the base as a mapped file, which learner and actors have in common: counted once
    rollout  keys and values of an order, the sampler's rows over the vocabulary, a packed copy of the weights or files
             with codes, which actors share; an evaluation may have a prompt for each row and a larger cap
    update   activations of the largest micro-batch, and the tiles of the head

On a CPU freed memory goes back to the system after a turn, so only the larger of the two peaks counts when processes
take turns. The constants were measured with `benchmarks/predicted.py`. Left out: the first run of a model, which
converts it, and linears without codes for C code (actor/engines/token_step/compiled/stored_codes.py). Pages of the
model's files can be dropped meanwhile, but each process loads a tokenizer of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan.shape import FP32_BYTES, ModelShape, adapter_bytes, layer_outputs, token_bytes
from launch.plan.work import Work
from shared.config.processes import (
    LOGIT_BYTES,
    PIECE_TOKENS,
    rows_at_once,
)
from shared.process.determinism import COMPILED_PRODUCTS

MIB = 2**20
LAUNCHER_BYTES = 115 * MIB
"""With the fork server's own part."""
LIBRARIES_BYTES = 285 * MIB
"""Python, torch and transformers, imported once by the fork server."""
LEARNER_BYTES = 75 * MIB
"""What a learner has beyond the libraries and its other items: tasks, threads."""
ACTOR_BYTES = 30 * MIB
"""The same of an actor."""
WORKER_BYTES = 8 * MIB
"""A process that scores completions."""
TOKEN_BYTES = 500
"""What a tokenizer takes for each token of the vocabulary."""
UNRETURNED_BYTES = 96 * MIB
"""Freed memory that a process may keep between short turns (shared/process/free_memory.py)."""
LONG_TURN_WEIGHTS = 64 * 10**6
"""A model with fewer weights usually has short turns."""
PRODUCT_BYTES = 0.65 * MIB
"""A product that oneDNN has compiled for bf16 (shared/process/determinism.py)."""
SUMMED_BYTES = 16 * MIB
"""Of each rank's gradient at a time (learner/update/placement/ranks.py)."""
VALUES_PER_OUTPUT: Mapping[str, float] = {"fp32": 2.5, "bf16": 3.2}
"""Values that the backward pass of a layer keeps for each value that its products give: inputs of norms and products,
rotated queries and keys, both sides of the gate. In bf16 some of them are kept in fp32."""
OWN_VALUES_PER_OUTPUT = 1.1
"""The same where the layers are computed without their modules."""
WORKING_LAYERS = 1.5
"""What the backward pass of one layer computes with, as a multiple of what the layer keeps."""
STACKED = 1.5
"""What a token step stores of the adapter for each of its values: between the blocks of B, zeros are stored too."""
NF4_BYTES = 0.53
"""A parameter with its share of the scales."""
SCALED = 64
"""Parameters with one scale (shared/model/layers/nf4.py, which loads torch)."""
HEAD_COLUMNS = 2048
"""Of the vocabulary, in a tile of shared/model/head.py."""
HEAD_TILES = 3
"""Logits, their exponentials, and both in bf16."""
HEAD_ROWS = 2
"""For each used token, directions of the gradient with the hidden size in fp32: those of all, and those in work."""
SHORT = 128 * 128
"""As in shared/model/layers/attention.py, up to this number of scores per head they are kept for the backward pass."""

Items = dict[str, int]
"""What the bytes are for -> bytes."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes, by what they are for; how many actors there are, and how many decode at once."""

    shared: Items
    """In memory once."""
    launcher: Items
    """The launcher and the processes that score."""
    learner: Items
    """What the learner always has."""
    actor: Items
    """What each actor always has."""
    update: Items
    """What the learner has besides while it computes an update."""
    rollout: Items
    """What an actor has besides while it decodes an order."""
    evaluation: Items
    """The same while it decodes an order of an evaluation."""
    evaluator: Items
    """What the process of eval.beside has while it evaluates; empty without one."""
    overlaps: bool
    """Whether update and rollout are at the same time."""
    actors: int
    at_once: int
    unreturned: int
    """What a process may keep of its last turn."""
    ranks: int = 1
    """Processes that each have what is said of the learner and of an update."""
    mapped: int = 0
    """Bytes of the files with codes in rollout and evaluation. Actors that decode at once share their pages."""

    @property
    def total(self) -> int:
        """At the peak of all processes together."""
        update, one = self.ranks * size_of(self.update), max(size_of(self.rollout), size_of(self.evaluation))
        left = min(one, self.unreturned)
        common = max(0, self.at_once - 1) * min(one, self.mapped)
        decode = self.at_once * one - common + (self.actors - self.at_once) * left
        if self.overlaps:
            return self.lasting + update + decode
        return self.lasting + max(update + self.actors * left, decode + min(update, self.ranks * self.unreturned))

    @property
    def lasting(self) -> int:
        """What all processes have all the time. With less, a run cannot start."""
        processes = [self.launcher, self.evaluator] + [self.learner] * self.ranks + [self.actor] * self.actors
        return size_of(self.shared) + sum(map(size_of, processes))

    @property
    def learner_peak(self) -> int:
        """Peak of the learner, shared pages included, as the system counts it."""
        return size_of(self.shared) + size_of(self.learner) + size_of(self.update)

    @property
    def actor_peak(self) -> int:
        """Peak of an actor, shared pages included. Where servers decode, it has no base."""
        decode = max(size_of(self.rollout), size_of(self.evaluation))
        base = 0 if decode else self.shared["base"]
        return size_of(self.shared) - base + size_of(self.actor) + decode


def size_of(items: Items) -> int:
    return sum(items.values())


def size(num_bytes: float) -> str:
    """`3.2 GiB`, `64 MiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / MIB:.0f} MiB"


def host_memory(shape: ModelShape, work: Work) -> HostMemory:
    """On a machine where all processes compute on the CPU."""
    adapter = adapter_bytes(work.lora_rank, shape)
    dense, rest, codes = work.value_bytes * shape.linear, work.value_bytes * shape.rest, int(NF4_BYTES * shape.linear)
    # The copies of a weight on its way are about as large as a layer.
    part = {"part of the base": dense // work.ranks, "gathered weights": dense // shape.layers} if work.divides else {}
    own_rest = {} if work.is_dense else {"embedding and head": rest}
    owned = adapter // work.ranks if work.divides_moments else adapter
    sent = {"adapter as messages": 2 * adapter * work.sent_value_bytes[work.dtype] // FP32_BYTES}
    moments = {"adapter": adapter, "gradient": adapter, "Adam's moments": 2 * owned}
    compiled = {"compiled products": int(COMPILED_PRODUCTS * PRODUCT_BYTES)} if work.dtype == "bf16" else {}
    folded = {"base + adapter": FP32_BYTES * shape.linear} if work.folds(shape) else {}
    actor = {"Python": ACTOR_BYTES, "adapter": adapter * work.value_bytes // FP32_BYTES, **sent}
    if not work.actor.is_elsewhere:
        actor |= own_rest | compiled | folded | stacked_items(shape, work) | scale_items(shape, work)
    evaluation, beside = evaluation_items(shape, work), work.eval.beside
    scoring = work.workers * WORKER_BYTES
    common = {"libraries": LIBRARIES_BYTES, "tokenizer": TOKEN_BYTES * shape.vocabulary}
    # The process of eval.beside is no child of the fork server. Of memory in common, only the base is counted once.
    evaluator = {**common, "scoring": scoring, **actor, **evaluation}
    return HostMemory(
        shared={**common, "base": dense + rest if work.is_dense else codes},
        launcher={"launcher": LAUNCHER_BYTES, **({"scoring": scoring * work.actors} if work.actors else {})},
        learner={
            "Python, tasks": LEARNER_BYTES,
            **own_rest,
            **compiled,
            **moments,
            **sent,
            **({"adapter as files": 2 * adapter} if work.orders_ahead and size_of(sent) < 2 * adapter else {}),
            **({"gradients of all ranks": owned + work.ranks * SUMMED_BYTES} if work.ranks > 1 else {}),
            **part,
        },
        actor=actor if work.actors else {},
        update=update_items(shape, work),
        rollout=rollout_items(shape, work),
        evaluation={} if beside else evaluation,
        evaluator=evaluator if beside else {},
        overlaps=work.overlaps,
        actors=work.actors,
        at_once=work.at_once,
        unreturned=UNRETURNED_BYTES if shape.linear < LONG_TURN_WEIGHTS else 0,
        ranks=work.ranks,
        mapped=size_of(mapped_items(shape, work)),
    )


def stacked_items(shape: ModelShape, work: Work) -> Items:
    """The adapter as our own loop multiplies by it: in the type that is computed with, and for few rows as codes."""
    if work.actor.engine != "hf" or not shape.own_layers or work.folds(shape):
        return {}
    num_bytes = work.value_bytes + int(work.codes_for(shape, 1) and not work.is_compiled)
    return {"adapter of token steps": int(STACKED * work.lora_rank * shape.adapter * num_bytes)}


def scale_items(shape: ModelShape, work: Work) -> Items:
    """C code reads the codes as they are stored, with scales in fp32 of its own."""
    reads = work.is_compiled and work.codes_for(shape, 1)
    return {"scales of codes": FP32_BYTES * shape.linear // SCALED} if reads else {}


def rollout_items(shape: ModelShape, work: Work) -> Items:
    """Empty where nothing is sampled, or servers do it."""
    if not work.samples or work.actor.is_elsewhere:
        return {}
    return decode_items(shape, work, work.order_groups, work.order_groups * work.rollout.group)


def decode_items(shape: ModelShape, work: Work, prompts: int, rows: int, cap: int = 0) -> Items:
    """While so many completions of so many prompts are decoded. cap: 0 for that of training."""
    cap = cap or work.rollout.max_new_tokens
    prompt = longest_prompt(work, cap)
    at_once = min(rows, decoded_at_once(shape, work, cap))
    # In a later turn each completion has a prompt of its own, half of what follows the question being new.
    prompts = at_once if work.in_turns else min(prompts, at_once)
    fed = cap // 2 if work.in_turns else prompt
    piece = max(fed, min(prompts * fed, PIECE_TOKENS))
    return {
        **({"packed weights": packed_bytes(shape, work, at_once)} if work.packs_for(shape, cap) else {}),
        **mapped_items(shape, work),
        "keys and values": (prompts * prompt + at_once * cap) * token_bytes(shape),
        **({"earlier turns": rows * prompt * token_bytes(shape)} if work.in_turns else {}),
        "sampler": at_once * shape.vocabulary * LOGIT_BYTES,
        # Their keys and values too, until they are copied.
        "prompts": piece * work.value_bytes * (layer_outputs(shape) + token_bytes(shape) // FP32_BYTES),
    }


def mapped_items(shape: ModelShape, work: Work) -> Items:
    """Of an order of any width, whose last rows are few."""
    codes = {"codes": int(NF4_BYTES * shape.linear)} if work.codes_for(shape, 1) else {}
    return codes | ({"head in 8 bits": shape.vocabulary * shape.hidden} if work.has_eight_bit_head(shape) else {})


def packed_bytes(shape: ModelShape, work: Work, rows: int) -> int:
    """Of the layers where our own loop reads no codes, and of the head where it is read in bf16, as far as
    `actor.packed` allows."""
    head = 0 if work.has_eight_bit_head(shape) else work.value_bytes * shape.vocabulary * shape.hidden
    if not shape.own_layers:
        return head if work.actor.packed == 1.0 else 0
    allowed = int(work.actor.packed * (work.value_bytes * shape.linear + head))
    whole_head = head if head <= allowed else 0
    return whole_head if work.codes_for(shape, rows) else allowed


def longest_prompt(work: Work, cap: int) -> int:
    """Tokens; in a later turn, all that a conversation may have."""
    return work.lengths.prompt + (cap if work.in_turns else 0)


def decoded_at_once(shape: ModelShape, work: Work, cap: int) -> int:
    """Rows of a token step, for completions of at most `cap` tokens."""
    cached = (longest_prompt(work, cap) + cap) * token_bytes(shape)
    return rows_at_once(work.actor.max_sequences, cached, shape.vocabulary, on_card=False)


def evaluation_items(shape: ModelShape, work: Work) -> Items:
    """Of the larger of its two orders; empty if there is none."""
    evaluation = work.eval
    if not evaluation.problems or work.actor.is_elsewhere:
        return {}
    cap = evaluation.longest_completion(work.rollout.max_new_tokens)
    orders = evaluation.largest_orders(work.rollout.prompts * work.rollout.group)
    return max((decode_items(shape, work, count, count * samples, cap) for count, samples in orders), key=size_of)


def update_items(shape: ModelShape, work: Work) -> Items:
    tokens, layer = micro_batch_tokens(work), layer_activations(shape, work)
    kept = shape.hidden * work.value_bytes if work.batch.recomputes else layer
    rows = min(work.batch.head_rows, used_tokens(work, tokens))
    return {
        "activations": int(tokens * (shape.layers * kept + (layer if work.batch.recomputes else 0))),
        "a layer's backward pass": int(WORKING_LAYERS * tokens * layer),
        "head": FP32_BYTES * (HEAD_TILES * rows * HEAD_COLUMNS + HEAD_ROWS * used_tokens(work, tokens) * shape.hidden),
    }


def layer_activations(shape: ModelShape, work: Work) -> float:
    """Bytes that one layer keeps of a token for its backward pass. Left out: scores that short completions keep in a
    bucket of their own, beside longer ones that keep none."""
    width = work.lengths.prompt + work.lengths.longest
    scores = shape.heads * width * (FP32_BYTES + work.value_bytes) if work.lengths.longest * width <= SHORT else 0
    kept = OWN_VALUES_PER_OUTPUT if shape.own_layers else VALUES_PER_OUTPUT[work.dtype]
    return kept * layer_outputs(shape) * work.value_bytes + scores


def step_tokens(work: Work) -> int:
    return work.groups * (work.lengths.prompt + work.rollout.group * work.lengths.longest)


def micro_batch_tokens(work: Work) -> int:
    """Tokens of the largest micro-batch, as learner/update/microbatch.py fills it."""
    prompt, completion, group = work.lengths.prompt, work.lengths.longest, work.rollout.group
    # Small enough that every rank gets one.
    budget = min(work.batch.token_budget, -(-step_tokens(work) // work.ranks))
    whole_groups, left = divmod(budget, prompt + group * completion)
    if whole_groups >= work.groups:
        return step_tokens(work)
    more = max(0, left - prompt) // completion
    tokens = whole_groups * (prompt + group * completion) + (prompt + more * completion if more else 0)
    return max(tokens, prompt + completion)


def used_tokens(work: Work, tokens: float) -> int:
    """Of a micro-batch with so many tokens, those of completions: only they meet the head."""
    prompt, completion, group = work.lengths.prompt, work.lengths.completion, work.rollout.group
    return max(1, round(tokens * completion / (prompt / group + completion)))
