"""Small scripts in place of a run's processes, and a screen that remembers. Scripts talk to a test through files in
their folder and through their log."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.topology import Process, Topology
from tests.support.runs import ROOT

QUICK = SupervisorLimits(tick_s=0.02, leaving_s=0.2, grace_s=1.0, pause_s=0.02, after_exit_s=0.2)
DEADLINE_S = 30.0

PROLOGUE = """
import os, pathlib, signal, subprocess, sys, time
from shared.process.parent_death import die_with_parent
die_with_parent()
here = pathlib.Path(sys.argv[1])
me = sys.argv[2]
with (here / f"{me}.pids").open("a") as file:
    file.write(f"{os.getpid()}\\n")
starts = len((here / f"{me}.pids").read_text().split())
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""
SERVE = "time.sleep(600)"
ON_TERM = """
def leave(*_):
    print("asked to stop", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(here / f"{me}.ready").touch()
"""
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"{me}.ready").touch()
time.sleep(600)
"""
WITH_WORKER = """
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with (here / "worker.pids").open("a") as file:
    file.write(f"{worker.pid}\\n")
(here / f"{me}.ready").touch()
"""


class Listener:
    """A screen that remembers, and can act at every tick."""

    def __init__(
        self, act: Callable[["Listener"], None] = lambda _: None, steps: Callable[[], int] = lambda: 0
    ) -> None:
        self.act = act
        self.steps = steps
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.begin = time.monotonic()

    def tick(self) -> int:
        """A test that hangs fails here, and the supervisor cleans up."""
        assert time.monotonic() - self.begin < DEADLINE_S
        self.act(self)
        return self.steps()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log_line(self, name: str, line: str) -> None:
        self.lines.append(f"{name} | {line}")


def child(folder: Path, name: str, script: str) -> Process:
    return Process(
        name=name,
        argv=(sys.executable, "-c", PROLOGUE + script, str(folder), name),
        environment={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        threads=1,
        log=folder / "logs" / f"{name}.log",
    )


def plan(folder: Path, learner: str, actor: str = SERVE) -> Topology:
    return Topology(
        run_dir=folder,
        endpoint="ipc",
        learner=child(folder, "learner", learner),
        actors=(child(folder, "actor0", actor),),
    )


def pids(folder: Path) -> list[int]:
    """Every process that ever ran in this test."""
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def starts(folder: Path, name: str) -> int:
    file = folder / f"{name}.pids"
    return len(file.read_text().split()) if file.exists() else 0
