"""`python -m tests.chaos.lease_storm FOLDER BLOWS SEED`: processes that want one lease all the time, while they are
killed and stopped at random instants. What came of it is printed as JSON.

Two runs of two processes share the lease of a card, each with a driver of its own. Who has a turn also takes a lock of
another kind (lockf), on a file that the lease knows nothing of: two holders would meet there. The kernel frees it with
its owner, as the lease; it is opened first, so it is closed first. Workers are forked, and die with this process.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from shared.process.lease import Lease
from shared.process.parent_death import ask_kernel
from tests.support.fake_card import FakeDriver

ROOT = Path(__file__).resolve().parents[2]
NAMES = "abcd"
"""Learner and actor of one run, learner and actor of another."""
LONGEST_TURN_S = 0.004
LONGEST_PAUSE_S = 0.03
LONGEST_STOP_S = 0.05
CALM_TURNS = 100
LIMIT_S = 60.0


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    kills: int
    """SIGKILLs; each worker was replaced at once."""
    stops: int
    """SIGSTOPs, each with a SIGCONT a moment later."""
    two_holders: int
    """Turns that met another one."""
    turns: dict[str, int]
    """Of each worker and those that replaced it."""
    afterwards: str
    """Who had the turns when all was calm again, in their order."""


class Workers:
    """The processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = {name: self.start(name) for name in NAMES}

    def start(self, name: str) -> int:
        pid = os.fork()
        if pid == 0:
            work(self.folder, name)
        return pid

    def kill(self, name: str) -> None:
        """And replace it."""
        os.kill(self.pids[name], signal.SIGKILL)
        os.waitpid(self.pids[name], 0)
        self.pids[name] = self.start(name)

    def stop_for(self, name: str, seconds: float) -> None:
        os.kill(self.pids[name], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.pids[name], signal.SIGCONT)

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def work(folder: Path, name: str) -> NoReturn:
    """Turns, until it is killed."""
    ask_kernel(signal.SIGKILL)
    rng = random.Random()
    witness = os.open(folder / "witness", os.O_RDWR | os.O_CREAT)
    log = os.open(folder / "turns", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    lease = Lease(folder / "lease", FakeDriver())
    while True:
        with lease.hold(name):
            try:
                fcntl.lockf(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.write(log, b"!")
            os.write(log, name.encode())
            time.sleep(rng.uniform(0.0, LONGEST_TURN_S))
            fcntl.lockf(witness, fcntl.LOCK_UN)


def rage(folder: Path, blows: int, seed: int) -> Storm:
    """Kill and stop in turn at random, then wait until all have had turns again."""
    rng, kills = random.Random(seed), 0
    workers = Workers(folder)
    try:
        for blow in range(blows):
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
            name = rng.choice(NAMES)
            if blow % 2:
                workers.stop_for(name, rng.uniform(0.0, LONGEST_STOP_S))
            else:
                workers.kill(name)
                kills += 1
        before = len(turns_in(folder))
        wait_for_turns(folder, before + CALM_TURNS)
    finally:
        workers.end()
    text = turns_in(folder)
    return Storm(
        kills=kills,
        stops=blows - kills,
        two_holders=text.count("!"),
        turns={name: text.count(name) for name in NAMES},
        afterwards=text[before:],
    )


def wait_for_turns(folder: Path, count: int) -> None:
    end = time.monotonic() + LIMIT_S
    while len(turns_in(folder)) < count:
        assert time.monotonic() < end, "nobody gets the lease any more"
        time.sleep(0.01)


def turns_in(folder: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "turns").read_text()
    return ""


def storm(folder: Path, blows: int, seed: int) -> Storm:
    """In a process of its own, which has loaded little and can fork quickly."""
    argv = [sys.executable, "-m", "tests.chaos.lease_storm", str(folder), str(blows), str(seed)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S + blows, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Storm)


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(rage(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
