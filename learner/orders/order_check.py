"""Whether an answer may be recorded: it is the one that was ordered, and an update can learn from it.

    policy       the version and the bytes ordered
    groups       ids, prompts and numbers of samples as ordered
    samples      1 <= tokens <= max_new_tokens, 0 <= id < vocabulary
    verdicts     the rewards that the run asks for; score 0 in a fault, and 1 or 0 from a built-in verifier
    numbers      protocol/validate.py

All of it is checked before the journal, for what is there is met again by every later life of the run. Left out on
purpose: whether tokens, log-probs and scores are true. The mismatch gate sees false log-probs once the update has its
own; a step that fails there can be sampled again (learner/durable/resample.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from learner.orders.orders import fills
from protocol.errors import ProtocolError
from protocol.messages import FilledOrder, Group, Order, Outcome, Policy
from protocol.plain_text import one_line
from protocol.validate import check_groups, refuse
from shared.config.data import VerifierConfig
from shared.config.named_rewards import weights

FAULTS = (Outcome.TIMEOUT, Outcome.ERROR, Outcome.ABSTAIN)
"""Nothing was found out, so there is no score."""


@dataclass(frozen=True, kw_only=True)
class OrderCheck:
    """What every answer of a run must fit."""

    vocabulary: int
    """Rows of the model's head; a token id is below it."""
    rewards: frozenset[str]
    """Names of the further rewards."""
    built_in: bool
    """Whether a verifier of ours judges, which knows 1 and 0 alone."""

    @classmethod
    def of(cls, verifier: VerifierConfig, vocabulary: int) -> Self:
        """For a run that is verified so."""
        return cls(
            vocabulary=vocabulary,
            rewards=frozenset(weights(verifier.rewards)),
            built_in=verifier.kind != "callable",
        )

    def fault(self, order: Order, policy: Policy, groups: FilledOrder) -> str:
        """What is wrong with an answer, in a sentence; empty if nothing."""
        if (groups.policy_version, groups.adapter_sha256) != (policy.version, policy.sha256):
            return (
                f"Order {order.order_id} was sampled from policy {groups.policy_version}"
                f" ({groups.adapter_sha256[:12]}), ordered was {policy.version} ({policy.sha256[:12]})."
            )
        if not fills(order, groups.groups):
            return f"The groups of order {order.order_id} are not the ones that were ordered."
        try:
            check_groups(groups)
            for group in groups.groups:
                refuse(
                    group, group.completion_ids >= self.vocabulary, f"a token id that is not below {self.vocabulary}"
                )
        except ProtocolError as error:
            return str(error)
        found = (self.group_fault(group, order.sampling.max_new_tokens) for group in groups.groups)
        return next(filter(None, found), "")

    def group_fault(self, group: Group, cap: int) -> str:
        """Of one group whose numbers are in order."""
        if group.rewards.keys() != self.rewards:
            return (
                f"Group {group.group_id} came with the rewards {shown(group.rewards)} and the run asks for"
                f" {shown(self.rewards)}; start the actor with this run's config.json."
            )
        lengths = np.array(group.lengths)
        if not lengths.all():
            return f"Group {group.group_id}, sample {int(lengths.argmin())} has no token."
        if lengths.max() > cap:
            return (
                f"Group {group.group_id}, sample {int(lengths.argmax())} has {lengths.max()} tokens and {cap} were"
                " ordered at most."
            )
        pairs = zip(group.outcomes, group.scores, strict=True)
        wrong = next((number for number, pair in enumerate(pairs) if not self.scored(*pair)), None)
        if wrong is not None:
            return (
                f"Group {group.group_id}, sample {wrong} has the outcome '{group.outcomes[wrong]}' and a score of"
                f" {group.scores[wrong]:g}, which do not go together."
            )
        return ""

    def scored(self, outcome: Outcome, score: float) -> bool:
        """Whether this score can belong to this outcome."""
        if self.built_in:
            return score == (outcome is Outcome.CORRECT)
        return score == 0.0 or outcome not in FAULTS


def shown(names: Iterable[str]) -> str:
    """Names that a peer may have chosen, sorted."""
    return one_line(str(sorted(names)))
