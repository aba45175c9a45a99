"""What the Samples page asks of one run: from a step to its groups, to the answers of a group, to the tokens of one.

Everything comes from rollouts.jsonl through the reader, which finds a group by its place in the file. Idle and
quarantined groups are answered like those that were trained on, with what became of them.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from launch.ui.group_rows import answer_row, group_row, head_row, listed_row
from launch.ui.questions import NotThere, whole
from launch.ui.runs_folder import OpenRun
from shared.errors import UserError
from shared.run.rollouts import RolloutGroup

MOST_FOUND = 60
MOST_STEPS = 300
"""Shown of one task."""
TASK = re.compile("[0-9a-f]{16}")
SEARCH_S = 1.5
"""A search of a long log answers after so long with what it has, and where to go on."""


def steps(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """The steps that have groups in the log, unless nothing has changed."""
    stamp = opened.stamp()
    if query.get("stamp") == stamp:
        return {"stamp": stamp}
    log = opened.run.rollouts
    return {"stamp": stamp, "status": opened.run.state(), "steps": log.steps(), "groups": len(log)}


def groups(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    step = whole(query, "step")
    found = opened.run.rollouts.tasks_of(step)
    if not found:
        raise NotThere(f"Step {step} has no groups in rollouts.jsonl of {opened.name}.")
    return {"step": step, "groups": [listed_row(task, number) for number, task in found.items()]}


def group(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    return group_row(group_at(opened, query), whole(query, "group"))


def group_at(opened: OpenRun, query: Mapping[str, str]) -> RolloutGroup:
    step, number = whole(query, "step"), whole(query, "group")
    found = opened.run.rollouts.group(step, number)
    if found is None:
        raise NotThere(f"Step {step} has no group {number} in rollouts.jsonl of {opened.name}, or it is damaged.")
    return found


def answer(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    found, place = group_at(opened, query), whole(query, "sample")
    if place >= len(found.samples):
        raise NotThere(f"That group has {len(found.samples)} answers; there is no answer {place}.")
    return answer_row(found, whole(query, "group"), place)


def history(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """The same task in all steps that have it, the last ones if there are many."""
    task = query.get("task", "")
    if not TASK.fullmatch(task):
        raise UserError(f"task got {task[:80]!r}, expected 16 hex digits.")
    return {"groups": [head_row(head, number) for number, head in opened.run.rollouts.history(task, MOST_STEPS)]}


def search(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Places with that text, from step `first` on. `next` is the step to go on from, None at the end."""
    text, began = query.get("text", ""), time.monotonic()
    if not text.strip():
        raise UserError("text got nothing, expected what to search for.")
    log, first, hits = opened.run.rollouts, whole(query, "first", 0), list[dict[str, Any]]()
    ended = False
    for step, found in log.search_steps(text, first=first):
        if ended:
            return {"hits": hits, "next": step}
        hits += [{"step": hit.step, "group": hit.number, "sample": hit.sample, "text": hit.text} for hit in found]
        ended = len(hits) >= MOST_FOUND or time.monotonic() - began > SEARCH_S
    return {"hits": hits, "next": None}
