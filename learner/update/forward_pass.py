"""Forward passes of the policy over samples: log-probs and entropies of their used tokens.

    samples -> micro-batches within a budget of tokens -> backbone on all tokens, head on the used rows

The budget says how large a micro-batch may be (budget.py). Results are returned by sample, so that no caller depends on
the cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from learner.objective.batch import Sample, TrainSample, at_sampled
from learner.update.budget import Budget
from learner.update.microbatch import MicroBatch, counted_by, cut, largest_part, micro_batch, placed
from learner.update.placement.placement import ALONE, Cut, Form, Placement, Tensors
from shared.model.head import TokenStats
from shared.model.layers.sequences import Sequences
from shared.model.policy import Policy
from shared.process.free_memory import Trimmer

Done = TypeVar("Done")


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """log pi_old: of the policy before the first gradient pass."""

    by_sample: Mapping[str, torch.Tensor]
    """[used tokens] by name of the sample; empty while the policy has not changed, since it is its own pi_old."""

    def of(self, batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """[u] for this micro-batch, whose log pi is `logprobs`; detached."""
        if not self.by_sample:
            return logprobs.detach()
        return torch.cat([self.by_sample[name] for name in batch.names])


UNCHANGED = OldLogprobs(by_sample={})
"""The policy is still the one before the first pass."""


class ForwardPass:
    """Runs samples through the policy, without gradient unless the caller wants one."""

    def __init__(
        self,
        policy: Policy,
        temperature: float,
        budget: Budget,
        progress: Callable[[], None],
        placement: Placement = ALONE,
    ) -> None:
        """temperature: of the samples. progress: called after each micro-batch, to keep the link alive. placement: who
        computes micro-batches."""
        self.policy = policy
        self.temperature = temperature
        self.budget = budget
        self.progress = progress
        self.placement = placement

    def over_cuts(self, samples: Sequence[TrainSample], work: Callable[[Cut], Done], form: Form[Done]) -> list[Done]:
        """`work` on every micro-batch. form: of what it returns."""
        return self.placement.each(self.cuts(samples), self.tokens, trimming_between(work), form)

    def gradient_over_cuts(
        self, samples: Sequence[TrainSample], work: Callable[[Cut], Done], form: Form[Done]
    ) -> list[Done]:
        """The same for work that adds to gradients, of which there are none yet."""
        return self.placement.gradient(self.cuts(samples), self.tokens, trimming_between(work), form)

    def cuts(self, samples: Sequence[TrainSample]) -> list[Cut]:
        padding = self.policy.layers is None
        most = self.placement.most_tokens(self.budget.now.tokens, lambda: self.tokens(samples))
        cuts = cut(samples, most, padding=padding)
        self.budget.saw(largest_part(cuts, padding=padding))
        return cuts

    def tokens(self, samples: Sequence[TrainSample]) -> int:
        """That a micro-batch of them would have."""
        return counted_by(self.policy.layers is None)(samples)

    @contextmanager
    def through_modules(self) -> Iterator[None]:
        """Inside the block, the backbone's own modules compute, so that hooks see their outputs."""
        policy = self.policy
        self.policy = replace(policy, layers=None)
        try:
            yield
        finally:
            self.policy = policy

    def on_device(self, samples: Sequence[TrainSample]) -> MicroBatch:
        return micro_batch(samples, self.policy.device)

    def stats(self, batch: MicroBatch, *, entropies: bool = False) -> TokenStats:
        return self.stats_at(batch, self.temperature, self.budget.now.rows, entropies=entropies)

    def stats_at(self, batch: MicroBatch, temperature: float, rows: int, *, entropies: bool = False) -> TokenStats:
        """[u] figures of the used tokens at a temperature, with gradient where the caller has it on."""
        hidden = self.policy.hidden(batch.sequences).index_select(0, batch.rows)
        return self.policy.stats(hidden, batch.targets, temperature=temperature, rows=rows, entropies=entropies)

    def log_likelihood(self, sample: Sample) -> torch.Tensor:
        """log p(y | x), with gradient. The rows are those that are configured: the end of a stage is not repeated."""
        batch = self.on_device([whole(sample)])
        return self.stats_at(batch, self.temperature, self.budget.limit.rows).logprobs.sum()

    @torch.no_grad()
    def per_sample(
        self, samples: Sequence[TrainSample], temperature: float, *, entropies: bool = False
    ) -> dict[str, torch.Tensor]:
        """Log-probs, or else entropies, of the used tokens of each sample, by its name."""

        def stats_of(part: Cut) -> Tensors:
            batch = self.on_device(part)
            found = self.stats_at(batch, temperature, self.budget.now.rows, entropies=entropies)
            counts = [int(sample.used.sum()) for sample in part]
            values = found.entropies if entropies else found.logprobs
            self.progress()
            return dict(zip(batch.names, values.split(counts), strict=True))

        form = Form(pack=lambda found: found, unpack=self.on_my_device)
        return {name: values for part in self.over_cuts(samples, stats_of, form) for name, values in part.items()}

    def on_my_device(self, tensors: Tensors) -> Tensors:
        return {name: values.to(self.policy.device) for name, values in tensors.items()}

    def old(self, samples: Sequence[TrainSample]) -> OldLogprobs:
        """Of the policy as it is now."""
        return OldLogprobs(by_sample=self.per_sample(samples, self.temperature))

    def recomputed(self, samples: Sequence[TrainSample], temperature: float) -> np.ndarray:
        """[n] log-probs of the used tokens, in the samples' order."""
        found = self.per_sample(samples, temperature)
        return torch.cat([found[sample.sample.name] for sample in samples]).cpu().numpy()

    def recomputed_by_base(self, samples: Sequence[TrainSample]) -> np.ndarray:
        """[n] the same with the adapter switched off, at the samples' temperature."""
        with self.policy.adapter.switched_off():
            return self.recomputed(samples, self.temperature)

    @torch.no_grad()
    def in_one_row(self, sample: TrainSample) -> torch.Tensor:
        """[n] log-probs of the used tokens, with prompt and completion as one sequence: the same numbers up to
        rounding, in products of other shapes."""
        prompt, completion = sample.sample.prompt_ids, sample.sample.completion_ids
        device = self.policy.device
        ids = placed(np.concatenate([prompt, completion])[:-1].astype(np.int64), device)
        row = Sequences(prompts=ids[None], lengths=ids.new_tensor([len(ids)]), completions=None, owner=ids[:0])
        before_token = placed(len(prompt) - 1 + np.flatnonzero(sample.used), device)
        targets = placed(completion[sample.used].astype(np.int64), device)
        hidden = self.policy.hidden(row).index_select(0, before_token)
        found = self.policy.stats(hidden, targets, temperature=self.temperature, rows=self.budget.now.rows)
        self.progress()
        return found.logprobs

    @torch.no_grad()
    def base_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """[u] log-probs of the used tokens under the base."""
        with self.policy.adapter.switched_off():
            return self.stats(batch).logprobs

    def with_entropies(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same samples; where the engine sent no entropies, one pass without gradient adds them."""
        if all(sample.entropies is not None for sample in samples):
            return list(samples)
        found = self.per_sample([whole(sample) for sample in samples], self.temperature, entropies=True)
        entropies = torch.cat([found[sample.name] for sample in samples]).cpu().numpy()
        parts = np.split(entropies, np.cumsum([sample.length for sample in samples])[:-1])
        return [
            replace(sample, entropies=at_sampled(sample, part)) for sample, part in zip(samples, parts, strict=True)
        ]


def trimming_between(work: Callable[[Cut], Done]) -> Callable[[Cut], Done]:
    """The same work; what a micro-batch has freed goes back to the system once the process has become larger than after
    the first one (shared/process/free_memory.py)."""
    trimmer = Trimmer()

    def work_and_return(part: Cut) -> Done:
        done = work(part)
        trimmer.after_part()
        return done

    return work_and_return


def whole(sample: Sample) -> TrainSample:
    """All sampled tokens used, none trained on."""
    nothing = np.zeros(len(sample.completion_ids), np.float32)
    return TrainSample(sample=sample, selected=sample.trained, weight=0.0, penalties=nothing, in_kl=False)
