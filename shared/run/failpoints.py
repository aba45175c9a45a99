"""Named points in a run's processes at which tests kill a process or make the disk fail. For tests only.

    TANDEM_FAILPOINTS=FOLDER     FOLDER/plan.json has the faults: at the n-th time a process passes a point, act

    kill       SIGKILL to the process itself                kill_all   to its parent first, then to itself
    ENOSPC EIO EROFS ...   OSError with this errno, before the call is made
    short      half of a write, then ENOSPC                 tear       half of a write, then SIGKILL

A point is a line of text: `before fsync /run/journal/000001.log`, `after learner sends Ack`. Patterns are those of
fnmatch. Each process counts its own hits. A fault acts once per run, in the first process that reaches it: its number
becomes a file in FOLDER, created exclusively, so that the restarted process continues. With `"trace": true` every point
passed is added to FOLDER/passed. Without the variable a point costs a call and one attribute test.
Left out on purpose: delays and lost messages, which belong in a proxy between the processes.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

VARIABLE = "TANDEM_FAILPOINTS"
PLAN = "plan.json"
PASSED = "passed"
KILL = "kill"
KILL_ALL = "kill_all"
SHORT = "short"
TEAR = "tear"


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong, once."""

    point: str
    """fnmatch pattern of the point."""
    hit: int = 1
    """Which passing of the point in one process, from 1."""
    act: str
    """What happens; see above."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """plan.json."""

    faults: tuple[Fault, ...] = ()
    """In no order: each waits for its point."""
    trace: bool = False
    """Whether to list the points that are passed."""


@dataclass(frozen=True)
class Failpoints:
    """The plan of this process; built once, from its environment."""

    folder: Path
    """Folder of the plan, the marks and the trace."""
    plan: Plan
    """The faults."""
    armed: bool
    """False in every real run."""
    hits: Counter[int]
    """How often this process has passed the point of each fault."""

    @classmethod
    def planned(cls, environment: Mapping[str, str]) -> "Failpoints":
        folder = environment.get(VARIABLE)
        if not folder:
            return cls(Path(), Plan(), armed=False, hits=Counter())
        plan = msgspec.json.decode((Path(folder) / PLAN).read_bytes(), type=Plan)
        return cls(Path(folder), plan, armed=True, hits=Counter())

    def passed(self, point: str) -> str:
        """Act if a fault is due. Returns the act if the caller must do it, else an empty string."""
        if self.plan.trace:
            append_line(self.folder / PASSED, point)
        for number, fault in enumerate(self.plan.faults):
            if fnmatchcase(point, fault.point):
                self.hits[number] += 1
                if self.hits[number] == fault.hit and self.take(number):
                    return act(fault.act, point)
        return ""

    def take(self, number: int) -> bool:
        """Claim this fault; False if it has acted already."""
        try:
            os.close(os.open(mark(self.folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        except FileExistsError:
            return False
        return True


def mark(folder: Path, number: int) -> Path:
    """The file that exists once the fault with this number has acted."""
    return folder / f"happened-{number:03d}"


def act(what: str, point: str) -> str:
    if what in (SHORT, TEAR):
        return what
    if what == KILL_ALL:
        os.kill(os.getppid(), signal.SIGKILL)
    if what in (KILL, KILL_ALL):
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, what)
    raise OSError(number, os.strerror(number), point)


def append_line(path: Path, line: str) -> None:
    """One write to a file that several processes append to."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(fd, line.encode() + b"\n")
    os.close(fd)


FAILPOINTS = Failpoints.planned(os.environ)


def reach(point: str, what: object = "") -> str:
    """Pass a point. `what` adds to its name: a path, or a message's type."""
    if not FAILPOINTS.armed:
        return ""
    return FAILPOINTS.passed(f"{point} {what if isinstance(what, str | Path) else type(what).__name__}".rstrip())
