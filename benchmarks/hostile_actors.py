"""Two equal real runs side by side, and a hostile actor joins one of them. What does it cost that run?

    python -m benchmarks.hostile_actors [--steps 1200] [--only KIND ...]    writes results/hostile_actors.json

Each kind of hostile actor has a pair of runs of its own. Both start at the same moment, each with 1,024 descriptors.
The hostile actor has a key of the run, opens a socket of its own, and names the digests that an honest actor names.

    times_as_long   steps of the undisturbed run / steps of the other in the same seconds: from the first steps of both
                    until the faster one has made its last
    more_mb         largest resident memory of the learner, less that of the undisturbed run
    more_logs_mb    size of the logs at the end, less that of the undisturbed run

A kind passes if both runs end with the same adapter, the three figures are within LIMITS, and the hostile actor went on
until the end. An actor that lies has joined by an invitation, samples like an honest one, and says false things about
it; its key must be revoked for that, after MOST_LIES groups at most. A lie that begins after honest groups may have
been learned from before it was found, so there the adapters may differ: AFTER_ALL.

Exit 1 if one does not pass; its runs are kept then. With `--only` other kinds keep their figures, so each kind
has the machine and date of its own. Left out: floods, which tests/unit/test_flood.py has, and unauthenticated peers,
which benchmarks/unauthenticated.py has.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from actor.rollout import Rollout
from benchmarks.gauges import descendants, folder_mb, gauges
from benchmarks.hostile_kinds import AFTER_ALL, KINDS, MOST_LIES, Hostile, Kind
from benchmarks.machine import RESULTS, machine, write_result
from launch.commands.in_process import local_actor
from launch.commands.run import make_run
from launch.presets.load import load_config
from learner.wiring import load_model
from protocol.messages import Hello
from shared.config.load import rules_digest
from shared.config.tree import Config

SETTINGS = (
    "tasks.levels=[1]",
    "rollout.prompts=4",
    "rollout.group=2",
    "rollout.max_new_tokens=8",
    "rollout.groups_per_order=1",
    "checkpoint.every=50",
    "eval.problems=0",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
    "link.heartbeat_s=0.2",
    "link.silence_s=60",
)
TEACHING = ("rollout.max_new_tokens=32", "rollout.group=8")
"""For actors that lie: with these, groups teach, and so a lie that is believed changes the adapter."""
DESCRIPTORS = 1024
LIMITS = {"times_as_long": 1.3, "more_mb": 64.0, "more_logs_mb": 1.0}
LOOK_EVERY_S = 0.1
FIRST_STEPS = 3
"""Steps that both runs have made before they are compared."""
START_S, SLOWEST_STEP_S = 180.0, 2.0


class Trial:
    """One run."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.run = make_run(folder, config)
        self.resident_mb: list[float] = []
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """`python -m launch resume`, with few descriptors."""
        words = [sys.executable, "-m", "launch", "resume", str(self.run.path)]
        with (self.run.path / "launch.txt").open("w") as out:
            self.popen = subprocess.Popen(
                ["bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "narrow", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def stop(self) -> None:
        """The processes of a run end with its launcher."""
        if self.popen:
            self.popen.kill()
            self.popen.wait()

    def num_steps(self) -> int:
        return self.run.metrics.read_bytes().count(b"\n") if self.run.metrics.exists() else 0

    def look(self) -> None:
        """Note the learner's memory."""
        try:
            children = descendants(self.popen.pid) if self.popen else []
            found = [child.pid for child in children if "-m learner" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:  # One has just ended.
            return
        self.resident_mb += [figures["rss_mb"] for pid in found if (figures := gauges(pid))]

    def figures(self) -> dict[str, Any]:
        """After the end; a run that failed has no summary."""
        summary = json.loads(self.run.summary.read_text()) if self.run.summary.exists() else {}
        return {
            "exit": self.popen.returncode if self.popen else None,
            "status": summary.get("status"),
            "adapter_sha256": summary.get("adapter_sha256"),
            "learner_mb": round(max(self.resident_mb, default=0.0), 1),
            "logs_mb": round(folder_mb(self.run.logs), 3),
        }


def side_by_side(folder: Path, config: Config, hello: Hello, kind: Kind, honest: Rollout) -> dict[str, Any]:
    """Both runs of a kind, from their start to their end."""
    calm, disturbed = Trial(folder / "calm", config), Trial(folder / "disturbed", config)
    lies = kind.__name__ in MOST_LIES
    hostile, over = Hostile(disturbed.run, config, hello, honest, invited=lies), threading.Event()
    thread = threading.Thread(target=hostile.act, args=(kind, over))
    thread.start()
    try:
        calm.start()
        disturbed.start()
        ratio = watch(calm, disturbed, config.run.steps)
    finally:
        calm.stop()
        disturbed.stop()
        over.set()
        thread.join()
        hostile.context.destroy(linger=0)
    return compared(kind.__name__, calm.figures(), disturbed.figures(), hostile.figures(), ratio)


def watch(calm: Trial, disturbed: Trial, steps: int) -> float:
    """Wait until both have ended; returns how many steps one makes while the other makes one."""
    deadline = time.monotonic() + START_S + SLOWEST_STEP_S * steps
    first: tuple[int, int] | None = None
    last = (0, 0)
    while calm.is_running() or disturbed.is_running():
        if time.monotonic() > deadline:
            raise TimeoutError(f"The runs {calm.run.path} and {disturbed.run.path} have not ended.")
        if max(last) < steps:
            last = calm.num_steps(), disturbed.num_steps()
            first = first or (last if min(last) >= FIRST_STEPS else None)
        calm.look()
        disturbed.look()
        time.sleep(LOOK_EVERY_S)
    return (last[0] - first[0]) / max(1, last[1] - first[1]) if first else math.inf


def compared(
    kind: str, calm: dict[str, Any], disturbed: dict[str, Any], hostile: dict[str, Any], ratio: float
) -> dict[str, Any]:
    """The three figures, and whether the kind passes."""
    figures = {
        "times_as_long": round(ratio, 3),
        "more_mb": round(disturbed["learner_mb"] - calm["learner_mb"], 1),
        "more_logs_mb": round(disturbed["logs_mb"] - calm["logs_mb"], 3),
    }
    ended = [(run["exit"], run["status"]) for run in (calm, disturbed)]
    same = calm["adapter_sha256"] == disturbed["adapter_sha256"]
    most = MOST_LIES.get(kind)
    passed = (
        ended == [(0, "done")] * 2
        and (same or kind in AFTER_ALL)
        and (most is None or (0 < hostile["false_groups"] <= most and bool(hostile["revoked_for"])))
        and all(figures[name] <= limit for name, limit in LIMITS.items())
        and not hostile["fault"]
    )
    return figures | {
        "passed": passed,
        "same_adapter": same,
        "undisturbed": calm,
        "disturbed": disturbed,
        "hostile": hostile,
    }


def hello_for(hello: Hello, config: Config) -> Hello:
    return replace(hello, rules_digest=rules_digest(config.verifier, config.rollout, config.environment))


def of_this_call(steps: int, found: dict[str, Any]) -> dict[str, Any]:
    """With where and when: the file also has kinds of other calls."""
    return {"machine": machine(), "steps": steps, **found}


def measured_before() -> dict[str, Any]:
    """Figures of other kinds, which stay with the machine and date that they have."""
    return json.loads((RESULTS / "hostile_actors.json").read_text())["kinds"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--only", nargs="+", choices=[kind.__name__ for kind in KINDS])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    settings = [*SETTINGS, f"run.steps={args.steps}"]
    config, teaching = load_config("embedded", settings), load_config("embedded", [*settings, *TEACHING])
    hello = load_model(config).expected()
    kinds = {kind.__name__: kind for kind in KINDS if kind.__name__ in (args.only or [kind.__name__])}
    results: dict[str, Any] = measured_before() if args.only else {}
    with local_actor(config) as honest:
        for name, kind in kinds.items():
            chosen = teaching if name in MOST_LIES else config
            found = side_by_side(folder / name, chosen, hello_for(hello, chosen), kind, honest.rollout)
            results[name] = of_this_call(args.steps, found)
            print(name, json.dumps(results[name]), flush=True)
            if results[name]["passed"]:
                shutil.rmtree(folder / name)
    passed = all(found["passed"] for found in results.values())
    figures = {"descriptors": DESCRIPTORS, "limits": LIMITS, "kinds": results, "passed": passed}
    print(write_result("hostile_actors", figures))
    if not passed:
        print(f"The runs that did not pass are in {folder}.")
        return 1
    folder.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
