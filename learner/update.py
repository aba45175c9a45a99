"""One training step on one batch: gradient over micro-batches, checks, optimizer.

    for each pass:  zero  ->  sum of micro-batch gradients  ->  finite?  ->  clip  ->  AdamW

A pass is atomic: running out of memory halves the micro-batch budget and replays the pass from the host's arrays;
nothing was applied. A value that is not finite stops the run before the optimizer step and names the sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from learner.batch import Sample, StepBatch, TrainSample, cut
from learner.loss import LossTerms, TokenBatch, policy_loss
from learner.microbatch import MicroBatch, micro_batch
from learner.optimizer import Optimizer
from shared.config import Config
from shared.errors import TrainingStopped
from shared.head import TokenStats
from shared.policy import Policy

Done = TypeVar("Done")


class NotFinite(TrainingStopped):
    """A loss or gradient that is not a number; the optimizer was not stepped."""


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What one step did."""

    grad_norm: float
    """Of the last pass, before clipping."""
    lr: float
    """Rate used."""
    ratios: np.ndarray
    """[n] over all passes."""
    clipped: np.ndarray
    """[n] bool over all passes."""
    kl: np.ndarray
    """[n] of the first pass."""
    mismatch: np.ndarray
    """[n] |learner - actor log-prob| before the first update."""
    weight_sum: float
    """Sum of the weights of all selected tokens: the mask's share of the loss's divisor."""


class Update:
    """Applies batches to a policy."""

    def __init__(self, policy: Policy, optimizer: Optimizer, config: Config, progress: Callable[[], None]) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        self.progress = progress
        self.token_budget = config.batch.token_budget
        # transformers cannot recompute activations of layers that read a cache.
        self.share_prompts = not config.batch.checkpointing

    def apply(self, step: int, batch: StepBatch) -> UpdateStats | None:
        """All passes over a batch; None if no group taught anything, and then nothing changes."""
        if not batch.samples:
            return None
        old = self.old_logprobs(batch.samples) if self.config.loss.passes > 1 else {}
        passes = [self.gradient_pass(step, batch.samples, old) for _ in range(self.config.loss.passes)]
        first = passes[0]
        return replace(
            passes[-1],
            ratios=np.concatenate([p.ratios for p in passes]),
            clipped=np.concatenate([p.clipped for p in passes]),
            kl=first.kl,
            mismatch=first.mismatch,
        )

    def gradient_pass(self, step: int, samples: Sequence[TrainSample], old: dict[str, torch.Tensor]) -> UpdateStats:
        """One optimizer step."""
        parts = self.over_cuts(samples, lambda part: self.backward(part, old))
        grad_norm = self.optimizer.clip()
        if not np.isfinite(grad_norm):
            raise NotFinite(f"The gradient of step {step} is not finite ({grad_norm}); the optimizer was not stepped.")
        return gathered(parts, grad_norm, self.optimizer.step(step))

    def over_cuts(self, samples: Sequence[TrainSample], work: Callable[[list[TrainSample]], Done]) -> list[Done]:
        """`work` on every micro-batch; on all of them again, with half the budget, if memory runs out."""
        while True:
            self.optimizer.zero_grad()
            cuts = cut(samples, self.token_budget, self.share_prompts)
            try:
                return [work(part) for part in cuts]
            except torch.OutOfMemoryError:
                if len(cuts) == len(samples):
                    raise
                self.token_budget //= 2

    def backward(self, samples: Sequence[TrainSample], old: dict[str, torch.Tensor]) -> "PassPart":
        """Add one micro-batch's gradient."""
        batch = micro_batch(samples, self.policy.device, self.share_prompts)
        base = self.base_logprobs(batch)
        logprobs = self.forward(batch).logprobs
        before = torch.cat([old[name] for name in batch.names]) if old else logprobs.detach()
        terms = policy_loss(token_batch(batch, logprobs, before, base), self.config.loss)
        check_finite(terms, batch)
        terms.loss.backward()
        self.progress()
        mismatch = (before - batch.actor_logprobs).abs()
        return PassPart(terms=terms, mismatch=mismatch, weight_sum=float(batch.weights.sum()))

    def forward(self, batch: MicroBatch) -> TokenStats:
        """Backbone on all tokens, head on the selected rows."""
        hidden = self.policy.hidden(batch.sequences).index_select(0, batch.rows)
        temperature, rows = self.config.rollout.temperature, self.config.batch.head_rows
        return self.policy.stats(hidden, batch.targets, temperature=temperature, rows=rows)

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
        """log pi_old of each sample's selected tokens, before the first pass."""

        def named(part: list[TrainSample]) -> dict[str, torch.Tensor]:
            batch = micro_batch(part, self.policy.device, self.share_prompts)
            counts = [int(sample.selected.sum()) for sample in part]
            logprobs = self.forward(batch).logprobs.split(counts)
            self.progress()
            return dict(zip(batch.names, logprobs, strict=True))

        return merged(self.over_cuts(samples, named))

    @torch.no_grad()
    def base_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """log pi_base of the selected tokens: the same model with the adapter switched off."""
        if self.config.loss.kl_beta == 0.0:
            return None
        with self.policy.adapter.switched_off():
            return self.forward(batch).logprobs

    @torch.no_grad()
    def with_entropies(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fill in entropies where the engine could not tell and the mask needs them: one pass without gradient."""
        if self.config.loss.entropy_fraction == 1.0 or all(s.entropies is not None for s in samples):
            return list(samples)
        everything = [
            TrainSample(sample=s, selected=np.ones(len(s.completion_ids), dtype=bool), weight=0.0) for s in samples
        ]

        def named(part: list[TrainSample]) -> dict[str, np.ndarray]:
            batch = micro_batch(part, self.policy.device, self.share_prompts)
            rows = self.forward(batch).entropies.split([len(s.selected) for s in part])
            self.progress()
            return {name: row.cpu().numpy() for name, row in zip(batch.names, rows, strict=True)}

        found = merged(self.over_cuts(everything, named))
        return [replace(sample, entropies=found[sample.name]) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class PassPart:
    """One micro-batch of a pass, done."""

    terms: LossTerms
    """Loss and per-token figures."""
    mismatch: torch.Tensor
    """[n]."""
    weight_sum: float
    """Of its tokens."""


def merged(parts: Sequence[dict[str, Done]]) -> dict[str, Done]:
    """The samples of all micro-batches in one."""
    return {name: value for part in parts for name, value in part.items()}


def token_batch(batch: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, base: torch.Tensor | None) -> TokenBatch:
    """What the loss sees of a micro-batch."""
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old,
        actor_logprobs=batch.actor_logprobs,
        base_logprobs=base,
        advantages=batch.advantages,
        weights=batch.weights,
        sample=batch.sample,
    )


def check_finite(terms: LossTerms, batch: MicroBatch) -> None:
    """Stop before the gradient is touched, naming the sample."""
    if bool(torch.isfinite(terms.loss)):
        return
    bad = (~torch.isfinite(terms.shares)).nonzero().flatten()
    name = batch.names[int(batch.sample[bad[0]])] if len(bad) else batch.names[0]
    raise NotFinite(f"The loss is not finite; the first suspect is sample {name}. The optimizer was not stepped.")


def gathered(parts: Sequence[PassPart], grad_norm: float, lr: float) -> UpdateStats:
    """The figures of one pass."""

    def column(tensors: list[torch.Tensor]) -> np.ndarray:
        return torch.cat(tensors).cpu().numpy()

    return UpdateStats(
        grad_norm=grad_norm,
        lr=lr,
        ratios=column([part.terms.ratios for part in parts]),
        clipped=column([part.terms.clipped for part in parts]),
        kl=column([part.terms.kl for part in parts]),
        mismatch=column([part.mismatch for part in parts]),
        weight_sum=sum(part.weight_sum for part in parts),
    )
