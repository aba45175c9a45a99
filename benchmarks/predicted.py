"""Predicted against measured cost of a run, for models of several sizes.

Each model is run three times with the command that a user types. The first run fills the cache, the second gives the
memory and the third the times, since looking at memory slows a run down. The prediction is that of `run`
(launch/plan), made before the start. Memory is the largest proportional sum of all processes (a shared page counts
once) and the largest resident size of learner and actor; times are medians of steps. What is sampled is not known
before the start, so all is predicted once more for the lengths that were sampled and the groups that were trained on.
Lengths differ as in a real run: the model with random weights ends an answer with one token in thirty-two. The reward
is the parity of token ids, because groups without differences would not be trained on; only the embedded model solves
its own tasks.

    python -m benchmarks.predicted [--models FOLDER ...] [--steps 12] [--prompts 2] [--tokens 128] [--set KEY=VALUE ...]

Without --models: the embedded model, and one of 28 million parameters with random weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from benchmarks import parity_reward
from benchmarks.machine import write_result
from benchmarks.process_tree import Watched, run_watched
from launch.commands.run import speeds_of
from launch.plan.cost import find_shape, work_of
from launch.plan.duration import step_time, update_s
from launch.plan.machine import NotMeasured
from launch.plan.memory import MIB, host_memory
from launch.plan.shape import Lengths, ModelShape
from launch.plan.work import Work
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
"""One in so many tokens of the small model's vocabulary ends an answer."""
POLL_S = 0.5
"""Between two looks at the memory. Ten in a second make a step twice as long."""
MANY = 1_000_000
"""More groups, and more kB, than a step has."""
NO_KEYS: Mapping[str, object] = MappingProxyType({})
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
        scratch = Path(temporary)
        models = {"embedded": None, "random-28m": small_model(scratch)} | {
            folder.name: folder for folder in args.models
        }
        found: dict[str, Any] = {}
        figures = {"prompts": args.prompts, "max_new_tokens": args.tokens, "set": args.set, "models": found}
        for name, folder in models.items():
            found[name] = compared(name, folder, args, scratch)
            print(name, json.dumps(found[name], indent=2), flush=True)
            # Each as it ends: a large model takes half an hour.
            print(write_result(args.out, figures), flush=True)


def small_model(scratch: Path) -> Path:
    """In a process of its own, so that no page of torch is shared with the runs."""
    folder = scratch / "random-28m"
    argv = [sys.executable, "-m", "benchmarks.half_billion_model", str(folder), "0", json.dumps(SMALL)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    ends = list(range(0, SMALL["vocab_size"], ENDS))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def compared(name: str, folder: Path | None, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Figures of one model."""
    runs = scratch / "runs"
    runs.mkdir(exist_ok=True)
    argv = partial(command, folder, args)
    watched(argv(runs / f"{name}-first", steps=1))
    # With the lengths of all completions, whose writing would count in the timed run.
    all_lengths = {"log.rollouts_per_step": MANY, "log.rollouts_kb": MANY}
    found = watched(argv(runs / f"{name}-memory", steps=args.steps, keys=all_lengths))
    timed(argv(runs / name, steps=args.steps))
    run, of_memory = RunDir(runs / name), RunDir(runs / f"{name}-memory")
    measured, predicted = measured_in(run), read_prediction(run)
    assert predicted
    memory = {key: getattr(measured_in(of_memory), key) for key in ("learner_mb", "actor_mb")}
    measured = msgspec.structs.replace(measured, all_mb=round(found.pss_mb), **memory)
    return {
        "predicted": msgspec.to_builtins(predicted),
        "measured": msgspec.to_builtins(measured),
        "predicted_over_measured": ratios(predicted, measured),
        "as_sampled": ratios(as_sampled(of_memory), measured),
    }


def command(
    folder: Path | None, args: argparse.Namespace, out: Path, steps: int, keys: Mapping[str, object] = NO_KEYS
) -> list[str]:
    """The command that a user types."""
    given = {"run.steps": steps, "eval.problems": 0, "compute.device": "cpu", **keys}
    if folder:
        given |= {
            "model.path": folder,
            "rollout.prompts": args.prompts,
            "rollout.max_new_tokens": args.tokens,
            "verifier.kind": "callable",
            "verifier.function": f"{parity_reward.__file__}:parity",
        }
    settings = [f"{key}={value}" for key, value in given.items()] + args.set
    words = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *words]


def log_of(argv: list[str]) -> Path:
    return Path(argv[argv.index("--out") + 1]).with_suffix(".log")


def watched(argv: list[str]) -> Watched:
    """A run whose memory is looked at."""
    found = run_watched(argv, log_of(argv), dict(os.environ), poll_s=POLL_S)
    refuse_failure(found.code, log_of(argv))
    return found


def timed(argv: list[str]) -> None:
    """A run that nothing looks at."""
    with log_of(argv).open("wb") as log:
        code = subprocess.run(argv, check=False, stdout=log, stderr=subprocess.STDOUT).returncode
    refuse_failure(code, log_of(argv))


def refuse_failure(code: int, log: Path) -> None:
    if code != 0:
        raise SystemExit(f"a run ended with {code}:\n{log.read_text()[-3000:]}")


def measured_in(run: RunDir) -> Figures:
    summary = read_summary(run)
    assert summary and summary.measured
    return summary.measured


def as_sampled(run: RunDir) -> Figures:
    """The prediction for what was sampled."""
    config = config_from_json(run.config.read_bytes())
    packs = gains_by_packing(read_flags(CPUINFO), config.compute)
    work = work_of(config, cores=cores_here(), packs=packs)
    shape = find_shape(config.model, config.lora.targets)
    rows = [json.loads(row) for row in run.metrics.read_text().splitlines()]
    memory = memory_as_sampled(shape, work, rows)
    try:
        speeds = speeds_of(config.compute, cache_root(config.model))
    except NotMeasured:  # On a machine that is too busy; memory is compared all the same.
        return memory
    usual = Lengths(
        prompt=work.lengths.prompt,
        completion=max(1, round(statistics.median(row["length/mean"] for row in rows))),
        longest=round(statistics.median(longest_of_steps(run))),
    )
    idle = [0 if config.loss.kl_beta else row["groups/idle"] for row in rows]
    work = replace(work, lengths=usual)
    trained = replace(work, groups=max(1, round(work.groups - statistics.median(idle))))
    time = replace(step_time(shape, work, *speeds), update=update_s(shape, trained, speeds[1]))
    return msgspec.structs.replace(memory, rollout_s=time.rollout, update_s=time.update, step_s=time.step)


def memory_as_sampled(shape: ModelShape, work: Work, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """For the longest step. Micro-batches are filled by the tokens that there are, so its mean length counts."""
    mean = max(1, round(max(row["length/mean"] for row in rows)))
    memory = host_memory(shape, replace(work, lengths=replace(work.lengths, completion=mean, longest=mean)))
    return Figures(
        learner_mb=round(memory.learner_peak / MIB),
        actor_mb=round(memory.actor_peak / MIB),
        all_mb=round(memory.total / MIB),
    )


def longest_of_steps(run: RunDir) -> list[int]:
    """Tokens of the longest completion of each step."""
    longest: dict[int, int] = {}
    for row in map(json.loads, run.rollouts.read_text().splitlines()):
        longest[row["step"]] = max(longest.get(row["step"], 1), *row["lengths"])
    return list(longest.values())


def ratios(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Predicted over measured."""
    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in COMPARED}
    return {name: round(ours / theirs, 3) for name, (ours, theirs) in pairs.items() if ours and theirs}


if __name__ == "__main__":
    main()
