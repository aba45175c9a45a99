"""How soon each curriculum brings the embedded model to 0.90 on held-out problems of level 3, the hard level.

All train on levels 1, 2 and 3 for STEPS steps with the preset's settings. Accuracy is that of greedy completions; that
of completions sampled at T = 1 is beside it, but levels off below 0.90 at the preset's rate with every curriculum.
The target is reached at the first checkpoint (one in EVERY steps) at which the mean of the last three evaluations is
0.90; a run that never gets there counts as STEPS, which is too good a figure. Steps and seconds are compared seed by
seed with `shuffled`. The cost of SENT's measurement is listed separately. With --work what was measured stays in that
folder, and the same one again continues, with the same settings.

    python -m benchmarks.curricula [--seeds 0 1 2 3 4] [--work DIR]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.level_runs import kept, measured, work_folder
from benchmarks.machine import write_result
from benchmarks.student import mean_interval, ratio_interval

TARGET, HARD, WINDOW, STEPS, EVERY = 0.90, 3, 3, 40, 2
KINDS = ("shuffled", "pass_rate", "sent", "levels")
SETTINGS = {
    "run.steps": STEPS,
    "tasks.levels": [1, 2, 3],
    "checkpoint.every": EVERY,
    "checkpoint.keep": STEPS,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
}


def main() -> None:
    """Measure, compare, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--work", type=Path, help="folder in which the runs stay (default: a temporary one)")
    parser.add_argument("--name", default="curricula", help="of the result file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for tries on other seeds")
    args = parser.parse_args()
    settings = SETTINGS | dict(word.split("=", 1) for word in args.set)
    with work_folder(args.work) as work:
        entropy_s = kept(work / "entropies-seconds.json", settings, lambda: measure_entropies(work, settings))
        runs = [one(work, kind, seed, settings) for seed in args.seeds for kind in KINDS]
    table = {kind: summary(runs, kind) for kind in KINDS}
    print(json.dumps(table, indent=2))
    facts = {"target": TARGET, "level": HARD, "settings": settings, "semantic_entropy_s": entropy_s}
    print(write_result(args.name, {**facts, "table": table, "runs": runs}))


def measure_entropies(work: Path, settings: dict[str, Any]) -> float:
    """Seconds that SENT's measurement took; once for all seeds."""
    keys = settings | cache(work)
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "launch", "curriculum", "embedded", *words], check=True)
    return round(time.monotonic() - start, 1)


def cache(work: Path) -> dict[str, Any]:
    """Where it is kept."""
    return {"curriculum.cache": str(work / "entropies.json")}


def one(work: Path, kind: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One run's figures."""
    keys = settings | {"run.seed": seed, "curriculum.kind": kind} | (cache(work) if kind == "sent" else {})
    found = measured(work, f"{kind}-{seed}", keys, [HARD])
    curves = {way: [point[way] for point in found["judged"]] for way in ("sampled", "greedy")}
    run: dict[str, Any] = {"kind": kind, "seed": seed}
    for way, curve in curves.items():
        step = reached([point["step"] for point in found["judged"]], curve)
        run[way] = {
            "steps": step,
            "seconds": None if step is None else found["seconds"][step - 1],
            "final": sum(curve[-WINDOW:]) / WINDOW,
            "curve": [round(share, 4) for share in curve],
        }
    run["seconds_all"] = found["seconds"][-1]
    run["stages"] = [row["curriculum/stage"] for row in found["rows"]]
    print(
        run["kind"], run["seed"], {way: (run[way]["steps"], round(run[way]["final"], 3)) for way in curves}, flush=True
    )
    return run


def reached(steps: Sequence[int], curve: Sequence[float]) -> int | None:
    """The first checkpoint whose last WINDOW evaluations have the target as their mean."""
    for end in range(WINDOW, len(curve) + 1):
        if sum(curve[end - WINDOW : end]) / WINDOW >= TARGET:
            return steps[end - 1]
    return None


def summary(runs: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Of one curriculum over the seeds, beside the shuffle's of the same seeds."""
    found: dict[str, Any] = {}
    for way in ("sampled", "greedy"):
        own, shuffled = ([run for run in runs if run["kind"] == k] for k in (kind, "shuffled"))
        found[way] = {
            "reached": sum(run[way]["steps"] is not None for run in own),
            "steps": mean_interval([steps_of(run, way) for run in own], 1),
            "seconds": mean_interval([seconds_of(run, way) for run in own], 1),
            "final": mean_interval([run[way]["final"] for run in own]),
            "steps_over_shuffled": ratio_interval(*([steps_of(run, way) for run in side] for side in (own, shuffled))),
            "seconds_over_shuffled": ratio_interval(*([seconds_of(r, way) for r in side] for side in (own, shuffled))),
        }
    return found


def steps_of(run: dict[str, Any], way: str) -> float:
    """To the target, or all."""
    return run[way]["steps"] or STEPS


def seconds_of(run: dict[str, Any], way: str) -> float:
    """To the target, or all."""
    return run[way]["seconds"] or run["seconds_all"]


if __name__ == "__main__":
    main()
