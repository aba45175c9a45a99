"""What another busy process on each core costs a training step, by what waiting threads do.

A step of actor and learner (local_run.py) is measured in a process of its own, quiet and beside one process for each
core that counts until its time is up. OpenMP's threads wait for each other at the end of each parallel part. `spin`:
libgomp's default, a loop of some milliseconds, which takes a core from the thread that is waited for. `short`: a
loop a fifth as long, then sleep, which is what a run uses. `passive`: sleep at once. Beside busy processes,
shared/process/busy_cores/ makes the loop shorter still and gathers the threads on half of the cores. The policies
alternate, several rounds; medians of all steps.
The small model takes four times as many steps: threads are looked at twice a second, and eight of its steps take less
than a second.

    python -m benchmarks.busy_machine [FOLDER] [--rounds 3] [--steps 8] [--policies spin short passive]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from shared.process.determinism import SPINS, cpu_environment

POLICIES = {
    "spin": {},
    "short": {"GOMP_SPINCOUNT": SPINS},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
SMALL = ("rollout.prompts=4", "rollout.max_new_tokens=48", "eval.problems=0", "optimizer.lr=3e-3")
LARGE = ("rollout.prompts=1", "rollout.max_new_tokens=24", "eval.problems=0")
MORE_STEPS = 4
"""Times as many for the small model."""
LONGEST_S = 300
"""A burner ends by itself after this."""
BURN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", help="a model folder in Hugging Face format")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(step_times(args.measure, args.steps)))
        return
    models = ["embedded", *([args.folder] if args.folder else [])]
    figures: dict[str, Any] = {"rounds": args.rounds, "cores": cores(), "load_before": os.getloadavg()[0]}
    figures |= {Path(model).name: measured(model, args.policies, args.rounds, args.steps) for model in models}
    print(json.dumps(figures, indent=2))
    print(write_result("busy_machine", figures))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def measured(model: str, policies: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    times: dict[tuple[str, str], list[float]] = {(name, state): [] for name in policies for state in ("quiet", "busy")}
    for _ in range(rounds):
        for name in policies:
            times[name, "quiet"] += in_process(model, name, steps)
            with burning():
                times[name, "busy"] += in_process(model, name, steps)
    medians = {key: statistics.median(found) for key, found in times.items()}
    return {
        name: {
            "quiet_s": round(medians[name, "quiet"], 4),
            "busy_s": round(medians[name, "busy"], 4),
            "times_as_long": round(medians[name, "busy"] / medians[name, "quiet"], 2),
            "quiet_of_first": round(medians[name, "quiet"] / medians[policies[0], "quiet"], 3),
        }
        for name in policies
    }


@contextmanager
def burning() -> Iterator[None]:
    """One busy process for each core; they end with the block, or by themselves."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN, str(LONGEST_S)]) for _ in range(cores())]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def in_process(model: str, policy: str, steps: int) -> list[float]:
    """Seconds of each step but the first two."""
    settled = {key: value for key, value in cpu_environment(cores(), "fast").items() if key != "GOMP_SPINCOUNT"}
    argv = [sys.executable, "-m", "benchmarks.busy_machine", "--measure", model, "--steps", str(steps)]
    environment = os.environ | settled | POLICIES[policy]
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def step_times(model: str, steps: int) -> list[float]:
    from benchmarks.local_run import run_here
    from launch.presets.load import load_config

    small = model == "embedded"
    keys = (*(SMALL if small else LARGE), f"model.path={model}", f"run.steps={steps * (MORE_STEPS if small else 1)}")
    threads = [f"compute.{role}_threads={cores()}" for role in ("learner", "actor")]
    rows = run_here(load_config("embedded", [*keys, *threads])).rows
    return [row.step_s for row in rows[2:]]


if __name__ == "__main__":
    main()
