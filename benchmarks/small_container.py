"""A run in a container with little memory: whether it fits with the keys that it has, and what that costs in time.

Every round runs the preset once in a control group whose memory is limited, and once without a limit. `run` sees the
limit and chooses what fits (`batch.recompute`, `actor.max_sequences`, packed weights); both get the same keys.
The kernel drops pages of files when the group has reached its limit, and ends a process if that is not enough. The
pages of all files are dropped before each run, so that the group pays for those that it reads. Swap must be off.

    peak_memory_mb       largest proportional sum of all processes (process_tree.py), with the pages of libraries
    peak_of_group_mb     what the kernel has counted for the group, pages of files included

The first run of a model converts it and is not counted.

    sudo .venv/bin/python -m benchmarks.small_container MODEL_FOLDER [--preset cpu_135m] [--limit-mb 1200] [--rounds 3]
        [--steps 4] [--set KEY=VALUE ...] [--name NAME]

Needs root, for the group and for dropping pages.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import write_result
from benchmarks.process_tree import run_watched
from benchmarks.student import mean_interval, ratio_interval
from shared.run.forecast import read_prediction
from shared.run.run_dir import RunDir

Run = dict[str, Any]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = ("memory.max", "memory.limit_in_bytes")
PEAK = ("memory.peak", "memory.max_usage_in_bytes")
ENDED = ("memory.events", "memory.oom_control")
"""Files of a group in versions 2 and 1 of cgroups. The last one counts the processes that were ended."""
DROP = Path("/proc/sys/vm/drop_caches")


def main() -> None:
    """Measure, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="a folder in Hugging Face format")
    parser.add_argument("--preset", default="cpu_135m")
    parser.add_argument("--limit-mb", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="one more key, as in `run`")
    parser.add_argument("--name", help="of the result; that of the preset if it is not given")
    args = parser.parse_args()
    if any(line.split()[1] != "0" for line in Path("/proc/meminfo").read_text().splitlines() if "SwapTotal" in line):
        raise SystemExit("This machine has swap space, so the limit would not hold; turn it off with swapoff -a.")
    # Not in /tmp, which may be in memory itself.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        runs = rounds(args, Path(temporary))
    figures = {**settings(args), **summary(runs), "runs": runs}
    print(write_result(f"small_container_{args.name or args.preset}", figures))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model.name} | {name: getattr(args, name) for name in ("preset", "limit_mb", "steps", "set")}


def limited_group(limit_mb: int) -> Path:
    """A new control group of this size."""
    own_tree = CGROUPS / "memory"
    group = (own_tree if own_tree.is_dir() else CGROUPS) / f"tandem-{os.getpid()}"
    group.mkdir()
    try:
        limit, *_ = (file_of(group, names) for names in (LIMIT, PEAK, ENDED))
        limit.write_text(str(limit_mb * 2**20))
    except BaseException:
        group.rmdir()
        raise
    return group


def file_of(group: Path, names: Sequence[str]) -> Path:
    """The one that this version has."""
    found = [group / name for name in names if (group / name).is_file()]
    if not found:
        raise SystemExit(
            f"{group} has neither {' nor '.join(names)}: turn on the memory controller for its parent (memory.peak"
            " needs Linux 5.19)"
        )
    return found[0]


def rounds(args: argparse.Namespace, work: Path) -> list[Run]:
    """All runs, every second round in reverse order."""
    run_once(args, work / "first", None, steps=1)
    found: list[Run] = []
    for number in range(args.rounds):
        for side in ("limited", "free")[:: -1 if number % 2 else 1]:
            found.append({"side": side, "round": number, **run_of(side, args, work / f"{side}-{number}")})
            print(found[-1], flush=True)
    return found


def run_of(side: str, args: argparse.Namespace, out: Path) -> Run:
    """A limited run has a group of its own."""
    if side == "free":
        return run_once(args, out, None, args.steps)
    group = limited_group(args.limit_mb)
    try:
        found = run_once(args, out, group, args.steps)
        peak = int(file_of(group, PEAK).read_text()) / 2**20
        return {**found, "peak_of_group_mb": round(peak), "ended_by_the_kernel": ended_in(group)}
    finally:
        group.rmdir()


def run_once(args: argparse.Namespace, out: Path, group: Path | None, steps: int) -> Run:
    """What a user would type, in the group if there is one."""
    keys = [f"model.path={args.model}", f"model.cache_dir={out.parent / 'cache'}", f"run.steps={steps}", *args.set]
    argv = [sys.executable, "-m", "launch", "run", args.preset, "--out", str(out)]
    argv += [word for key in keys for word in ("--set", key)]
    if group:
        argv = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *argv]
    os.sync()
    DROP.write_text("3")
    watched = run_watched(argv, out.with_suffix(".log"), os.environ | {"HF_HUB_OFFLINE": "1"})
    if watched.code != 0:
        raise SystemExit(f"{out.name} ended with {watched.code}:\n{out.with_suffix('.log').read_text()[-3000:]}")
    config, predicted = json.loads((out / "config.json").read_text()), read_prediction(RunDir(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "recompute": config["batch"]["recompute"],
        "max_sequences": config["actor"]["max_sequences"],
        "predicted_mb": predicted and predicted.all_mb,
        "peak_memory_mb": round(watched.pss_mb),
        "whole_process_s": round(watched.wall_s),
        "step_s": [round(row["time/step_s"], 2) for row in rows],
        # The first step warms up.
        "median_step_s": round(median(row["time/step_s"] for row in rows[1:] or rows), 2),
    }


def ended_in(group: Path) -> int:
    """Processes of the group that the kernel has ended for want of memory."""
    rows = file_of(group, ENDED).read_text().splitlines()
    return next((int(row.split()[1]) for row in rows if row.split()[0] == "oom_kill"), 0)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Both sides over the rounds, and how much longer a step takes with little memory."""

    def column(side: str, key: str) -> list[float]:
        return [run[key] for run in runs if run["side"] == side]

    keys = ("median_step_s", "peak_memory_mb")
    found = {side: {key: mean_interval(column(side, key)) for key in keys} for side in ("limited", "free")}
    group = mean_interval(column("limited", "peak_of_group_mb"))
    ratio = ratio_interval(column("limited", "median_step_s"), column("free", "median_step_s"))
    return {
        **found,
        "peak_of_group_mb": group,
        "ended_by_the_kernel": sum(column("limited", "ended_by_the_kernel")),
        "step_ratio": ratio,
    }


if __name__ == "__main__":
    main()
