r"""Scores a completion: the verdict of a built-in verifier, and the named rewards beside it.

    kind    compared as                        the strict form, which `verifier.strict` demands
    gsm8k   number (number_answer.py)          right after the last `####`
    exact   number                             the whole text after thinking
    math    number, list or formula            in the last \boxed{}
            (math_answer.py)

`verifier.rounded_digits` lets `math` accept a rounded decimal for the gold answer; the strict form never does.

Without `strict`, the final answer is looked for in the places that final_answer.py lists, in that order. The gold
answer of `gsm8k` and `exact` is plain (`18`) or in GSM8K format (`... #### 18`). A gold answer that cannot be read is
an error of the data, not of the model.

Only the text after thinking and before the end of the turn counts. A truncated completion has the outcome `truncated`
whatever it says, because it is not known which final answer it would have given. A policy learns to exploit wrong
accepts, so anything that is not plainly the gold answer is wrong or unparsable. Every pattern runs in linear time.

Two named rewards of `verifier.rewards` are built in. They look only at the form, and are 1 or 0:

    think_tags     one <think> ... </think> with text in it at the start, text after it, and no other tag. The opening
                   tag may be at the end of the prompt, where some templates put it
    answer_tags    after the thinking, if there is any, one <answer> ... </answer> with text in it, and nothing else

A named reward never changes the outcome or the score. None adds nothing to a sum, as in TRL, and is sent as 0. So it
counts as 0 in the mean of `reward/<name>`, unlike in TRL. NaN, a number that is too large, or another type
makes the verdict an error that names the reward; so does a function that raises, because its call fails.

With `callable` and no `verifier.function`, as with several functions in TRL, the score is the weighted sum of the named
rewards that are not None, and the outcome is that of a function that returned this sum. `verifier.correct` names the
reward that decides instead whether such a completion is correct. If that is None, the completion is wrong and keeps its
score. To abstain would drop what the other rewards say of it, and the key must not change what is learned.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from actor.verifiers.answer_text import Unreadable
from actor.verifiers.final_answer import (
    END_OF_TURN,
    boxed_answers,
    counted,
    final_answers,
    formulas_given,
    marked_number,
)
from actor.verifiers.math_answer import equals_gold
from actor.verifiers.number_answer import is_number, whole_text
from actor.verifiers.reward_function import RewardCalls, load_reward_function, verdict
from actor.verifiers.verdict import ScoreJob, Verdict, bounded, fault
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig, VerifierKind
from shared.config.named_rewards import is_function, name_of, weights
from shared.gold_answer import gold_number, numbers_in

MAX_CHARS = 1_000_000
TAG = re.compile(r"</?think>")
ANSWER_TAGS = re.compile(r"\s*<answer>(?P<inside>.*)</answer>\s*", re.DOTALL)
Reader = Callable[[str], list[str]]


def score_job(kind: VerifierKind, job: ScoreJob, *, strict: bool, rounded_digits: int = 0) -> Verdict:
    if job.truncated:
        return fault(Outcome.TRUNCATED, "")
    if "answer" not in job.columns:
        return fault(Outcome.ERROR, "The task has no column `answer`.")
    text, answer = counted(job.completion[: MAX_CHARS + 1]), job.columns["answer"]
    match kind:
        case "gsm8k":
            return score_number(text, answer, marked_number if strict else final_answers)
        case "math":
            if strict:
                return score_math(text, answer, boxed_answers)
            return score_math(text, answer, rounded_digits=rounded_digits)
        case _:
            return score_number(text, answer, whole_text if strict else final_answers)


def score_math(text: str, answer: str, read: Reader = formulas_given, *, rounded_digits: int = 0) -> Verdict:
    """Compares the final answer as a formula."""
    if not answer.strip():
        return fault(Outcome.ERROR, "The gold answer is empty; fix the data's answer column.")
    if len(text) > MAX_CHARS:
        return fault(Outcome.UNPARSABLE, f"The completion is longer than {MAX_CHARS} characters.")
    given = read(text)
    if not given:
        return fault(Outcome.UNPARSABLE, "")
    try:
        right = equals_gold(given, answer, rounded_digits)
    except MemoryError:
        # Not the verifier's fault, and not an error that should stop a run: the completion asked for too much.
        return fault(Outcome.TIMEOUT, "Comparing the final answer took more memory than verifier.memory_mb.")
    except (Unreadable, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # What sympy raises where a formula makes no sense to it.
        return fault(Outcome.UNPARSABLE, str(error))
    outcome = Outcome.CORRECT if right else Outcome.WRONG
    return Verdict(outcome=outcome, score=float(right), final_answer=bounded(", ".join(given)), note="")


def score_number(text: str, answer: str, read: Reader) -> Verdict:
    """Compares the final answer as a number."""
    gold = gold_number(answer)
    if gold is None:
        return fault(Outcome.ERROR, f"The gold answer {answer[-60:]!r} is not a number; fix the data's answer column.")
    if len(text) > MAX_CHARS:
        return fault(Outcome.UNPARSABLE, f"The completion is longer than {MAX_CHARS} characters.")
    written = read(text)
    numbers = numbers_in(written)
    if not numbers:
        return fault(Outcome.UNPARSABLE, "")
    if is_number(written, gold):
        return Verdict(outcome=Outcome.CORRECT, score=1.0, final_answer=bounded(gold), note="")
    several = len(numbers) > 1
    note = f"The final answer holds {len(numbers)} different numbers." if several else ""
    return Verdict(outcome=Outcome.WRONG, score=0.0, final_answer=None if several else bounded(numbers[0]), note=note)


def think_tags(job: ScoreJob) -> float:
    text = turn_text(job)
    if job.prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    if TAG.findall(text) != ["<think>", "</think>"]:
        return 0.0
    before, _, rest = text.partition("<think>")
    thought, _, said = rest.partition("</think>")
    return float(not before.strip() and bool(thought.strip()) and bool(said.strip()))


def answer_tags(job: ScoreJob) -> float:
    match = ANSWER_TAGS.fullmatch(counted(turn_text(job)))
    inside = match["inside"] if match else ""
    return float(bool(inside.strip()) and "<answer>" not in inside and "</answer>" not in inside)


def turn_text(job: ScoreJob) -> str:
    """The completion up to the end of the turn."""
    end = END_OF_TURN.search(job.completion)
    return job.completion[: end.start()] if end else job.completion


FORMAT_REWARDS: dict[str, Callable[[ScoreJob], float]] = {"think_tags": think_tags, "answer_tags": answer_tags}
Returned = Mapping[str, list[object]]
"""By its file and name, what a function of the user's returned: one value a job."""
Judge = Callable[[Sequence[ScoreJob], Returned], list[Verdict]]


class Scoring:
    """Loaded once in each worker. RewardError if a function of the user cannot be loaded."""

    def __init__(self, verifier: VerifierConfig) -> None:
        self.calls = RewardCalls(verifier.form)
        self.judge: Judge | None = None if verifier.adds_up_rewards else judge(verifier)
        self.named = {name_of(spec): named(spec) for spec in verifier.rewards}
        self.weights, self.deciding = weights(verifier.rewards), name_of(verifier.correct)
        specs = [verifier.function] if self.judge and verifier.kind == "callable" else []
        specs += filter(is_function, verifier.rewards)
        self.functions = {spec: load_reward_function(spec, key_of(spec, verifier)) for spec in dict.fromkeys(specs)}

    def score(self, jobs: Sequence[ScoreJob]) -> list[Verdict]:
        """One verdict a job; CallFailed if a function's call cannot be used."""
        if self.judge and all(job.compares_answers for job in jobs):
            nothing = dict.fromkeys(self.named, 0.0)
            return [structs.replace(found, rewards=nothing) for found in self.judge(jobs, {})]
        self.calls.log.start(len(jobs))
        values = self.calls.values(list(self.functions.values()), jobs)
        returned = dict(zip(self.functions, values, strict=True))
        found = {name: reward(jobs, returned) for name, reward in self.named.items()}
        verdicts = self.judge(jobs, returned) if self.judge else self.added_up(found, jobs)
        for name, rewards in found.items():
            verdicts = [with_reward(*pair, name) for pair in zip(verdicts, rewards, strict=True)]
        return self.calls.log.added_to(verdicts)

    def added_up(self, found: Mapping[str, list[Verdict]], jobs: Sequence[ScoreJob]) -> list[Verdict]:
        return [
            added_up({name: of[place] for name, of in found.items()}, self.weights, job.truncated, self.deciding)
            for place, job in enumerate(jobs)
        ]


def key_of(spec: str, verifier: VerifierConfig) -> str:
    return "verifier.function" if spec == verifier.function else "verifier.rewards"


def judge(verifier: VerifierConfig) -> Judge:
    if verifier.kind == "callable":
        spec = verifier.function
        return lambda jobs, returned: [
            verdict(value, job.truncated) for value, job in zip(returned[spec], jobs, strict=True)
        ]
    if verifier.kind == "environment":
        # Replaced by what the environment says.
        return lambda jobs, _: [fault(Outcome.ABSTAIN, "") for _ in jobs]
    kind, strict, digits = verifier.kind, verifier.strict, verifier.rounded_digits
    return lambda jobs, _: [score_job(kind, job, strict=strict, rounded_digits=digits) for job in jobs]


def named(spec: str) -> Judge:
    """A reward as verdicts, of which only the score is used. It is the same for a truncated completion."""
    if is_function(spec):
        return lambda _, returned: [verdict(value, truncated=False) for value in returned[spec]]
    form = FORMAT_REWARDS[spec]
    return lambda jobs, _: [verdict(form(job), truncated=False) for job in jobs]


def added_up(rewards: Mapping[str, Verdict], weights: Mapping[str, float], truncated: bool, deciding: str) -> Verdict:
    """The weighted sum of the rewards that apply, judged as one function's number; abstain if none applies. deciding:
    name of the reward that says whether it is correct; if empty, the sum does."""
    applying = [weights[name] * of.score for name, of in rewards.items() if of.outcome is not Outcome.ABSTAIN]
    found = verdict(sum(applying) if applying else None, truncated)
    if not deciding or found.outcome not in (Outcome.CORRECT, Outcome.WRONG):
        return found
    is_correct = rewards[deciding].outcome is Outcome.CORRECT
    return structs.replace(found, outcome=Outcome.CORRECT if is_correct else Outcome.WRONG)


def with_reward(found: Verdict, reward: Verdict, name: str) -> Verdict:
    """The verdict with one more reward, or the error that the reward is."""
    if reward.outcome is Outcome.ERROR and found.outcome is not Outcome.ERROR:
        found = structs.replace(fault(Outcome.ERROR, f"{name}: {reward.note}"), rewards=found.rewards)
    return structs.replace(found, rewards=found.rewards | {name: reward.score})
