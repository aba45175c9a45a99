"""How long until the embedded model's five-step mean reward is 0.90: Tandem against TRL's GRPOTrainer with PEFT.

Both start from the same values (the NF4 base, dequantised for TRL, which has no NF4 path on a CPU), with the same
prompts, G, LoRA, temperature and cap, each with the best of three learning rates, one after the other in one run on
one machine. Time counts from the first training step, so neither side's imports or evaluation count; whole-process
times are listed too. Memory is the largest sum over all processes of a side, launcher included, a page that several of
them share counted once; the sum that counts it in each is listed too.

    python -m benchmarks.time_to_reward --trl-python /path/to/bin/python      (an environment with trl==1.16.0, peft)
"""

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.plain_checkpoint import write_plain_checkpoint
from benchmarks.process_tree import run_watched
from learner.tasks import load_rows
from shared.config_load import load_config
from shared.determinism import cpu_environment

TARGET, WINDOW, MAX_STEPS = 0.90, 5, 60
RATES = ("2e-3", "3e-3", "4e-3")
# The preset as it is, in strict turns; the same with sampling one step ahead, a thread each; and TRL.
SIDES = ("tandem", "tandem_ahead", "trl")


def main() -> None:
    """Measure both, write the result, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", required=True, help="Python of an environment with trl==1.16.0 and peft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        runs = [measured(side, rate, args, work) for rate in RATES for side in SIDES]
    print(json.dumps(summary(runs), indent=2))
    print(write_result("time_to_reward", {"target": TARGET, "seed": args.seed, **summary(runs), "runs": runs}))


def prepare(work: Path) -> None:
    """The plain checkpoint and the task file that TRL reads."""
    config = load_config("embedded")
    write_plain_checkpoint(config.model, work / "plain")
    train, _ = load_rows(config.tasks, config.verifier.kind)
    (work / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))


def measured(side: str, rate: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One training run of one side."""
    out = work / f"{side}-{rate}"
    argv = trl_argv(rate, args, work, out) if side == "trl" else tandem_argv(side, rate, args, out)
    environment = os.environ | cpu_environment(args.threads, "fast") | {"HF_HUB_OFFLINE": "1"}
    log = out.with_suffix(".log")
    watched = run_watched(argv, log, environment)
    if watched.code != 0:
        raise SystemExit(f"{side} at {rate} ended with {watched.code}:\n{log.read_text()[-3000:]}")
    rows = json.loads(out.with_suffix(".json").read_text()) if side == "trl" else tandem_rows(out)
    reached = reached_at(rows)
    steps = [b["time_s"] - a["time_s"] for a, b in pairwise(rows)]
    run = {
        "side": side,
        "lr": rate,
        "steps_to_target": reached,
        "seconds_to_target": None if reached is None else round(rows[reached - 1]["time_s"], 2),
        "median_step_s": round(sorted(steps)[len(steps) // 2], 3),
        "whole_process_s": round(watched.wall_s, 1),
        "peak_memory_mb": round(watched.pss_mb),
        "peak_resident_mb": round(watched.rss_mb),
    }
    print(run, flush=True)
    return run


def tandem_argv(side: str, rate: str, args: argparse.Namespace, out: Path) -> list[str]:
    """Our own command line, without evaluations."""
    keys: dict[str, Any] = {"optimizer.lr": rate, "eval.problems": 0}
    if side == "tandem_ahead":
        half = args.threads // 2
        keys |= {"pipeline.max_lag": 1, "compute.learner_threads": half, "compute.actor_threads": half}
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    run = ["run", "embedded", "--out", str(out), "--steps", str(MAX_STEPS), "--seed", str(args.seed)]
    return [sys.executable, "-m", "launch", *run, *overrides]


def trl_argv(rate: str, args: argparse.Namespace, work: Path, out: Path) -> list[str]:
    """The script beside this one, in TRL's environment."""
    script = Path(__file__).with_name("trl_grpo.py")
    options = {
        "--model": work / "plain",
        "--tasks": work / "tasks.jsonl",
        "--lr": rate,
        "--target": TARGET,
        "--max-steps": MAX_STEPS,
        "--out": out.with_suffix(".json"),
        "--seed": args.seed,
        "--threads": args.threads,
    }
    return [args.trl_python, str(script), *(str(word) for pair in options.items() for word in pair)]


def tandem_rows(out: Path) -> list[dict[str, float]]:
    """Reward and time of each step, counted from the start of the first."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    start = rows[0]["time_s"] - rows[0]["time/step_s"]
    return [{"reward": row["reward/mean"], "time_s": row["time_s"] - start} for row in rows]


def reached_at(rows: list[dict[str, float]]) -> int | None:
    """The first step whose five-step mean is at the target."""
    for step in range(WINDOW, len(rows) + 1):
        if sum(row["reward"] for row in rows[step - WINDOW : step]) / WINDOW >= TARGET:
            return step
    return None


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each side's best, and the ratios."""
    best = {side: min(of(runs, side), key=lambda run: run["seconds_to_target"]) for side in SIDES}
    return {"best": best, **{side: against(best[side], best["trl"]) for side in SIDES if side != "trl"}}


def against(tandem: dict[str, Any], trl: dict[str, Any]) -> dict[str, float]:
    """Ratios of one side of ours to TRL."""
    return {
        "times_faster": round(trl["seconds_to_target"] / tandem["seconds_to_target"], 2),
        "step_times_faster": round(trl["median_step_s"] / tandem["median_step_s"], 2),
        "memory_ratio": round(tandem["peak_memory_mb"] / trl["peak_memory_mb"], 3),
        "resident_ratio": round(tandem["peak_resident_mb"] / trl["peak_resident_mb"], 3),
    }


def of(runs: list[dict[str, Any]], side: str) -> list[dict[str, Any]]:
    """The runs of a side that reached the target."""
    reached = [run for run in runs if run["side"] == side and run["seconds_to_target"] is not None]
    if not reached:
        raise SystemExit(f"{side} did not reach {TARGET} within {MAX_STEPS} steps at any rate")
    return reached


if __name__ == "__main__":
    main()
