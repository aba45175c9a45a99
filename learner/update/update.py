"""One training step on one batch: gradient over micro-batches, checks, optimizer.

    for each pass, for each minibatch:
        zero  ->  sum of micro-batch gradients  ->  norm  ->  may it be used?  ->  clip  ->  AdamW

pi_old is the policy before the first of these updates, so from the second one on the clip is active; the log-probs of
the sampler stay those that came with the samples. The order is fixed: minibatches in the order of the batch, in every
pass. So a step is one function of its batch, and one version, however many updates it has.

All of them together are atomic: `undo` takes back what was done of a step that is refused, or for which memory ran out
(budget.py). A gradient that may not be used (gradient_check.py) is computed once more: if the second one is valid, the
fault was in the machine and not in the batch. If it is not, NumericalFault tells what every sample does alone.

The mismatch gate (mismatch.py) comes after the first gradient, which has log pi already, and before the optimizer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from learner.continual.anchor import Anchor
from learner.objective.batch import StepBatch, TrainSample, grouped
from learner.objective.constraint import PenalisedTokens, constraint_loss
from learner.objective.loss import KlTokens, TokenBatch, kl_loss, policy_loss
from learner.update.figures import PASS_PART, Gradient, PassPart, UpdateStats, gathered, of_step
from learner.update.forward_pass import UNCHANGED, ForwardPass, OldLogprobs
from learner.update.gradient_check import Finding, Norms, NumericalFault
from learner.update.gradient_noise import GradientNoise, GroupGradients
from learner.update.microbatch import MicroBatch
from learner.update.mismatch import Gap, Gate, Suspects, Tokens, gap_of, refusal
from learner.update.optimizer import Optimizer
from shared.config.tree import ConstraintConfig, LossConfig
from shared.errors import TrainingStopped
from shared.model.adapter_file import adapter_bytes, install_adapter

log = logging.getLogger("learner")
ROUNDING_SAMPLES = (8, 64)
"""At most so many: the tokens of a few are enough for a mean, and a pass over them is short. More are checked before a
run is stopped."""
Accumulated = tuple[list[PassPart], GradientNoise | None]
"""The micro-batches of a pass, whose gradients add up in the parameters; the noise, if it was measured."""
Accumulate = Callable[[Sequence[TrainSample], OldLogprobs], Accumulated]


class WeightsNotFinite(TrainingStopped):
    """The optimizer made weights whose norm is no number; they were neither published nor saved."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """What an update starts from."""

    adapter: bytes
    """A safetensors file in PEFT's format."""
    optimizer: bytes
    """AdamW's moments, a safetensors file."""
    norms: dict[str, Any]
    """State of gradient_check.Norms."""
    anchor: bytes = b""
    """What the policy is kept close to, a safetensors file; empty if there is nothing."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a step that is not applied goes back to."""

    gate: dict[str, Any]
    """State of mismatch.Gate."""
    position: Position | None
    """None if the step has only one update."""


class Update:
    """Applies batches to a policy."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        optimizer: Optimizer,
        norms: Norms,
        *,
        loss: LossConfig,
        constraint: ConstraintConfig,
        gate: Gate,
        measures_noise: bool,
        anchor: Anchor | None = None,
    ) -> None:
        """measures_noise: group after group, for batches that grow with it. anchor: of a curriculum in stages."""
        self.forward_pass = forward_pass
        self.policy = forward_pass.policy
        self.optimizer = optimizer
        self.norms = norms
        self.loss = loss
        self.constraint = constraint
        self.gate = gate
        self.measures_noise = measures_noise
        self.anchor = anchor
        self.begun: Beginning | None = None
        """Of the step that is computed."""

    def apply(self, step: int, batch: StepBatch) -> UpdateStats:
        """All passes over a batch, which must have something to score."""
        minibatches = batch.minibatches()
        several = self.loss.passes * len(minibatches) > 1
        # Until the optimizer's step of its only update, a step changes no value.
        self.begun = Beginning(gate=self.gate.state_dict(), position=self.position(whole=False) if several else None)
        old = self.forward_pass.old(batch.used) if several else UNCHANGED
        noisy = self.measures_noise and batch.sampled > 1
        accumulate = partial(self.group_after_group, sampled=batch.sampled) if noisy else self.accumulate
        gradient = self.usable_gradient(step, minibatches[0], old, accumulate)
        if batch.on_policy:
            self.check_mismatch(step, batch.used, mismatch_of(gradient, batch.used, old))
        updates = [self.applied(step, gradient)]
        for samples in [*minibatches[1:], *(self.loss.passes - 1) * minibatches]:
            gradient = self.usable_gradient(step, samples, old, self.accumulate)
            updates.append(self.applied(step, gradient))
        self.check_weights(step)
        self.begun = None
        return of_step(updates, len(minibatches))

    def usable_gradient(
        self, step: int, samples: Sequence[TrainSample], old: OldLogprobs, accumulate: Accumulate
    ) -> Gradient:
        """The clipped gradient in the parameters; NumericalFault if it may not be used, the second time as well."""
        gradient = self.gradient(samples, old, accumulate)
        if gradient.refusal:
            log.warning("step %d: %s; it is computed once more", step + 1, gradient.refusal.what)
            gradient = self.gradient(samples, old, accumulate)
        if gradient.refusal:
            raise NumericalFault(step, gradient.refusal, self.each_alone(samples, old), old.by_sample)
        return gradient

    def gradient(self, samples: Sequence[TrainSample], old: OldLogprobs, accumulate: Accumulate) -> Gradient:
        """The clipped gradient of these samples, in the parameters, and whether it may be used."""
        parts, noise = accumulate(samples, old)
        penalty, norm = self.forward_pass.placement.together(self.clipped)
        loss = loss_of(parts) + penalty
        refused = self.norms.refusal(loss, norm)
        return Gradient(parts=parts, loss=loss, norm=norm, refusal=refused, noise=noise, ewc_penalty=penalty)

    def clipped(self) -> tuple[float, float]:
        """Penalty of the anchor, and norm, of the gradient in the parameters."""
        penalty = self.anchor.pull(self.optimizer.gradients()) if self.anchor else 0.0
        return penalty, self.optimizer.clip()

    def reserve(self) -> None:
        """Have the memory of the optimizer's step, on all ranks."""
        self.forward_pass.placement.together(self.optimizer.reserve)

    def accumulate(self, samples: Sequence[TrainSample], old: OldLogprobs) -> Accumulated:
        self.optimizer.zero_grad()
        parts = self.forward_pass.gradient_over_cuts(samples, lambda part: self.backward(part, old), PASS_PART)
        self.optimizer.bring_home()
        return parts, None

    def group_after_group(self, samples: Sequence[TrainSample], old: OldLogprobs, sampled: int) -> Accumulated:
        """The same gradient from micro-batches of one group each, with its noise. sampled: groups of the step."""
        gradients = GroupGradients([*self.optimizer.stepped.values()], self.optimizer.owners.total_norm)
        parts: list[PassPart] = []
        for group in grouped(samples):
            parts += self.accumulate(group, old)[0]
            self.forward_pass.placement.together(gradients.take)
        return parts, self.forward_pass.placement.together(lambda: gradients.give_back(sampled))

    def each_alone(self, samples: Sequence[TrainSample], old: OldLogprobs) -> list[Finding]:
        """What every sample adds to loss and gradient; leaves no gradient behind."""
        found: list[Finding] = []
        for sample in samples:
            parts, _ = self.accumulate([sample], old)
            norm = self.forward_pass.placement.together(self.optimizer.clip)
            found.append(Finding(sample=sample.sample.name, loss=loss_of(parts), grad_norm=norm))
        self.optimizer.zero_grad()
        return found

    def applied(self, step: int, gradient: Gradient) -> UpdateStats:
        """The optimizer's step with the gradient in the parameters."""
        self.reserve()
        rate = self.optimizer.step(step)
        # The gradient of a KL alone is so small that beside it the next one that teaches would look like a spike.
        # One of zero would turn the guard off, once more than half of the window are.
        if gradient.has_objective and gradient.norm > 0.0:
            self.norms.applied(gradient.norm)
        return gathered(gradient, rate)

    def check_mismatch(self, step: int, samples: Sequence[TrainSample], mismatch: np.ndarray) -> None:
        if len(mismatch) and not self.gate.admits(gap_of(mismatch), roundings(self.forward_pass, samples)):
            ordered, forward_pass = self.forward_pass.temperature, self.forward_pass
            tokens = Tokens(
                actor=np.concatenate([s.sample.actor_logprobs[s.used] for s in samples]),
                learner=forward_pass.recomputed(samples, ordered),
                temperature=ordered,
            )
            suspects = Suspects(
                at_temperature=partial(forward_pass.recomputed, samples),
                at_scale=partial(at_scale, forward_pass, samples),
            )
            raise refusal(step, tokens, self.gate, suspects)

    def check_weights(self, step: int) -> None:
        """After the last pass. The gradients were finite, so only the rate can be the cause."""
        if not self.optimizer.all_finite():
            raise WeightsNotFinite(
                f"Step {step + 1} turned a finite gradient into weights that are not finite: optimizer.lr ="
                f" {self.optimizer.config.lr:g} is too large. They were neither published nor saved; start a new run"
                " with a smaller rate."
            )

    def backward(self, samples: Sequence[TrainSample], old: OldLogprobs) -> PassPart:
        batch = self.forward_pass.on_device(samples)
        reference = self.reference_logprobs(batch) if self.loss.kl_beta > 0.0 else None
        penalty_reference = self.penalty_reference(samples)
        untold = any(sample.sample.entropies is None for sample in samples)
        found = self.forward_pass.stats(batch, entropies=untold)
        logprobs = found.logprobs
        before = old.of(batch, logprobs)
        terms = policy_loss(token_batch(batch, logprobs, before), self.loss)
        kl = kl_loss(kl_tokens(batch, logprobs, before, before if reference is None else reference), self.loss)
        penalty = constraint_loss(
            PenalisedTokens(
                logprobs=logprobs[batch.penalised],
                reference=before[batch.penalised] if penalty_reference is None else penalty_reference,
                weights=batch.penalties,
            )
        )
        (terms.loss + kl.loss + penalty.loss).backward()
        self.forward_pass.progress()
        return PassPart(
            terms=terms,
            kl=kl,
            penalty=penalty,
            mismatch=(before - batch.actor_logprobs).abs(),
            logprobs=before,
            used={sample.sample.name: int(sample.used.sum()) for sample in samples},
            entropies=found.entropies,
            weight_sum=batch.weight_sum,
        )

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """[u] log-probs that the KL is taken to: of the base, or of the policy at the start of its stage."""
        if self.anchor is None:
            return self.forward_pass.base_logprobs(batch)
        with self.anchor.reference():
            return self.forward_pass.stats(batch).logprobs

    def penalty_reference(self, samples: Sequence[TrainSample]) -> torch.Tensor | None:
        """[m] log pi_base of the penalised tokens, by a pass over their samples alone; None if the base is not the
        constraint's reference."""
        alone = [replace(s, selected=np.zeros_like(s.selected), in_kl=False) for s in samples if s.penalties.any()]
        if self.constraint.reference != "base" or not alone:
            return None
        return self.forward_pass.base_logprobs(self.forward_pass.on_device(alone))

    def forget_gradient(self) -> None:
        """After a step: the next one begins without it, and until then the card may be another process's."""
        self.optimizer.zero_grad()

    def undo(self) -> None:
        """After a step that was not applied: everything as it was before it, and no gradient."""
        self.optimizer.zero_grad()
        begun, self.begun = self.begun, None
        if begun:
            self.gate.load_state_dict(begun.gate)
            if begun.position:
                self.restore(begun.position)

    def position(self, *, whole: bool = True) -> Position:
        """What the next update starts from. whole: with the moments of all ranks, on rank 0."""
        return Position(
            adapter=adapter_bytes(self.policy.adapter),
            optimizer=self.optimizer.state_bytes() if whole else self.optimizer.own_state_bytes(),
            norms=self.norms.state_dict(),
            anchor=self.anchor.state_bytes() if self.anchor else b"",
        )

    def restore(self, position: Position) -> None:
        """Go back to it, including values that are not finite."""
        install_adapter(self.policy.adapter, position.adapter, finite=False)
        self.optimizer.load_state_bytes(position.optimizer)
        self.norms.load_state_dict(position.norms)
        if self.anchor and position.anchor:
            self.anchor.load_state_bytes(position.anchor)


def mismatch_of(gradient: Gradient, samples: Sequence[TrainSample], old: OldLogprobs) -> np.ndarray:
    """[u] |learner - actor log-prob| of all samples of a step, before its first update."""
    if not old.by_sample:
        return torch.cat([part.mismatch for part in gradient.parts]).cpu().numpy()
    learner = torch.cat([old.by_sample[one.sample.name] for one in samples]).cpu().numpy()
    return np.abs(learner - np.concatenate([one.sample.actor_logprobs[one.used] for one in samples]))


def roundings(forward_pass: ForwardPass, samples: Sequence[TrainSample]) -> Iterator[Gap]:
    """The learner against itself: samples together, as in an update, and each as one row of its own."""
    # An entropy mask may leave a sample without a token.
    samples = [sample for sample in samples if sample.used.any()]
    for most in ROUNDING_SAMPLES:
        every = -(-len(samples) // most)
        some = samples[::every]
        together = forward_pass.recomputed(some, forward_pass.temperature)
        alone = torch.cat([forward_pass.in_one_row(sample) for sample in some]).cpu().numpy()
        yield gap_of(np.abs(alone - together))
        if every == 1:
            return


def at_scale(forward_pass: ForwardPass, samples: Sequence[TrainSample], factor: float) -> np.ndarray:
    """[n] log-probs of the used tokens with the adapter's scale multiplied by a factor."""
    if factor == 0.0:
        return forward_pass.recomputed_by_base(samples)
    layers = forward_pass.policy.adapter.layers.values()
    scales = [layer.scale for layer in layers]
    try:
        for layer in layers:
            layer.scale *= factor
        return forward_pass.recomputed(samples, forward_pass.temperature)
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale


def loss_of(parts: Sequence[PassPart]) -> float:
    return float(torch.stack([part.loss for part in parts]).sum())


def token_batch(batch: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor) -> TokenBatch:
    """What the objective sees of a micro-batch: its selected tokens among the used ones."""
    return TokenBatch(
        logprobs=logprobs[batch.selected],
        old_logprobs=old[batch.selected],
        actor_logprobs=batch.actor_logprobs[batch.selected],
        teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[batch.selected],
        advantages=batch.advantages,
        weights=batch.weights[batch.selected],
        sample=batch.sample,
        counts=batch.counts,
    )


def kl_tokens(batch: MicroBatch, logprobs: torch.Tensor, old: torch.Tensor, base: torch.Tensor) -> KlTokens:
    """What the KL sees of a micro-batch."""
    return KlTokens(
        logprobs=logprobs[batch.in_kl],
        old_logprobs=old[batch.in_kl],
        actor_logprobs=batch.actor_logprobs[batch.in_kl],
        base_logprobs=base[batch.in_kl],
        weights=batch.weights[batch.in_kl],
    )
