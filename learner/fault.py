"""An update that must not be applied: what was found, in which step, and which sample is to blame.

A sample's share is its gradient alone: the loss is a sum over tokens with weights settled before, so the gradient of
the step is the sum of its samples' gradients, and one that is not finite or out of proportion shows by itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shared.errors import TrainingStopped

Kind = Literal["not finite", "spike"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a gradient is not to be used."""

    kind: Kind
    """`not finite`: loss or norm. `spike`: the norm is beyond its bound."""
    what: str
    """In words, with the figures."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one sample does alone."""

    sample: str
    """Group id and index."""
    loss: float
    """Its share of the loss."""
    grad_norm: float
    """Of its share of the gradient."""

    @property
    def finite(self) -> bool:
        """Whether both are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class NumericalFault(TrainingStopped):
    """The optimizer was not stepped."""

    def __init__(
        self, step: int, refusal: Refusal, findings: Sequence[Finding], old: Mapping[str, torch.Tensor]
    ) -> None:
        """old: log-probs before the first pass, by sample; empty where there is one pass."""
        super().__init__(sentence(step, refusal, findings))
        self.step = step
        self.refusal = refusal
        self.findings = tuple(findings)
        self.old = old

    @property
    def suspect(self) -> Finding:
        """Who is to blame."""
        return suspect(self.findings)


def suspect(findings: Sequence[Finding]) -> Finding:
    """The first that is not finite, else the one with the largest gradient."""
    broken = [finding for finding in findings if not finding.finite]
    return broken[0] if broken else max(findings, key=lambda finding: finding.grad_norm)


def sentence(step: int, refusal: Refusal, findings: Sequence[Finding]) -> str:
    """Step, what, who."""
    who = suspect(findings)
    return (
        f"Step {step + 1}: {refusal.what}; the suspect is sample {who.sample}"
        f" (alone: loss {who.loss:.4g}, gradient norm {who.grad_norm:.4g}). The optimizer was not stepped."
    )
