"""What the Samples page asks of one run: from a step to its groups, to the answers of a group, to the tokens of one.

Everything comes from rollouts.jsonl through the reader, which finds a group by its place in the file. Groups that
taught nothing, or that were refused, are answered like those that were trained on, with what became of them.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from launch.ui.questions import NotThere, whole
from launch.ui.runs_folder import OpenRun
from shared.errors import UserError
from shared.run.rollout_index import RolloutIndex
from shared.run.rollouts import GroupHead, RolloutGroup, RolloutSample

PROMPT_END = 300
"""Characters of a prompt in a list."""
SEARCHED_TOGETHER = 32
"""Steps between two looks at the clock."""
MOST_FOUND = 60
MOST_STEPS = 300
"""Shown of one task."""
TASK = re.compile("[0-9a-f]{16}")
SEARCH_S = 1.5
"""A search of a long log answers after so long with what it has, and where to go on."""


def steps(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    """The steps that have groups in the log, unless nothing has changed."""
    stamp = opened.stamp()
    if words.get("stamp") == stamp:
        return {"stamp": stamp}
    log = opened.run.rollouts
    return {"stamp": stamp, "status": opened.run.state(), "steps": log.steps(), "groups": len(log), "bytes": log.size}


def groups(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    step = whole(words, "step")
    heads = numbered(opened.run.rollouts, step)
    if not heads:
        raise NotThere(f"Step {step} has no groups in rollouts.jsonl of {opened.name}.")
    rows = [head_row(head, place) | {"prompt": prompt_end(opened, step, place)} for place, head in heads]
    return {"step": step, "groups": rows}


def numbered(log: RolloutIndex, step: int) -> list[tuple[int, GroupHead]]:
    """The groups of a step with their numbers. One that is damaged has a number and is left out."""
    log.look()
    return [(number, head) for number, place in enumerate(log.places.get(step, ())) if (head := log.head(place))]


def prompt_end(opened: OpenRun, step: int, place: int) -> str:
    """Where the question is; few-shot examples and the system prompt come before it."""
    found = opened.run.rollouts.group(step, place)
    return found.prompt[-PROMPT_END:] if found else ""


def head_row(head: GroupHead, place: int) -> dict[str, Any]:
    """place: among the groups of its step."""
    return {
        "step": head.step,
        "group": place,
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


def group(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    """The answers of one group, without the figures of their tokens."""
    found = group_at(opened, words)
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
        for sample in found.samples
    ]
    shown = head_row(found, whole(words, "group"))
    return shown | {"prompt": found.prompt, "answer": found.answer, "answers": answers}


def group_at(opened: OpenRun, words: Mapping[str, str]) -> RolloutGroup:
    step, place = whole(words, "step"), whole(words, "group")
    found = opened.run.rollouts.group(step, place)
    if found is None:
        raise NotThere(f"Step {step} has no group {place} in rollouts.jsonl of {opened.name}, or it is damaged.")
    return found


def answer(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    """One answer, token by token."""
    found, place = group_at(opened, words), whole(words, "sample")
    if place >= len(found.samples):
        raise NotThere(f"That group has {len(found.samples)} answers; there is no answer {place}.")
    sample = found.samples[place]
    return {
        "step": found.step,
        "group": whole(words, "group"),
        "sample": place,
        "pieces": sample.pieces,
        "ids": sample.ids,
        "turns": turns(sample),
        "values": {
            "entropy": sample.entropy,
            "mask": sample.mask,
            "ratio": known(sample.ratio()),
            "mismatch": known(sample.mismatch()),
            "advantage": known(sample.push()),
            "actor": sample.logprob,
            "learner": known(sample.learner()),
        },
    }


def known(values: list[float | None]) -> list[float | None] | None:
    return values if any(value is not None for value in values) else None


def turns(sample: RolloutSample) -> list[dict[str, Any]]:
    """Pieces of an answer by who wrote them: whose, and how many tokens."""
    return [{"sampled": turn.sampled, "tokens": turn.tokens} for turn in sample.turns or ()]


def history(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    """The same task in all steps that have it, the last ones if there are many."""
    log, task = opened.run.rollouts, words.get("task", "")
    if not TASK.fullmatch(task):
        raise UserError(f"task got {task[:80]!r}, expected 16 hex digits.")
    steps, key = log.steps(), int(task, 16)
    places = [(number, place) for step in steps for number, place in enumerate(log.places[step])]
    same = [(number, place) for number, place in places if log.tasks[place] == key]
    heads = [(number, head) for number, place in same[-MOST_STEPS:] if (head := log.head(place))]
    return {"groups": [head_row(head, number) for number, head in heads]}


def search(opened: OpenRun, words: Mapping[str, str]) -> dict[str, Any]:
    """Places with that text, from step `first` on. `next` is the step to go on from, None at the end."""
    text, began = words.get("text", ""), time.monotonic()
    if not text.strip():
        raise UserError("text got nothing, expected what to search for.")
    log, first, hits = opened.run.rollouts, whole(words, "first", 0), list[dict[str, Any]]()
    steps = [step for step in log.steps() if step >= first]
    for place in range(0, len(steps), SEARCHED_TOGETHER):
        part = steps[place : place + SEARCHED_TOGETHER]
        if len(hits) >= MOST_FOUND or time.monotonic() - began > SEARCH_S:
            return {"hits": hits, "next": part[0]}
        found = log.search(text, first=part[0], last=part[-1])
        hits += [{"step": hit.step, "group": hit.number, "sample": hit.sample, "text": hit.text} for hit in found]
    return {"hits": hits, "next": None}
