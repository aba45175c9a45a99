"""How much of level 1 a policy forgets while it is trained on level 3, and what prevents that.

Every run trains STAGE steps on level 1 and then STAGE on level 3. The arms differ in what happens between: nothing,
elastic weight consolidation at two weights, KL to the policy of that moment, a fifth of the draws from level 1.
Forgetting is the accuracy at level 1 at the end of the first stage less that at the end of the run (sampled at T = 1,
512 held-out problems, the same draws); below zero means that level 3 taught level 1. The cost of an arm at
level 3 is listed beside it.

Differences to `nothing` are intervals of one family: two figures of each of the four other arms. They are corrected for
that (Bonferroni), so all eight are true at once with 95 %; those of single arms are not corrected.

    python -m benchmarks.ewc [--seeds 0 1 2 3 4] [--work DIR]      runs stay in DIR, and the same DIR again continues
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.level_runs import measured, work_folder
from benchmarks.machine import write_result
from benchmarks.student import mean_interval

EASY, HARD, STAGE = 1, 3, 30
SETTINGS = {
    "run.steps": 2 * STAGE,
    "tasks.levels": [EASY, HARD],
    "curriculum.kind": "levels",
    "curriculum.stage_steps": STAGE,
    "curriculum.advance_at": 1.0,
    "checkpoint.every": STAGE,
    "checkpoint.keep": 2,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
}
ARMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ewc_weak": {"curriculum.ewc": 0.01},
    "ewc_strong": {"curriculum.ewc": 0.1},
    "kl": {"curriculum.kl_to": "stage", "loss.kl_beta": 0.1},
    "replay": {"curriculum.replay": 0.2},
}
COMPARED = ("forgetting", "level_3_after")
COMPARISONS = len(COMPARED) * (len(ARMS) - 1)


def main() -> None:
    """Measure, compare, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--work", type=Path, help="folder in which the runs stay (default: a temporary one)")
    parser.add_argument("--name", default="ewc", help="of the result file")
    args = parser.parse_args()
    with work_folder(args.work) as work:
        runs = [one(work, arm, seed) for seed in args.seeds for arm in ARMS]
    table = {arm: summary(runs, arm) for arm in ARMS}
    print(json.dumps(table, indent=2))
    print(
        write_result(
            args.name, {"settings": SETTINGS, "arms": ARMS, "comparisons": COMPARISONS, "table": table, "runs": runs}
        )
    )


def one(work: Path, arm: str, seed: int) -> dict[str, Any]:
    """One run's figures."""
    found = measured(work, f"{arm}-{seed}", SETTINGS | ARMS[arm] | {"run.seed": seed}, [EASY, HARD])
    at = {(point["step"], point["level"]): point for point in found["judged"]}
    run: dict[str, Any] = {"arm": arm, "seed": seed}
    for way in ("sampled", "greedy"):
        before, after = at[STAGE, EASY][way], at[2 * STAGE, EASY][way]
        hard = {"level_3_before": at[STAGE, HARD][way], "level_3_after": at[2 * STAGE, HARD][way]}
        run[way] = {"level_1_before": before, "level_1_after": after, "forgetting": before - after, **hard}
    penalties = [row["ewc/penalty"] for row in found["rows"] if row["ewc/penalty"]]
    run["penalty_last"] = penalties[-1] if penalties else None
    print(arm, seed, run["sampled"], run["penalty_last"], flush=True)
    return run


def summary(runs: Sequence[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Of one arm over the seeds; differences to `nothing` are taken seed by seed, and corrected as one family."""
    own, nothing = ([run for run in runs if run["arm"] == a] for a in (arm, "nothing"))
    found: dict[str, Any] = {}
    for way in ("sampled", "greedy"):
        found[way] = {
            key: mean_interval([run[way][key] for run in own])
            for key in ("forgetting", "level_1_after", "level_3_after")
        }
        pairs = list(zip(own, nothing, strict=True))
        for key in COMPARED:
            differences = [a[way][key] - b[way][key] for a, b in pairs]
            found[way][f"{key}_less_nothing"] = mean_interval(differences, comparisons=COMPARISONS)
    return found


if __name__ == "__main__":
    main()
