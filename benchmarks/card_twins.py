"""The embedded twins of the presets for 8 GB, in bf16 on a CPU: no false refusal, equal bits in replay, faults named.

Each twin trains for as many steps as asked, with both processes, all gates and its own verifier, and is replayed from
its journal. Then every fault of bf16_gates.py is planted into a short run of the twin in one process, and must be
refused by the canary and, with the canary off, by the mismatch gate, by name.

    python -m benchmarks.card_twins [--steps 20] [--fault-steps 4]
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bf16_gates import SAYS, THREADS, caught, command
from benchmarks.machine import write_result
from launch.presets.load import PRESETS_DIR
from shared.process.determinism import cpu_environment

TWINS = sorted(path.stem for path in PRESETS_DIR.glob("*_8gb*_embedded.toml"))
SHORT = ("rollout.prompts=4", "rollout.max_new_tokens=48", "eval.problems=0", "tasks.limit=64")


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fault-steps", type=int, default=4)
    args = parser.parse_args()
    figures: dict[str, Any] = {"steps": args.steps}
    for twin in TWINS:
        figures[twin] = {**trained(twin, args.steps), "faults": faults(twin, args.fault_steps)}
        print(twin, json.dumps(figures[twin]), flush=True)
    print(write_result("card_twins", figures))


def trained(twin: str, steps: int) -> dict[str, Any]:
    """A refusal ends the command, and with it this program."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command("run", twin, "--out", str(folder), "--set", f"run.steps={steps}", "--set", "eval.problems=0")
        replayed = json.loads(command("replay", str(folder)).splitlines()[-1])
        summary = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((folder / "run.json").read_text())
    judged = [row for row in rows if row["mismatch/p99"] is not None]
    return {
        "dtype": facts["compute"]["dtype"],
        "steps": len(rows),
        "steps_judged": len(judged),
        "largest_mean": max(row["mismatch/mean"] for row in judged),
        "largest_p99": max(row["mismatch/p99"] for row in judged),
        "reward_first_last": [rows[0]["reward/mean"], rows[-1]["reward/mean"]],
        "quarantined": sum(row["groups/quarantined"] for row in rows),
        "replay_equal": replayed["adapter_sha256"] == summary["adapter_sha256"],
    }


def faults(twin: str, steps: int) -> dict[str, Any]:
    os.environ.update(cpu_environment(THREADS, "fast"))
    keys = (*SHORT, f"run.steps={steps}")
    return {name: caught(keys, name, steps, twin) for name in SAYS}


if __name__ == "__main__":
    main()
