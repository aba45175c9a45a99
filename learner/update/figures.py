"""Statistics of an update: of a micro-batch, of a pass, of a step; and how those of a micro-batch reach other ranks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from learner.objective.loss import KlTerms, LossTerms
from learner.update.gradient_check import Refusal
from learner.update.gradient_noise import GradientNoise
from learner.update.placement.placement import Form, Tensors


@dataclass(frozen=True, kw_only=True)
class PassPart:
    """One micro-batch of a pass, done."""

    terms: LossTerms
    """The objective and its per-token figures."""
    kl: KlTerms
    """To the base."""
    penalty: KlTerms
    """Of the penalised tokens."""
    mismatch: torch.Tensor
    """[u], of all used tokens."""
    logprobs: torch.Tensor
    """[u] log pi_old."""
    used: Mapping[str, int]
    """Used tokens of each sample, by its name, in their order."""
    entropies: torch.Tensor
    """[u], or [0] if the engine told those of all samples."""
    weight_sum: float
    """Of the objective's tokens."""

    @property
    def loss(self) -> torch.Tensor:
        return (self.terms.loss + self.kl.loss + self.penalty.loss).detach()


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The sum over the micro-batches of a pass."""

    parts: list[PassPart]
    """What each of them said."""
    loss: float
    """Sum of their losses."""
    norm: float
    """Of the sum of their gradients, before clipping."""
    refusal: Refusal | None
    """Why it may not be used, if so."""
    noise: GradientNoise | None
    """If it was measured."""
    ewc_penalty: float
    """Part of the loss."""

    @property
    def has_objective(self) -> bool:
        """Whether a token carries gradient of the objective, not only of a KL. A minibatch may have no selected token,
        or only masked samples."""
        return any(bool(part.terms.shares.any()) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What one step did, or one of its updates. With minibatches, figures of a pass are the means over its updates."""

    loss: float
    """Of the last pass, all terms."""
    grad_norm: float
    """Of the last pass, before clipping."""
    lr: float
    """Rate used."""
    ratios: np.ndarray
    """[n] over all passes."""
    clipped: np.ndarray
    """[n] bool over all passes."""
    stale: np.ndarray
    """[n] bool over all passes: left out because the policy has moved away from a sample that did badly."""
    importance: np.ndarray
    """[n] pi_old / mu of the objective's tokens, before it is truncated or masked."""
    kl: np.ndarray
    """[k] of the first pass; nothing where there is no KL term."""
    mismatch: np.ndarray
    """[u] |learner - actor log-prob| before the first update."""
    logprobs: Mapping[str, np.ndarray]
    """[used tokens] log pi before the first update, by name of the sample."""
    entropies: np.ndarray
    """[u] nats, of the used tokens in the first pass; without those of micro-batches whose engine told them all."""
    weight_sum: float
    """Sum of the weights of all selected tokens: the mask's share of the loss's divisor."""
    constraint_loss: float
    """What penalised tokens added to the loss of the last pass."""
    penalised_kl: np.ndarray
    """[m] k3 of the penalised tokens to their reference, in the last pass."""
    noise: GradientNoise | None
    """Of the first pass; None where it is not measured."""
    ewc_penalty: float
    """In the last pass; 0 where there is no earlier stage to stay close to."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of a step's batch."""

    stats: UpdateStats | None = None
    """None if no update was applied: no group taught anything and there is no KL, or the batch was quarantined."""
    quarantined: int = 0
    """Groups that were quarantined."""


def gathered(gradient: Gradient, lr: float) -> UpdateStats:
    """After all micro-batches: each figure comes from the device at once."""
    parts = gradient.parts

    def column(tensors: list[torch.Tensor]) -> np.ndarray:
        return torch.cat(tensors).cpu().numpy()

    return UpdateStats(
        loss=gradient.loss,
        grad_norm=gradient.norm,
        lr=lr,
        ratios=column([part.terms.ratios for part in parts]),
        clipped=column([part.terms.clipped for part in parts]),
        stale=column([part.terms.stale for part in parts]),
        importance=column([part.terms.importance for part in parts]),
        kl=column([part.kl.kl for part in parts]),
        mismatch=column([part.mismatch for part in parts]),
        logprobs=by_sample(parts),
        entropies=column([part.entropies for part in parts]),
        weight_sum=sum(part.weight_sum for part in parts),
        constraint_loss=sum(torch.stack([part.penalty.loss.detach() for part in parts]).tolist()),
        penalised_kl=column([part.penalty.kl for part in parts]),
        noise=gradient.noise,
        ewc_penalty=gradient.ewc_penalty,
    )


def by_sample(parts: Sequence[PassPart]) -> dict[str, np.ndarray]:
    counts = {name: count for part in parts for name, count in part.used.items()}
    logprobs = torch.cat([part.logprobs for part in parts]).cpu().numpy()
    return dict(zip(counts, np.split(logprobs, np.cumsum(list(counts.values()))[:-1]), strict=True))


def of_step(updates: Sequence[UpdateStats], minibatches: int) -> UpdateStats:
    """Of all updates of a step, in their order."""
    first, last = updates[:minibatches], updates[-minibatches:]

    def mean(name: str) -> float:
        return sum(getattr(one, name) for one in last) / minibatches

    def column(name: str, among: Sequence[UpdateStats]) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in among])

    return UpdateStats(
        loss=mean("loss"),
        grad_norm=mean("grad_norm"),
        lr=updates[-1].lr,
        ratios=column("ratios", updates),
        clipped=column("clipped", updates),
        stale=column("stale", updates),
        importance=column("importance", first),
        kl=column("kl", first),
        mismatch=column("mismatch", first),
        logprobs={name: row for one in first for name, row in one.logprobs.items()},
        entropies=column("entropies", first),
        weight_sum=mean("weight_sum"),
        constraint_loss=mean("constraint_loss"),
        penalised_kl=column("penalised_kl", last),
        noise=updates[0].noise,
        ewc_penalty=mean("ewc_penalty"),
    )


TERMS = {"terms": LossTerms, "kl": KlTerms, "penalty": KlTerms}
"""Parts of it that have nothing but tensors."""
OWN = ("mismatch", "logprobs", "entropies")


def pack_part(part: PassPart) -> Tensors:
    """For another rank."""
    inner = {
        f"{name}.{field.name}": getattr(getattr(part, name), field.name)
        for name, kind in TERMS.items()
        for field in fields(kind)
    }
    used = np.frombuffer(json.dumps(dict(part.used)).encode(), np.uint8)
    facts = {
        "used": torch.from_numpy(used.copy()),
        "weight_sum": torch.tensor(part.weight_sum, dtype=torch.float64),
    }
    return inner | {name: getattr(part, name) for name in OWN} | facts


def unpack_part(tensors: Tensors) -> PassPart:
    def of(name: str) -> dict[str, torch.Tensor]:
        return {field.name: tensors[f"{name}.{field.name}"] for field in fields(TERMS[name])}

    return PassPart(
        terms=LossTerms(**of("terms")),
        kl=KlTerms(**of("kl")),
        penalty=KlTerms(**of("penalty")),
        mismatch=tensors["mismatch"],
        logprobs=tensors["logprobs"],
        entropies=tensors["entropies"],
        used=json.loads(tensors["used"].numpy().tobytes()),
        weight_sum=float(tensors["weight_sum"]),
    )


PASS_PART = Form(pack=pack_part, unpack=unpack_part)
