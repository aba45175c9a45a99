"""Our own decode loop over the policy module.

A prompt is computed once for its group, and the group's G rows share its keys and values. At most `width` rows are
decoded at once, and a row whose completion has ended is taken over by the next one (actor/engines/decoding.py):

    width = actor.max_sequences, or at most 256 of which keys, values and logits take at most 512 MiB (2 GiB on a card)

Tokens, log-probs and entropies come from the same logits. The result is a function of the order and the adapter alone:
batch shapes follow from the tokens, and each completion draws from its own stream.
Left out on purpose: top-k, top-p, beams (see sampler.py), speculative decoding.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import DynamicCache

from actor.engines.decoding import Decoding
from actor.engines.engine import Completion, Identity, Progress, in_order
from actor.engines.kv_cache import KVCache, PromptPass
from actor.engines.layers import dense_bytes, layers_of
from actor.engines.sampler import draw
from actor.engines.vllm_options import token_bytes
from protocol.messages import GroupOrder, Sampling
from shared.base.checksum import BaseChecksum, frozen_sums
from shared.base.load import checking, class_logprobs, refuse_difference, sample_ids, whole_rows
from shared.config.processes import ActorConfig, is_folded, rows_at_once
from shared.model.adapter_file import install_adapter, layout_digest
from shared.model.canary import sequence_logprobs
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.seeding import uniforms

DEFAULTS = ActorConfig()


class HFEngine:
    """Engine over a Policy of our own."""

    def __init__(self, policy: Policy, prompter: Prompter, config: ActorConfig = DEFAULTS) -> None:
        self.policy, self.max_sequences = policy, config.max_sequences
        self.folds = is_folded(config.fold, dense_bytes(policy.adapter))
        cached = torch.float32 if policy.device.type == "cpu" else policy.dtype
        self.token_bytes = token_bytes(policy.config.to_dict(), cached.itemsize)
        self.layers = layers_of(policy)
        self.prepare()
        self.base = BaseChecksum(lambda: frozen_sums(policy))
        self.end_ids = torch.tensor(prompter.end_ids, device=policy.device)
        self.identity = Identity(
            engine="hf",
            base_digest=policy.base_digest,
            tokenizer_digest=prompter.digest,
            lora_digest=layout_digest(policy.adapter),
        )

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
        """Decode as many completions at once as the width allows, until the last has ended."""
        self.policy.refuse_if_too_long(max(len(group.prompt_ids) for group in groups), sampling.max_new_tokens)
        width = self.width(groups, sampling)
        decoding = Decoding(groups, sampling, width, self.policy.device)
        self.load_prompts(decoding)
        hidden = decoding.last_hidden[decoding.prompt_of_row]
        while True:
            logits = self.policy.logits(hidden, sampling.temperature or 1.0)
            progress(decoding.append(logits, self.end_ids))
            if not len(decoding.rows):
                return in_order(groups, decoding.done)
            if not decoding.settled:
                self.load_prompts(decoding)
            hidden = decoding.with_first(self.step(decoding))

    def step(self, decoding: Decoding) -> torch.Tensor:
        """One token through the decoder: [n, H]."""
        cache, ids, positions = decoding.cache, decoding.last_ids, decoding.positions
        cache.rows.step(decoding.tokens)
        if self.layers:
            return self.layers(ids, positions, cache)
        return self.forward(ids[:, None], positions[:, None], cache.token_mask(), cache)

    def width(self, groups: tuple[GroupOrder, ...], sampling: Sampling) -> int:
        """How many completions of an order are decoded at once."""
        tokens = max(len(group.prompt_ids) for group in groups) + sampling.max_new_tokens
        on_card = self.policy.device.type != "cpu"
        return rows_at_once(self.max_sequences, tokens * self.token_bytes, len(self.policy.head), on_card=on_card)

    def load_prompts(self, decoding: Decoding) -> None:
        """Run the prompts of completions that are new, left-padded."""
        if missing := decoding.missing():
            width, device = decoding.cache.rows.width, self.policy.device
            lengths = decoding.prompt_lengths[missing]
            ids = torch.zeros((len(missing), width), dtype=torch.int64, device=device)
            for row, group in enumerate(missing):
                prompt = decoding.groups[group].prompt_ids
                ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            padding = width - lengths
            positions = (torch.arange(width, device=device) - padding[:, None]).clamp(min=0)
            prompts = PromptPass(padding, width)
            decoding.load(missing, prompts, self.forward(ids, positions, prompts.mask(), prompts))
        decoding.settle()

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: KVCache | PromptPass
    ) -> torch.Tensor:
        """[B, t] ids -> [B, H] hidden at the last column."""
        output = self.policy.backbone(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state[:, -1]

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
        self.prepare()

    def sleep(self) -> None:
        """Nothing but the model is kept between orders."""

    def wake(self) -> bool:
        """The model has not left memory."""
        return False


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
    return int(draw(logits, uniform if temperature else None).ids)
