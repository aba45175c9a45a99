"""What a process's end means: the user's mistake in one sentence, or a crash with the last words of its log.

A process that stood still or waited in vain: the words for it, and the stacks of all before anything is killed.

stopped (SIGSTOP)        only its parent can tell; an actor is replaced, a learner ends the run
no progress              it ended itself (shared/process/watchdog.py); its stacks lie there already
heard nothing of a peer  it said so in one sentence and ended; both ends are worth a look
"""

import shutil
from collections.abc import Sequence

from launch.supervisor.child import Child
from launch.supervisor.growing_file import last_lines
from launch.supervisor.topology import ProcessFailed
from shared.errors import UserError
from shared.process.children import how_it_ended

PREFIX = "error: "
GAVE_UP = 1
"""Exit code of a process whose watchdog ran out, or whose peer fell silent. Crashes share it."""


def stall(child: Child, code: int) -> str:
    """How a process that stood still or waited in vain came to its end; empty if it ended in another way."""
    if code != GAVE_UP:
        return ""
    if child.stacks.hold_a_stall():
        return f"{child.name} made no progress within link.silence_s and ended itself"
    said = last_lines(child.process.log, 1, child.output_start)
    return f"{child.name}: {said[0].removeprefix(PREFIX).rstrip('.')}" if said and said[0].startswith(PREFIX) else ""


def stopped(child: Child, seconds: float) -> str:
    """The sentence about a process that somebody stopped."""
    return f"{child.name} (process {child.pid}) was stopped (SIGSTOP) for {seconds:.1f} s"


def stalled(sentence: str, steps_done: int, children: Sequence[Child]) -> ProcessFailed:
    """The error that ends a run, after all processes have said where they stand."""
    for child in children:
        child.write_stacks()
    files = ", ".join(str(child.process.stacks) for child in children if child.process.stacks.exists())
    return ProcessFailed(
        f"after step {steps_done}, {sentence}." + (f" Where each process stood: {files}" if files else "")
    )


USER_ERROR = 2
"""Exit code of a process that said `error: ...` about something the user can mend."""
SHOWN_LINES = 15


def failure(child: Child, code: int, steps_done: int) -> UserError | ProcessFailed:
    """The exception to raise for a child that failed."""
    lines = last_lines(child.process.log, SHOWN_LINES, child.output_start)
    sentences = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    if code == USER_ERROR and sentences:
        return UserError(sentences[-1])
    if code == USER_ERROR:
        return UserError(unsaid(child))
    shown = "\n".join(f"  {child.name} | {line}" for line in lines) or "  (it said nothing)"
    return ProcessFailed(
        f"{child.name} {how_it_ended(code)} after step {steps_done}; the end of {child.process.log}:\n{shown}"
    )


def unsaid(child: Child) -> str:
    """It had something to say and could not write it: a log lies on the run's own disk."""
    log = child.process.log
    free = shutil.disk_usage(log.parent).free
    return (
        f"{child.name} stopped over something that can be mended, but {log} could not take its sentence; that disk has "
        f"{free >> 10} KiB free: make room there (or make it writable again), then use `resume`."
    )
