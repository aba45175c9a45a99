"""Starts `watch`, if textual is installed; the application itself is in app.py."""

import importlib.util
import os
from pathlib import Path

from shared.errors import UserError
from shared.run.reader import Run


def watch(*, directory: Path) -> int:
    run = Run(directory)
    if importlib.util.find_spec("textual") is None:
        raise UserError(
            "`watch` needs textual, which is not installed; use `pip install -e '.[watch]'`, or `show` without it."
        )
    # Where textual reads keys and draws.
    if not (os.isatty(0) and os.isatty(2)):
        raise UserError("`watch` needs a terminal, and got a file or a pipe; use `show`, which prints text.")
    from launch.display.terminal.app import Watcher

    Watcher(run).run()
    return 0
