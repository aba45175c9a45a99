"""Whether a filled order may be recorded: it is what was ordered, and an update can learn from it.

    policy       version and digest as ordered
    groups       ids, prompts and number of completions as ordered
    completions  1 <= tokens <= max_new_tokens, 0 <= id < vocabulary
    outcomes     the rewards that the run asks for; score 0 in a fault, and 1 or 0 from a built-in verifier
    teacher      its log-probs where they were ordered
    names        of what reward functions logged: printable
    numbers      protocol/validate.py

All of this is checked before the order goes into the journal, because every later start of the run reads it from there.
Left out on purpose: whether tokens, log-probs and scores are true. The mismatch gate finds false log-probs once the
update has computed its own, and a step that fails there can be sampled again (learner/durable/resample.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from learner.orders.orders import fills
from protocol.errors import ProtocolError
from protocol.messages import FilledOrder, Group, Order, Outcome, Policy
from protocol.plain_text import for_log
from protocol.validate import check_groups
from shared.config.data import VerifierConfig
from shared.config.named_rewards import weights

CORRECT = Outcome.CORRECT
FAULTS = (Outcome.TIMEOUT, Outcome.ERROR, Outcome.ABSTAIN)
"""The verifier came to no result, so the score must be 0."""


@dataclass(frozen=True, kw_only=True)
class OrderCheck:
    """What every filled order of a run must satisfy."""

    vocabulary: int
    """Rows of the model's head. Token ids must be smaller."""
    rewards: frozenset[str]
    """Names of the rewards besides the verifier's score."""
    built_in: bool
    """Whether the verifier is built in, so that a score is 1 or 0."""

    @classmethod
    def of(cls, verifier: VerifierConfig, vocabulary: int) -> Self:
        return cls(
            vocabulary=vocabulary,
            rewards=frozenset(weights(verifier.rewards)),
            built_in=verifier.kind not in ("callable", "environment"),
        )

    def fault(self, order: Order, policy: Policy, filled: FilledOrder) -> str:
        """One sentence about the first fault; empty if there is none."""
        if (filled.policy_version, filled.adapter_sha256) != (policy.version, policy.sha256):
            return (
                f"Order {order.order_id} was sampled from policy {filled.policy_version}"
                f" ({filled.adapter_sha256[:12]}), ordered was {policy.version} ({policy.sha256[:12]})."
            )
        if not fills(order, filled.groups):
            return f"The groups of order {order.order_id} are not the ones that were ordered."
        if order.teacher and any(group.teacher is None for group in filled.groups):
            return f"The groups of order {order.order_id} came without the log-probs of the teacher."
        try:
            check_groups(filled, self.vocabulary)
        except ProtocolError as error:
            return str(error)
        found = (self.group_fault(group, order.sampling.max_new_tokens) for group in filled.groups)
        return next(filter(None, found), "") or self.name_fault(filled)

    def name_fault(self, filled: FilledOrder) -> str:
        """The same for the names that its reward functions made up."""
        names = {name for group in filled.groups for name in (*group.metrics, *group.extras)}
        if wrong := {name for name in names if not name.isprintable()}:
            return (
                f"Order {filled.order_id} came with the names {shown(wrong)} of logged values; log under names of"
                " printable characters."
            )
        return ""

    def group_fault(self, group: Group, cap: int) -> str:
        """The same for one group that has passed check_groups."""
        if group.rewards.keys() != self.rewards:
            return (
                f"Group {group.group_id} came with the rewards {shown(group.rewards)} and the run asks for"
                f" {shown(self.rewards)}; start the actor with this run's config.json."
            )
        lengths = group.lengths
        if not all(lengths):
            return f"Group {group.group_id}, completion {lengths.index(0)} has no token."
        if (most := max(lengths)) > cap:
            return (
                f"Group {group.group_id}, completion {lengths.index(most)} has {most} tokens and {cap} were"
                " ordered at most."
            )
        if not all(possible := self.possible(group)):
            wrong = possible.index(False)
            return (
                f"Group {group.group_id}, completion {wrong} has the outcome '{group.outcomes[wrong]}' and a score of"
                f" {group.scores[wrong]:g}, which do not go together."
            )
        return ""

    def possible(self, group: Group) -> list[bool]:
        """[G] whether outcome and score go together."""
        pairs = zip(group.outcomes, group.scores, strict=True)
        if self.built_in:
            return [score == (outcome is CORRECT) for outcome, score in pairs]
        return [score == 0.0 or outcome not in FAULTS for outcome, score in pairs]


def shown(names: Iterable[str]) -> str:
    """Sorted, and safe to print: a peer may have chosen the names."""
    return for_log(str(sorted(names)))
