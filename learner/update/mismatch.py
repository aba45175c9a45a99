"""The mismatch gate: before a batch is learned from, actor and learner must agree about its tokens.

    d_t = log mu(o_t) - log pi(o_t),  the same tokens, the same version, before the optimizer's step
    refused: mean |d| or its 99th percentile is above its limit, or not a number
    limit:   max(floor of the compute type, factor * min(the same figure of r, what is believed)); it only rises
    r_t = log pi(o_t) among the others - log pi(o_t) alone,  both by the learner

Both compute with the same weights, so d is rounding alone; what is left of it is corrected by the truncated
importance weight. It is the cheapest end-to-end test of the whole system, and costs nothing: the gradient's own pass
has log pi. How much is normal depends on the model: in bf16 the mean of |d| is 0.0005 with a million parameters and
0.025 with 135 million. It also depends on the policy: one that is sure of nearly all tokens has nearly all of its
rounding in the few others. So in bf16 the learner measures its own, r, on the tokens in question, but only if d is
above the floor and above what was measured before; on some of them first, and on many before a run is stopped.
`loss.max_mismatch` replaces all of this by one limit of the percentile.

When the gate refuses, the log-probs are computed again under what is likely to have gone wrong, and the cause that
explains d is named. A wrong adapter that no guess explains is still told from rounding: then d is proportional to the
adapter's effect e, the difference between policy and base. Samples of an older version are expected to differ and are
not judged.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import TrainingStopped

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
"""What a sampler may have used instead."""
FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Wrong scales of the adapter, as multiples of the right one."""
EXPLAINED = 0.1
"""A cause explains d if it leaves a tenth of it."""
ROUNDING = 0.5
"""A difference in log-prob that bf16 or 4 bits often make; a wrong adapter mostly makes larger ones."""
RELATED = 4.0
"""Correlation of d with the adapter's effect, times the root of the count, above which chance cannot explain it."""
TIMES_MEAN, TIMES_P99 = 2.5, 3.0
"""Limits as multiples of the learner's own rounding. The mean varies less from batch to batch."""


log = logging.getLogger("learner")


class Mismatch(TrainingStopped):
    """Actor and learner disagree about the tokens of the same version."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """|d| over the tokens of a step."""

    mean: float
    """Nats."""
    p95: float
    """95th percentile."""
    p99: float
    """99th percentile."""
    largest: float
    """Maximum."""

    def __str__(self) -> str:
        return f"mean {self.mean:.3g}, p95 {self.p95:.3g}, p99 {self.p99:.3g}, maximum {self.largest:.3g}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest figures of |d| that are let through."""

    mean: float
    """Nats."""
    p99: float
    """99th percentile."""

    def admit(self, gap: Gap) -> bool:
        """False for NaN too."""
        return gap.mean <= self.mean and gap.p99 <= self.p99

    def at_least(self, rounding: Gap) -> "Limits":
        """Raised to what this much rounding allows, as far as it is believed."""
        return Limits(
            mean=max(self.mean, TIMES_MEAN * min(rounding.mean, BELIEVED.mean)),
            p99=max(self.p99, TIMES_P99 * min(rounding.p99, BELIEVED.p99)),
        )

    def __str__(self) -> str:
        mean = "" if math.isinf(self.mean) else f" and {self.mean:.3g} on average"
        return f"{self.p99:.3g} at the 99th percentile{mean}"


FP32 = Limits(mean=1e-3, p99=0.01)
"""At half a billion parameters, rounding is a hundredth of this."""
BF16 = Limits(mean=0.005, p99=0.05)
"""Ten times the rounding of the embedded model in the mean, four times in the percentile."""
BELIEVED = Limits(mean=0.1, p99=1.0)
"""Largest rounding of the learner's own that raises a limit. Beyond it, log-probs in bf16 say too little about the
policy. A model of 135 million parameters that was sure of nearly all tokens had 0.02 and 0.5."""
TOO_MUCH_ROUNDING = (
    "rounding: the learner's own log-probs of these tokens differ that much from one batch to another"
    " (use compute.dtype = fp32, or a smaller optimizer.lr)"
)
NF4_PLUGIN = Limits(mean=0.06, p99=0.5)
"""vLLM's plugin multiplies in bf16 whatever the learner computes in, so the learner's own rounding says nothing."""


class Gate:
    """The limits of a run. In bf16 they rise with the largest rounding that was measured, and are saved with a
    checkpoint: a run that was killed must not be stopped where it would have gone on."""

    def __init__(self, max_mismatch: float, floor: Limits) -> None:
        """max_mismatch: as configured, 0 for automatic limits."""
        self.measures = max_mismatch == 0.0 and floor == BF16
        self.limits = Limits(mean=math.inf, p99=max_mismatch) if max_mismatch else floor
        self.blurred = False
        """Whether the learner's own rounding was above BELIEVED when it was last measured."""

    def admits(self, gap: Gap, roundings: Iterable[Gap]) -> bool:
        """roundings: the learner's own on more and more of these tokens, each measured only if it decides."""
        measured = iter(roundings if self.measures else ())
        while not self.limits.admit(gap) and (rounding := next(measured, None)):
            self.blurred = not BELIEVED.admit(rounding)
            self.limits = self.limits.at_least(rounding)
            log.info("rounding of this policy: %s; allowed: %s", rounding, self.limits)
        return self.limits.admit(gap)

    def copy(self) -> "Gate":
        """With the limits as they are now, which rise apart from these."""
        other = Gate(0.0, self.limits)
        other.measures = self.measures
        return other

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"mean": self.limits.mean, "p99": self.limits.p99} if self.measures else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.measures:
            self.limits = Limits(mean=state["mean"], p99=state["p99"])


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The log-probs of a step, computed by both."""

    actor: np.ndarray
    """[n] log mu."""
    learner: np.ndarray
    """[n] log pi."""
    temperature: float
    """Of log pi."""


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """The learner's log-probs of the same tokens, each [n], had something gone wrong."""

    at_temperature: Callable[[float], np.ndarray]
    """With another temperature."""
    at_scale: Callable[[float], np.ndarray]
    """With the adapter's scale multiplied by this, at the temperature that was ordered; 0 is the base."""


def gap_of(mismatch: np.ndarray) -> Gap:
    """[n] |d| in four figures."""
    p95, p99 = np.quantile(mismatch, [0.95, 0.99])
    return Gap(mean=float(mismatch.mean()), p95=float(p95), p99=float(p99), largest=float(mismatch.max()))


def refusal(step: int, tokens: Tokens, gate: Gate, suspects: Suspects) -> Mismatch:
    """In words, with the likely cause."""
    gap = gap_of(np.abs(tokens.actor - tokens.learner))
    cause = likely_cause(tokens, gate.limits, suspects, blurred=gate.blurred)
    return Mismatch(
        f"Step {step + 1}: actor and learner differ in log-prob ({gap}; allowed: {gate.limits}) on"
        f" {len(tokens.actor)} tokens of the same policy version, and nothing was learned from them. Likely cause:"
        f" {cause}. Raise loss.max_mismatch only if you know why."
    )


def likely_cause(tokens: Tokens, limits: Limits, suspects: Suspects, *, blurred: bool = False) -> str:
    """What explains d best, and where nothing does, what d looks like. blurred: rounding may explain it."""
    base = suspects.at_scale(0.0)
    others = [t for t in TEMPERATURES if t != tokens.temperature]
    causes = {temperature_cause(t, tokens.temperature): suspects.at_temperature(t) for t in others}
    causes["a stale adapter: the actor's log-probs are those of the base without one"] = base
    causes |= {scale_cause(factor): suspects.at_scale(factor) for factor in FACTORS}
    left = {cause: gap_of(np.abs(tokens.actor - found)) for cause, found in causes.items()}
    nearest = min(left, key=lambda cause: left[cause].mean)
    gap = gap_of(np.abs(tokens.actor - tokens.learner))
    if explains(left[nearest], gap, limits):
        return nearest
    if blurred:
        return TOO_MUCH_ROUNDING
    difference = tokens.actor - tokens.learner
    if (difference > -min(limits.p99, ROUNDING) / 2).mean() >= 0.99 and difference.mean() > 0.0:
        return "truncation: the actor's log-probs are higher throughout, as under top-p, top-k or min-p"
    effect = tokens.learner - base
    if abs(related := correlation(difference, effect)) >= RELATED / math.sqrt(len(effect)):
        share = 1.0 + related * float(np.linalg.norm(difference) / np.linalg.norm(effect))
        return (
            f"a stale adapter, half of one, or a wrong scale: the actor's log-probs show about {share:.0%} of the"
            " adapter's effect"
        )
    if gap.p99 <= ROUNDING and abs(difference.mean()) <= gap.mean / 2:
        return (
            "another compute type, another quantisation of the base, or a stale adapter that differs by little: the"
            " differences are small and go both ways"
        )
    return "a stale adapter or half of one, or another base, on the actor's side"


def temperature_cause(found: float, ordered: float) -> str:
    return f"the actor samples at temperature {found:g} where {ordered:g} was ordered (not applied, or the model's own)"


def scale_cause(factor: float) -> str:
    # Early in a run, an older version looks like the current one at a smaller scale.
    what = "a wrong scale" if factor > 1.0 else "a stale adapter, half of one, or a wrong scale"
    return f"{what}: the actor applies its adapter {factor:g} times (lora.alpha or lora.rank)"


def explains(left: Gap, gap: Gap, limits: Limits) -> bool:
    """What is left is rounding, or a tenth of what there was; and it is much less than there was."""
    within = left.mean <= max(min(limits.mean, limits.p99), EXPLAINED * gap.mean)
    return within and left.p99 <= max(limits.p99, EXPLAINED * gap.p99) and left.mean <= gap.mean / 2


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Of two vectors about zero; 0 where one of them is zero or not finite."""
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms > 0.0 and math.isfinite(norms) else 0.0
