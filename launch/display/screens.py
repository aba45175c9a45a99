"""What shows a run while it trains: a live panel on a terminal, plain lines for a log or a pipe.

A terminal would print `^C` where it is pressed and shift the live panel by a line, so that echo is switched off while
the panel is open. Only the foreground job may change its terminal: the kernel stops any other that tries (SIGTTOU).
"""

import os
import re
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from launch.display.live import View, draw
from launch.display.watch import (
    WINDOW,
    Row,
    Watch,
    clock,
    goal,
    mean,
    number,
    outcome_shares,
    seconds_left,
    step_of,
    steps_done,
    value,
)
from protocol.plain_text import for_terminal
from shared.run.run_dir import RunDir

REFRESH_S = 0.5
"""The panel costs a few milliseconds of a core that the run could use."""
WAITING_S = 10.0
"""Without a terminal, the last log line is printed this often while no step ends."""
LINES = 50
"""A longer run prints only every k-th step, so that there are about this many lines."""
SILENT_S = 30.0
"""A step is printed anyway if nothing was printed for this long."""
STAMP = re.compile(r"^[-\d]{10} [:,\d]{8,12} (?:INFO )?")
"""What logging puts before a message."""
LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^(warning|error): ")
STDIN = 0
LOCAL_FLAGS = 3
"""Index of the local flags in what tcgetattr returns."""


def make_screen(console: Console, run: RunDir, steps: int, *, verbose: bool) -> "LiveScreen | PlainScreen":
    """Plain lines without a terminal, or if all log lines are wanted."""
    if console.is_terminal and not verbose:
        return LiveScreen(console, run, steps)
    return PlainScreen(console, run, steps, verbose=verbose)


class LiveScreen:
    """Redraws one panel in place. It has no thread; the supervisor's tick drives it."""

    def __init__(self, console: Console, run: RunDir, steps: int) -> None:
        self.title = str(run.path)
        self.steps = steps
        self.watch = Watch(run.metrics)
        self.last_lines: dict[str, str] = {}
        self.notes: deque[str] = deque(maxlen=3)
        self.started_at = self.drawn_at = time.monotonic()
        self.live = Live(self, console=console, auto_refresh=False)
        self.opened = ExitStack()

    def __rich__(self) -> RenderableType:
        return draw(
            View(
                title=self.title,
                steps=self.steps,
                rows=self.watch.rows,
                elapsed_s=time.monotonic() - self.started_at,
                last_lines=self.last_lines,
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
        """Redraw when a step has ended, or twice a second."""
        now = time.monotonic()
        if self.watch.poll() or now - self.drawn_at >= REFRESH_S:
            self.drawn_at = now
            self.live.refresh()
        return steps_done(self.watch.rows)

    def note(self, text: str) -> None:
        self.notes.append(for_terminal(text))

    def log_line(self, name: str, line: str) -> None:
        """A warning stays on the terminal above the panel; of other lines only the last is shown."""
        line = for_terminal(line)
        if loud(line):
            self.live.console.print(Text(f"{name} | {bare(name, line)}"))
        if line.strip():
            self.last_lines[name] = bare(name, line)


class PlainScreen:
    """One line for each step, or every few steps in a long run."""

    def __init__(
        self, console: Console, run: RunDir, steps: int, *, verbose: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self.watch = Watch(run.metrics)
        self.steps = steps
        self.verbose = verbose
        self.now = now
        self.pace = Pace(steps)
        self.last_line = ""
        self.printed_at = now()

    def __enter__(self) -> "PlainScreen":
        # An earlier session has printed its steps already.
        self.watch.poll()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self) -> int:
        """Print the steps that have ended since the last tick."""
        new = self.watch.poll()
        rows = self.watch.rows
        for count in range(len(rows) - len(new) + 1, len(rows) + 1):
            if self.pace.due(step_of(rows[count - 1]), self.now()):
                self.print_step(rows[:count])
        self.print_waiting()
        return steps_done(rows)

    def print_step(self, rows: Sequence[Row]) -> None:
        self.last_line, self.printed_at = "", self.now()
        self.line(step_line(rows, self.steps))

    def print_waiting(self) -> None:
        """While no step ends, show now and then that the processes are at work."""
        if self.last_line and not self.verbose and self.now() - self.printed_at >= WAITING_S:
            self.line(self.last_line)
            self.last_line, self.printed_at = "", self.now()

    def note(self, text: str) -> None:
        self.line(text)

    def log_line(self, name: str, line: str) -> None:
        if self.verbose or loud(line):
            self.line(f"{name} | {line}")
        elif line.strip():
            self.last_line = f"{name} | {bare(name, line)}"

    def line(self, text: str) -> None:
        """Without wrapping and markup, since other programs read this."""
        self.console.print(Text(for_terminal(text)), soft_wrap=True)


class Pace:
    """Which steps of a long run get a line."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.every = -(-steps // LINES)
        self.printed_at = float("-inf")

    def due(self, step: int, now: float) -> bool:
        """Every k-th step, the first, the last, and any step after a long silence."""
        due = step % self.every == 0 or step in (1, self.steps) or now - self.printed_at >= SILENT_S
        if due:
            self.printed_at = now
        return due


def step_line(rows: Sequence[Row], steps: int) -> str:
    """`step 12/40  reward 0.71  mean5 0.69  correct 71%  ...` for the last of these rows."""
    row = rows[-1]
    parts = [
        f"step {steps_done(rows):>{len(str(steps))}}/{steps}",
        f"{goal(rows).partition('/')[0]} {number(value(row, goal(rows)), '.3f')}",
        f"mean5 {number(mean(rows[-WINDOW:], goal(rows)), '.3f')}",
        *(f"{name} {share:.0%}" for name, share in outcome_shares(row).items()),
        f"idle groups {number(value(row, 'groups/idle'), '.0f')}/{number(value(row, 'groups/total'), '.0f')}",
        f"entropy {number(value(row, 'entropy/mean'), '.3f')}",
        f"tokens/s {number(value(row, 'tokens_per_s'), '.0f')}",
        f"left {clock(seconds_left(rows, steps))}",
    ]
    return "  ".join(parts)


def loud(line: str) -> bool:
    """Whether it is a warning or worse."""
    return LOUD.search(line) is not None


def bare(name: str, line: str) -> str:
    """Without time stamp and name; the screen puts the name of the process before the line."""
    return STAMP.sub("", line).removeprefix(f"{name} ")


@contextmanager
def quiet_keys(descriptor: int) -> Iterator[None]:
    """Switch off the echo of control keys. Does nothing if the descriptor is not a terminal or not ours to change."""
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
    """Whether this is our terminal, and our process group is in its foreground."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False
