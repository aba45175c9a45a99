"""The run directory and its files. `from shared.run import Run` reads one.

`Run` is imported when it is asked for: the processes of a run write files, and need nothing of what reads them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.run.reader import Run as Run


def __getattr__(name: str) -> Any:
    if name != "Run":
        raise AttributeError(f"shared.run has no {name}")
    from shared.run.reader import Run

    return Run
