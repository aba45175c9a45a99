"""The model of a policy in float64 with full logits, one sequence at a time: no padding, mask, chunks or cuts.

It runs transformers' own code on W + s B A, and the step's loss is that of tests/reference.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call

from learner.objective.batch import Sample
from shared.config.tree import Config, LossConfig
from shared.model.policy import Policy
from tests import reference
from tests.support.fakes import dense_twin

Named = dict[str, torch.Tensor]


class Truth:
    """The dense model in float64 with A and B as its only parameters."""

    def __init__(self, checkpoint: Path, policy: Policy, temperature: float) -> None:
        self.model = dense_twin(checkpoint).double()
        self.weights = {name: value.detach() for name, value in self.model.named_parameters()}
        self.scale = next(iter(policy.adapter.layers.values())).scale
        self.temperature = temperature
        parameters = policy.adapter.parameters()
        self.leaves = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}

    def logprobs(self, sample: Sample, *, adapter: bool = True) -> torch.Tensor:
        """[T] log-probs of the completion."""
        return self.stats(sample, adapter)[0]

    def entropies(self, sample: Sample) -> np.ndarray:
        """[T] entropies at the completion's positions."""
        return self.stats(sample, True)[1].detach().numpy()

    def stats(self, sample: Sample, adapter: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies from full logits."""
        merged = dict(self.weights)
        for layer in {name.rpartition(".")[0] for name in self.leaves} if adapter else ():
            delta = self.leaves[f"{layer}.lora_B"] @ self.leaves[f"{layer}.lora_A"]
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + self.scale * delta
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logits = functional_call(self.model, merged, kwargs={"input_ids": ids[None]}).logits[0]
        predicted = logits[len(sample.prompt_ids) - 1 : -1]
        return reference.softmax_stats(predicted, torch.from_numpy(sample.completion_ids), self.temperature)

    def gradients(self, samples: Sequence[Sample], config: Config, old: Named, idle: Sequence[Sample] = ()) -> Named:
        """Of the step's loss, with respect to every A and B. idle: samples of groups that were paid alike."""
        loss = self.loss(samples, config, old, idle)
        return dict(zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True))

    def loss(self, samples: Sequence[Sample], config: Config, old: Named, idle: Sequence[Sample] = ()) -> torch.Tensor:
        """Objective and constraint over a step."""
        entropies = [s.entropies[s.trained].tolist() for s in samples if s.entropies is not None]
        masks = reference.top_tokens(entropies, config.loss.entropy_fraction) if samples else []
        rollouts = [self.rollout(s, mask, old) for s, mask in zip(samples, masks, strict=True)]
        rollouts += [self.rollout(s, [True] * s.length, old) for s in idle]
        objective = objective_of(config.objective, config.rollout.max_new_tokens)
        strengths = penalty_strengths(samples, config) if config.constraint.beta else []
        strengths += [[0.0] * s.length for s in idle if strengths]
        if not strengths:
            return reference.loss(rollouts, objective)
        penalty = reference.constraint(rollouts, strengths, objective, config.constraint.reference)
        return reference.loss(rollouts, objective) + config.constraint.beta * penalty

    def rollout(self, sample: Sample, mask: list[bool], old: Named) -> reference.Rollout:
        """The sampled tokens of a completion as the reference wants them; without `old` the policy itself is the old
        one."""
        sampled = torch.from_numpy(sample.trained)
        logprobs = self.logprobs(sample)[sampled]
        return reference.Rollout(
            logprobs=logprobs,
            old=old[sample.name].double()[sampled] if old else logprobs.detach(),
            actor=torch.from_numpy(sample.actor_logprobs).double()[sampled],
            base=self.logprobs(sample, adapter=False).detach()[sampled],
            selected=mask,
            advantage=sample.advantage,
        )


def objective_of(loss: LossConfig, longest: int) -> reference.Objective:
    return reference.Objective(
        kind=loss.kind,
        bounds=loss.ratio_bounds,
        cap=loss.cap,
        correction=loss.importance,
        floor=loss.importance_floor,
        stale=loss.stale_limit or 0.0,
        dual=loss.dual_clip,
        taus=(loss.tau_positive, loss.tau_negative),
        beta=loss.kl_beta,
        kl=loss.kl_gradient,
        longest=longest,
    )


def penalty_strengths(samples: Sequence[Sample], config: Config) -> list[list[float]]:
    """What the reference says of the step's tokens, before beta."""
    constraint = config.constraint
    return reference.penalised_tokens(
        [s.entropies[s.trained].tolist() for s in samples if s.entropies is not None],
        [s.actor_logprobs[s.trained].tolist() for s in samples],
        [s.advantage for s in samples],
        low_entropy=constraint.low_entropy,
        share=constraint.share,
        strengths=(constraint.high, constraint.low),
    )


def near_policy(truth: Truth, samples: Sequence[Sample], spread: float) -> Named:
    """fp32 log-probs about the policy's own, as a former policy or a sampler would have had."""
    generator = torch.Generator().manual_seed(11)
    exact = {s.name: truth.logprobs(s).detach() for s in samples}
    return {n: (x + spread * torch.randn(x.shape, generator=generator)).float() for n, x in exact.items()}


def sampled_nearby(truth: Truth, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as if a sampler close to the policy had drawn them."""
    near = near_policy(truth, samples, 0.3)
    return [replace(s, actor_logprobs=near[s.name].numpy()) for s in samples]
