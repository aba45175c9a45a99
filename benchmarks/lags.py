"""What samples of an older policy cost and give: real runs of the embedded preset with a lag of 0, 1, 2 and 4 steps.

Two processes, as a user starts them; above 0 they compute at once, each with one of two cores. For each lag, each
correction (the arms of off_policy.py) and each seed:

    steps_to_0.90, seconds_to_0.90    until the mean sampled reward of five steps is 0.90; None if it never is
    step_s                            median time of a step, from the fifth on
    ess, capped                       effective sample size of the importance weights as a share of the tokens, and the
                                      share of them at the cap: means of all steps. What staleness does to the gradient

The staleness itself is no measurement: groups of step s come from version max(0, s - pipeline.max_lag), exactly. Seeds
are the outer loop, so that a slow hour meets every arm.

    python -m benchmarks.lags --work DIR [--seeds 0 1 2] [--lags 0 1 2 4] [--arms none token sequence_mask] [--steps 50]
    python -m benchmarks.lags --work DIR --seeds 0 1 2 3 4 --lags 2 4 --arms token stale --out lags_default

The second measures what `loss.stale_limit` is by default. Each run's figures are kept in DIR as it ends; the same DIR
again continues. 36 and 20 runs of 20 seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.off_policy import ARMS
from benchmarks.student import mean_interval
from benchmarks.time_to_reward import TARGET, reached_at, tandem_rows

WARM_STEPS = 4


def main() -> None:
    """Train each, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["none", "token", "sequence_mask"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="lags", help="name of the result file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    runs = [
        measured(args.work, arm, lag, seed, args.steps) for seed in args.seeds for lag in args.lags for arm in args.arms
    ]
    table = {f"lag {lag}": {arm: summary(runs, arm, lag) for arm in args.arms} for lag in args.lags}
    print(json.dumps(table, indent=2))
    print(write_result(args.out, {"steps": args.steps, "target": TARGET, "table": table, "runs": runs}))


def measured(work: Path, arm: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """One run's figures, from an earlier start if they are there."""
    file = work / f"{arm}-lag{lag}-seed{seed}-steps{steps}.json"
    if not file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            file.write_text(json.dumps(one(Path(folder) / "run", arm, lag, seed, steps)))
    found: dict[str, Any] = json.loads(file.read_text())
    print(arm, lag, seed, found["stopped"] or found["steps_to_0.90"], flush=True)
    return found


def one(out: Path, arm: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """A run; one that a check stopped has learned nothing from there on."""
    keys = {"run.seed": seed, "run.steps": steps, "eval.problems": 0, "pipeline.max_lag": lag, **ARMS[arm]}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *sets]
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    stopped = done.stderr.strip()[-300:] if done.returncode else ""
    rows, curve = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], tandem_rows(out)
    reached = reached_at(curve)
    return {
        "arm": arm,
        "lag": lag,
        "seed": seed,
        "stopped": stopped,
        "steps_to_0.90": reached,
        "seconds_to_0.90": None if reached is None else round(curve[reached - 1]["time_s"], 2),
        "step_s": round(statistics.median(row["time/step_s"] for row in rows[WARM_STEPS:]), 4),
        "ess": mean_of(rows, "importance/ess"),
        "capped": mean_of(rows, "importance/capped"),
        "reward_last_five": round(statistics.fmean(row["reward"] for row in curve[-5:]), 3),
        "rewards": [round(row["reward"], 3) for row in curve],
    }


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Of those that have it."""
    found = [row[name] for row in rows if row[name] is not None]
    return round(statistics.fmean(found), 4) if found else None


def summary(runs: Sequence[dict[str, Any]], arm: str, lag: int) -> dict[str, Any]:
    """Means over the seeds with their 95 % interval; of those that reached the target, and how many did."""
    own = [run for run in runs if (run["arm"], run["lag"]) == (arm, lag)]
    reached = [run for run in own if run["steps_to_0.90"] is not None]
    names = ("steps_to_0.90", "seconds_to_0.90")
    return {
        "reached": f"{len(reached)} of {len(own)}",
        "stopped": sum(bool(run["stopped"]) for run in own),
        **{name: mean_interval([run[name] for run in reached]) if len(reached) > 1 else None for name in names},
        **{name: mean_interval([run[name] for run in own]) for name in ("step_s", "reward_last_five")},
        **{name: mean_of(own, name) for name in ("ess", "capped")},
    }


if __name__ == "__main__":
    main()
