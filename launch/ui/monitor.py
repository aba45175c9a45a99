"""What the Monitor page asks about one run: its state, its curves, and what each process did when.

Curves are thinned to a few hundred points before they are sent (mean, smallest and largest of the steps of a point), so
a run of 10,000 steps is as quick to draw as one of 100. A zoom asks again for its steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from launch.ui.questions import whole
from launch.ui.runs_folder import OpenRun, verdict_row
from shared.run.evaluation import Decoded, Evaluation
from shared.run.forecast import Figures, read_prediction
from shared.run.history import Phase
from shared.run.metrics import Curves, Row
from shared.run.reader import state_of
from shared.run.summary import RunVerdict

POINTS = 240
"""Unless the page asks for another number, as Monitor does (static/monitor.js)."""
MOST_POINTS = 1000
DIGITS = 5
"""Of a value, as a chart shows it."""
NO_CURVES = ("step", "time_s")
LANE_STEPS = 24
"""Steps whose phases are drawn one by one."""
TOLERANCE_S = 2e-3
"""An update lasts as long in a trace as in the metrics, but for the moments between two looks at the clock."""
TO_LOOK_AT = {
    "reward and outcome disagree": {"outcome": "wrong", "sort": "reward"},
    "answers are cut off": {"outcome": "truncated", "sort": "length"},
    "nothing is parsed": {"outcome": "unparsable"},
    "all groups alike": {"sort": "untrained"},
    "the curriculum is exhausted": {"sort": "untrained"},
    "updates are refused": {"fate": "quarantined"},
    "answers grow without more reward": {"sort": "length"},
    "the verifier fails: timeout": {"outcome": "timeout"},
    "the verifier fails: error": {"outcome": "error"},
    "entropy collapses": {"colour": "entropy"},
    "entropy explodes": {"colour": "entropy"},
    "mismatch grows": {"colour": "mismatch"},
    "importance weights are at the cap": {"colour": "ratio"},
}
"""Beginning of a verdict's name -> the answers that show it, as the Samples page is asked for them."""


def overview(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    run, stamp = opened.run, opened.stamp()
    if query.get("stamp") == stamp:
        return {"stamp": stamp}
    metrics = run.metrics
    last = metrics.row(-1) if len(metrics) else {}
    logged = run.rollouts.steps()
    return {
        "stamp": stamp,
        "name": opened.name,
        "status": run.state(),
        "steps": len(metrics),
        "last": last,
        **happened(opened, last),
        "spent": run.spent(),
        "last_logged": logged[-1] if logged else None,
        "damaged": {"metrics.jsonl": metrics.damaged, "rollouts.jsonl": run.rollouts.damaged},
    }


def happened(opened: OpenRun, last: Row) -> dict[str, Any]:
    """The part of the overview that few steps change. It is made again when one of its files or the stage of the last
    row has changed."""
    run, files = opened.run, opened.run.files
    logs = (files.logs / "learner.log", files.logs / "supervisor.log")
    watched = (files.config, files.plan, files.eval, files.checkpoints, files.quarantine, *logs)
    state = (*map(state_of, watched), last.get("curriculum/stage"), run.metrics.generation)
    if opened.happened[0] != state:
        found = {
            "planned": run.config().run.steps,
            "events": run.events(),
            "evaluations": [evaluation_row(found) for found in run.evaluations()],
            "predicted": read_prediction(files) or Figures(),
        }
        opened.happened = (state, found)
    return opened.happened[1]


def why(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """The verdicts, apart from the overview: of a long run they take longer than all the rest."""
    found = opened.verdicts.of(opened.stamp())
    return {"verdicts": [verdict_row(one) | {"look": to_look_at(one)} for one in found]}


def to_look_at(verdict: RunVerdict) -> Mapping[str, str] | None:
    return next((query for name, query in TO_LOOK_AT.items() if verdict.name.startswith(name)), None)


def evaluations(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """All of them but for their single tasks, and the checkpoints that can be evaluated."""
    run, stamp = opened.run, opened.stamp()
    if query.get("stamp") == stamp:
        return {"stamp": stamp}
    found = [structs.replace(one, task_results=(), examples=()) for one in run.evaluations()]
    saved = [{"step": one.step, "best": one.best} for one in run.checkpoints()]
    return {"stamp": stamp, "evaluations": found, "checkpoints": saved}


def evaluation_row(found: Evaluation) -> dict[str, Any]:
    ways = {name: share_row(way) for name, way in found.ways().items()}
    return {"label": found.label, "in_curve": found.in_curve, "step": found.version, "ways": ways}


def share_row(way: Decoded) -> dict[str, Any]:
    return {"value": way.accuracy, "low": way.low, "high": way.high}


def curves(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Of `keys` (separated by commas, or all that were measured), of the steps `first` to `last`."""
    metrics, asked = opened.run.metrics, query.get("keys", "")
    steps = metrics.column("step")
    begin, end = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    first, last = whole(query, "first", begin), whole(query, "last", end)
    points = whole(query, "points", POINTS, most=MOST_POINTS)
    keys = metrics.keys()
    wanted = [key for key in keys if (key in asked.split(",") if asked else key not in NO_CURVES)]
    found = metrics.curves(wanted, points, first, last)
    first, last = max(first, begin), min(last, end)
    thinned = len(found.step) < last - first + 1
    keys = drawn(wanted, found, thinned=thinned, keep_empty=bool(asked))
    return {"first": first, "last": last, "steps": found.step, "keys": keys}


def drawn(keys: Sequence[str], curves: Curves, *, thinned: bool, keep_empty: bool) -> dict[str, dict[str, list[float]]]:
    """low, high: only where a point stands for several steps. Curves without any value are left out unless kept."""
    parts = {"mean": curves.mean, "low": curves.low, "high": curves.high} if thinned else {"mean": curves.mean}
    shown = [place for place in range(len(keys)) if keep_empty or not np.isnan(curves.mean[place]).all()]
    found = {part: shortened(values[shown]) for part, values in parts.items()}
    return {keys[place]: {part: rows[row] for part, rows in found.items()} for row, place in enumerate(shown)}


def shortened(values: np.ndarray) -> list[list[float]]:
    """[keys, points] with as many digits as a chart shows. JSON writes NaN as null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.floor(np.log10(np.abs(values))) - (DIGITS - 1)
    # Powers of ten are exact only upwards.
    up, down = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.clip(-power, 0, 300)
    short = np.round(values / up * down) / down * up
    return np.where(np.isfinite(short), short, values).tolist()


def lanes(opened: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Phases of the processes in the last steps of the range: as traced, if the run has ended and has a trace of them,
    else from the times of each step."""
    steps = opened.run.metrics.column("step")
    end = int(steps[-1]) if len(steps) else 0
    last = min(whole(query, "last", end), end)
    first = max(whole(query, "first", 1), last - LANE_STEPS + 1)
    traced = opened.run.trace() if opened.run.state() != "running" else []
    chosen = (steps >= first) & (steps <= last)
    measured = within(traced, opened.run.metrics.known_column("time/update_s")[chosen], end - last)
    phases = measured or opened.run.phases(first, last)
    return {"first": first, "last": last, "measured": bool(measured), "phases": phases}


def within(traced: Sequence[Phase], update_s: np.ndarray, later: int) -> list[Phase]:
    """The phases of these steps: from the end of the update before them, or from the beginning of the trace, to their
    last update. A trace has no numbers of steps. Its last update should be that of the run's last step; there are none
    if its updates do not last as long as those of the steps.

    update_s: how long each of these steps updated. later: steps after them.
    """
    updates = [phase for phase in traced if phase.name == "update"]
    stop = len(updates) - later
    start = stop - len(update_s)
    if start < 0 or stop <= start:
        return []
    lasted = [phase.end_s - phase.start_s for phase in updates[start:stop]]
    if not np.allclose(lasted, update_s, rtol=0, atol=TOLERANCE_S):
        return []
    begin = updates[start - 1].end_s if start else traced[0].start_s
    return [phase for phase in traced if phase.start_s >= begin and phase.end_s <= updates[stop - 1].end_s]
