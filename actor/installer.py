"""Installs an adapter in the engine and verifies it before anything is sampled from it.

    check sha256 of the bytes -> engine.install -> log-probs of the canary -> compare with the learner's log-probs

In fp32, and in bf16 with the learner's own kernels, the log-probs agree to 1e-3 each. Other bf16 kernels round
differently. If a difference is larger, the mean of all decides instead, and its limit is a multiple of the engine's own
rounding: how much the same log-probs change when more tokens follow. That is measured only when it decides.

Without this, a wrong installation (an old or half-copied adapter, a damaged base, another scale) would show only at the
learner's mismatch gate, after the completions of a step were drawn from the wrong policy.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protocol.messages import Policy
from shared.errors import DamageError, TrainingStopped
from shared.model.adapter_file import digest
from shared.run.failpoints import reach

TOLERANCE = 1e-3
"""Two fp32 passes over the same weights differ by much less, in any order of summation."""
FLOOR = 0.02
"""Mean difference in bf16 that is let through whatever the engine's own rounding is."""
TIMES = 2.5
"""The limit of the mean as a multiple of the engine's own rounding."""
LONGER = 3
"""The row that the engine's rounding is measured with, as a multiple of the canary."""

REMEDY = (
    "Use `resume`; if this happens again, this machine's memory or its cached base is damaged, or actor and learner run"
    " different code."
)

log = logging.getLogger("actor")


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Differences between the engine's log-probs and the learner's that are rounding."""

    largest: float = TOLERANCE
    """Of one log-prob."""
    measured: bool = False
    """Above it, the mean may be what the engine's own rounding allows."""


EXACT = Allowed()


class Installable(Protocol):
    """An engine, as far as adapters go."""

    def install(self, version: int, adapter: bytes) -> None: ...

    def logprobs(self, ids: np.ndarray) -> np.ndarray: ...


class CanaryMismatch(TrainingStopped):
    """The engine's policy is not the one that the learner published."""


class Installer:
    """Installs policies in one engine, and knows which adapter is installed."""

    def __init__(
        self, engine: Installable, allowed: Allowed = EXACT, place: str = "this actor", remedy: str = REMEDY
    ) -> None:
        """place: where the engine computes; remedy: what to do if it computes other values."""
        self.engine = engine
        self.allowed = allowed
        self.place = place
        self.remedy = remedy
        self.verified: dict[int, np.ndarray] = {}
        """The canary of version 0, which is the base's, and of the version that was verified last."""
        self.installed = ""
        """sha256 of the installed adapter; empty if none is, or if the last one failed a check."""

    def install(self, policy: Policy, *, woken: bool) -> None:
        """Install this policy unless it is installed. woken: the engine reloaded its weights, so verify them again."""
        # Compared by digest: after a restart the learner may use a version number again for other bytes.
        if policy.sha256 != self.installed:
            self.load(policy)
            self.verify(policy)
        elif woken:
            self.verify(policy)

    def forget(self) -> None:
        """The engine has lost what was installed."""
        self.installed = ""

    def load(self, policy: Policy) -> None:
        """Give the engine the adapter's bytes. DamageError if they are not the bytes that the learner sent."""
        data = policy.adapter.tobytes()
        if (found := digest(data)) != policy.sha256:
            raise DamageError(
                f"The adapter of policy {policy.version} has sha256 {found[:12]} here and {policy.sha256[:12]} at the"
                " learner: bits changed on the way or in this machine's memory; start this actor again."
            )
        self.installed = ""
        reach("before actor installs", policy)
        self.engine.install(policy.version, data)
        reach("after actor installs", policy)
        self.installed = policy.sha256

    def verify(self, policy: Policy) -> None:
        """Compare the canary. CanaryMismatch if it differs too much; a policy without a canary is not verified."""
        expected = policy.canary_logprobs
        if not len(expected):
            return
        found = self.engine.logprobs(policy.canary_ids)
        if excess := self.excess(policy.canary_ids, found, expected):
            self.installed = ""
            noise = self.noise(policy.canary_ids, found)
            cause = probable_cause(found, expected, self.verified, noise)
            raise CanaryMismatch(
                f"Policy {policy.version} was installed, but {self.place} computes other values: the canary's log-probs"
                f" are {listed(found)} here and {listed(expected)} at the learner ({excess}). Nothing was sampled from"
                f" it.{cause} {self.remedy}"
            )
        base = {version: kept for version, kept in self.verified.items() if version == 0}
        self.verified = base | {policy.version: expected}

    def excess(self, ids: np.ndarray, found: np.ndarray, expected: np.ndarray) -> str:
        """By how much they differ and what was allowed; empty if they agree."""
        if found.shape != expected.shape:
            return f"they are {len(found)} and {len(expected)}"
        difference = np.abs(found - expected)
        worst, mean = float(difference.max()), float(difference.mean())
        # "not >": NaN does not agree either.
        if worst <= self.allowed.largest:
            return ""
        if not self.allowed.measured:
            return f"they differ by {worst:.3g}, guard.canary_tolerance allows {self.allowed.largest:g}"
        limit = self.noise(ids, found)
        log.debug("canary: mean difference %.2g, %.2g allowed", mean, limit)
        return "" if mean <= limit else f"they differ by {mean:.3g} in the mean, rounding allows {limit:.3g}"

    def noise(self, ids: np.ndarray, found: np.ndarray) -> float:
        """The mean difference up to which two are the same."""
        return max(FLOOR, TIMES * self.rounding(ids, found)) if self.allowed.measured else self.allowed.largest

    def rounding(self, ids: np.ndarray, found: np.ndarray) -> float:
        """Mean difference of the same log-probs when other tokens follow. 0 if they are no numbers."""
        longer = self.engine.logprobs(np.concatenate([ids, np.tile(ids, LONGER - 1)]))
        difference = np.abs(longer[: len(found)] - found).mean() if np.isfinite(found).all() else 0.0
        return float(np.nan_to_num(difference))


def probable_cause(found: np.ndarray, expected: np.ndarray, verified: Mapping[int, np.ndarray], noise: float) -> str:
    """From what earlier versions gave. noise: the mean difference up to which two are the same."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return ""
    distance = float(np.abs(found - expected).mean())
    for version, known in sorted(verified.items(), reverse=True):
        if known.shape == found.shape and float(np.abs(found - known).mean()) < min(noise, distance / 4):
            of_base = ", the base without an adapter" if version == 0 else ""
            return f" They are those of policy {version}{of_base}: the adapter was not installed."
    base = verified.get(0)
    if base is None or not (effect := expected - base).any():
        return ""
    share = float((found - base) @ effect / (effect @ effect))
    return f" They show about {share:.0%} of the adapter's effect: half an adapter, an old one, or a wrong scale."


def listed(values: np.ndarray) -> str:
    return f"[{', '.join(f'{value:.5g}' for value in values)}]"
