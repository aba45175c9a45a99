"""Our own decode loop over the policy module.

A prompt is computed once for its group, and the group's G rows share its keys and values. Rows that have ended leave
the batch. Tokens, log-probs and entropies come from the same logits. The result is a function of the order and the
adapter alone: batch shapes follow from the tokens, and each completion draws from its own stream.
Left out on purpose: top-k, top-p, beams (see sampler.py), speculative decoding.
"""

import numpy as np
import torch

from actor.engines.engine import Completion, EndedCompletion, Identity, Progress, in_order
from actor.engines.kv_cache import KVCache
from actor.engines.sampler import draw
from protocol.messages import Finish, GroupOrder, Sampling
from shared.base.checksum import BaseChecksum, frozen_sums
from shared.base.load import checking, class_logprobs, refuse_difference, sample_ids, whole_rows
from shared.model.adapter_file import install_adapter, layout_digest
from shared.model.canary import sequence_logprobs
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.seeding import uniforms


class HFEngine:
    """Engine over a Policy of our own."""

    def __init__(self, policy: Policy, prompter: Prompter) -> None:
        self.policy = policy
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
        self.policy.adapter.fold()

    @torch.inference_mode()
    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """Prefill each prompt once, then decode all completions together until the last has ended."""
        batch = DecodeBatch(groups, sampling, self.policy.device)
        hidden = self.prefill(batch, groups)
        while True:
            logits = self.policy.logits(hidden, sampling.temperature or 1.0)
            progress(batch.append(logits, self.end_ids))
            if not len(batch.rows):
                return in_order(groups, batch.done)
            mask = batch.cache.token_mask()
            hidden = self.forward(batch.last_ids[:, None], batch.positions[:, None], mask, batch.cache)

    def prefill(self, batch: "DecodeBatch", groups: tuple[GroupOrder, ...]) -> torch.Tensor:
        """Run the P prompts, left-padded; returns the last hidden row of each of the N completions."""
        width, device = batch.prompt_columns, self.policy.device
        ids = torch.zeros((len(groups), width), dtype=torch.int64, device=device)
        for row, group in enumerate(groups):
            ids[row, width - len(group.prompt_ids) :] = torch.from_numpy(group.prompt_ids.astype(np.int64))
        positions = (torch.arange(width, device=device) - batch.padding[:, None]).clamp(min=0)
        hidden = self.forward(ids, positions, batch.cache.prompt_mask(), batch.cache)
        return hidden[batch.prompt_of_row]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: KVCache) -> torch.Tensor:
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
            found = self.generate(groups, sampling, lambda ended: None)
            for ids, group in zip(prompts, found, strict=True):
                sampled = [torch.from_numpy(one.ids).to(ids) for one in group]
                expected = class_logprobs(
                    self.policy, whole_rows([torch.cat([ids, completion]) for completion in sampled])
                )
                for row, one in enumerate(group):
                    known = expected[row, len(ids) - 1 :][: len(one.ids)].cpu()
                    refuse_difference(self.policy, torch.from_numpy(one.logprobs), known, path)

    def sleep(self) -> None:
        """Nothing but the model is kept between orders."""

    def wake(self) -> bool:
        """The model has not left memory."""
        return False


class DecodeBatch:
    """The completions of one order while they are being decoded."""

    def __init__(self, groups: tuple[GroupOrder, ...], sampling: Sampling, device: torch.device) -> None:
        lengths = torch.tensor([len(group.prompt_ids) for group in groups], device=device)
        sizes = torch.tensor([len(group.seeds) for group in groups], device=device)
        self.cap = sampling.max_new_tokens
        self.prompt_columns = int(lengths.max())
        self.padding = self.prompt_columns - lengths
        self.prompt_of_row = torch.repeat_interleave(torch.arange(len(groups), device=device), sizes)
        self.cache = KVCache(self.padding, self.prompt_columns, self.prompt_of_row, self.cap)
        self.rows = torch.arange(len(self.prompt_of_row), device=device)
        self.positions = lengths[self.prompt_of_row] - 1
        self.uniforms = self.draw_uniforms(groups, device) if sampling.temperature > 0 else None
        self.ids = torch.zeros((len(self.rows), self.cap), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((len(self.rows), self.cap), device=device)
        self.entropies = torch.zeros_like(self.logprobs)
        self.places = [(row, column) for row, group in enumerate(groups) for column in range(len(group.seeds))]
        self.done: list[EndedCompletion] = []
        self.last_ids = self.rows
        self.time = 0

    def draw_uniforms(self, groups: tuple[GroupOrder, ...], device: torch.device) -> torch.Tensor:
        """[N, cap] each completion's own stream."""
        streams = [uniforms(seed, self.cap) for group in groups for seed in group.seeds]
        return torch.from_numpy(np.stack(streams)).to(device)

    def append(self, logits: torch.Tensor, end_ids: torch.Tensor) -> list[EndedCompletion]:
        """Draw the next token of every row still in the batch; rows that end leave it and are returned."""
        drawn = draw(logits, None if self.uniforms is None else self.uniforms[self.rows, self.time])
        self.ids[self.rows, self.time] = drawn.ids
        self.logprobs[self.rows, self.time] = drawn.logprobs
        self.entropies[self.rows, self.time] = drawn.entropies
        self.time += 1
        stopped = torch.isin(drawn.ids, end_ids)
        self.last_ids, self.positions = drawn.ids, self.positions + 1
        over = stopped if self.time < self.cap else torch.ones_like(stopped)
        return self.leave(over, stopped) if bool(over.any()) else []

    def leave(self, over: torch.Tensor, stopped: torch.Tensor) -> list[EndedCompletion]:
        """Take the rows that are over out of the batch; all of them have the same length."""
        ended = self.ended(self.rows[over], stopped[over].tolist())
        self.done += ended
        self.rows, self.last_ids, self.positions = self.rows[~over], self.last_ids[~over], self.positions[~over]
        self.cache.keep(~over)
        return ended

    def ended(self, rows: torch.Tensor, stopped: list[bool]) -> list[EndedCompletion]:
        """What these rows have sampled so far."""
        ids = self.ids[rows, : self.time].int().cpu().numpy()
        logprobs, entropies = (kept[rows, : self.time].cpu().numpy() for kept in (self.logprobs, self.entropies))
        finishes = [Finish.STOP if s else Finish.LENGTH for s in stopped]
        places = [self.places[row] for row in rows.tolist()]
        return [
            EndedCompletion(
                row=row,
                column=column,
                completion=Completion(ids=ids[i], logprobs=logprobs[i], entropies=entropies[i], finish=finishes[i]),
            )
            for i, (row, column) in enumerate(places)
        ]
