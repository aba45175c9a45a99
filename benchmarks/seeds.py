"""The embedded preset on several seeds: reward curve, steps and seconds to 0.90, held-out accuracy before and after.

python -m benchmarks.seeds [--seeds 0 1 2]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.time_to_reward import reached_at, tandem_rows


def main() -> None:
    """Train each, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds: list[int] = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        runs = [measured(seed, Path(folder) / str(seed)) for seed in seeds]
    print(json.dumps(runs, indent=2))
    print(write_result("seeds", {"runs": runs}))


def measured(seed: int, out: Path) -> dict[str, Any]:
    """One run of the preset."""
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), "--seed", str(seed)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    rows = tandem_rows(out)
    reached = reached_at(rows)
    rewards = [round(row["reward"], 3) for row in rows]
    return {
        "seed": seed,
        "reward_first_five": round(sum(rewards[:5]) / 5, 3),
        "reward_last_five": round(sum(rewards[-5:]) / 5, 3),
        "steps_to_0.90": reached,
        "seconds_to_0.90": None if reached is None else round(rows[reached - 1]["time_s"], 1),
        "training_s": round(rows[-1]["time_s"], 1),
        "wall_s": summary["wall_s"],
        "n": summary["eval"]["base"]["n"],
        **{f"{label}_{way}": interval(summary["eval"][label][way]) for label in ("base", "final") for way in WAYS},
        "rewards": rewards,
    }


WAYS = ("greedy", "sampled")


def interval(share: dict[str, float]) -> list[float]:
    """Accuracy with the ends of its 95 % interval."""
    return [round(share[key], 3) for key in ("accuracy", "low", "high")]


if __name__ == "__main__":
    main()
