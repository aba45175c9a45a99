"""A process that stood still or waited in vain: the words for it, and the stacks of all before anything is killed.

stopped (SIGSTOP)        only its parent can tell; an actor is replaced, a learner ends the run
no progress              it ended itself (shared/process/watchdog.py); its stacks lie there already
heard nothing of a peer  it said so in one sentence and ended; both ends are worth a look
"""

from collections.abc import Sequence

from launch.child import Child
from launch.errors import ProcessFailed
from launch.growing_file import last_lines

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
