"""The data of the Samples page: groups, answers and tokens, from records of rollouts.jsonl.

    a step       its groups: rewards, outcomes, what became of them, where the question is
    a group      its prompt and its answers, without the figures of their tokens
    an answer    token by token

The page of a process (samples.py) and the page as files (bundle.py) get the same data. Texts stay as they are; the page
makes text nodes of them.
"""

from typing import Any

from shared.run.rollouts import GroupHead, GroupTask, RolloutGroup, RolloutSample, Values

DIGITS = 6
PROMPT_END = 300
"""Characters of a prompt in a list: the question; few-shot examples and the system prompt come before it."""


def head_row(head: GroupHead, number: int) -> dict[str, Any]:
    return {
        "step": head.step,
        "group": number,
        "id": head.group_id,
        "task": head.task,
        "fate": head.fate,
        "stale": head.stale,
        "spread": head.spread,
        "rewards": head.rewards,
        "advantages": head.advantages,
        "outcomes": head.outcomes,
        "lengths": head.lengths,
    }


def listed_row(task: GroupTask, number: int) -> dict[str, Any]:
    """In the list of a step."""
    return head_row(task, number) | {"prompt": task.prompt[-PROMPT_END:]}


def group_row(group: RolloutGroup, number: int) -> dict[str, Any]:
    answers = [
        {
            "text": sample.text,
            "outcome": sample.outcome,
            "finish": sample.finish,
            "reward": sample.reward,
            "rewards": sample.rewards,
            "extras": sample.extras,
            "advantage": sample.advantage,
            "kept": sample.kept,
            "tokens": len(sample.ids),
            "turns": len(sample.turns) if sample.turns else 0,
        }
        for sample in group.samples
    ]
    return head_row(group, number) | {"prompt": group.prompt, "answer": group.answer, "answers": answers}


def answer_row(group: RolloutGroup, number: int, place: int) -> dict[str, Any]:
    """place: of the answer in its group."""
    sample = group.samples[place]
    return {
        "step": group.step,
        "group": number,
        "sample": place,
        "pieces": sample.pieces,
        "ids": sample.ids,
        "turns": turns(sample),
        "values": {
            "entropy": known(sample.own(sample.entropy)),
            "mask": sample.mask,
            "ratio": known(sample.ratio()),
            "mismatch": known(sample.mismatch()),
            "advantage": known(sample.push()),
            "actor": known(sample.own(sample.logprob)),
            "learner": known(sample.learner()),
        },
    }


def known(values: Values) -> Values | None:
    """With as many digits as the log has. None if all are unknown."""
    shown = [None if value is None else round(value, DIGITS) for value in values]
    return shown if any(value is not None for value in shown) else None


def turns(sample: RolloutSample) -> list[dict[str, Any]]:
    """Pieces of an answer by who wrote them: whose, and how many tokens."""
    return [{"sampled": turn.sampled, "tokens": turn.tokens} for turn in sample.turns or ()]
