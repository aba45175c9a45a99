"""Fills one order: decode while holding the lease, release it, score. Completions that end early are scored meanwhile.

Completion text exists only here, for the verifier; the learner gets token ids and numbers.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from actor.engines.engine import Completion, EndedCompletion, Engine
from actor.installer import EXACT, Allowed, Installer
from actor.scoring.scores import Scorer, Scores
from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.messages import FilledOrder, Finish, Group, GroupOrder, Order, Policy, Timings
from shared.process.lease import ComputeLease
from shared.process.trace import NO_TRACE, Trace
from shared.run.metrics import peak_memory_mb

Beat = Callable[[str], None]


class Rollout:
    """Fills orders with one engine and one scorer."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        lease: ComputeLease,
        text: Callable[[list[int]], str],
        canary: Allowed = EXACT,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.engine = engine
        self.installer = Installer(engine, canary)
        self.scorer = scorer
        self.lease = lease
        self.text = text
        self.trace = trace

    def fill(self, order: Order, policy: Policy, beat: Beat) -> FilledOrder:
        """Sample with exactly the policy version that the order names, then score."""
        with self.lease.hold("actor", lambda: beat("waiting for its turn")) as turn:
            start = time.monotonic()
            with self.trace.phase("install"):
                self.installer.install(policy, woken=self.engine.wake())
            scoring = OrderScoring(order.groups, self.scorer.begin(), self.text, beat)
            with self.trace.phase("decode"):
                completions = self.engine.generate(order.groups, order.sampling, scoring.on_ended)
            self.engine.sleep()
            decoded = time.monotonic()
        with self.trace.phase("score"):
            groups = scoring.groups(completions)
        card = turn.peak.mib()
        timings = Timings(
            wait_s=turn.waited_s,
            rollout_s=decoded - start,
            verify_s=time.monotonic() - decoded,
            memory_mb=peak_memory_mb(),
            card_allocated_mb=card["allocated"],
            card_reserved_mb=card["reserved"],
            card_driver_mb=card["driver"],
        )
        return FilledOrder(
            order_id=order.order_id,
            policy_version=policy.version,
            adapter_sha256=policy.sha256,
            groups=groups,
            timings=timings,
        )


class OrderScoring:
    """Scores the completions of one order: each goes to the verifier as soon as it has ended."""

    def __init__(
        self, orders: tuple[GroupOrder, ...], scores: Scores, text: Callable[[list[int]], str], beat: Beat
    ) -> None:
        self.orders = orders
        self.scores = scores
        self.text = text
        self.beat = beat
        self.prompts = [text(order.prompt_ids.tolist()) for order in orders]
        self.firsts = list(accumulate((len(order.seeds) for order in orders), initial=0))

    def on_ended(self, ended: Sequence[EndedCompletion]) -> None:
        """The engine calls this every few tokens, with the completions that have ended since."""
        self.beat("decoding")
        self.scores.add({self.firsts[one.group] + one.index: self.job(one) for one in ended})

    def job(self, ended: EndedCompletion) -> ScoreJob:
        ids = ended.completion.ids.tolist()
        return ScoreJob(
            prompt=self.prompts[ended.group],
            completion=self.text(ids),
            completion_ids=ids,
            truncated=ended.completion.finish is Finish.LENGTH,
            columns=self.orders[ended.group].columns,
        )

    def verdicts(self) -> list[Verdict]:
        """Wait for all verdicts, in the order of the completions."""
        return self.scores.verdicts(lambda: self.beat("scoring"))

    def groups(self, completions: list[list[Completion]]) -> tuple[Group, ...]:
        verdicts = iter(self.verdicts())
        return tuple(
            scored_group(order, group, [next(verdicts) for _ in group])
            for order, group in zip(self.orders, completions, strict=True)
        )


def scored_group(order: GroupOrder, completions: list[Completion], verdicts: list[Verdict]) -> Group:
    """The record that the learner gets."""
    entropies = [one.entropies for one in completions if one.entropies is not None]
    return Group(
        group_id=order.group_id,
        prompt_ids=order.prompt_ids,
        completion_ids=np.concatenate([one.ids for one in completions]),
        trained=None,
        lengths=tuple(len(one.ids) for one in completions),
        logprobs=np.concatenate([one.logprobs for one in completions]),
        entropies=np.concatenate(entropies) if len(entropies) == len(completions) else None,
        finishes=tuple(one.finish for one in completions),
        outcomes=tuple(verdict.outcome for verdict in verdicts),
        scores=tuple(verdict.score for verdict in verdicts),
        rewards={name: tuple(verdict.rewards[name] for verdict in verdicts) for name in verdicts[0].rewards},
    )
