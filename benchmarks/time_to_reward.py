"""How long until the embedded model's five-step mean reward is 0.90: Tandem against TRL's GRPOTrainer with PEFT.

Both start from the same values (the NF4 base, dequantised for TRL, which has no NF4 path on a CPU), with the same
prompts, G, LoRA, temperature, cap and optimizer (AdamW's betas, decay and clipping are read from our preset and handed
to TRL; the rate is constant on both sides). Each side has three learning rates and every rate the same seeds; a side's
rate is the one with the smallest geometric mean of seconds over the seeds, all of which must have reached the target.
Ratios are taken seed by seed and given with their 95 % interval (student.py); the ratios of our two sides are two
statements, not corrected.

Runs go one after the other on one machine, seed by seed, so that a slow hour falls on all sides. Time counts from the
first training step, so neither side's imports or evaluation count; whole-process times are listed too. TRL stops at the
target and Tandem goes on to --max-steps. So the median step is that of the steps up to the target, without the first,
which warms up: past the target, every answer is correct in most of our groups, which then have no part in the update.
Memory is the largest sum over all processes of a side, launcher included, a page that several of them share counted
once; the sum that counts it in each is listed too. Not the same: TRL divides advantages by the standard deviation with
n - 1, we by the one with n, which makes ours 7 % larger at G = 8; Adam takes that out again.

    python -m benchmarks.time_to_reward --trl-python /path/to/bin/python      (an environment with trl==1.16.0, peft)
"""

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.dense_base import write_dense_base
from benchmarks.machine import write_result
from benchmarks.process_tree import run_watched
from benchmarks.student import mean_interval, ratio_interval
from launch.presets.load import load_config
from learner.tasks.tasks import load_rows
from shared.config.tree import Config
from shared.process.determinism import cpu_environment

Run = dict[str, Any]

TARGET, WINDOW, MAX_STEPS = 0.90, 5, 60
RATES = ("2e-3", "3e-3", "4e-3")
SEEDS = (0, 1, 2)
# The preset as it is, in strict turns; the same with sampling one step ahead, a thread each; and TRL.
SIDES = ("tandem", "tandem_ahead", "trl")


def main() -> None:
    """Measure both, write the result, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", required=True, help="Python of an environment with trl==1.16.0 and peft")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="time_to_reward", help="of the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        runs = [measured(side, rate, seed, args, work) for seed in args.seeds for rate in args.rates for side in SIDES]
    found = summary(runs, len(args.seeds))
    print(json.dumps(found, indent=2))
    print(write_result(args.name, {"target": args.target, "seeds": args.seeds, **found, "runs": runs}))


def prepare(work: Path) -> None:
    """The dense base and the task file that TRL reads."""
    config = load_config("embedded")
    if config.optimizer.schedule != "constant" or config.optimizer.warmup_steps:
        raise SystemExit("the embedded preset no longer has a constant rate, which is what trl_grpo.py gives to TRL")
    write_dense_base(config.model, work / "dense")
    train = load_rows(config.tasks, config.verifier.kind)[0]
    (work / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))


def measured(side: str, rate: str, seed: int, args: argparse.Namespace, work: Path) -> Run:
    """One training run of one side."""
    out = work / f"{side}-{rate}-{seed}"
    argv = trl_argv(rate, seed, args, work, out) if side == "trl" else tandem_argv(side, rate, seed, args, out)
    environment = os.environ | environment_of(side, args.threads) | {"HF_HUB_OFFLINE": "1"}
    log = out.with_suffix(".log")
    watched = run_watched(argv, log, environment)
    if watched.code != 0:
        raise SystemExit(f"{side} at {rate}, seed {seed}, ended with {watched.code}:\n{log.read_text()[-3000:]}")
    rows = json.loads(out.with_suffix(".json").read_text()) if side == "trl" else tandem_rows(out)
    run = {
        "side": side,
        "lr": rate,
        "seed": seed,
        **times_of(rows, args.target),
        "whole_process_s": round(watched.wall_s, 1),
        "peak_memory_mb": round(watched.pss_mb),
        "peak_resident_mb": round(watched.rss_mb),
    }
    print(run, flush=True)
    return run


def environment_of(side: str, threads: int) -> dict[str, str]:
    """Tandem's variables make results repeatable, which TRL does not ask for."""
    return {"OMP_NUM_THREADS": str(threads)} if side.startswith("trl") else cpu_environment(threads, "fast")


def times_of(rows: list[dict[str, float]], target: float) -> Run:
    """To the target, and of a step on the way there; where it was not reached, of a step of the whole run."""
    reached = reached_at(rows, target)
    steps = [after["time_s"] - before["time_s"] for before, after in pairwise(rows[:reached])]
    return {
        "steps_to_target": reached,
        "seconds_to_target": None if reached is None else round(rows[reached - 1]["time_s"], 2),
        "median_step_s": round(median(steps), 3),
    }


def tandem_argv(side: str, rate: str, seed: int, args: argparse.Namespace, out: Path) -> list[str]:
    """Our own command line, without evaluations."""
    keys: dict[str, Any] = {"optimizer.lr": rate, "eval.problems": 0}
    if side == "tandem_ahead":
        half = args.threads // 2
        keys |= {"pipeline.max_lag": 1, "compute.learner_threads": half, "compute.actor_threads": half}
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    run = ["run", "embedded", "--out", str(out), "--steps", str(args.max_steps), "--seed", str(seed)]
    return [sys.executable, "-m", "launch", *run, *overrides]


def trl_argv(rate: str, seed: int, args: argparse.Namespace, work: Path, out: Path) -> list[str]:
    """The script beside this one, in TRL's environment."""
    options = {
        "--model": work / "dense",
        "--tasks": work / "tasks.jsonl",
        "--dtype": "fp32",
        "--reward": "answer",
        "--target": args.target,
        "--max-steps": args.max_steps,
        "--out": out.with_suffix(".json"),
        "--seed": seed,
        "--threads": args.threads,
    }
    return trl_command(args.trl_python, load_config("embedded"), options | {"--lr": rate})


def trl_command(python: str, config: Config, options: dict[str, Any]) -> list[str]:
    """trl_grpo.py with the sizes, LoRA and optimizer of a configuration of ours, and options that win over them."""
    optimizer, rollout, lora = config.optimizer, config.rollout, config.lora
    ours = {
        "--prompts": rollout.prompts,
        "--group": rollout.group,
        "--micro-batch": rollout.prompts * rollout.group,
        "--tokens": rollout.max_new_tokens,
        "--rank": lora.rank,
        "--alpha": lora.alpha,
        "--lr": optimizer.lr,
        "--beta1": optimizer.beta1,
        "--beta2": optimizer.beta2,
        "--weight-decay": optimizer.weight_decay,
        "--max-grad-norm": optimizer.max_grad_norm,
    }
    script = Path(__file__).with_name("trl_grpo.py")
    return [python, "-P", str(script), *(str(word) for pair in (ours | options).items() for word in pair)]


def tandem_rows(out: Path) -> list[dict[str, float]]:
    """Reward and time of each step, counted from the start of the first."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    start = rows[0]["time_s"] - rows[0]["time/step_s"]
    return [{"reward": row["reward/mean"], "time_s": row["time_s"] - start} for row in rows]


def reached_at(rows: list[dict[str, float]], target: float = TARGET) -> int | None:
    """The first step whose five-step mean is at the target."""
    for step in range(WINDOW, len(rows) + 1):
        if sum(row["reward"] for row in rows[step - WINDOW : step]) / WINDOW >= target:
            return step
    return None


def summary(runs: list[Run], num_seeds: int) -> dict[str, Any]:
    """Each side at its best rate, and the ratios seed by seed."""
    best = {side: best_runs(runs, side, num_seeds) for side in SIDES}
    found: dict[str, Any] = {"best": {side: told(own) if own else None for side, own in best.items()}}
    pairs = {side: own for side, own in best.items() if side != "trl" and own and best["trl"]}
    return found | {side: against(own, best["trl"]) for side, own in pairs.items()}


def best_runs(runs: list[Run], side: str, num_seeds: int) -> list[Run]:
    """The runs of the rate with the smallest geometric mean of seconds; none if no rate reached it with all seeds."""
    by_rate: dict[str, list[Run]] = {}
    for run in runs:
        if run["side"] == side and run["seconds_to_target"] is not None:
            by_rate.setdefault(run["lr"], []).append(run)
    whole = [own for own in by_rate.values() if len(own) == num_seeds]
    return min(whole, key=lambda own: geometric_mean([run["seconds_to_target"] for run in own]), default=[])


def told(own: list[Run]) -> dict[str, Any]:
    """One side over the seeds."""
    keys = ("steps_to_target", "seconds_to_target", "median_step_s", "peak_memory_mb", "peak_resident_mb")
    return {"lr": own[0]["lr"], **{key: mean_interval([run[key] for run in own]) for key in keys}}


def against(own: list[Run], trl: list[Run]) -> dict[str, Any]:
    """Ratios of one side of ours to TRL, runs of the same seed beside each other."""

    def ratio(key: str, above: list[Run], below: list[Run]) -> dict[str, Any]:
        return ratio_interval([run[key] for run in above], [run[key] for run in below])

    return {
        "times_faster": ratio("seconds_to_target", trl, own),
        "step_times_faster": ratio("median_step_s", trl, own),
        "memory_ratio": ratio("peak_memory_mb", own, trl),
        "resident_ratio": ratio("peak_resident_mb", own, trl),
    }


if __name__ == "__main__":
    main()
