"""What the Compare page asks: how two to four runs differ in configuration, in accuracy on the same tasks, and in which
answers. The curves come from each run itself.

The intervals are those of `python -m launch compare`: the first run against each other one, paired by task, two
verdicts for each pair. Evaluations of different tasks are not compared, and the reason is shown instead; so is the
reason where sampled completions have no verdict.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from launch.commands.compare import LEVEL, Side, flipped, open_side, refuse_unlike, why_no_verdict
from launch.ui.runs_folder import RunsFolder
from shared.errors import UserError
from shared.run.evaluation import TaskResult, right
from shared.statistics import paired

FEWEST, MOST = 2, 4
USUAL = "final"
MOST_CHANGED = 60
"""Tasks shown of those whose answer changed, for each direction."""


def compared(runs: RunsFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """`runs`: names, with a slash in between, which no name has. `label`: which evaluation."""
    names, label = [name for name in query.get("runs", "").split("/") if name], query.get("label", "") or USUAL
    if len(set(names)) != len(names) or not FEWEST <= len(names) <= MOST:
        raise UserError(f"runs got {len(names)} names, expected {FEWEST} to {MOST} different ones.")
    opened = [runs.open(name) for name in names]
    labels: set[str] = set()
    described: list[dict[str, Any]] = []
    trees: list[Mapping[str, Any]] = []
    for one in opened:
        with one.lock:
            labels |= {found.label for found in one.run.evaluations()}
            described.append(one.description(one.stamp()))
            trees.append(msgspec.to_builtins(one.run.config()))
    paths = [one.run.path for one in opened]
    return {
        "runs": described,
        "labels": sorted(labels),
        "label": label,
        "differences": differences(trees),
        "pairs": [
            pair(paths[0].name, path.name, *sides(paths[0], path, label, labels | {USUAL})) for path in paths[1:]
        ],
    }


def differences(trees: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Keys that do not have the same value in all runs."""
    flat = [dict(keys_of(tree)) for tree in trees]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [{"key": key, "values": [one.get(key) for one in flat]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def keys_of(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def sides(a: Path, b: Path, label: str, labels: Set[str]) -> tuple[Side | None, Side | None, str]:
    """Both evaluations, or why they cannot be compared. Only these labels are looked for: one from the address could be
    the path of any file."""
    if label not in labels:
        return None, None, f"These runs have no evaluation {label!r}; choose one of the list."
    try:
        found = open_side(a, label), open_side(b, label)
        refuse_unlike(*found)
    except UserError as error:
        return None, None, str(error)
    return (*found, "")


def pair(a: str, b: str, one: Side | None, other: Side | None, problem: str) -> dict[str, Any]:
    named = {"a": a, "b": b, "problem": problem, "ways": [], "changed": []}
    if one is None or other is None:
        return named
    first, second = one.evaluation, other.evaluation
    ways = [way("greedy", first.greedy.accuracy, second.greedy.accuracy, right(first), right(second))]
    if why := why_no_verdict(first.sampled, second.sampled):
        named["problem"] = f"no verdict on sampled answers, {why}"
    else:
        draws = [[task.sampled for task in side.task_results] for side in (first, second)]
        ways.append(way("sampled", first.sampled.accuracy, second.sampled.accuracy, *draws))
    lost, won = flipped(first, second), flipped(second, first)
    changed = [
        *(changed_row("a", mine, theirs) for mine, theirs in lost[:MOST_CHANGED]),
        *(changed_row("b", mine, theirs) for theirs, mine in won[:MOST_CHANGED]),
    ]
    return named | {"ways": ways, "changed": changed, "lost": len(lost), "won": len(won), "n": first.n}


def way(name: str, a: float, b: float, scores_a: Sequence[float], scores_b: Sequence[float]) -> dict[str, Any]:
    found = paired(scores_a, scores_b, LEVEL)
    interval = {"mean": found.mean, "low": found.low, "high": found.high, "certain": found.certain, "p": found.p}
    return {"name": name, "a": a, "b": b, "level": LEVEL, **interval}


def changed_row(better: str, a: TaskResult, b: TaskResult) -> dict[str, Any]:
    """better: which of the two is right."""
    words = {"a": a.last_words, "b": b.last_words, "outcomes": [a.greedy, b.greedy]}
    return {"better": better, "question": a.question, "answer": a.answer, **words}
