"""One start of a run: from the launcher's start until nothing of it is left, perhaps with a kill at some instant.

The caller is a subreaper: all processes that a killed launcher leaves behind become its children, so every process is
counted.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tests.chaos.forking import fork_module

PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 300.0
ORPHANS_S = 60.0
TICK_S = 0.002

Victim = Literal["learner", "actor0", "launcher", "all", "disk"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A SIGKILL from outside, or a disk filled to the last byte."""

    victim: Victim
    """Who is killed."""
    after_s: float
    """How long after a start of the run, or after the kill before it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How one start ended."""

    code: int
    """The launcher's exit code; minus the signal's number if one ended it."""
    kills: int
    """Kills that hit a process that was running."""
    sentence: str
    """What the launcher said last."""


def adopt_orphans() -> None:
    """Be the parent of all descendants whose own parent dies."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def run_once(run: Path, log: Path, environment: dict[str, str], kills: list[Kill]) -> Start:
    """Start the launcher and wait for its end; the kills that were done are taken off the list, the disk is freed."""
    with log.open("ab") as file:
        before = file.tell()
        pid = fork_module("launcher", ["tests.chaos.launcher", str(run)], environment, file.fileno())
    ballast = run.with_name("ballast")
    code, hits = watch(pid, kills, ballast)
    reap_all()
    ballast.unlink(missing_ok=True)
    said = log.read_bytes()[before:].decode().strip().splitlines()
    return Start(code=code, kills=hits, sentence=said[-1] if said else "")


def watch(pid: int, kills: list[Kill], ballast: Path) -> tuple[int, int]:
    """Until the launcher ends; kill when it is time."""
    began = last = time.monotonic()
    hits = 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), hits
        now = time.monotonic()
        assert now - began < LIMIT_S, f"a start of a run did not end within {LIMIT_S} s"
        if kills and now - last >= kills[0].after_s:
            last = now
            victim = kills.pop(0).victim
            hits += fill_disk(ballast) if victim == "disk" else kill(pid, victim)
        time.sleep(TICK_S)


def kill(launcher: int, victim: Victim) -> int:
    """SIGKILL to those of this name that run; how many that were."""
    children = {name_of(pid): pid for pid in children_of(launcher)}
    found = {"launcher": launcher} | children
    targets = list(found.values()) if victim == "all" else [found[victim]] if victim in found else []
    return sum(killed(pid) for pid in targets)


def fill_disk(ballast: Path) -> bool:
    """Take all that is left beside the run; the first refusal may still leave some bytes to smaller writes."""
    with ballast.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return True


def killed(pid: int) -> bool:
    """Whether it was there to be killed; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return state != "Z"


def children_of(pid: int) -> list[int]:
    """Running or ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def name_of(pid: int) -> str:
    """As the process called itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def reap_all() -> None:
    """Every orphan must end by itself, soon: children die with their parents."""
    deadline = time.monotonic() + ORPHANS_S
    while left := children_of(os.getpid()):
        assert time.monotonic() < deadline, f"left over: {[(pid, name_of(pid)) for pid in left]}"
        for pid in left:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(TICK_S)
