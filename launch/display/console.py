"""The console that commands print to, and a command that the user can copy from it and run.

The console is as wide as the terminal, or 120 columns where the output is a file or a pipe. The command names the
interpreter or the script that runs this one.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console

PLAIN_WIDTH = 120
SCRIPT = "tandem"
"""What `pip install .` makes."""


class PipeConsole(Console):
    """Raises BrokenPipeError when the reader is gone (`| head`). rich would end the process, and with it the run."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    # rich would take FORCE_COLOR, which notebooks and CI set, for a terminal, and draw the live display into a file.
    terminal = sys.stdout.isatty()
    width = None if terminal else PLAIN_WIDTH
    # rich would put a symbol in place of `:x:`, also where markup is off.
    return PipeConsole(highlight=False, emoji=False, force_terminal=terminal, width=width)


def next_command(*words: str) -> str:
    """`python -m launch resume runs/first`, or `.venv/bin/python ...` where plain `python` is another one; `tandem ...`
    if that is what the user called."""
    if Path(sys.argv[0]).name == SCRIPT:
        return f"{shlex.quote(script(sys.argv[0], shutil.which(SCRIPT)))} {shlex.join(words)}"
    return f"{shlex.quote(interpreter(sys.executable, shutil.which('python')))} -m launch {shlex.join(words)}"


def script(called: str, on_path: str | None) -> str:
    """The name alone if it is the one on PATH."""
    return SCRIPT if on_path and os.path.realpath(on_path) == os.path.realpath(called) else called


def interpreter(running: str, on_path: str | None) -> str:
    """The shortest name of the running interpreter that works in this folder and with this PATH."""
    if on_path and os.path.realpath(os.path.dirname(on_path)) == os.path.realpath(os.path.dirname(running)):
        return "python"
    here = Path.cwd()
    return str(Path(running).relative_to(here)) if Path(running).is_relative_to(here) else running
