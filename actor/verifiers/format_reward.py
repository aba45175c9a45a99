"""Built-in rewards for form alone: 1 for the form asked for, 0 for any other. They say nothing about the answer.

think_tags     one <think> ... </think> with something in it at the start, something after it, no tag besides. The
               opening tag may stand at the end of the prompt: some templates put it there
answer_tags    after the thinking, if there is any, one <answer> ... </answer> with something in it and no more
"""

import re
from collections.abc import Callable

from actor.verifiers.final_answer import END_OF_TURN, counted
from actor.verifiers.verdict import ScoreJob

TAG = re.compile(r"</?think>")
ANSWER = re.compile(r"\s*<answer>(?P<inside>.*)</answer>\s*", re.DOTALL)


def think_tags(job: ScoreJob) -> float:
    """Whether it thinks once, aloud, and then speaks."""
    text = spoken(job)
    if job.prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    if TAG.findall(text) != ["<think>", "</think>"]:
        return 0.0
    before, _, rest = text.partition("<think>")
    thought, _, said = rest.partition("</think>")
    return float(not before.strip() and bool(thought.strip()) and bool(said.strip()))


def answer_tags(job: ScoreJob) -> float:
    """Whether all it says after thinking is one marked answer."""
    match = ANSWER.fullmatch(counted(spoken(job)))
    inside = match["inside"] if match else ""
    return float(bool(inside.strip()) and "<answer>" not in inside and "</answer>" not in inside)


def spoken(job: ScoreJob) -> str:
    """Up to the end of the turn."""
    end = END_OF_TURN.search(job.completion)
    return job.completion[: end.start()] if end else job.completion


FORMAT_REWARDS: dict[str, Callable[[ScoreJob], float]] = {"think_tags": think_tags, "answer_tags": answer_tags}
