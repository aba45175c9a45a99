"""Installs adapters, and proves that each went in before anything is sampled from it.

    bytes match their sha256 -> engine.install -> canary scored -> within the tolerance of the learner's log-probs

A swap that went wrong (a stale or half-copied adapter, a damaged base, another scale) would otherwise show only in the
learner's mismatch gate, after a step's samples were drawn from the wrong policy.
"""

import logging

import numpy as np

from actor.engines.engine import Engine
from protocol.messages import Policy
from shared.errors import DamageError, TrainingStopped
from shared.model.adapter_file import digest
from shared.run.failpoints import reach

TOLERANCE = 1e-3
"""Two fp32 passes over the same weights, whatever the order of their sums, agree far better."""

log = logging.getLogger("actor")


class CanaryMismatch(TrainingStopped):
    """The engine does not hold what the learner published."""


class Installer:
    """What an engine holds, and how it came in."""

    def __init__(self, engine: Engine, tolerance: float = TOLERANCE) -> None:
        self.engine = engine
        self.tolerance = tolerance
        self.installed = ""

    def install(self, policy: Policy, *, woken: bool) -> None:
        """Make the engine hold this policy. woken: its weights have been away, so they must be proved again."""
        # By digest: a learner that was restarted may give one version number to other bytes.
        if policy.sha256 != self.installed:
            self.put_in(policy)
            self.prove(policy)
        elif woken:
            self.prove(policy)

    def put_in(self, policy: Policy) -> None:
        """The bytes, if they are still what the learner sent."""
        data = policy.adapter.tobytes()
        if (found := digest(data)) != policy.sha256:
            raise DamageError(
                f"The adapter of policy {policy.version} has sha256 {found[:12]} here and {policy.sha256[:12]} at the"
                " learner: bits changed on the way or in this machine's memory; start this actor anew."
            )
        self.installed = ""
        reach("before actor installs", policy)
        self.engine.install(policy.version, data)
        reach("after actor installs", policy)
        self.installed = policy.sha256

    def prove(self, policy: Policy) -> None:
        """Score the canary; a policy without one is taken as it is."""
        expected = policy.canary_logprobs
        if not len(expected):
            return
        found = self.engine.score(policy.canary_ids)
        worst = float(np.abs(found - expected).max()) if found.shape == expected.shape else np.inf
        log.debug("canary of policy %d differs by %.2g", policy.version, worst)
        if not worst <= self.tolerance:
            self.installed = ""
            raise CanaryMismatch(mismatch(policy.version, found, expected, worst, self.tolerance))


def mismatch(version: int, found: np.ndarray, expected: np.ndarray, worst: float, tolerance: float) -> str:
    """Both lists, and what to do."""
    return (
        f"Policy {version} is not what this actor holds after installing it: the canary's log-probs are {listed(found)}"
        f" here and {listed(expected)} at the learner (they differ by {worst:.3g}, guard.canary_tolerance allows"
        f" {tolerance:g}). Nothing was sampled from it. Use `resume`; if it comes back, this machine's memory or its"
        " cached base is damaged, or actor and learner run different code."
    )


def listed(values: np.ndarray) -> str:
    """`[-1.25, -0.5]`"""
    return f"[{', '.join(f'{value:.5g}' for value in values)}]"
