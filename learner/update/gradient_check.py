"""Which gradients may be used, by the norms of earlier ones, and the fault that is reported otherwise.

    refused: loss or norm not finite;  norm > L (absolute);  norm > F x median of the last W norms, once there are 8

The norms are those before clipping, of updates that were applied and had a token that teaches and a norm above 0. They
decide what is trained on, so they are part of a checkpoint: a resumed or replayed run judges every step as the
undisturbed one did.

A fault names the sample that caused it. The loss is a sum over tokens with weights computed before, so the gradient of
the step is the sum of its samples' gradients: each sample's own gradient shows whether it is not finite or too large.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from shared.config.tree import GuardConfig
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
        return suspect(self.findings)


def suspect(findings: Sequence[Finding]) -> Finding:
    broken = [finding for finding in findings if not finding.finite]
    return broken[0] if broken else max(findings, key=lambda finding: finding.grad_norm)


def sentence(step: int, refusal: Refusal, findings: Sequence[Finding]) -> str:
    who = suspect(findings)
    return (
        f"Step {step + 1}: {refusal.what}; the suspect is sample {who.sample}"
        f" (alone: loss {who.loss:.4g}, gradient norm {who.grad_norm:.4g}). The optimizer was not stepped."
    )


FEWEST = 8
"""Norms before their median says anything."""


class Norms:
    """The gradient norms of the last updates."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=config.spike_window)

    def refusal(self, loss: float, norm: float) -> Refusal | None:
        """Why this gradient is not to be used, if so."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            return Refusal(kind="not finite", what=f"loss {loss:.4g} and gradient norm {norm:.4g} are not both finite")
        limit, relative = self.config.grad_norm_limit, self.relative_limit()
        if limit and norm > limit:
            what = f"the gradient norm is {norm:.4g} and guard.grad_norm_limit is {limit:g}"
            return Refusal(kind="spike", what=what)
        if relative and norm > relative:
            what = (
                f"the gradient norm is {norm:.4g}, more than guard.spike_factor = {self.config.spike_factor:g} times"
                f" the median of the last {len(self.recent)} ({median(self.recent):.4g})"
            )
            return Refusal(kind="spike", what=what)
        return None

    def relative_limit(self) -> float:
        """The bound by the steps before; 0 for none."""
        enough = len(self.recent) >= min(FEWEST, self.config.spike_window)
        return self.config.spike_factor * median(self.recent) if enough else 0.0

    def applied(self, norm: float) -> None:
        self.recent.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; a float's shortest form gives the same float back."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=self.config.spike_window)
