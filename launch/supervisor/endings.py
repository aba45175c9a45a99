"""Explains why a process ended: a user error in one sentence, a crash with the last lines of its log, or a stall.

    exit code 2                 a user error: its sentence, from the log
    exit code 1, no progress    the watchdog ended it and wrote its stacks (shared/process/watchdog.py)
    exit code 1, silent peer    it waited too long for its peer and wrote one sentence about it
    stopped (SIGSTOP)           only its parent can see that; an actor is replaced, a learner ends the run
    anything else               a crash

Before a stalled run ends, all processes write their stacks.
"""

import shutil
from collections.abc import Sequence

from launch.supervisor.child import Child
from launch.supervisor.topology import ProcessFailed
from shared.errors import UserError
from shared.process.children import how_it_ended
from shared.process.entry_point import LOST_RANK
from shared.run.growing_file import last_lines

PREFIX = "error: "
GAVE_UP = 1
"""Exit code after no progress or after a silent peer. Crashes have it too."""
USER_ERROR = 2
"""Exit code of a process that wrote `error: ...` about something the user can fix."""
SHOWN_LINES = 15


def later(code: int) -> int:
    """Of several ranks that failed, the first one has the least of this: it was killed, has a sentence, or crashed. The
    others lost it."""
    return 0 if code < 0 else {USER_ERROR: 1, LOST_RANK: 3}.get(code, 2)


def stall_sentence(child: Child, code: int) -> str:
    """Why a process ended that made no progress or whose peer was silent; empty if it ended for another reason."""
    if code != GAVE_UP:
        return ""
    if child.stacks.show_no_progress():
        return f"{child.name} made no progress within link.silence_s and ended itself"
    said = last_lines(child.process.log, 1, child.output_start)
    return f"{child.name}: {said[0].removeprefix(PREFIX).rstrip('.')}" if said and said[0].startswith(PREFIX) else ""


def stopped_sentence(child: Child, seconds: float) -> str:
    return f"{child.name} (process {child.pid}) was stopped (SIGSTOP) for {seconds:.1f} s"


def stall_error(sentence: str, steps_done: int, children: Sequence[Child]) -> ProcessFailed:
    """The error that ends a stalled run. All processes write their stacks first."""
    for child in children:
        child.write_stacks()
    files = ", ".join(str(child.process.stacks) for child in children if child.process.stacks.exists())
    return ProcessFailed(
        f"after step {steps_done}, {sentence}." + (f" Stacks of each process: {files}" if files else "")
    )


def failure(child: Child, code: int, steps_done: int) -> UserError | ProcessFailed:
    """The error that ends the run when a child has failed."""
    lines = last_lines(child.process.log, SHOWN_LINES, child.output_start)
    sentences = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    if code == USER_ERROR and sentences:
        return UserError(sentences[-1])
    if code == USER_ERROR:
        return unwritable_log_error(child)
    shown = "\n".join(f"  {child.name} | {line}" for line in lines) or "  (it said nothing)"
    return ProcessFailed(
        f"{child.name} {how_it_ended(code)} after step {steps_done}; the end of {child.process.log}:\n{shown}"
    )


def unwritable_log_error(child: Child) -> UserError:
    """For exit code 2 without a sentence: the log could not be written, probably because the disk is full."""
    log = child.process.log
    free = shutil.disk_usage(log.parent).free
    return UserError(
        f"{child.name} stopped because of something that you can fix, but could not write the reason to {log}; that "
        f"disk has {free >> 10} KiB free: make room there (or make it writable again), then use `resume`."
    )
