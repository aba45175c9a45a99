"""One training step on one batch: gradient over micro-batches, checks, optimizer.

    for each pass:  zero  ->  sum of micro-batch gradients  ->  norm  ->  may it be used?  ->  clip  ->  AdamW

A pass is atomic: running out of memory halves the micro-batch budget and replays the pass from the host's arrays;
nothing was applied. A gradient that may not be used (learner/update/gradient_check.py) is computed once more: if it is
right then, the
machine erred and not the batch. If it is not, NumericalFault tells what every sample does alone.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from learner.continual.anchor import Anchor
from learner.objective.batch import Sample, StepBatch, TrainSample, needs_entropies
from learner.objective.constraint import HeldTokens, constraint_loss
from learner.objective.loss import KlTokens, TokenBatch, kl_loss, policy_loss
from learner.update.figures import Gradient, PassPart, UpdateStats, gathered
from learner.update.gradient_check import Finding, Norms, NumericalFault
from learner.update.gradient_noise import GradientNoise, GroupGradients
from learner.update.microbatch import MicroBatch, by_group, cut, micro_batch
from learner.update.mismatch import Tokens, gap_of, refusal
from learner.update.optimizer import Optimizer
from shared.config.tree import Config
from shared.errors import TrainingStopped
from shared.model.head import TokenStats
from shared.model.policy import Policy

Done = TypeVar("Done")
log = logging.getLogger("learner")


class WeightsNotFinite(TrainingStopped):
    """The optimizer made weights whose norm is no number; they were neither published nor saved."""


class Update:
    """Applies batches to a policy."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        norms: Norms,
        config: Config,
        progress: Callable[[], None],
        anchor: Anchor | None = None,
    ) -> None:
        """anchor: what the policy is held to, where a curriculum in stages asks for it."""
        self.policy = policy
        self.optimizer = optimizer
        self.norms = norms
        self.config = config
        self.progress = progress
        self.anchor = anchor
        self.token_budget = config.batch.token_budget
        # transformers cannot recompute activations of layers that read a cache.
        self.share_prompts = not config.batch.checkpointing

    def apply(self, step: int, batch: StepBatch, *, gated: bool = False) -> UpdateStats | None:
        """All passes over a batch; None if no group taught anything and there is no KL, and then nothing changes.

        gated: all of it was sampled from the version that is updated, so the actor must agree about it.
        """
        samples = batch.scored
        if not samples:
            return None
        old = self.old_logprobs(samples) if self.config.loss.passes > 1 else {}
        sampled = batch.sampled if self.config.growth.max_prompts else 0
        first = self.gradient_pass(step, samples, old, sampled, gated=gated)
        passes = [first, *(self.gradient_pass(step, samples, old) for _ in range(1, self.config.loss.passes))]
        self.check_weights(step)
        return replace(
            passes[-1],
            ratios=np.concatenate([p.ratios for p in passes]),
            clipped=np.concatenate([p.clipped for p in passes]),
            kl=first.kl,
            mismatch=first.mismatch,
            entropies=first.entropies,
            noise=first.noise,
        )

    def gradient_pass(
        self,
        step: int,
        samples: Sequence[TrainSample],
        old: dict[str, torch.Tensor],
        sampled: int = 0,
        *,
        gated: bool = False,
    ) -> UpdateStats:
        """One optimizer step. sampled: groups of the step, where the noise of the gradient is to be measured."""
        gradient = self.gradient(samples, old, sampled)
        if gradient.refusal:
            log.warning("step %d: %s; it is computed once more", step + 1, gradient.refusal.what)
            gradient = self.gradient(samples, old, sampled)
        if gradient.refusal:
            raise NumericalFault(step, gradient.refusal, self.each_alone(samples, old), old)
        if gated:
            self.check_mismatch(step, samples, np.concatenate([p.mismatch.cpu().numpy() for p in gradient.parts]))
        self.norms.applied(gradient.norm)
        return gathered(gradient, self.optimizer.step(step))

    def gradient(
        self, samples: Sequence[TrainSample], old: dict[str, torch.Tensor], sampled: int = 0, pulled: bool = True
    ) -> Gradient:
        """The clipped gradient of these samples, in the parameters, and whether it may be used. pulled: with what holds
        the policy to an earlier stage."""
        noise = None
        if sampled > 1:
            parts, noise = self.group_after_group(samples, old, sampled)
        else:
            parts = self.over_cuts(samples, lambda part: self.backward(part, old))
        penalty = self.anchor.pull() if self.anchor and pulled else 0.0
        norm = self.optimizer.clip()
        loss = float(torch.stack([part.loss for part in parts]).sum()) + penalty
        refusal = self.norms.refusal(loss, norm)
        return Gradient(parts=parts, loss=loss, norm=norm, refusal=refusal, noise=noise, ewc_penalty=penalty)

    def group_after_group(
        self, samples: Sequence[TrainSample], old: dict[str, torch.Tensor], sampled: int
    ) -> tuple[list[PassPart], GradientNoise]:
        """The same gradient from micro-batches that hold one group each, with its noise."""
        gradients = GroupGradients(list(self.optimizer.parameters.values()))
        parts: list[PassPart] = []
        for group in by_group(samples):
            parts += self.over_cuts(group, lambda part: self.backward(part, old))
            gradients.take()
        return parts, gradients.give_back(sampled)

    def each_alone(self, samples: Sequence[TrainSample], old: dict[str, torch.Tensor]) -> list[Finding]:
        """What every sample adds to loss and gradient; leaves no gradient behind."""
        found = [(sample.sample.name, self.gradient([sample], old, pulled=False)) for sample in samples]
        self.optimizer.zero_grad()
        return [Finding(sample=name, loss=alone.loss, grad_norm=alone.norm) for name, alone in found]

    def check_mismatch(self, step: int, samples: Sequence[TrainSample], mismatch: np.ndarray) -> None:
        """The gate: before anything is learned from them. NaN does not agree."""
        allowed, temperature = self.config.loss.max_mismatch, self.config.rollout.temperature
        if len(mismatch) and not gap_of(mismatch).p99 <= allowed:
            tokens = Tokens(
                actor=np.concatenate([s.sample.actor_logprobs[s.scored] for s in samples]),
                learner=self.rescored(samples, temperature, True),
                temperature=temperature,
            )
            raise refusal(step, tokens, allowed, lambda other, adapter: self.rescored(samples, other, adapter))

    @torch.no_grad()
    def rescored(self, samples: Sequence[TrainSample], temperature: float, adapter: bool) -> np.ndarray:
        """[n] log-probs of the scored tokens at a temperature, with the adapter or without, in the samples' order."""

        def named(part: list[TrainSample]) -> dict[str, np.ndarray]:
            batch = self.on_device(part)
            rows = self.forward(batch, temperature).logprobs.split([int(sample.scored.sum()) for sample in part])
            self.progress()
            return {name: row.cpu().numpy() for name, row in zip(batch.names, rows, strict=True)}

        with nullcontext() if adapter else self.policy.adapter.switched_off():
            found = merged(self.over_cuts(samples, named))
        return np.concatenate([found[sample.sample.name] for sample in samples])

    def check_weights(self, step: int) -> None:
        """After the last pass; gradients are finite, so only the rate can be to blame."""
        if not self.optimizer.all_finite():
            raise WeightsNotFinite(
                f"Step {step + 1} made weights that overflow from a gradient that does not: optimizer.lr ="
                f" {self.config.optimizer.lr:g} is too large. Nothing of it was published or saved; start a new run"
                " with a smaller rate."
            )

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

    def backward(self, samples: Sequence[TrainSample], old: dict[str, torch.Tensor]) -> PassPart:
        """Add one micro-batch's gradient."""
        batch = self.on_device(samples)
        base = self.base_logprobs(batch)
        held_base = self.held_base_logprobs(samples)
        found = self.forward(batch)
        logprobs = found.logprobs
        before = torch.cat([old[name] for name in batch.names]) if old else logprobs.detach()
        terms = policy_loss(token_batch(batch, logprobs, before), self.config.loss)
        kl = kl_loss(kl_tokens(batch, logprobs, before, before if base is None else base), self.config.loss)
        reference = before[batch.held] if held_base is None else held_base
        held = constraint_loss(
            HeldTokens(logprobs=logprobs[batch.held], reference=reference, weights=batch.held_weights)
        )
        (terms.loss + kl.loss + held.loss).backward()
        self.progress()
        return PassPart(
            terms=terms,
            kl=kl,
            held=held,
            mismatch=(before - batch.actor_logprobs).abs(),
            entropies=found.entropies,
            weight_sum=float(batch.weights[batch.selected].sum()),
        )

    def on_device(self, samples: Sequence[TrainSample]) -> MicroBatch:
        """As tensors, where the policy computes."""
        return micro_batch(samples, self.policy.device, self.share_prompts)

    def forward(self, batch: MicroBatch, temperature: float | None = None) -> TokenStats:
        """Backbone on all tokens, head on the scored rows; at the temperature of the samples unless told otherwise."""
        hidden = self.policy.hidden(batch.sequences).index_select(0, batch.rows)
        scale, rows = temperature or self.config.rollout.temperature, self.config.batch.head_rows
        return self.policy.stats(hidden, batch.targets, temperature=scale, rows=rows)

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
        """log pi_old of each sample's scored tokens, before the first pass."""

        def named(part: list[TrainSample]) -> dict[str, torch.Tensor]:
            batch = self.on_device(part)
            counts = [int(sample.scored.sum()) for sample in part]
            logprobs = self.forward(batch).logprobs.split(counts)
            self.progress()
            return dict(zip(batch.names, logprobs, strict=True))

        return merged(self.over_cuts(samples, named))

    @torch.no_grad()
    def base_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """log pi_base of the scored tokens: the same model with the adapter switched off, or as it once was."""
        if self.config.loss.kl_beta == 0.0:
            return None
        with self.anchor.reference() if self.anchor else self.policy.adapter.switched_off():
            return self.forward(batch).logprobs

    @torch.no_grad()
    def held_base_logprobs(self, samples: Sequence[TrainSample]) -> torch.Tensor | None:
        """log pi_base of the held tokens, by a pass over their answers alone; None if nothing is held to the base."""
        nothing = [replace(s, selected=np.zeros_like(s.selected), in_kl=False) for s in samples if s.held.any()]
        if self.config.constraint.reference != "base" or not nothing:
            return None
        with self.policy.adapter.switched_off():
            return self.forward(self.on_device(nothing)).logprobs

    @torch.no_grad()
    def with_entropies(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fill in entropies where the engine could not tell and they are needed: one pass without gradient."""
        if not needs_entropies(self.config) or all(s.entropies is not None for s in samples):
            return list(samples)
        everything = [whole(sample) for sample in samples]

        def named(part: list[TrainSample]) -> dict[str, np.ndarray]:
            batch = self.on_device(part)
            rows = self.forward(batch).entropies.split([len(s.selected) for s in part])
            self.progress()
            return {name: row.cpu().numpy() for name, row in zip(batch.names, rows, strict=True)}

        found = merged(self.over_cuts(everything, named))
        return [replace(sample, entropies=found[sample.name]) for sample in samples]


def whole(sample: Sample) -> TrainSample:
    """All tokens scored, none trained on."""
    length = len(sample.completion_ids)
    held = np.zeros(length, np.float32)
    return TrainSample(sample=sample, selected=np.ones(length, bool), weight=0.0, held=held, in_kl=False)


def merged(parts: Sequence[dict[str, Done]]) -> dict[str, Done]:
    """The samples of all micro-batches in one."""
    return {name: value for part in parts for name, value in part.items()}


def token_batch(batch: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor) -> TokenBatch:
    """What the objective sees of a micro-batch: its selected tokens among the scored ones."""
    return TokenBatch(
        logprobs=logprobs[batch.selected],
        old_logprobs=old[batch.selected],
        actor_logprobs=batch.actor_logprobs[batch.selected],
        advantages=batch.advantages,
        weights=batch.weights[batch.selected],
        sample=batch.sample,
    )


def kl_tokens(batch: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, base: torch.Tensor) -> KlTokens:
    """What the KL sees of it."""
    return KlTokens(
        logprobs=logprobs[batch.in_kl],
        old_logprobs=old[batch.in_kl],
        actor_logprobs=batch.actor_logprobs[batch.in_kl],
        base_logprobs=base[batch.in_kl],
        weights=batch.weights[batch.in_kl],
    )
