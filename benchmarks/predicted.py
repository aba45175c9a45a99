"""Predicted against measured cost of a run, for models of several sizes.

Each model is run twice with the command that a user types: once to fill the cache, then for a few steps that count. The
prediction is that of `run` (launch/plan), made before the start. Memory is the largest proportional sum of all
processes (a shared page counts once) and the largest resident size of learner and actor; times are medians of steps.
Lengths are not known before the start, so all is predicted once more with the lengths that were sampled. They differ as
in a real run: the model with random weights ends an answer with one token in thirty-two. The reward is the parity of
token ids, because groups without differences would not be trained on; only the embedded model solves its own tasks.

    python -m benchmarks.predicted [--models FOLDER ...] [--steps 12] [--prompts 2] [--tokens 128] [--set KEY=VALUE ...]

Without --models: the embedded model, and one of 28 million parameters with random weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import parity_reward
from benchmarks.machine import write_result
from benchmarks.process_tree import run_watched
from launch.commands.run import speeds_of
from launch.plan.cost import find_shape, work_of
from launch.plan.duration import step_time
from launch.plan.machine import NotMeasured
from launch.plan.memory import MIB, host_memory
from shared.config.load import config_from_json
from shared.config.model import cache_root
from shared.process.processor import cores_here, gains_by_packing, read_flags
from shared.run.forecast import Figures, read_prediction
from shared.run.run_dir import CPUINFO, RunDir
from shared.run.summary import read_summary

SMALL = {
    "vocab_size": 16_384,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
ENDS = 32
"""Every so many-th token of the small model ends an answer."""
POLL_S = 0.5
"""Ten looks at the memory in a second make a step twice as long."""
COMPARED = ("all_mb", "learner_mb", "actor_mb", "rollout_s", "update_s", "step_s")


def main() -> None:
    """Run, compare, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="model folders")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all models")
    parser.add_argument("--out", default="predicted", help="name of the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        models = {"embedded": None, "random-28m": small_model(work)} | {folder.name: folder for folder in args.models}
        found: dict[str, Any] = {}
        figures = {"prompts": args.prompts, "max_new_tokens": args.tokens, "set": args.set, "models": found}
        for name, folder in models.items():
            found[name] = compared(name, folder, args, work)
            print(name, json.dumps(found[name], indent=2), flush=True)
            # Each as it ends: a large model takes a quarter of an hour.
            print(write_result(args.out, figures), flush=True)


def small_model(work: Path) -> Path:
    """In a process of its own, so that no page of torch is shared with the runs."""
    folder = work / "random-28m"
    argv = [sys.executable, "-m", "benchmarks.half_billion_model", str(folder), "0", json.dumps(SMALL)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    ends = list(range(0, SMALL["vocab_size"], ENDS))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def compared(name: str, folder: Path | None, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Figures of one model."""
    runs = work / "runs"
    runs.mkdir(exist_ok=True)
    run_once(folder, args, runs / f"{name}-first", steps=1)
    watched = run_once(folder, args, runs / name, steps=args.steps)
    run = RunDir(runs / name)
    summary, predicted = read_summary(run), read_prediction(run)
    assert summary and summary.measured and predicted
    measured = msgspec.structs.replace(summary.measured, all_mb=round(watched))
    return {
        "predicted": msgspec.to_builtins(predicted),
        "measured": msgspec.to_builtins(measured),
        "predicted_over_measured": ratios(predicted, measured),
        "at_the_sampled_lengths": ratios(at_lengths(run, predicted, measured), measured),
    }


def run_once(folder: Path | None, args: argparse.Namespace, out: Path, steps: int) -> float:
    """Largest proportional memory in MB of a run."""
    keys = {"run.steps": steps, "eval.problems": 0, "compute.device": "cpu"}
    if folder:
        keys |= {
            "model.path": folder,
            "rollout.prompts": args.prompts,
            "rollout.max_new_tokens": args.tokens,
            "verifier.kind": "callable",
            "verifier.function": f"{parity_reward.__file__}:parity",
        }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    words += [word for given in args.set for word in ("--set", given)]
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *words]
    log = out.with_suffix(".log")
    found = run_watched(argv, log, dict(os.environ), poll_s=POLL_S)
    if found.code != 0:
        raise SystemExit(f"the run of {folder or 'embedded'} ended with {found.code}:\n{log.read_text()[-3000:]}")
    return found.pss_mb


def at_lengths(run: RunDir, predicted: Figures, measured: Figures) -> Figures:
    """The prediction for completions as long as those that were sampled: time for their average, memory for the average
    of the longest step."""
    config = config_from_json(run.config.read_bytes())
    packs = gains_by_packing(read_flags(CPUINFO), config.compute)
    work = work_of(config, cores=cores_here(), packs=packs)
    mean = measured.completion_tokens or work.lengths.completion
    longest = max(json.loads(row)["length/mean"] for row in run.metrics.read_text().splitlines())
    lengths = replace(work.lengths, completion=max(1, round(mean)), longest=max(1, round(longest)))
    work = replace(work, lengths=lengths)
    shape = find_shape(config.model, config.lora.targets)
    memory = host_memory(shape, work)
    found = msgspec.structs.replace(
        predicted,
        learner_mb=round(memory.learner_peak / MIB),
        actor_mb=round(memory.actor_peak / MIB),
        all_mb=round(memory.total / MIB),
    )
    try:
        actor, learner = speeds_of(config.compute, cache_root(config.model))
    except NotMeasured:  # On a machine that is too busy; memory is compared all the same.
        return found
    time = step_time(shape, work, actor, learner)
    return msgspec.structs.replace(found, rollout_s=time.rollout, update_s=time.update, step_s=time.step)


def ratios(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Predicted over measured."""
    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in COMPARED}
    return {name: round(ours / theirs, 3) for name, (ours, theirs) in pairs.items() if ours and theirs}


if __name__ == "__main__":
    main()
