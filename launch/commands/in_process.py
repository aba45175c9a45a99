"""The actor's parts in this process, without a wire.

Orders filled in this process: engine and verifier of the actor, no wire, no journal. For `eval` and the tests.

How the wrong answers of an evaluation vote, heard where they are scored.

The verifier says what it took for the final answer; that is the vote. So nothing is read a second time, and what counts
for the reward counts for the majority. Votes are counted by value, as in clusters.py: one wrong formula in four
spellings is one candidate with four votes. A user's own function says no such thing, and then there is no vote.

Which answers to one question mean the same.

Answers are compared as the verifier compares one with a gold answer: as canonical numbers, or, where it compares
formulas, by asking it whether the one would be right if the other were gold. An answer joins the first cluster whose
first member it equals. What has no final answer is one cluster.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

from actor.engines.engine import Engine
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from actor.scoring.scores import Scorer, Scores, score_all
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.wiring import build_engine
from learner.evaluation.evaluate import Votes
from learner.tasks.tasks import Task
from protocol.messages import FilledOrder, Order, Policy
from protocol.outcome import Outcome
from shared.config.data import VerifierKind
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.lease import NoLease

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
        rollout = Rollout(engine, ballots, NoLease(), prompter.text)
        yield LocalActor(engine=engine, ballots=ballots, rollout=rollout, prompter=prompter)
    finally:
        pool.close()


class LocalDesk:
    """An order desk that is its own actor."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.policies: dict[int, Policy] = {}
        self.answers: dict[str, FilledOrder] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Keep it for the orders that name it."""
        self.policies[policy.version] = policy

    def submit(self, orders: Iterable[Order]) -> None:
        """Fill them now."""
        for order in orders:
            policy = self.policies[order.policy_version]
            self.answers[order.order_id] = self.rollout.fill(order, policy, lambda phase: None)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """They are there."""
        return [self.answers.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nobody to keep awake."""


Same = Callable[[str, str], bool]


def clusters(answers: Sequence[str | None], same: Same) -> tuple[int, ...]:
    """How many answers have each meaning."""
    firsts: list[str | None] = []
    counts: list[int] = []
    for answer in answers:
        known = (place for place, first in enumerate(firsts) if equal(answer, first, same))
        place = next(known, None)
        if place is None:
            firsts.append(answer)
            counts.append(1)
        else:
            counts[place] += 1
    return tuple(counts)


def equal(answer: str | None, first: str | None, same: Same) -> bool:
    """Two answers, or none twice."""
    if answer is None or first is None:
        return answer is first
    return answer == first or same(first, answer)


def comparison(kind: VerifierKind, questions: Sequence[Sequence[str | None]], scorer: Scorer) -> Same:
    """What decides whether two different spellings mean the same, for the answers to each of these questions."""
    if kind != "math":
        return lambda first, answer: False
    pairs = {pair for answers in questions for pair in combinations(dict.fromkeys(filter(None, answers)), 2)}
    ordered = sorted(pairs)
    verdicts = score_all(scorer, [as_job(first, answer) for first, answer in ordered])
    equals = {pair for pair, verdict in zip(ordered, verdicts, strict=True) if verdict.outcome is Outcome.CORRECT}
    return lambda first, answer: (first, answer) in equals


def as_job(first: str, answer: str) -> ScoreJob:
    """The one as the gold answer, the other as a completion."""
    return ScoreJob(
        prompt="", completion=f"\\boxed{{{answer}}}", completion_ids=[], truncated=False, columns={"answer": first}
    )
