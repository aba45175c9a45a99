"""Who is told about a run: a live picture on a terminal, plain lines anywhere else."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from launch.display import View, draw
from launch.plain_lines import Pace, bare, loud, step_line
from launch.quiet_keys import quiet_keys
from launch.watch import Row, Watch, step_of, steps_done
from shared.run.run_dir import RunDir

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
