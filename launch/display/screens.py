"""Who is told about a run: a live picture on a terminal, plain lines anywhere else.

The run as lines of text, for logs and pipes.

A terminal that does not print `^C` where it is pressed: the characters would shift the live picture by a line.

Only the job in the foreground may change its terminal: the kernel stops any other one that tries (SIGTTOU), so a run in
the background leaves it alone. Nobody presses keys for that one either.
"""

import os
import re
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from launch.display.live import View, draw
from launch.display.watch import (
    WINDOW,
    Row,
    Watch,
    clock,
    mean,
    number,
    outcome_shares,
    seconds_left,
    step_of,
    steps_done,
    value,
)
from shared.run.run_dir import RunDir

LOCAL_FLAGS = 3
"""Index of the flags in what tcgetattr returns."""


@contextmanager
def quiet_keys(descriptor: int) -> Iterator[None]:
    """While this is open. Nothing to do where the descriptor is no terminal, or not ours to change."""
    if not in_foreground(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    quiet = list(before)
    quiet[LOCAL_FLAGS] &= ~termios.ECHOCTL
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        if in_foreground(descriptor):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def in_foreground(descriptor: int) -> bool:
    """Whether this is our terminal, and our process group has it."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


LINES = 50
"""A longer run prints only every k-th step, so that about this many lines come."""
PATIENCE_S = 30.0
"""A step is printed all the same if nothing was printed for so long."""

STAMP = re.compile(r"^[-\d]{10} [:,\d]{8,12} (?:INFO )?")
"""What logging puts before a message; the log file keeps it."""
LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^(warning|error): ")


class Pace:
    """Which steps get a line."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.every = -(-steps // LINES)
        self.printed_at = float("-inf")

    def due(self, step: int, now: float) -> bool:
        """Every k-th step, the first, the last, and any after a long silence."""
        due = step % self.every == 0 or step in (1, self.steps) or now - self.printed_at >= PATIENCE_S
        if due:
            self.printed_at = now
        return due


def step_line(rows: Sequence[Row], steps: int) -> str:
    """`step 12/40  reward 0.71  mean5 0.69  correct 71%  ...` for the last of these rows."""
    row = rows[-1]
    parts = [
        f"step {steps_done(rows):>{len(str(steps))}}/{steps}",
        f"reward {number(value(row, 'reward/mean'), '.3f')}",
        f"mean5 {number(mean(rows[-WINDOW:], 'reward/mean'), '.3f')}",
        *(f"{name} {share:.0%}" for name, share in outcome_shares(row).items()),
        f"dropped {number(value(row, 'groups/dropped'), '.0f')}/{number(value(row, 'groups/total'), '.0f')}",
        f"entropy {number(value(row, 'entropy/mean'), '.3f')}",
        f"tokens/s {number(value(row, 'tokens_per_s'), '.0f')}",
        f"left {clock(seconds_left(rows, steps))}",
    ]
    return "  ".join(parts)


def loud(line: str) -> bool:
    """Whether a log line is a warning or worse."""
    return LOUD.search(line) is not None


def bare(name: str, line: str) -> str:
    """A log line of this process without time stamp and name, which stands before it anyway."""
    return STAMP.sub("", line).removeprefix(f"{name} ")


REFRESH_S = 0.5
"""The picture costs a few milliseconds of a core that the run could use."""
STDIN = 0
QUIET_S = 10.0
"""Off a terminal, a word about what is going on comes this often while no step ends."""


class Screen(Protocol):
    """An audience that can be opened and closed."""

    def __enter__(self) -> "Screen": ...

    def __exit__(self, *_: object) -> None: ...

    def tick(self) -> int: ...

    def note(self, text: str) -> None: ...

    def log_line(self, name: str, line: str) -> None: ...


def screen(console: Console, run: RunDir, steps: int, *, verbose: bool) -> Screen:
    """Live on a terminal; plain lines off it, and wherever all log lines are wanted."""
    if console.is_terminal and not verbose:
        return LiveScreen(console, run, steps)
    return PlainScreen(console, run, steps, verbose=verbose)


class LiveScreen:
    """Redraws one panel in place. No thread: the supervisor's tick drives it."""

    def __init__(self, console: Console, run: RunDir, steps: int) -> None:
        self.title = str(run.path)
        self.steps = steps
        self.watch = Watch(run.metrics)
        self.said: dict[str, str] = {}
        self.notes: deque[str] = deque(maxlen=3)
        self.started = self.drawn = time.monotonic()
        self.live = Live(self, console=console, auto_refresh=False)
        self.opened = ExitStack()

    def __rich__(self) -> RenderableType:
        """The picture as of now."""
        return draw(
            View(
                title=self.title,
                steps=self.steps,
                rows=self.watch.rows,
                elapsed_s=time.monotonic() - self.started,
                said=self.said,
                notes=list(self.notes),
            )
        )

    def __enter__(self) -> "LiveScreen":
        self.opened.enter_context(quiet_keys(STDIN))
        self.opened.enter_context(self.live)
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def tick(self) -> int:
        """Redraw when a step ended, or twice a second."""
        now = time.monotonic()
        if self.watch.poll() or now - self.drawn >= REFRESH_S:
            self.drawn = now
            self.live.refresh()
        return steps_done(self.watch.rows)

    def note(self, text: str) -> None:
        """Shown below the picture."""
        self.notes.append(text)

    def log_line(self, name: str, line: str) -> None:
        """Only the last one of each process is shown; a warning stays above the picture."""
        if loud(line):
            self.live.console.print(Text(f"{name} | {bare(name, line)}"))
        if line.strip():
            self.said[name] = bare(name, line)


class PlainScreen:
    """One line a step, or every few steps in a long run."""

    def __init__(
        self, console: Console, run: RunDir, steps: int, *, verbose: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self.watch = Watch(run.metrics)
        self.steps = steps
        self.verbose = verbose
        self.now = now
        self.pace = Pace(steps)
        self.said = ""
        self.said_at = now()

    def __enter__(self) -> "PlainScreen":
        # The steps of an earlier session were printed by that one.
        self.watch.poll()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self) -> int:
        """Print the steps that ended since the last tick."""
        new = self.watch.poll()
        rows = self.watch.rows
        for count in range(len(rows) - len(new) + 1, len(rows) + 1):
            if self.pace.due(step_of(rows[count - 1]), self.now()):
                self.print_step(rows[:count])
        self.print_waiting()
        return steps_done(rows)

    def print_step(self, rows: Sequence[Row]) -> None:
        """The line of the last of these rows."""
        self.said, self.said_at = "", self.now()
        self.line(step_line(rows, self.steps))

    def print_waiting(self) -> None:
        """While nothing ends: what a process said last."""
        if self.said and not self.verbose and self.now() - self.said_at >= QUIET_S:
            self.line(self.said)
            self.said, self.said_at = "", self.now()

    def note(self, text: str) -> None:
        """At once."""
        self.line(text)

    def log_line(self, name: str, line: str) -> None:
        """All of them if asked for, otherwise warnings."""
        if self.verbose or loud(line):
            self.line(f"{name} | {line}")
        elif line.strip():
            self.said = f"{name} | {bare(name, line)}"

    def line(self, text: str) -> None:
        """No wrapping, no markup: other programs read this."""
        self.console.print(Text(text), soft_wrap=True)
