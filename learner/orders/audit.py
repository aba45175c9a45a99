"""Checks a share of what actors claim: the learner computes log-probs and scores of some groups itself.

    first       of an actor with a share above 0, its first FIRST_GROUPS groups are checked
    then        one group of each 1 / share, at a random place among them that nobody can foresee. Both counts are for
                sampled groups and, once more, for greedy ones of evaluations
    log-probs   those of the ordered version, by the learner's policy. False if |d| is above the limits of the mismatch
                gate (learner/update/mismatch.py) times SLACK: a group has few tokens. Finds a wrong version too
    scores      outcomes and scores, by the run's own verifier in a process of its own (second_scores.py)

So a lie in every group is found with the first one, or within 2 / share - 1 groups if it begins later; a lie in a share
p of the groups within 1 / (p share) groups on average. False log-probs that the mismatch gate finds before are caught
in their step, which is audited as a whole then (audited.py): all groups of an actor together, without SLACK, since so
many tokens need none and somebody is to blame. Smaller ones than the limits are not found; the truncated importance
weight bounds what they do.

Left out on purpose: tokens that the policy did not sample but that have their true log-probs (the best of many
attempts, say), outcomes that are faults (a slow machine has more timeouts), rewards of functions, the teacher's
log-probs, and groups of an earlier start of the learner, since the journal does not say who filled an order.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from learner.objective.batch import TrainSample, all_samples
from learner.update.budget import NO_NOTES, Attempts
from learner.update.forward_pass import ForwardPass, whole
from learner.update.mismatch import Gap, Gate, gap_of
from learner.update.update import roundings
from protocol.messages import FilledOrder, Group, Order, Policy
from shared.model.adapter_file import adapter_bytes, install_adapter
from shared.process.card import Driver
from shared.process.lease import ComputeLease

FIRST_GROUPS = 8
SLACK = 2.0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An order as an actor filled it."""

    actor_id: str
    """Who filled it."""
    order: Order
    """What was ordered."""
    filled: FilledOrder
    """What came."""
    policy: Policy
    """Of the version that the order names."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A group to check."""

    claim: Claim
    """The filled order that it came in."""
    place: int
    """Its position there."""

    @property
    def actor_id(self) -> str:
        return self.claim.actor_id

    @property
    def group(self) -> Group:
        return self.claim.filled.groups[self.place]

    @property
    def is_greedy(self) -> bool:
        return self.claim.order.sampling.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Lie:
    """What an actor claimed and the learner does not find."""

    actor_id: str
    """Who."""
    evidence: str
    """In words, without a full stop."""


class Check(Protocol):
    """Finds false numbers."""

    def lies(self, chosen: Sequence[Chosen]) -> list[Lie]: ...


class Draws:
    """Which groups of an actor are checked."""

    def __init__(self, share: Callable[[str], float], rng: random.Random | None = None) -> None:
        """share: of an actor, by its id. rng: not one that somebody could foresee."""
        self.share = share
        self.rng = rng or random.SystemRandom()
        self.seen: Counter[tuple[str, bool]] = Counter()
        """Groups of each actor; greedy ones are counted apart, since nothing is known of its log-probs from them."""
        self.places: dict[tuple[str, bool], int] = {}
        """Which group of the present block is checked."""
        self.liars: set[str] = set()
        """All that they send until they are gone is checked."""

    def takes(self, actor_id: str, *, greedy: bool = False) -> bool:
        """Whether the next group of this actor is checked. greedy: whether its tokens are the most likely ones."""
        if actor_id in self.liars:
            return True
        share = self.share(actor_id)
        if share <= 0.0:
            return False
        block, which = math.ceil(1.0 / share), (actor_id, greedy)
        number = self.seen[which]
        self.seen[which] += 1
        if number < FIRST_GROUPS:
            return True
        place = (number - FIRST_GROUPS) % block
        if place == 0:
            self.places[which] = self.rng.randrange(block)
        return place == self.places[which]


class Audit:
    """All checks on a share of the groups."""

    def __init__(self, draws: Draws, checks: Sequence[Check], checks_of_refused: Sequence[Check] = ()) -> None:
        """checks_of_refused: the checks of a step that the mismatch gate has refused; none: the same ones."""
        self.draws = draws
        self.checks = checks
        self.checks_of_refused = checks_of_refused or checks

    def lies(self, claims: Iterable[Claim]) -> list[Lie]:
        """In the groups that are drawn; at most one of each actor."""
        drawn = [one for one in every_group(claims) if self.draws.takes(one.actor_id, greedy=one.is_greedy)]
        return self.found(drawn, self.checks)

    def all_lies(self, claims: Iterable[Claim]) -> list[Lie]:
        """In all groups of actors that are checked at all, of a refused step."""
        theirs = [one for one in every_group(claims) if self.draws.share(one.actor_id) > 0.0]
        return self.found(theirs, self.checks_of_refused)

    def found(self, chosen: Sequence[Chosen], checks: Sequence[Check]) -> list[Lie]:
        if not chosen:
            return []
        found = [lie for check in checks for lie in check.lies(chosen)]
        self.draws.liars |= {lie.actor_id for lie in found}
        return list({lie.actor_id: lie for lie in reversed(found)}.values())


def every_group(claims: Iterable[Claim]) -> list[Chosen]:
    return [Chosen(claim=claim, place=place) for claim in claims for place in range(len(claim.filled.groups))]


def by_actor(chosen: Sequence[Chosen]) -> list[list[Chosen]]:
    found: dict[str, list[Chosen]] = {}
    for one in chosen:
        found.setdefault(one.actor_id, []).append(one)
    return list(found.values())


class LogprobCheck:
    """Computes log-probs of the ordered version once more."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        gate: Callable[[], Gate],
        lease: ComputeLease,
        driver: Driver | None,
        newest: Callable[[], int | None],
        *,
        together: bool = False,
    ) -> None:
        """gate: a new one, with the present limits of the run. newest: the version that the policy has now; None
        if actors compute with other values. together: all groups of an actor at once, without SLACK."""
        self.forward_pass = forward_pass
        self.gate = gate
        self.lease = lease
        self.attempts = Attempts(forward_pass.budget, NothingToUndo(), NO_NOTES, driver)
        self.newest = newest
        self.together = together

    def lies(self, chosen: Sequence[Chosen]) -> list[Lie]:
        by_version: dict[int, list[Chosen]] = {}
        for one in chosen:
            # The most likely token has log-prob 0 at temperature 0, whatever the policy.
            if not one.is_greedy:
                by_version.setdefault(one.claim.policy.version, []).append(one)
        if not by_version:
            return []
        with self.lease.hold("learner", self.forward_pass.progress):
            return [
                lie
                for version, group in by_version.items()
                for lie in self.attempts.repeated("the audit", lambda v=version, g=group: self.under(v, g))
            ]

    def under(self, version: int, chosen: Sequence[Chosen]) -> list[Lie]:
        """The lies about one version."""
        if version == self.newest():
            return self.all_compared(chosen)
        adapter = self.forward_pass.policy.adapter
        current = adapter_bytes(adapter)
        try:
            install_adapter(adapter, chosen[0].claim.policy.adapter.tobytes())
            return self.all_compared(chosen)
        finally:
            install_adapter(adapter, current, finite=False)

    def all_compared(self, chosen: Sequence[Chosen]) -> list[Lie]:
        parts = by_actor(chosen) if self.together else [[one] for one in chosen]
        return [lie for part in parts for lie in self.compared(part)]

    def samples(self, one: Chosen) -> list[TrainSample]:
        return [whole(sample) for sample in all_samples(one.group, np.zeros(len(one.group.lengths)))]

    def compared(self, part: Sequence[Chosen]) -> list[Lie]:
        """Groups of one actor."""
        samples = [sample for one in part for sample in self.samples(one)]
        computed = self.forward_pass.recomputed(samples, part[0].claim.order.sampling.temperature)
        told = np.concatenate([sample.sample.actor_logprobs[sample.used] for sample in samples])
        gap, gate, slack = gap_of(np.abs(told - computed)), self.gate(), 1.0 if self.together else SLACK
        if gate.admits(eased(gap, slack), roundings(self.forward_pass, samples)):
            return []
        more = f" and {len(part) - 1} more" if len(part) > 1 else ""
        allowed = "these are" if self.together else f"{SLACK:g} times these are"
        evidence = (
            f"the log-probs of group {part[0].group.group_id}{more} differ from those of policy"
            f" {part[0].claim.policy.version} by {gap.mean:.3g} on average and {gap.p99:.3g} at the 99th percentile,"
            f" and {allowed} allowed: {gate.limits}"
        )
        return [Lie(actor_id=part[0].actor_id, evidence=evidence)]


class NothingToUndo:
    """A check leaves nothing behind."""

    def undo(self) -> None:
        """No gradient and no update."""


def eased(gap: Gap, slack: float) -> Gap:
    return replace(gap, mean=gap.mean / slack, p99=gap.p99 / slack)
