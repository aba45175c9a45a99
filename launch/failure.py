"""What a process's end means: the user's mistake in one sentence, or a crash with the last words of its log."""

import shutil

from launch.child import Child
from launch.errors import ProcessFailed
from launch.growing_file import last_lines
from launch.stalls import PREFIX
from shared.errors import UserError
from shared.process.children import how_it_ended

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
