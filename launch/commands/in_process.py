"""The actor's parts in this process, without a wire.

Orders filled in this process: engine and verifier of the actor, no wire, no journal. For `eval` and the tests.

How the wrong answers of an evaluation vote, heard where they are scored.

The verifier says what it took for the final answer; that is the vote. So nothing is read a second time, and what counts
for the reward counts for the majority. Votes are counted by value, as in clusters.py: one wrong formula in four
spellings is one candidate with four votes. A user's own function says no such thing, and then there is no vote.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actor.engines.engine import Engine
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from actor.scoring.stream import Scorer, Scores
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.wiring import build_engine
from launch.commands.curriculum import clusters, comparison
from learner.evaluation.evaluate import Votes
from learner.tasks.tasks import Task
from protocol.messages import Groups, Order, Policy
from shared.config.data import VerifierKind
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.lease import NoTurns

Heard = dict[tuple[str, tuple[int, ...]], str | None]
"""Question and tokens of an answer -> its vote."""


class Ballots:
    """A scorer that remembers what was extracted."""

    def __init__(self, scorer: Scorer, kind: VerifierKind) -> None:
        self.scorer = scorer
        self.kind: VerifierKind = kind
        self.heard: Heard = {}

    def begin(self) -> Scores:
        """As the scorer does."""
        return Counted(self.scorer.begin(), self.heard)

    def count(self, tasks: Sequence[Task], wrong: Sequence[Sequence[list[int]]]) -> list[Votes]:
        """wrong: the wrong answers to each task, as tokens."""
        said = [
            [self.heard[task.columns["question"], tuple(ids)] for ids in answers]
            for task, answers in zip(tasks, wrong, strict=True)
        ]
        voted = [[vote for vote in votes if vote is not None] for votes in said]
        same = comparison(self.kind, voted, self.scorer)
        return [(clusters(votes, same), len(answers) - len(votes)) for votes, answers in zip(voted, said, strict=True)]


class Counted:
    """The scores of one order, which leave their votes behind."""

    def __init__(self, scores: Scores, heard: Heard) -> None:
        self.scores = scores
        self.heard = heard
        self.jobs: dict[int, ScoreJob] = {}

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        """Remembered until their verdicts are there."""
        self.jobs |= jobs
        self.scores.add(jobs)

    def verdicts(self, on_progress: Callable[[], None]) -> list[Verdict]:
        """Those of the scorer."""
        verdicts = self.scores.verdicts(on_progress)
        for place, verdict in zip(sorted(self.jobs), verdicts, strict=True):
            job = self.jobs[place]
            self.heard[job.columns["question"], tuple(job.completion_ids)] = verdict.extracted
        return verdicts


@dataclass(frozen=True, kw_only=True)
class LocalActor:
    """What fills orders here."""

    engine: Engine
    """Samples."""
    ballots: Ballots
    """Scores, and remembers what was extracted."""
    rollout: Rollout
    """Both."""
    prompter: Prompter
    """Tokenizer and template."""


@contextmanager
def local_actor(config: Config) -> Iterator[LocalActor]:
    """Scoring workers end with the block."""
    engine, prompter = build_engine(config)
    pool = ScorePool(config.verifier)
    ballots = Ballots(pool, config.verifier.kind)
    try:
        rollout = Rollout(engine, ballots, NoTurns(), prompter.text)
        yield LocalActor(engine=engine, ballots=ballots, rollout=rollout, prompter=prompter)
    finally:
        pool.close()


class LocalDesk:
    """An order desk that is its own actor."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.policies: dict[int, Policy] = {}
        self.answers: dict[str, Groups] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Keep it for the orders that name it."""
        self.policies[policy.version] = policy

    def submit(self, orders: Iterable[Order]) -> None:
        """Fill them now."""
        for order in orders:
            policy = self.policies[order.policy_version]
            self.answers[order.order_id] = self.rollout.fill(order, policy, lambda phase: None)

    def collect(self, order_ids: Sequence[str]) -> list[Groups]:
        """They are there."""
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nobody to keep awake."""
