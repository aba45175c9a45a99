"""One order, filled: decode under the lease, release it, score.

Completion text exists here alone, for the verifier; what goes to the learner is ids and numbers.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from actor.engine import Completion, Engine
from actor.installer import TOLERANCE, Installer
from actor.verdict import ScoreJob, Verdict
from protocol.messages import Finish, Group, GroupOrder, Groups, Order, Policy, Timings
from shared.memory import peak_memory_mb
from shared.turns import Turns

Beat = Callable[[str], None]


class Scorer(Protocol):
    """Scores completions in order; score_pool.py in real life."""

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """One verdict a job."""
        ...


class Rollout:
    """Fills orders with one engine and one scorer."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        turns: Turns,
        text: Callable[[list[int]], str],
        canary_tolerance: float = TOLERANCE,
    ) -> None:
        self.engine = engine
        self.installer = Installer(engine, canary_tolerance)
        self.scorer = scorer
        self.turns = turns
        self.text = text

    def fill(self, order: Order, policy: Policy, beat: Beat) -> Groups:
        """Sample from exactly the version the order names, then score."""
        with self.turns.hold("actor") as wait_s:
            start = time.monotonic()
            self.installer.install(policy, woken=self.engine.wake())
            completions = self.engine.generate(order.groups, order.sampling, lambda: beat("decoding"))
            self.engine.sleep()
            decoded = time.monotonic()
        groups = self.score(order.groups, completions, beat)
        timings = Timings(
            wait_s=wait_s,
            rollout_s=decoded - start,
            verify_s=time.monotonic() - decoded,
            memory_mb=peak_memory_mb(),
        )
        return Groups(
            order_id=order.order_id,
            policy_version=policy.version,
            adapter_sha256=policy.sha256,
            groups=groups,
            timings=timings,
        )

    def score(
        self, orders: tuple[GroupOrder, ...], completions: list[list[Completion]], beat: Beat
    ) -> tuple[Group, ...]:
        """All samples in one call, so that a user's reward function sees the whole batch."""
        jobs = [job for order, samples in zip(orders, completions, strict=True) for job in self.jobs_of(order, samples)]
        verdicts = iter(self.scorer.score(jobs, lambda: beat("scoring")))
        return tuple(
            scored_group(order, samples, [next(verdicts) for _ in samples])
            for order, samples in zip(orders, completions, strict=True)
        )

    def jobs_of(self, order: GroupOrder, samples: list[Completion]) -> list[ScoreJob]:
        """What the verifier sees of one group."""
        prompt = self.text(order.prompt_ids.tolist())
        return [
            ScoreJob(
                prompt=prompt,
                completion=self.text(sample.ids.tolist()),
                completion_ids=sample.ids.tolist(),
                truncated=sample.finish is Finish.LENGTH,
                columns=order.columns,
            )
            for sample in samples
        ]


def scored_group(order: GroupOrder, samples: list[Completion], verdicts: list[Verdict]) -> Group:
    """Samples and verdicts as one record of the wire."""
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    return Group(
        group_id=order.group_id,
        prompt_ids=order.prompt_ids,
        completion_ids=np.concatenate([sample.ids for sample in samples]),
        lengths=tuple(len(sample.ids) for sample in samples),
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        entropies=np.concatenate(entropies) if len(entropies) == len(samples) else None,
        finishes=tuple(sample.finish for sample in samples),
        outcomes=tuple(verdict.outcome for verdict in verdicts),
        scores=tuple(verdict.score for verdict in verdicts),
        rewards={name: tuple(verdict.rewards[name] for verdict in verdicts) for name in verdicts[0].rewards},
    )
