"""Starts `watch`, if textual is installed; the application itself is in app.py."""

import importlib.util
from pathlib import Path

from shared.errors import UserError
from shared.run.reader import Run


def watch(*, directory: Path) -> int:
    run = Run(directory)
    if importlib.util.find_spec("textual") is None:
        raise UserError(
            "`watch` needs textual, which is not installed; use `pip install -e '.[watch]'`, or `show` without it."
        )
    from launch.display.terminal.app import Watcher

    Watcher(run).run()
    return 0
