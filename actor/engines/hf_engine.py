"""Our own decode loop over the policy module.

A prompt is computed once for its group, and the group's G rows share its keys and values. At most `width` rows are
decoded at once, and a row whose completion has ended is taken over by the next one:

    width = actor.max_sequences (the plan of a run may set it), or as many as 512 MiB of keys, values and logits allow
            (2 GiB on a card), at most 256

On a CPU the shapes of a step follow the tokens (actor/engines/decoding.py). On a card, a model that
token_step/layers.py covers is decoded in fixed shapes (actor/engines/fixed_decoding.py).

Tokens, log-probs and entropies come from the same logits. The result is a function of the order and the adapter alone:
batch shapes follow from the tokens, and each completion draws from its own stream. Where memory does not suffice, half
as many rows are decoded at once, and what has not ended begins again. The tokens stay what they are, unless rounding
turns one: PyTorch reads codes for few rows only, those of the adapter for fewer still, and prompts are copied to them.
Left out on purpose: top-k, top-p, beams (see shared/model/sampler.py), speculative decoding.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from transformers import DynamicCache

from actor.engines.decoding import Decoding
from actor.engines.engine import Completion, EndedCompletion, Identity, Progress, in_order
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.prompts import last_hidden, pieces
from actor.engines.replay import CudaGraphs
from actor.engines.token_step.coded import Codes
from actor.engines.token_step.compiled.head import CompiledHead, TiledHead
from actor.engines.token_step.compiled.library import Library
from actor.engines.token_step.compiled.step import CompiledDraw, CompiledLayers, no_codes
from actor.engines.token_step.compiled.stored_codes import StoredCodes
from actor.engines.token_step.eight_bit import EightBitHead
from actor.engines.token_step.layers import Layers, layers_of
from actor.engines.token_step.packed import Packable, Packing, RowProduct
from actor.engines.token_step.stacks import dense_bytes
from actor.engines.turns import Turns, run_groups
from actor.engines.vllm_options import token_bytes
from protocol.messages import GroupOrder, Sampling
from shared.base.checksum import BaseChecksum
from shared.base.load import checking, class_logprobs, refuse_difference, sample_ids, whole_rows
from shared.base.residency import Residency, Resident
from shared.config.processes import PIECE_TOKENS, ActorConfig, is_folded, rows_at_once
from shared.errors import ModelError, in_words
from shared.model.adapter_file import install_adapter, layout_digest
from shared.model.canary import sequence_logprobs
from shared.model.layers.products import RowsTimesWeight, product_of_largest
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.process.free_memory import return_freed_memory
from shared.seeding import uniforms

DEFAULTS = ActorConfig()
CALM_ORDERS = 8
"""After so many orders that fitted into memory, twice as many rows are tried again."""
KEPT_WHILE_DECODING = 32 * 2**20
"""If more freed memory than this is left before the first token of an order, it is returned to the system, which takes
a few milliseconds. Prompts and a new adapter often leave more, and the actor would have it until the order ends."""
LARGEST_WIDTH = 4096
"""That `actor.max_sequences` may be."""

log = logging.getLogger(__name__)


class Unfinished:
    """The completions of an order that have not ended yet."""

    def __init__(self, groups: tuple[GroupOrder, ...], progress: Progress) -> None:
        self.groups, self.progress = groups, progress
        self.done: list[EndedCompletion] = []

    def rest(self) -> tuple[tuple[GroupOrder, ...], Progress]:
        """An order of them alone, and who is told of those that end."""
        done = {(one.group, one.index) for one in self.done}
        left = [
            (number, [index for index in range(len(group.seeds)) if (number, index) not in done])
            for number, group in enumerate(self.groups)
        ]
        left = [(number, indices) for number, indices in left if indices]
        groups = (
            replace(self.groups[number], seeds=tuple(self.groups[number].seeds[index] for index in indices))
            for number, indices in left
        )
        return tuple(groups), partial(self.told, left)

    def told(self, left: list[tuple[int, list[int]]], ended: Sequence[EndedCompletion]) -> None:
        """left: the numbers of the groups and completions that were asked for."""
        found = [replace(one, group=left[one.group][0], index=left[one.group][1][one.index]) for one in ended]
        self.done += found
        self.progress(found)


class Width:
    """How many completions fit into memory at once, as far as is known."""

    def __init__(self) -> None:
        self.limit = LARGEST_WIDTH
        self.calm = 0
        """Orders since that was halved or doubled."""

    def of(self, planned: int) -> int:
        """For an order that begins."""
        if self.calm >= CALM_ORDERS:
            self.limit, self.calm = min(2 * self.limit, LARGEST_WIDTH), 0
        return min(planned, self.limit)

    def halve(self, width: int) -> int:
        self.limit, self.calm = width // 2, 0
        return self.limit


class HFEngine:
    """Engine over a Policy of our own."""

    def __init__(
        self,
        policy: Policy,
        prompter: Prompter,
        config: ActorConfig = DEFAULTS,
        residency: Residency | None = None,
        codes: Codes | StoredCodes | None = None,
        eight_bit: EightBitHead | TiledHead | None = None,
        compiled: Library | None = None,
    ) -> None:
        """codes: of the weights that a token step may read as such; with C code, as they are stored. eight_bit: the
        head, if logits come from that. compiled: the token step in C, if that computes."""
        self.policy, self.max_sequences = policy, config.max_sequences
        self.residency = residency or Resident(policy)
        self.folds = is_folded(config.fold, dense_bytes(policy.adapter))
        cached = torch.float32 if policy.device.type == "cpu" else policy.dtype
        self.token_bytes = token_bytes(policy.config.to_dict(), cached.itemsize)
        self.head, self.codes, self.compiled = eight_bit or RowProduct(policy.head), codes, compiled
        self.layers = token_layers(policy, codes, compiled)
        self.draw = CompiledDraw(compiled) if compiled else policy.kernels.draw
        self.head_product = head_product(policy, self.head, compiled)
        # The C code reads weights as they lie; the plan of a run counts no memory for a packed head alone.
        self.packing = Packing(0.0 if compiled else config.packed)
        self.prepare()
        # A method of this object would refer to it in a circle, and keep its tensors until a garbage collection.
        self.base = BaseChecksum(partial(all_sums, self.residency, codes, eight_bit))
        self.end_ids = torch.tensor(prompter.end_ids, dtype=torch.int64, device=policy.device)
        self.fitting = Width()
        self.turns: Turns | None = None
        """Of conversations that are being sampled."""
        self.piece_tokens = PIECE_TOKENS
        self.fixed: FixedLoop | None = None
        if policy.device.type == "cuda" and isinstance(self.layers, Layers):
            capture = partial(CudaGraphs, torch.cuda.Stream(policy.device)) if config.graphs == "auto" else None
            self.fixed = FixedLoop(policy, self.layers, self.end_ids, Grain(), capture)
        self.identity = Identity(
            engine="hf",
            base_digest=policy.base_digest,
            tokenizer_digest=prompter.digest,
            lora_digest=layout_digest(policy.adapter),
        )

    @property
    def loop(self) -> str:
        """Which decode loop this is, for the mark of its check."""
        graphs = self.fixed is not None and self.fixed.replay.capture is not None
        eight_bit = not isinstance(self.head, RowProduct)
        parts = {"folded": self.folds, "codes": self.codes, "head in 8 bits": eight_bit, "graphs": graphs}
        names = [part for part, used in parts.items() if used]
        return ", ".join(["decode loop", *names, *([self.compiled.name] if self.compiled else [])])

    def install(self, version: int, adapter: bytes) -> None:
        """Copy the adapter in, after a check that the base still is what was loaded."""
        self.base.check()
        install_adapter(self.policy.adapter, adapter)
        self.prepare()

    def prepare(self) -> None:
        """Compute once for an adapter what every step needs of it."""
        if self.folds:
            self.policy.adapter.fold()
        if self.layers:
            self.layers.prepare()

    @torch.inference_mode()
    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """Decode as many completions at once as memory allows, until the last has ended."""
        self.policy.refuse_if_too_long(max(len(group.prompt_ids) for group in groups), sampling.max_new_tokens)
        self.turns = None
        return self.generate_all(groups, sampling, progress)

    @torch.inference_mode()
    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        if self.turns is None:
            # For all turns: later ones have less room.
            self.turns = Turns()
        found = self.generate_all(groups, sampling, progress)
        for group, completions in zip(groups, found, strict=True):
            for index, completion in enumerate(completions):
                self.turns.draw(group, index, len(completion.ids))
        return found

    def generate_all(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        order, count = Unfinished(groups, progress), sum(len(group.seeds) for group in groups)
        width = self.fitting.of(min(self.width(groups, sampling), count))
        self.packing.prepare(self.row_products(), self.thin_products(), sampling.max_new_tokens, width)
        while reason := self.shortage(order, sampling, width):
            # Outside of the handler, whose exception keeps the tensors of all that it has left.
            self.free_memory()
            width = self.narrower(width, sampling, reason)
        self.fitting.calm += 1
        return in_order(groups, order.done)

    def shortage(self, order: Unfinished, sampling: Sampling, width: int) -> str:
        """Decode what has not ended. Says why memory did not suffice; empty if it did."""
        groups, told = order.rest()
        try:
            if self.fixed:
                self.fixed.decode(groups, sampling, width, told, self.turns)
            else:
                self.decode(groups, sampling, width, told)
        except torch.OutOfMemoryError as error:
            return in_words(error)
        return ""

    def narrower(self, width: int, sampling: Sampling, reason: str) -> int:
        if width == 1:
            raise ModelError(
                f"One completion of up to {sampling.max_new_tokens} tokens does not fit into memory beside the model"
                f" ({reason}); lower rollout.max_new_tokens, tasks.max_prompt_tokens or the caps of [eval]. Fewer"
                " completions at once, which actor.max_sequences sets, have been tried."
            )
        log.warning(
            "out of memory with %d completions at once (%s); those that have not ended begin again, %d at once."
            " actor.max_sequences sets the number",
            width,
            reason,
            width // 2,
        )
        return self.fitting.halve(width)

    def free_memory(self) -> None:
        """Of an order that could not be decoded."""
        self.forget()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def decode(self, groups: tuple[GroupOrder, ...], sampling: Sampling, width: int, told: Progress) -> None:
        """In shapes that follow the tokens."""
        device, compiled = self.policy.device, self.compiled is not None
        decoding = Decoding(groups, sampling, width, device, self.draw, self.turns, compiled=compiled)
        self.load_prompts(decoding)
        return_freed_memory(KEPT_WHILE_DECODING)
        hidden = decoding.last_hidden[decoding.prompt_of_row]
        while True:
            logits = self.policy.logits(hidden, sampling.temperature or 1.0, self.head_product)
            told(decoding.append(logits, self.end_ids))
            if not len(decoding.rows):
                return
            if not decoding.settled:
                self.load_prompts(decoding)
            hidden = decoding.with_first(self.step(decoding))

    def step(self, decoding: Decoding) -> torch.Tensor:
        """One token through the decoder: [n, H]."""
        cache, ids, positions = decoding.cache, decoding.last_ids, decoding.positions
        cache.rows.step(decoding.tokens)
        if self.layers:
            return self.layers(ids, positions, cache.layers)
        return last_hidden(self.policy, ids[:, None], positions[:, None], cache.token_mask(), cache)

    def width(self, groups: tuple[GroupOrder, ...], sampling: Sampling) -> int:
        """How many completions of an order are decoded at once."""
        tokens = max(len(group.prompt_ids) for group in groups) + sampling.max_new_tokens
        on_card = self.policy.device.type != "cpu"
        return rows_at_once(self.max_sequences, tokens * self.token_bytes, len(self.policy.head), on_card=on_card)

    def load_prompts(self, decoding: Decoding) -> None:
        """Run the prompts of completions that are new."""
        width = decoding.cache.rows.width
        for part in pieces(decoding.missing(), width, self.piece_tokens):
            some = [decoding.groups[group] for group in part]
            decoding.load(list(part), *run_groups(self.policy, some, self.turns, width))
        decoding.settle()

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        return sequence_logprobs(self.policy, ids)

    def check(self) -> None:
        """ModelError unless the decode loop gives the log-probs of the model's own class; for a fresh policy."""
        prompts, completions = sample_ids(len(self.policy.head), self.policy.device)
        groups = tuple(
            GroupOrder(group_id=f"check/{row}", prompt_ids=ids.int().cpu().numpy(), columns={}, seeds=(row, row + 9))
            for row, ids in enumerate(prompts)
        )
        sampling = Sampling(temperature=1.0, max_new_tokens=len(completions[0]))
        path = "sequences that are decoded with a cache"
        with checking(self.policy, path):
            self.forget()
            self.prepare()
            found = self.generate(groups, sampling, lambda ended: None)
            for ids, group in zip(prompts, found, strict=True):
                sampled = [torch.from_numpy(one.ids).to(ids) for one in group]
                expected = class_logprobs(
                    self.policy, whole_rows([torch.cat([ids, completion]) for completion in sampled])
                )
                for row, one in enumerate(group):
                    known = expected[row, len(ids) - 1 :][: len(one.ids)].cpu()
                    refuse_difference(self.policy, torch.from_numpy(one.logprobs), known, path)
        # Graphs hold the windows of the check.
        self.forget()
        self.prepare()

    def row_products(self) -> list[RowProduct]:
        """Of a token step: of the layers where they are our own, and of the head where it is read in bf16."""
        head = [self.head] if isinstance(self.head, RowProduct) else []
        return [*(self.layers.row_products() if self.layers else ()), *head]

    def thin_products(self) -> list[Packable]:
        """Of the adapter, where the layers are our own."""
        return self.layers.thin_products() if self.layers else []

    def forget(self) -> None:
        """Free all memory but the model's: packed weights, graphs and buffers."""
        for product in (*self.row_products(), *self.thin_products()):
            product.unpack()
        if self.fixed:
            self.fixed.forget()

    def sleep(self) -> None:
        """Nothing but the model is kept until the next order, and the model only where the residency keeps it."""
        self.forget()
        self.turns = None
        if self.codes:
            self.codes.release()
        if not isinstance(self.head, RowProduct):
            self.head.release()
        self.residency.sleep()

    def wake(self) -> bool:
        return self.residency.wake()


def token_layers(
    policy: Policy, codes: Codes | StoredCodes | None, compiled: Library | None
) -> Layers | CompiledLayers | None:
    """The layers of a token step; None where those of the model serve."""
    if compiled:
        return CompiledLayers(policy, compiled, codes.of if isinstance(codes, StoredCodes) else no_codes)
    return layers_of(policy, codes if isinstance(codes, Codes) else None)


def head_product(
    policy: Policy, head: RowProduct | EightBitHead | TiledHead, compiled: Library | None
) -> RowsTimesWeight:
    """What gives logits."""
    if isinstance(head, TiledHead):
        assert compiled is not None, "only C code reads these codes"
        return CompiledHead(compiled, head, policy.head)
    return partial(product_of_largest, weight=policy.head, rounded=head)


def all_sums(
    residency: Residency, codes: Codes | StoredCodes | None, eight_bit: EightBitHead | TiledHead | None
) -> dict[str, int]:
    """Of all that is frozen."""
    return residency.sums() | (codes.sums() if codes else {}) | (eight_bit.checksums() if eight_bit else {})


def stream(
    policy: Policy, prompt_ids: Sequence[int], end_ids: Sequence[int], sampling: Sampling, seed: int
) -> Iterator[int]:
    """The tokens of one completion, the end token included, each computed when it is asked for: for showing it while it
    is sampled. The same head and draws as in an order, but transformers' own cache and layers."""
    cache, tokens = DynamicCache(), torch.tensor([list(prompt_ids)], device=policy.device)
    draws = torch.from_numpy(uniforms(seed, sampling.max_new_tokens)).to(policy.device)
    for time in range(sampling.max_new_tokens):
        token = next_token(policy, tokens, cache, sampling.temperature, draws[time : time + 1])
        yield token
        if token in end_ids:
            return
        tokens = torch.tensor([[token]], device=policy.device)


@torch.inference_mode()
def next_token(
    policy: Policy, tokens: torch.Tensor, cache: DynamicCache, temperature: float, uniform: torch.Tensor
) -> int:
    """[1, t] new tokens -> the one that follows."""
    hidden = policy.backbone(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
    logits = policy.logits(hidden, temperature or 1.0)
    return int(policy.kernels.draw(logits, uniform if temperature else None).ids)
