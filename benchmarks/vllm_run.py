"""The embedded preset with either engine, as a user runs it: start-up, step times, steps to a reward of 0.9, mismatch.

    python -m benchmarks.vllm_run [--nf4] [--server] [--only NAME]

In .venv-vllm, which `tests/run.sh vllm` makes. --nf4: also with the plugin; --server: also with `vllm serve` on this
machine, which is started before and not counted.
Start-up is the launcher's start until the actor has joined, imports and all. Mismatch is that of the steps after the
20th, on every token that is learned from.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from actor.engines.vllm_options import DISTRIBUTIONS, version_of
from benchmarks.machine import write_result
from shared.process.determinism import cpu_environment
from tests.support.vllm_process import VLLMProcess, embedded_needs

TARGET, WINDOW = 0.90, 5
ENGINES = {
    "hf": {},
    "vllm": {"actor.engine": "vllm"},
    "vllm server": {"actor.engine": "vllm_server"},
    "vllm nf4": {"actor.engine": "vllm", "actor.weights": "nf4", "loss.max_mismatch": 0.5},
}


def main() -> None:
    """One run each, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nf4", action="store_true", help="also with NF4 codes through the plugin")
    parser.add_argument("--server", action="store_true", help="also with `vllm serve` on this machine")
    parser.add_argument("--only", choices=ENGINES, help="this engine alone, with a result file of its own")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    asked = {"vllm nf4": args.nf4, "vllm server": args.server}
    names = [args.only] if args.only else [name for name in ENGINES if asked.get(name, True)]
    figures: dict[str, Any] = {}
    for name in names:
        with keys_of(name) as keys:
            figures[name] = measured(keys, args.steps)
    print(json.dumps(figures, indent=2))
    facts = {"vllm": version_of(*DISTRIBUTIONS), "target": TARGET, "steps": args.steps, "engines": figures}
    print(write_result("vllm_run" + (f"_{args.only.replace(' ', '_')}" if args.only else ""), facts))


@contextmanager
def keys_of(name: str) -> Iterator[dict[str, Any]]:
    """Of this engine; a server runs meanwhile."""
    if name != "vllm server":
        yield ENGINES[name]
        return
    with tempfile.TemporaryDirectory() as folder:
        server = VLLMProcess(embedded_needs(), Path(folder) / "log")
        server.start()
        try:
            server.wait()
            yield ENGINES[name] | {"server.urls": json.dumps([server.url])}
        finally:
            server.kill()


def measured(keys: dict[str, Any], steps: int) -> dict[str, Any]:
    """A whole run."""
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), "--steps", str(steps)]
        began = time.time()
        done = subprocess.run([*argv, "--set", "eval.problems=0", *overrides], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        joined = joined_at(out / "logs" / "actor0.log")
    late = [row for row in rows if row["step"] > 20] or rows
    return {
        "start_up_s": round(joined - began, 1),
        "median_step_s": round(median(row["time/step_s"] for row in rows), 3),
        "median_rollout_s": round(median(row["time/rollout_s"] for row in rows), 3),
        "median_update_s": round(median(row["time/update_s"] for row in rows), 3),
        "steps_to_target": reached([row["reward/mean"] for row in rows]),
        "last_reward": round(mean(row["reward/mean"] for row in rows[-WINDOW:]), 3),
        "mismatch_p99_after_20_updates": max(row["mismatch/p99"] for row in late if row["mismatch/p99"] is not None),
        "mismatch_max_after_20_updates": max(row["mismatch/max"] for row in late if row["mismatch/max"] is not None),
        "actor_mb": round(max(row["mem/actor_mb"] for row in rows)),
        "whole_process_s": round(rows[-1]["time_s"], 1),
    }


def joined_at(log: Path) -> float:
    """Seconds since the epoch, from the actor's own log."""
    (line,) = [line for line in log.read_text().splitlines() if "joined run" in line][:1]
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def reached(rewards: list[float]) -> int | None:
    """The first step whose five-step mean is at the target."""
    for end in range(WINDOW, len(rewards) + 1):
        if mean(rewards[end - WINDOW : end]) >= TARGET:
            return end
    return None


if __name__ == "__main__":
    os.environ.update(cpu_environment(2, "fast") | {"HF_HUB_OFFLINE": "1"})
    main()
