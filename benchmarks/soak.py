"""Thousands of steps with actors coming and going: does anything grow?

One learner and one actor stay; up to two further actors join and are killed (SIGKILL, or SIGTERM one time in four) by a
seeded schedule. Real processes over real sockets, the embedded model on tiny shapes. Every second: resident memory
(all, and the part that belongs to no file), open files and threads of each, size of journal and checkpoints, zombies.
At the end: each step once in metrics.jsonl, `replay` matches, nothing of the run is left. benchmarks/slope.py says how
growth is judged; the result keeps the curves of memory, too.

    python -m benchmarks.soak [--steps 10000] [--minutes 20] [--seed 0]
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gauges import BOUNDS, descendants, folder_mb, gauges, is_zombie
from benchmarks.machine import write_result
from benchmarks.slope import Slope, slope
from launch.commands.run import make_run
from launch.presets.load import load_config
from launch.supervisor.child import Child
from launch.supervisor.starter import ForkedProcess, ForkServerStarter
from launch.supervisor.topology import process, topology
from protocol.access.keys import create_actor_key
from shared.config.tree import Config
from shared.run.growing_file import GrowingFile
from shared.run.run_dir import RunDir

SETTINGS = (
    "tasks.levels=[1]",
    "rollout.prompts=4",
    "rollout.group=2",
    "rollout.max_new_tokens=8",
    "rollout.groups_per_order=1",
    "checkpoint.every=20",
    "journal.keep=checkpoints",
    "eval.problems=0",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
    "link.heartbeat_s=0.2",
    "link.silence_s=60",
    "loss.max_mismatch=1.0",
)
SAMPLE_EVERY_S = 1.0
FURTHER_ACTORS = ("actor1", "actor2")
EVENT_EVERY = (20, 80)
"""Steps between two arrivals or departures, drawn evenly."""
SHARE_TERMINATED = 0.25
JOURNAL_BOUND_MB = 0.02
NAMES = ("learner", "actor0", "fork_server")
OF_A_FURTHER_ACTOR = {"learner.fds": 2, "fork_server.fds": 1}
"""Open files for each further actor. Subtracted: more of them at the end than before would look like a slope."""
CURVE_POINTS = 40


class Crew:
    """The processes of the run."""

    def __init__(self, run: RunDir, config: Config, seed: int) -> None:
        self.run = run
        self.config = config
        self.random = random.Random(seed)
        plan = topology(run.path, config)
        self.starter = ForkServerStarter(plan.learner.environment, run.path, run.logs / "fork_server.log")
        self.children = {p.name: Child(p, self.starter) for p in plan.processes}
        self.next_event = 100
        self.counts = {"joined": 0, "killed": 0, "terminated": 0}
        for name in FURTHER_ACTORS:
            create_actor_key(run.keys, name)

    def change_further_actors(self, step: int) -> None:
        """A further actor comes or goes when one is due."""
        if step < self.next_event:
            return
        self.next_event = step + self.random.randint(*EVENT_EVERY)
        name = self.random.choice(FURTHER_ACTORS)
        if name in self.children:
            self.send_away(name)
        else:
            self.invite(name)

    def invite(self, name: str) -> None:
        """One more actor."""
        module = ("actor", "--run", str(self.run.path), "--id", name)
        compute = self.config.compute
        actor = process(name, module, compute.actor_threads, compute.blas, self.run.path)
        self.children[name] = Child(actor, self.starter)
        self.counts["joined"] += 1

    def send_away(self, name: str) -> None:
        """Without a word, or asked to."""
        child = self.children.pop(name)
        gentle = self.random.random() < SHARE_TERMINATED
        self.counts["terminated" if gentle else "killed"] += 1
        if gentle:
            child.ask_to_stop()
            time.sleep(0.5)
        child.kill()

    def pids(self) -> dict[str, int]:
        """Those that stay, and the process they were forked from."""
        found = {"fork_server": self.starter.popen.pid}
        for name in ("learner", "actor0"):
            started = self.children[name].started
            assert isinstance(started, ForkedProcess)
            started.exit_code()
            if started.pid:
                found[name] = started.pid
        return found

    def close(self) -> None:
        """Ends all that is left."""
        for child in self.children.values():
            child.kill()
        self.starter.close()


class Soak:
    """A run that is watched."""

    def __init__(self, run: RunDir, crew: Crew) -> None:
        self.run = run
        self.crew = crew
        self.rows = GrowingFile(run.metrics)
        self.step = 0
        self.samples: list[dict[str, float]] = []

    def watch(self, minutes: float) -> None:
        """Until the learner is done, or the time is up and it has been asked to stop."""
        learner = self.crew.children["learner"]
        end = time.monotonic() + 60 * minutes
        due, asked = 0.0, False
        while (code := learner.exit_code()) is None:
            time.sleep(0.05)
            self.step += len(self.rows.new_lines())
            self.crew.change_further_actors(self.step)
            if asked or self.step >= self.crew.config.run.steps:
                continue  # What is given back at the end would look like a slope.
            if time.monotonic() >= due:
                due = time.monotonic() + SAMPLE_EVERY_S
                self.sample()
            if time.monotonic() > end:
                asked = True
                learner.ask_to_stop()
        self.step += len(self.rows.new_lines())
        if code != 0:
            raise SystemExit(f"the learner ended with {code}; see {learner.process.log}")

    def sample(self) -> None:
        """One row."""
        row: dict[str, float] = {"step": self.step, "time_s": time.monotonic()}
        for name, pid in self.crew.pids().items():
            row |= {f"{name}.{what}": value for what, value in gauges(pid).items()}
        row["further_actors"] = sum(name in self.crew.children for name in FURTHER_ACTORS)
        row["journal_mb"] = folder_mb(self.run.journal)
        row["checkpoints_mb"] = folder_mb(self.run.checkpoints)
        row["zombies"] = sum(is_zombie(child) for child in descendants(os.getpid()))
        self.samples.append(row)

    def whole(self) -> list[dict[str, float]]:
        """Samples with all processes."""
        return [row for row in self.samples if "learner.fds" in row and "actor0.fds" in row]

    def curves(self) -> dict[str, list[float]]:
        """Memory over the steps, at evenly chosen samples from the first to the last."""
        rows = self.whole()
        chosen = [rows[round(place)] for place in np.linspace(0, len(rows) - 1, CURVE_POINTS)]
        names = ("step", *(f"{name}.{what}" for name in NAMES for what in ("rss_mb", "anon_mb")))
        return {name: [round(row[name], 2) for row in chosen] for name in names}

    def slopes(self) -> dict[str, Slope]:
        """Of everything that should be flat, without what the further actors of the moment have open."""
        whole = self.whole()
        steps = [row["step"] for row in whole]
        bounds = {f"{name}.{what}": bound for name in NAMES for what, bound in BOUNDS.items()}
        bounds |= {"journal_mb": JOURNAL_BOUND_MB, "checkpoints_mb": JOURNAL_BOUND_MB}
        return {
            name: slope(
                steps, [row[name] - OF_A_FURTHER_ACTOR.get(name, 0) * row["further_actors"] for row in whole], bound
            )
            for name, bound in bounds.items()
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, judge, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    config = load_config("embedded", [*SETTINGS, f"run.steps={args.steps}", f"run.seed={args.seed}"])
    run = make_run(folder / "run", config)
    crew = Crew(run, config, args.seed)
    soak, start = Soak(run, crew), time.monotonic()
    try:
        soak.watch(args.minutes)
    finally:
        crew.close()
    wall_s = time.monotonic() - start
    figures = {"seed": args.seed, "steps": soak.step, "wall_s": round(wall_s, 1), "further_actors": crew.counts}
    figures |= judged(soak) | proved(run, soak.step)
    print(json.dumps(figures, indent=2))
    print(write_result("soak", figures))
    shutil.rmtree(folder)


def judged(soak: Soak) -> dict[str, Any]:
    """Slopes and what else was seen."""
    slopes = soak.slopes()
    return {
        "samples": len(soak.samples),
        "per_1000_steps": {name: found.figures() for name, found in slopes.items()},
        "all_flat": all(found.flat for found in slopes.values()),
        "curves": soak.curves(),
        "most_zombies_at_once": max(row["zombies"] for row in soak.samples),
        "left_behind": len(descendants(os.getpid())),
    }


def proved(run: RunDir, steps: int) -> dict[str, Any]:
    """That the run is sound."""
    rows = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    argv = [sys.executable, "-m", "launch", "replay", str(run.path)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    replay = json.loads(done.stdout.splitlines()[-1]) if done.returncode in (0, 1) else {"error": done.stderr[-500:]}
    return {
        "each_step_once": rows == list(range(1, steps + 1)),
        "segments": len(list(run.journal.glob("*.log"))),
        "files_mb": {path.name: round(path.stat().st_size / 2**20, 2) for path in (run.metrics, run.rollouts)},
        "replay": {name: replay.get(name) for name in ("from_step", "steps", "match", "error")},
    }


if __name__ == "__main__":
    main()
