"""A command that the user can copy and run: it names the interpreter that runs this one."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def next_command(*words: str) -> str:
    """`python -m launch resume runs/first`, or `.venv/bin/python ...` where plain `python` is another one."""
    return f"{shlex.quote(interpreter(sys.executable, shutil.which('python')))} -m launch {shlex.join(words)}"


def interpreter(running: str, on_path: str | None) -> str:
    """The shortest name of the running interpreter that works in this folder and with this PATH."""
    if on_path and os.path.realpath(os.path.dirname(on_path)) == os.path.realpath(os.path.dirname(running)):
        return "python"
    here = Path.cwd()
    return str(Path(running).relative_to(here)) if Path(running).is_relative_to(here) else running
