"""What happened in a run, and when: its events, and what each process did for how long.

    events    from logs, checkpoints, evaluations, quarantine and metrics; nothing is written for them but
              logs/supervisor.log, where the launcher notes which process it started again
    phases    from the times of each step, or as measured with --trace

A step has the time at which it ended and how long it was, so its phases can be drawn without a trace:

    |<------------------- time/step_s ------------------->| time_s
     actor    decode (rollout_s), score (verify_s)
     learner                                     update (update_s), which ends the step

Left out on purpose: what several actors did at once, and overlap under a lag. A trace has both.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import compile as pattern
from typing import Any, Literal

import numpy as np

EventKind = Literal["start", "resume", "restart", "checkpoint", "evaluation", "stage", "quarantine"]
BEGINS = pattern(r"^(\S+ \S+),\d+ INFO learner begins at step (\d+) of (\d+)")
NOTED = pattern(r"^(\S+ \S+) after step (\d+): (.*)")
CLOCK = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a process did for a while."""

    process: str
    """`learner`, `actor0`; `actor` where it is not measured."""
    name: str
    """As in trace.json: `decode`, `score`, `update`, `waiting` ..."""
    start_s: float
    """Of a trace: since 1970. Else since the run began, as time_s of the metrics."""
    end_s: float
    step: int | None = None
    """None in a trace."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened once."""

    kind: EventKind
    step: int
    """After which it happened; 0 before the first."""
    at: float | None
    """Seconds since 1970, where it is known."""
    text: str
    """In words."""


def starts(learner_log: Sequence[str]) -> Iterator[Event]:
    for line in learner_log:
        if found := BEGINS.match(line):
            step, at = int(found[2]), seconds(found[1])
            kind = "resume" if step else "start"
            yield Event(kind=kind, step=step, at=at, text=f"the learner begins at step {step} of {found[3]}")


def restarts(supervisor_log: Sequence[str]) -> Iterator[Event]:
    for line in supervisor_log:
        if found := NOTED.match(line):
            yield Event(kind="restart", step=int(found[2]), at=seconds(found[1]), text=found[3])


def noted(step: int, text: str) -> str:
    """A line of supervisor.log."""
    return f"{time.strftime(CLOCK)} after step {step}: {' '.join(text.split())}"


def seconds(stamp: str) -> float | None:
    """Since 1970; None if the text is no time."""
    try:
        return time.mktime(time.strptime(stamp, CLOCK))
    except ValueError:
        return None


def stages(steps: np.ndarray, stage: np.ndarray) -> Iterator[Event]:
    """Where the next stage of a curriculum began. [steps] each, as in the metrics."""
    for place in np.flatnonzero(np.diff(stage) > 0).tolist():
        text = f"stage {int(stage[place + 1]) + 1} of the curriculum begins"
        yield Event(kind="stage", step=int(steps[place + 1]), at=None, text=text)


def step_phases(
    step: int, end_s: float, step_s: float, rollout_s: float, verify_s: float, update_s: float
) -> Iterator[Phase]:
    """Figures that were not measured have no phase."""
    begin = end_s - step_s
    # The times of several actors are summed, so they may be longer than the step.
    scored = min(begin + (0.0 if math.isnan(rollout_s) else rollout_s), end_s)
    rows = (
        ("actor", "decode", begin, min(begin + rollout_s, end_s)),
        ("actor", "score", scored, min(scored + verify_s, end_s)),
        ("learner", "update", end_s - update_s, end_s),
    )
    for process, name, first, last in rows:
        if last > first:
            yield Phase(process=process, name=name, start_s=float(first), end_s=float(last), step=step)


def traced(file: Path) -> Iterator[Phase]:
    """logs/trace-NAME.json of one process. A phase that a kill cut off has no end and is left out."""
    name = file.stem.removeprefix("trace-")
    open_phases: dict[int, list[dict[str, Any]]] = {}
    with file.open("rb") as lines:
        for event in filter(None, map(traced_event, lines)):
            nested = open_phases.setdefault(event["pid"], [])
            if event["ph"] == "B":
                nested.append(event)
            elif event["ph"] == "E" and nested:
                begun = nested.pop()
                yield Phase(process=name, name=begun["name"], start_s=begun["ts"] / 1e6, end_s=event["ts"] / 1e6)


def traced_event(line: bytes) -> dict[str, Any] | None:
    """None for the first line of a file, and for one that cannot be read."""
    try:
        event = json.loads(line.rstrip(b",\n"))
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"pid", "ph", "ts", "name"} <= event.keys() else None
