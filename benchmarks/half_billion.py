"""A model of half a billion parameters on a CPU, through the whole pipeline: step times, and memory of both processes.

Makes a checkpoint of Qwen2-0.5B's shape with random weights and the real vocabulary (half_billion_model.py), quantises
it to NF4 once, starts a run from that cache with the command that a user types, and reads step times from its metrics.
Memory is proportional (a page that two processes share counts half in each), at its largest, by process. The reward is
the parity of token ids: random weights solve nothing, and groups without differences would not be trained on.
Completions are of full length, since an end token is as likely as any other. Afterwards the run is replayed.

    python -m benchmarks.half_billion [--steps 4] [--prompts 1] [--group 8] [--tokens 64] [--keep FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import parity_reward
from benchmarks.machine import write_result
from shared.base.cache import cached_base
from shared.config.model import ModelConfig

ROLES = {"learner": "-m learner --run", "actor": "-m actor --run"}
POLL_S = 0.5
SHOWN = ("time/step_s", "time/rollout_s", "time/update_s", "tokens_per_s", "mismatch/p99", "grad_norm", "length/mean")


def main() -> None:
    """Make, quantise, train, replay, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for checkpoint, cache and run (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = measured(args, args.keep or Path(temporary))
    print(json.dumps(figures, indent=2))
    print(write_result("half_billion", figures))


def measured(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures."""
    checkpoint = work / "half-billion"
    # In a process of its own, which gives its memory back.
    maker = [sys.executable, "-m", "benchmarks.half_billion_model", str(checkpoint), str(args.seed)]
    parameters = int(subprocess.run(maker, stdout=subprocess.PIPE, text=True, check=True).stdout)
    model = ModelConfig(path=str(checkpoint), cache_dir=str(work / "cache"))
    quantised_s, again_s = seconds_for(model), seconds_for(model)
    run, log = work / "run", work / "run.log"
    memory, wall_s = watched(launch("run", "cpu_05b", "--out", str(run), *overrides(args, model)), log)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    replayed = subprocess.run(launch("replay", str(run)), capture_output=True, text=True, check=True)
    return {
        "parameters": parameters,
        "checkpoint_mb": megabytes(checkpoint / "model.safetensors"),
        "nf4_mb": megabytes(cached_base(model).folder / "model.safetensors"),
        "quantise_s": quantised_s,
        "check_of_the_cache_s": again_s,
        "prompts": args.prompts,
        "group": args.group,
        "max_new_tokens": args.tokens,
        "median_step_s": round(statistics.median(row["time/step_s"] for row in rows), 2),
        "wall_s": wall_s,
        "peak_pss_mb": memory,
        "replay_matches": json.loads(replayed.stdout.splitlines()[-1])["match"],
        "steps": [{key: round(row[key], 6) for key in SHOWN} for row in rows],
    }


def seconds_for(model: ModelConfig) -> float:
    """Until the quantised base is there and checked."""
    start = time.monotonic()
    cached_base(model)
    return round(time.monotonic() - start, 1)


def launch(*words: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "launch", *words]


def overrides(args: argparse.Namespace, model: ModelConfig) -> list[str]:
    """What differs from the preset: the model, the tasks and the reward that go with random weights, the size."""
    keys = {
        "run.steps": args.steps,
        "run.seed": args.seed,
        "model.path": model.path,
        "model.cache_dir": model.cache_dir,
        "tasks.source": "embedded",
        "verifier.kind": "callable",
        "verifier.function": f"{parity_reward.__file__}:parity",
        "rollout.prompts": args.prompts,
        "rollout.group": args.group,
        "rollout.max_new_tokens": args.tokens,
        "eval.problems": 0,
    }
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def watched(argv: Sequence[str], log: Path) -> tuple[dict[str, int], float]:
    """The command to its end; largest proportional memory in MB of each role and of all processes together."""
    start, peaks = time.monotonic(), dict.fromkeys((*ROLES, "all"), 0)
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            now = memory_by_role(process.pid)
            peaks = {role: max(peak, now[role]) for role, peak in peaks.items()}
            time.sleep(POLL_S)
    if process.returncode != 0:
        raise SystemExit(f"the run ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return peaks, round(time.monotonic() - start, 1)


def memory_by_role(pid: int) -> dict[str, int]:
    """Proportional MB now; scoring workers, the fork server and the launcher count in `all` alone."""
    found = dict.fromkeys((*ROLES, "all"), 0.0)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            command, pss = " ".join(process.cmdline()), process.memory_full_info().pss / 2**20
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found["all"] += pss
        for role, part in ROLES.items():
            found[role] += pss if part in command else 0.0
    return {role: round(value) for role, value in found.items()}


def megabytes(file: Path) -> int:
    """Size of a file."""
    return round(file.stat().st_size / 2**20)


if __name__ == "__main__":
    main()
