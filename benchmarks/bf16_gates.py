"""The gates in bf16: honest runs that must not be refused, faults that must be caught and named, and equal bits.

Short runs in this process (local_run.py), on the embedded model and, with a folder, on a real one; each with its own
seed. Every planted fault is met twice: by the canary, and by the mismatch gate with the canary off. A fault of the
adapter is planted at the last version, because the first one has B = 0; the temperature from the start. The report has
the largest figures of |actor - learner| that were let through. Then a run of the command line is killed, resumed and
replayed, and its adapter compared with that of an undisturbed run.

    python -m benchmarks.bf16_gates [FOLDER] [--runs 20] [--large-runs 20] [--steps 4]
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import parity_reward
from benchmarks.machine import write_result
from shared.process.determinism import cpu_environment

THREADS = 1
SMALL = ("rollout.prompts=4", "rollout.max_new_tokens=48", "eval.problems=0")
EMBEDDED = ("optimizer.lr=3e-3",)
LARGE = ("optimizer.lr=1e-3", "rollout.prompts=1", "rollout.max_new_tokens=24")
SAYS = {
    "stale": r"stale adapter|the adapter was not installed",
    "off": r"those of the base without one|the base without an adapter",
    "half": r"half of one|half an adapter",
    "doubled": r"a wrong scale",
    "hot": r"the actor samples at temperature 1\.2 where 1 was ordered",
}
"""What a refusal must say, from the gate or from the canary."""
WAIT_S = 600


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", help="a model folder in Hugging Face format")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--large-runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    os.environ.update(cpu_environment(THREADS, "fast"))
    figures: dict[str, Any] = {"steps": args.steps, "threads": THREADS}
    figures["embedded"] = measured("embedded", EMBEDDED, args.runs, args.steps)
    if args.folder:
        figures[Path(args.folder).name] = measured(args.folder, LARGE, args.large_runs, args.steps)
    print(json.dumps(figures, indent=2))
    print(write_result("bf16_gates", figures))


def measured(model: str, keys: tuple[str, ...], runs: int, steps: int) -> dict[str, Any]:
    keys = (*SMALL, *keys, f"model.path={model}", f"run.steps={steps}")
    return {
        "honest": honest(keys, runs),
        "faults": {name: caught(keys, name, steps) for name in SAYS},
        "bits": repeated(keys),
    }


def settings(keys: tuple[str, ...], seed: int) -> list[str]:
    threads = [f"compute.{role}_threads={THREADS}" for role in ("learner", "actor")]
    return [*keys, f"run.seed={seed}", "compute.dtype=bf16", *threads]


def honest(keys: tuple[str, ...], runs: int) -> dict[str, Any]:
    from benchmarks.local_run import run_here
    from launch.presets.load import load_config
    from shared.errors import TrainingStopped

    refused: list[str] = []
    rows = []
    for seed in range(runs):
        try:
            rows += run_here(load_config("embedded", settings(keys, seed))).rows
        except TrainingStopped as refusal:
            refused.append(f"seed {seed}: {refusal}")
    judged = [row for row in rows if not math.isnan(row.mismatch_p99)]
    return {
        "runs": runs,
        "refused": refused,
        "steps_judged": len(judged),
        "largest_mean": max(row.mismatch_mean for row in judged),
        "largest_p99": max(row.mismatch_p99 for row in judged),
    }


def caught(keys: tuple[str, ...], name: str, steps: int, preset: str = "embedded") -> dict[str, Any]:
    """The refusals of one fault, from the canary and from the mismatch gate."""
    from benchmarks.local_run import Planted, run_here
    from launch.presets.load import load_config
    from shared.errors import TrainingStopped

    planted = Planted(name=name, version=0 if name == "hot" else steps - 1)
    found: dict[str, Any] = {}
    for gate, tokens in (("canary", 16), ("mismatch", 0)):
        if name == "hot" and gate == "canary":
            continue  # It looks at weights, not at samples.
        try:
            run_here(load_config(preset, [*settings(keys, 0), f"guard.canary_tokens={tokens}"]), planted)
            found[gate] = {"caught": False, "named": False, "said": ""}
        except TrainingStopped as refusal:
            said = re.sub(r"\[.*?\]", "[...]", str(refusal))
            found[gate] = {"caught": True, "named": bool(re.search(SAYS[name], said)), "said": said}
    return found


def repeated(keys: tuple[str, ...]) -> dict[str, Any]:
    """Adapters of the same run: twice, killed and resumed, replayed."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        first, second, killed = (work / name for name in ("first", "second", "killed"))
        for folder in (first, second):
            command("run", "embedded", "--out", str(folder), *sets(keys))
        kill_after_a_step(killed, keys)
        command("resume", str(killed))
        shas = {
            folder.name: json.loads((folder / "summary.json").read_text())["adapter_sha256"]
            for folder in (first, second, killed)
        }
        replayed = json.loads(command("replay", str(killed)).splitlines()[-1])
    shas["replayed"] = replayed["adapter_sha256"]
    return {"adapter_sha256": shas, "equal": len(set(shas.values())) == 1}


def sets(keys: tuple[str, ...]) -> list[str]:
    reward = ("verifier.kind=callable", f"verifier.function={parity_reward.__file__}:parity")
    return [word for key in settings((*keys, *reward, "checkpoint.every=1"), 0) for word in ("--set", key)]


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def kill_after_a_step(folder: Path, keys: tuple[str, ...]) -> None:
    """SIGKILL to the launcher, whose processes end with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "run", "embedded", "--out", str(folder), *sets(keys)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end, metrics = time.monotonic() + WAIT_S, folder / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < end and not (metrics.is_file() and metrics.read_text().strip()):
        time.sleep(0.02)
    process.kill()
    process.wait()


if __name__ == "__main__":
    main()
