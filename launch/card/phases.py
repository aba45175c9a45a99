"""How much of a card each phase of a run needs: the code of both processes, run over a policy without values.

    learner   load, update forward, update head, update backward, optimizer, waiting
    actor     load, evaluation prompts, evaluation decode, rollout prompts, rollout decode, waiting

Every phase is the largest of its kind: the longest prompts, completions as long as they may be, all of whose tokens
count in the objective, a micro-batch that is not the first one of its step, the last token of a completion. `waiting`
is what a process keeps while the other has its turn.

Parts that follow each other in the same memory are run once: one piece of the prompts, and two of the head's tiles. Two
things cannot be seen from outside and are added: the dense values that bitsandbytes makes inside its product, and the
memory of CUDA graphs, which keep the temporaries of a token step.
Left out: the end of a stage with EWC, and passes without gradient, which take less than the update itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from actor.engines.fixed_decoding import Grain, shape_of
from actor.engines.fixed_rows import FixedBuffers, TokenStep, key_sizes
from actor.engines.kv_cache import KVCache, LayerCache
from actor.engines.prompts import PromptPass, last_hidden, pieces, run_prompts
from actor.engines.token_step.layers import Layers, layers_of
from actor.engines.turns import run_continued
from launch.card.items import (
    ADAM,
    CONTEXT,
    EMBEDDING,
    GRADIENTS,
    GRAPHS,
    HEAD,
    KV,
    LORA,
    NF4,
    REST,
    SCALES,
    TEMPORARIES,
    TILES,
    TURNS,
    WAITING,
    WEIGHTS,
    Peak,
)
from launch.card.storages import Storages
from launch.card.vllm import vllm_peaks
from launch.card.work import CardWork, LargestOrder, MicroBatch, largest_micro_batch, largest_orders
from launch.plan.memory import Items
from learner.update.optimizer import Optimizer
from protocol.messages import GroupOrder
from shared.base.architecture import architecture_of
from shared.base.load import DTYPES
from shared.base.meta import META, meta_policy
from shared.config.training import BatchConfig, OptimizerConfig
from shared.model.head import CARD_COLUMNS
from shared.model.layers.lora import FrozenLinear
from shared.model.layers.nf4 import BLOCK
from shared.model.layers.sequences import Sequences
from shared.model.policy import Policy

ITEM_OF = {"packed": NF4, "weight": WEIGHTS, "bias": REST}
"""By the name that a product gives its tensors (shared/model/layers/lora.py); all others are scales."""
HEAD_TILES = 2
FEW_ROWS = 4
"""bitsandbytes' own limit for all cards."""


class MetaTracer:
    """Of a model, by its config.json."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts

    def learner(self, work: CardWork, layers: int) -> list[Peak]:
        on_host = work.compute.parallel == "zero2"
        return learner_peaks(self.policy(work, layers), work.batch, largest_micro_batch(work), steps_on_host=on_host)

    def actor(self, work: CardWork, layers: int) -> list[Peak]:
        if work.actor.engine == "vllm":
            return vllm_peaks(held_items(self.policy(work, layers)), work, self.facts)
        if work.actor.is_elsewhere:
            # Not even a context.
            return [Peak(name=name, items={CONTEXT: 0}, reserved=0) for name in ("rollout", WAITING)]
        policy = self.policy(work, layers)
        policy.adapter.cast_to(policy.dtype)
        peaks = actor_peaks(policy, largest_orders(work, self.facts))
        return [with_graphs(peak) for peak in peaks] if work.actor.graphs == "auto" else peaks

    def policy(self, work: CardWork, layers: int) -> Policy:
        """With so many layers."""
        whole = self.facts["num_hidden_layers"]
        of_layers = {key: value for key, value in self.facts.items() if isinstance(value, list) and len(value) == whole}
        cut = {key: value[:layers] for key, value in of_layers.items()}
        facts = {**self.facts, **cut, "num_hidden_layers": layers}
        return meta_policy(architecture_of(facts), work.model, work.lora, DTYPES[work.compute.dtype])


def learner_peaks(policy: Policy, batch: BatchConfig, part: MicroBatch, *, steps_on_host: bool = False) -> list[Peak]:
    """policy: without values (shared/base/meta.py); its adapter is trained from now on. steps_on_host: so AdamW takes
    nothing of the card, and the gradient goes before its step."""
    policy.adapter.requires_grad()
    if batch.recomputes:
        policy.recompute_activations()
    storages = Storages(dense_values)
    with storages:
        with storages.phase("load"):
            hold(storages, policy)
            optimizer = None if steps_on_host else Optimizer(policy.adapter.parameters(), OptimizerConfig(), steps=1)
            if optimizer:
                name_trained(storages, policy, optimizer)
        storages.release()
        update(storages, policy, part, batch.head_rows)
        if optimizer:
            with storages.phase("optimizer"):
                optimizer.step(0)
                name_trained(storages, policy, optimizer)
        # As after every step (learner/quarantine/guard.py).
        forget_gradients(policy)
        storages.release()
        with storages.phase(WAITING):
            pass
    return storages.peaks()


def held_items(policy: Policy) -> Items:
    storages = Storages()
    with storages.phase("load"):
        hold(storages, policy)
    return storages.peaks()[0].items


def hold(storages: Storages, policy: Policy) -> None:
    """What a process has from its start to its end."""
    for module in policy.backbone.modules():
        if isinstance(module, FrozenLinear):
            for name, tensor in module.tensors().items():
                storages.name(ITEM_OF.get(name, SCALES), [tensor])
    storages.name(EMBEDDING, policy.lm.get_input_embeddings().parameters())
    storages.name(HEAD, [policy.head])
    storages.name(LORA, policy.adapter.parameters().values())
    storages.name(REST, [*policy.backbone.parameters(), *policy.backbone.buffers()])


def name_trained(storages: Storages, policy: Policy, optimizer: Optimizer) -> None:
    storages.name(GRADIENTS, gradients(policy))
    moments = (state.values() for state in optimizer.adamw.state.values())
    storages.name(ADAM, [value for values in moments for value in values if value.is_meta])


def update(storages: Storages, policy: Policy, part: MicroBatch, head_rows: int) -> None:
    """One micro-batch."""
    short = replace(policy, head=policy.head[: HEAD_TILES * CARD_COLUMNS])
    used = torch.empty(part.completions * part.completion, dtype=torch.int64, device=META)
    with storages.phase("update forward"):
        if not part.is_whole:
            for parameter in policy.adapter.parameters().values():
                parameter.grad = torch.zeros_like(parameter)
            storages.name(GRADIENTS, gradients(policy))
        hidden = hidden_rows(policy, part).index_select(0, used)
    with storages.phase("update head", temporaries=TILES):
        loss = short.stats(hidden, used, temperature=1.0, rows=head_rows, entropies=False).logprobs.sum()
        del hidden
    with storages.phase("update backward"):
        loss.backward()
        del loss
        storages.name(GRADIENTS, gradients(policy))


def forget_gradients(policy: Policy) -> None:
    for parameter in policy.adapter.parameters().values():
        parameter.grad = None


def gradients(policy: Policy) -> Iterator[torch.Tensor]:
    yield from (value.grad for value in policy.adapter.parameters().values() if value.grad is not None)


def hidden_rows(policy: Policy, part: MicroBatch) -> torch.Tensor:
    """[n, H] of a micro-batch without padding."""
    with META:
        prompts = torch.zeros((part.prompts, part.prompt), dtype=torch.int64)
        completions = torch.zeros((part.completions, part.fed), dtype=torch.int64)
        lengths, owner = prompts[:, 0], completions[:, 0]
    return policy.hidden(Sequences(prompts=prompts, lengths=lengths, completions=completions, owner=owner))


def actor_peaks(policy: Policy, orders: Iterable[LargestOrder]) -> list[Peak]:
    """policy: without values."""
    storages = Storages(dense_values)
    with storages, torch.no_grad():
        with storages.phase("load"):
            hold(storages, policy)
            layers = layers_of(policy)
            if layers:
                layers.prepare()
                storages.name(LORA, prepared(layers))
        storages.release()
        for order in orders:
            if layers:
                run_order(storages, policy, layers, order)
            else:
                run_through_modules(storages, policy, order)
            storages.release()
        with storages.phase(WAITING):
            pass
    return storages.peaks()


def prepared(layers: Layers) -> Iterator[torch.Tensor]:
    """Adapters in the compute type, of all stacks."""
    yield from (product.dense for product in layers.thin_products())


def dense_values(func: Any, args: Sequence[Any]) -> int:
    """Of the product with NF4 codes, unless it has so few rows that every card multiplies by the codes: the weight, and
    its scales in fp32, twice."""
    if func._opname != "gemm_4bit":
        return 0
    x, _, shape, *_ = args
    count = shape[0] * shape[1]
    return 0 if x.numel() <= FEW_ROWS * shape[1] else count * x.element_size() + 2 * 4 * count // BLOCK


def run_order(storages: Storages, policy: Policy, layers: Layers, order: LargestOrder) -> None:
    """A piece of its prompts, and the last token of every row."""
    sizes = key_sizes(policy, layers)
    earlier = (order.kept, sizes.heads, order.prompt, sizes.size)
    kept = [
        (torch.empty(earlier, dtype=sizes.dtype, device=META), torch.empty(earlier, dtype=sizes.dtype, device=META))
        for _ in range(sizes.layers if order.kept else 0)
    ]
    ids, seeds = np.zeros(order.prompt, np.int32), tuple(range(order.samples))
    groups = [GroupOrder(group_id=str(one), prompt_ids=ids, columns={}, seeds=seeds) for one in range(order.groups)]
    shape = shape_of(groups, order.cap, order.width, Grain().prompt)
    with storages.phase(f"{order.name} prompts"):
        storages.name(TURNS, chain.from_iterable(kept))
        buffers = FixedBuffers.of(policy, layers, shape)
        storages.name(KV, kept_values(buffers.cache.layers))
        piece = next(pieces(range(shape.slots), shape.width))
        prompts = [ids for _ in piece]
        if kept:
            known = [[(k[row][:, : order.known], v[row][:, : order.known]) for k, v in kept] for row in piece]
            passed, _ = run_continued(policy, prompts, known, order.prompt)
        else:
            passed, _ = run_prompts(policy, prompts, order.prompt)
        buffers.cache.put(passed, piece, piece)
        del passed
    with storages.phase(f"{order.name} decode"):
        TokenStep(policy, layers, buffers, torch.zeros(1, dtype=torch.int64, device=META), 1.0)()


def run_through_modules(storages: Storages, policy: Policy, order: LargestOrder) -> None:
    """The same for a model whose layers are not ours: a prompt is in memory once, and shapes follow the tokens. Prompts
    of later turns are run whole."""
    count, ids = min(order.groups, order.width), np.zeros(order.prompt, np.int32)
    # One token has the shapes of all.
    first = run_prompts(policy, [ids[:1]], 1)[0].layers if order.kept else []
    kept = [one.new_empty((order.kept, one.shape[1], order.prompt, one.shape[3])) for pair in first for one in pair]
    with storages.phase(f"{order.name} prompts"):
        storages.name(TURNS, kept)
        piece = next(pieces(range(count), order.prompt))
        passed, _ = run_prompts(policy, [ids for _ in piece], order.prompt)
        prompts = PromptPass(torch.zeros(count, dtype=torch.int64, device=META), order.prompt)
        prompts.layers = [
            (k.new_empty((count, *k.shape[1:])), v.new_empty((count, *v.shape[1:]))) for k, v in passed.layers
        ]
        cache = KVCache(order.width, order.cap, order.prompt, META)
        cache.add_prompts(prompts)
        storages.name(KV, kept_values(cache.layers))
        del passed, prompts
    with storages.phase(f"{order.name} decode"):
        windows = (getattr(part, "sliding_window", None) for part in (policy.config, *policy.backbone.modules()))
        tokens = place_rows(cache, order, count, {window for window in windows if window})
        hidden = last_hidden(policy, tokens[:, None], tokens[:, None], cache.token_mask(), cache)
        policy.kernels.draw(policy.logits(hidden, 1.0), torch.empty_like(tokens, dtype=torch.float64))


def place_rows(cache: KVCache, order: LargestOrder, prompts: int, windows: Iterable[int]) -> torch.Tensor:
    """[n] the rows as they are at the end of an order. The cache would look at values to place them."""
    rows = cache.rows
    rows.count, rows.places, rows.now = order.width, -(-order.width // prompts), order.cap
    rows.prompt_of_row = rows.place_of_row = torch.zeros(order.width, dtype=torch.int64, device=META)
    rows.of_slot = torch.zeros(prompts * rows.places, dtype=torch.int64, device=META)
    rows.full = order.width == prompts * rows.places
    bias = torch.zeros((order.width, 1, 1, order.prompt + order.cap), device=META)
    rows.biases = dict.fromkeys([None, *windows], bias)
    return rows.prompt_of_row


def kept_values(caches: Iterable[LayerCache]) -> Iterator[torch.Tensor]:
    for cache in caches:
        yield from (cache.prompt_keys, cache.prompt_values, cache.keys, cache.values)


def with_graphs(peak: Peak) -> Peak:
    """A graph has its temporaries for itself, as long as it exists."""
    kept = peak.items.get(TEMPORARIES, 0) if peak.name.endswith("decode") else 0
    return replace(peak, items=peak.items | {GRAPHS: kept}, reserved=peak.reserved + kept) if kept else peak
