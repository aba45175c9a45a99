"""Time and memory of a step with a real model on a CPU: TRL's GRPOTrainer in fp32 and in bf16, and Tandem in bf16 or,
with `--dtype`, in fp32. Without bf16 instructions a step takes minutes; there, let both
sides compute in fp32 (`--trl trl_fp32 --dtype fp32`).

Each run makes a few steps of P prompts x G completions from the same model, with the same prompts, LoRA, optimizer
and reward. The rounds of each P run all sides one after the other, every second round in reverse order, so that a slow
hour falls on all of them. The first step of a run warms up and does not count. Step times and memory are compared round
by round, with the 95 % interval of the ratio (student.py), to the better of TRL's two sides.

A step must do all its work on each side, and a run in which one did not is refused: completions have their full length,
but for a few in a thousand, because a copy of the model names an end token that is hardly ever sampled, and every step
has a gradient, because the reward is the share of even token ids. A step's prompts are all rows of the task file. TRL's
settings are its fastest on a CPU (trl_grpo.py). Memory is the largest proportional sum over all processes of a side: a
page that several share counts once. The NF4 base and its dense copy are made before the first run.

    python -m benchmarks.race_half_billion MODEL_FOLDER --trl-python PYTHON [--prompts 1 4] [--rounds 3] [--steps 4]
        [--trl trl_bf16] [--dtype bf16]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks import parity_reward
from benchmarks.machine import write_result
from benchmarks.process_tree import Watched, run_watched
from benchmarks.student import mean_interval, ratio_interval
from benchmarks.time_to_reward import environment_of, trl_command
from launch.presets.load import load_config
from learner.tasks.tasks import load_rows
from shared.base.cache import cached_base, dense_base
from shared.base.interleaved import interleaved_base
from shared.base.load import DTYPES
from shared.config.data import TasksConfig
from shared.config.tree import Config
from shared.model.layers.nf4 import WEIGHTS
from shared.model.prompt import THINKING, load_tokenizer, special_ids

Run = dict[str, Any]

PRESET = "cpu_05b"
TRL_SIDES = {"trl_fp32": "fp32", "trl_bf16": "bf16"}
GROUP = 8
PROMPT_TOKENS = 128
"""Those of the tasks have fewer."""
POLL_S = 0.2
FULL = 0.95
"""Of the tokens of a step that are there."""


def main() -> None:
    """Measure all, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="a folder in Hugging Face format")
    parser.add_argument("--trl-python", required=True, help="Python of an environment with trl and peft")
    parser.add_argument("--weights", default="4-bit GGUF, dequantised", help="what the weights of the folder are")
    parser.add_argument("--prompts", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", nargs="+", choices=TRL_SIDES, default=list(TRL_SIDES), help="the sides of TRL")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of Tandem")
    parser.add_argument("--set", action="append", default=[], help="one more key for Tandem, as in `run`")
    parser.add_argument("--name", default="race_half_billion", help="of the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_endless(args.model, work / "model")
        base_mb = prepared_mb(configured(1, args, work), DTYPES[args.dtype])
        runs = [run for prompts in args.prompts for run in race(prompts, args, work)]
    figures = {
        str(prompts): summary([r for r in runs if r["prompts"] == prompts], args.trl, base_mb)
        for prompts in args.prompts
    }
    print(json.dumps(figures, indent=2))
    about = {
        "model": args.model.name,
        "weights": args.weights,
        f"base_in_{args.dtype}_mb": base_mb,
        "threads": args.threads,
    }
    print(write_result(args.name, about | {"prompts": figures, "runs": runs}))


def write_endless(model: Path, folder: Path) -> None:
    """A copy of the model whose end token is hardly ever sampled, so that completions have their full length."""
    shutil.copytree(model, folder)
    token, index = unused_token(model)
    renamed = {
        "tokenizer_config.json": {"eos_token": token},
        "generation_config.json": {"eos_token_id": index},
        "config.json": {"eos_token_id": index},
    }
    for name, end in renamed.items():
        settings = json.loads((model / name).read_text()) | end
        (folder / name).write_text(json.dumps(settings, indent=2))


def unused_token(model: Path) -> tuple[str, int]:
    """The last special token that has no part in chats: a base model's mark between files, for example."""
    tokenizer = load_tokenizer(model)
    named = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    special = {tokenizer.convert_ids_to_tokens(index): index for index in special_ids(tokenizer)}
    free = {token: index for token, index in special.items() if token not in named | {*THINKING}}
    free = {token: index for token, index in free.items() if token not in tokenizer.get_chat_template()}
    if not free:
        raise SystemExit(f"every special token of {model} is in use, so none can be an end that is never sampled")
    return max(free.items(), key=lambda entry: entry[1])


def prepared_mb(config: Config, dtype: torch.dtype) -> int:
    """Makes the base in all its forms; the size of the dense one."""
    base = cached_base(config.model)
    interleaved_base(base)
    dense = dense_base(base, dtype)
    return round((dense.folder / WEIGHTS).stat().st_size / 2**20)


def configured(prompts: int, args: argparse.Namespace, work: Path) -> Config:
    """Tandem's configuration."""
    return load_config(PRESET, overrides(prompts, args, work))


def overrides(prompts: int, args: argparse.Namespace, work: Path) -> list[str]:
    """What differs from the preset: the model, the tasks and the reward of this race, the size."""
    keys = {
        "run.steps": args.steps,
        "model.path": work / "model",
        "model.cache_dir": work / "cache",
        "tasks.source": work / f"tasks-{prompts}.jsonl",
        "tasks.system_prompt": "",
        "tasks.few_shot": 0,
        "rollout.temperature": 1.0,
        "curriculum.kind": "shuffled",
        "verifier.kind": "callable",
        "verifier.function": f"{parity_reward.__file__}:parity",
        "reward.truncated": 0,
        "rollout.prompts": prompts,
        "rollout.group": GROUP,
        "rollout.max_new_tokens": args.tokens,
        "rollout.groups_per_order": 0,
        # One group at a time, as on TRL's side.
        "batch.token_budget": GROUP * args.tokens + PROMPT_TOKENS,
        "optimizer.warmup_steps": 0,
        "optimizer.schedule": "constant",
        "compute.dtype": args.dtype,
        "compute.learner_threads": args.threads,
        "compute.actor_threads": args.threads,
        "eval.problems": 0,
    }
    return [*(f"{key}={value}" for key, value in keys.items()), *args.set]


def race(prompts: int, args: argparse.Namespace, work: Path) -> list[Run]:
    """All rounds of one size."""
    rows = load_rows(TasksConfig(levels=(2,), limit=prompts), "gsm8k")[0]
    (work / f"tasks-{prompts}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sides = ["tandem", *args.trl]
    orders = [sides[:: -1 if number % 2 else 1] for number in range(args.rounds)]
    return [measured(side, prompts, number, args, work) for number, order in enumerate(orders) for side in order]


def measured(side: str, prompts: int, number: int, args: argparse.Namespace, work: Path) -> Run:
    """One run of one side."""
    out = work / f"{side}-{prompts}-{number}"
    ours = side == "tandem"
    argv = tandem_argv(prompts, args, work, out) if ours else trl_argv(side, prompts, args, work, out)
    environment = os.environ | environment_of(side, args.threads) | {"HF_HUB_OFFLINE": "1"}
    watched = run_watched(argv, out.with_suffix(".log"), environment, POLL_S)
    if watched.code != 0:
        log = out.with_suffix(".log").read_text()
        raise SystemExit(f"{side} with {prompts} prompts ended with {watched.code}:\n{log[-3000:]}")
    rows = tandem_rows(out) if ours else json.loads(out.with_suffix(".json").read_text())
    run = {"side": side, "prompts": prompts, "round": number, **figures_of(rows, watched, args.steps, args.tokens)}
    print(run, flush=True)
    return run


def tandem_argv(prompts: int, args: argparse.Namespace, work: Path, out: Path) -> list[str]:
    """Our own command line."""
    words = [word for key in overrides(prompts, args, work) for word in ("--set", key)]
    return [sys.executable, "-m", "launch", "run", PRESET, "--out", str(out), *words]


def trl_argv(side: str, prompts: int, args: argparse.Namespace, work: Path, out: Path) -> list[str]:
    """trl_grpo.py in TRL's environment."""
    options = {
        "--model": work / "model",
        "--tasks": work / f"tasks-{prompts}.jsonl",
        "--dtype": TRL_SIDES[side],
        "--reward": "parity",
        # One group at a time, so that the logits of all groups are not in memory together.
        "--micro-batch": GROUP,
        "--target": 2.0,
        "--max-steps": args.steps,
        "--out": out.with_suffix(".json"),
        "--seed": 0,
        "--threads": args.threads,
    }
    return trl_command(args.trl_python, configured(prompts, args, work), options)


def tandem_rows(out: Path) -> list[dict[str, float]]:
    """Time at the end, mean length and gradient of each step."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {"time_s": row["time_s"], "length": row["length/mean"], "grad_norm": row["grad_norm"] or 0.0} for row in rows
    ]


def figures_of(rows: list[dict[str, float]], watched: Watched, steps: int, tokens: int) -> Run:
    """Times and memory of a run whose steps all did their work."""
    if len(rows) != steps or any(row["length"] < FULL * tokens or not row["grad_norm"] > 0 for row in rows):
        raise SystemExit(f"not {steps} steps of {tokens} tokens with a gradient: {rows}")
    times = [after["time_s"] - before["time_s"] for before, after in pairwise(rows)]
    return {
        "step_s": [round(time, 3) for time in times],
        "median_step_s": round(median(times), 3),
        "whole_process_s": round(watched.wall_s, 1),
        "peak_memory_mb": round(watched.pss_mb),
        "peak_resident_mb": round(watched.rss_mb),
    }


def summary(runs: list[Run], trl: list[str], base_mb: int) -> dict[str, Any]:
    """Each side over the rounds; Tandem's share of the better of TRL's sides, in time and in memory."""
    keys = ("median_step_s", "peak_memory_mb")
    by_side = {
        side: {key: [run[key] for run in runs if run["side"] == side] for key in keys} for side in ("tandem", *trl)
    }
    best = {key: min(trl, key=lambda side, key=key: fmean(by_side[side][key])) for key in keys}
    return {
        **{side: {key: mean_interval(own[key]) for key in keys} for side, own in by_side.items()},
        "beyond_the_base_mb": round(fmean(by_side["tandem"]["peak_memory_mb"])) - base_mb,
        "better_of_trl": best,
        "step_of_trl": ratio_interval(by_side["tandem"][keys[0]], by_side[best[keys[0]]][keys[0]]),
        "memory_of_trl": ratio_interval(by_side["tandem"][keys[1]], by_side[best[keys[1]]][keys[1]]),
    }


if __name__ == "__main__":
    main()
