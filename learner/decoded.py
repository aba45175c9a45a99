"""From the groups of one evaluation lane to its figures (shared/run/evaluation.py says what each means)."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from learner.tasks import Task
from protocol.messages import Finish, Group, Outcome, Sampling
from shared.run.evaluation import Decoded, Share, share_of
from shared.statistics import maj_at_k, pass_at_k, sizes

Votes = tuple[tuple[int, ...], int]
"""Votes for each wrong answer to a task, and answers without a vote."""
CountVotes = Callable[[Sequence[Task], Sequence[Sequence[list[int]]]], list[Votes]]
"""The wrong answers to each task, as tokens, to their votes. Who counts decides which of them mean the same."""

READ = (Outcome.CORRECT, Outcome.WRONG)


def decoded(tasks: Sequence[Task], groups: Sequence[Group], sampling: Sampling, count: CountVotes | None) -> Decoded:
    """Every group answers its task, with the same number of draws."""
    draws = len(groups[0].lengths)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    finishes = [finish for group in groups for finish in group.finishes]
    lengths = [length for group in groups for length in group.lengths]
    shares = [right_share(group) for group in groups]
    whole = share_of(shares)
    return Decoded(
        correct=whole.correct,
        accuracy=whole.accuracy,
        low=whole.low,
        high=whole.high,
        n=whole.n,
        temperature=sampling.temperature,
        cap=sampling.max_new_tokens,
        draws=draws,
        format_rate=sum(outcome in READ for outcome in outcomes) / len(outcomes),
        truncation_rate=sum(finish is Finish.LENGTH for finish in finishes) / len(finishes),
        length_mean=float(np.mean(lengths)),
        length_median=float(np.median(lengths)),
        length_max=max(lengths),
        pass_at=pass_at(groups) if draws > 1 else {},
        maj_at=maj_at(tasks, groups, count) if draws > 1 and count else {},
        by_level=shares_by(tasks, shares, ("level",)),
        by_subject=shares_by(tasks, shares, ("subject", "type")),
    )


def num_right(group: Group) -> int:
    """Right answers of a group."""
    return sum(outcome is Outcome.CORRECT for outcome in group.outcomes)


def right_share(group: Group) -> float:
    """Their share."""
    return num_right(group) / len(group.outcomes)


def pass_at(groups: Sequence[Group]) -> dict[int, Share]:
    """k -> the mean over tasks."""
    draws = len(groups[0].lengths)
    return {k: share_of([pass_at_k(draws, num_right(group), k) for group in groups]) for k in sizes(draws)}


def maj_at(tasks: Sequence[Task], groups: Sequence[Group], count: CountVotes) -> dict[int, Share]:
    """k -> the mean over tasks. All right answers are one candidate, however they are written."""
    votes = count(tasks, [wrong_answers(group) for group in groups])
    counted = [(num_right(group), *found) for group, found in zip(groups, votes, strict=True)]
    return {k: share_of([maj_at_k(*counts, k) for counts in counted]) for k in sizes(len(groups[0].lengths))}


def wrong_answers(group: Group) -> list[list[int]]:
    """Tokens of all answers that are not right."""
    ids = np.split(group.completion_ids, np.cumsum(group.lengths)[:-1])
    pairs = zip(ids, group.outcomes, strict=True)
    return [answer.tolist() for answer, outcome in pairs if outcome is not Outcome.CORRECT]


def shares_by(tasks: Sequence[Task], shares: Sequence[float], columns: Sequence[str]) -> dict[str, Share]:
    """Value of the first of these columns that a task has -> share, in order of the values."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for task, share in zip(tasks, shares, strict=True):
        values = [task.columns[column] for column in columns if column in task.columns]
        if values:
            grouped[values[0]].append(share)
    return {value: share_of(grouped[value]) for value in sorted(grouped)}
