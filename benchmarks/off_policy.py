"""Which off-policy correction keeps learning: the embedded problems with samples that are 0, 2 and 4 steps old.

Every arm trains STEPS steps of the embedded preset, actor and learner in one process. No task comes twice in so few
steps, so the sampled reward of a step is measured on unseen problems. Listed for each arm and lag, as means over
the seeds with their 95 % interval (student.py): the mean reward of the last five steps, of all steps, the same minus
the arm `token` with that lag and seed (with Bonferroni's correction for that many comparisons), and the runs whose
five-step mean reached TARGET and did not fall below HELD of it again.

    python -m benchmarks.off_policy --work DIR [--seeds 0 1 2 3 4] [--lags 0 2 4] [--arms token ...] [--lr 2e-3]

Each run is kept in DIR as it ends, so parts can be measured one after the other; the same DIR again continues. The
result is written when all that were asked for are there. 120 runs of 10 to 20 seconds, half an hour on two cores.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.local_run import trained
from benchmarks.machine import write_result
from benchmarks.student import mean_interval
from launch.commands.in_process import local_actor
from launch.presets.load import load_config
from shared.config.tree import Config
from shared.errors import TrainingStopped

STEPS, WINDOW, TARGET, HELD = 40, 5, 0.85, 0.8
ALL = {"loss.stale_limit": 0.0}
"""No completion is left out."""
ARMS: dict[str, dict[str, Any]] = {
    "none": {"loss.importance_cap": 0, **ALL},
    "token": {**ALL},
    "token_mask": {"loss.importance": "token_mask", "loss.importance_floor": 0.5, **ALL},
    "sequence": {"loss.importance": "sequence", **ALL},
    "sequence_mask": {"loss.importance": "sequence_mask", **ALL},
    "stale": {},
    "dppo": {"loss.kind": "dppo", "reward.advantage": "std"},
    "updates": {"batch.updates": 4, **ALL},
}
"""Changes of the preset: `dapo` with truncated weights by token, from a lag of 2 on with a stale_limit."""
PLAIN = "token"


def main() -> None:
    """Measure what is missing, compare, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    runs = [
        measured(args.work, arm, lag, seed, args.lr, args.steps)
        for seed in args.seeds
        for lag in args.lags
        for arm in args.arms
    ]
    table = {f"lag {lag}": {arm: summary(runs, arm, lag, len(args.arms) - 1) for arm in args.arms} for lag in args.lags}
    print(json.dumps(table, indent=2))
    facts = {"steps": args.steps, "lr": args.lr, "target": TARGET, "held": HELD, "arms": ARMS}
    print(write_result("off_policy", {**facts, "table": table, "runs": runs}))


def measured(work: Path, arm: str, lag: int, seed: int, lr: float, steps: int) -> dict[str, Any]:
    """One run's figures, from an earlier start if they are there."""
    file = work / f"{arm}-lag{lag}-seed{seed}-lr{lr:g}-steps{steps}.json"
    if not file.is_file():
        file.write_text(json.dumps(one(arm, lag, seed, lr, steps)))
    return json.loads(file.read_text())


def one(arm: str, lag: int, seed: int, lr: float, steps: int) -> dict[str, Any]:
    """A run; one that a check stopped has learned nothing from there on."""
    config = config_for(arm, lag, seed, lr, steps)
    run: dict[str, Any] = {"arm": arm, "lag": lag, "seed": seed, "stopped": ""}
    rows: list[dict[str, Any]] = []
    try:
        with local_actor(config) as actor:
            rows = [row.to_row() for row in trained(config, actor.rollout).rows]
    except TrainingStopped as error:
        run["stopped"] = str(error)
    columns = ("reward/mean", "importance/mean", "importance/capped", "importance/ess", "clip/fraction", "entropy/mean")
    run |= {name: [row[name] for row in rows] for name in columns}
    print(arm, lag, seed, run["stopped"] or f"{final(run):.3f}", flush=True)
    return run


def config_for(arm: str, lag: int, seed: int, lr: float, steps: int) -> Config:
    keys = {"run.seed": seed, "run.steps": steps, "optimizer.lr": lr, "pipeline.max_lag": lag, **ARMS[arm]}
    threads = {"compute.learner_threads": 1, "compute.actor_threads": 1}
    return load_config("embedded", [f"{key}={value}" for key, value in {**threads, **keys}.items()])


def final(run: dict[str, Any]) -> float:
    """Mean reward of the last steps; 0 of a run that was stopped."""
    return fmean(run["reward/mean"][-WINDOW:]) if run["reward/mean"] else 0.0


def whole(run: dict[str, Any]) -> float:
    """Mean reward of all steps, the area below the curve."""
    return fmean(run["reward/mean"]) if run["reward/mean"] else 0.0


def kept(run: dict[str, Any]) -> bool:
    """Whether it reached the target and stayed near it."""
    curve = run["reward/mean"]
    means = [fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1)]
    first = next((place for place, mean in enumerate(means) if mean >= TARGET), None)
    return first is not None and min(means[first:]) >= HELD * TARGET


def summary(runs: Sequence[dict[str, Any]], arm: str, lag: int, comparisons: int) -> dict[str, Any]:
    """Of one arm at one lag over the seeds, beside the plain one of the same seeds."""
    own = [run for run in runs if (run["arm"], run["lag"]) == (arm, lag)]
    plain = {run["seed"]: run for run in runs if (run["arm"], run["lag"]) == (PLAIN, lag)}
    found: dict[str, Any] = {
        "final": mean_interval([final(run) for run in own]),
        "all_steps": mean_interval([whole(run) for run in own]),
        "kept_learning": f"{sum(kept(run) for run in own)} of {len(own)}",
        "stopped": sum(bool(run["stopped"]) for run in own),
    }
    if arm != PLAIN and plain:
        family = max(1, comparisons)
        found |= {
            "final_minus_token": mean_interval([final(r) - final(plain[r["seed"]]) for r in own], 3, family),
            "all_steps_minus_token": mean_interval([whole(r) - whole(plain[r["seed"]]) for r in own], 3, family),
        }
    return found


if __name__ == "__main__":
    main()
