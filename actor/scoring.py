"""All that a worker finds out about completions: the verdict, and the named rewards of `verifier.rewards` beside it.

A named reward never changes outcome or score. One that is None counts 0, as in TRL; one that is NaN, too large or no
number makes the verdict an error that names it, and so does one that raises, by way of the call that failed.
"""

from collections.abc import Callable, Sequence

from msgspec import structs

from actor.format_reward import FORMAT_REWARDS
from actor.reward_function import RewardFunction, load_reward_function, score_with, values_of, verdict
from actor.verdict import ScoreJob, Verdict, fault
from actor.verifier import score_job
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig
from shared.config.named_rewards import is_function, name_of

Judge = Callable[[Sequence[ScoreJob]], list[Verdict]]


class Scoring:
    """Loaded once, in each worker. RewardError if a function of the user's cannot be."""

    def __init__(self, verifier: VerifierConfig) -> None:
        self.judge: Judge = judge(verifier)
        self.named = {name_of(spec): named(spec) for spec in verifier.rewards}

    def score(self, jobs: Sequence[ScoreJob]) -> list[Verdict]:
        """One verdict a job; CallFailed if a function's call cannot be used."""
        verdicts = self.judge(jobs)
        for name, reward in self.named.items():
            verdicts = [with_reward(*pair, name) for pair in zip(verdicts, reward(jobs), strict=True)]
        return verdicts


def judge(verifier: VerifierConfig) -> Judge:
    """What decides the outcome."""
    if verifier.kind == "callable":
        function = load_reward_function(verifier.function)
        return lambda jobs: score_with(function, jobs)
    kind, strict, digits = verifier.kind, verifier.strict, verifier.rounded_digits
    return lambda jobs: [score_job(kind, job, strict=strict, rounded_digits=digits) for job in jobs]


def named(spec: str) -> Judge:
    """A reward as verdicts, of which only the score is used."""
    if is_function(spec):
        return from_function(load_reward_function(spec))
    form = FORMAT_REWARDS[spec]
    return lambda jobs: [verdict(form(job), truncated=False) for job in jobs]


def from_function(function: RewardFunction) -> Judge:
    """Whatever length a completion has, its reward is what the function says."""
    return lambda jobs: [verdict(value, truncated=False) for value in values_of(function, jobs)]


def with_reward(found: Verdict, reward: Verdict, name: str) -> Verdict:
    """The verdict with one more reward, or the error that the reward is."""
    if reward.outcome is Outcome.ERROR and found.outcome is not Outcome.ERROR:
        found = structs.replace(fault(Outcome.ERROR, f"{name}: {reward.note}"), rewards=found.rewards)
    return structs.replace(found, rewards=found.rewards | {name: reward.score})
