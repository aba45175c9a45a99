"""A look at something that may never answer: a dead network file system, a resolver, a driver.

It runs in a daemon thread, which is left behind when its time is up and ends with the process. What may crash the
process, or hold the interpreter, goes into a process of its own instead (`probe.py`).
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from launch.doctor.known import Missing

T = TypeVar("T")


class Look(Generic[T]):
    """A look under way."""

    def __init__(self, look: Callable[[], T], limit_s: float) -> None:
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.answers: queue.Queue[T | Missing] = queue.Queue(1)
        threading.Thread(target=self._run, args=(look,), daemon=True).start()

    def result(self) -> T | Missing:
        """What was seen, or why not, at the latest when the time is up."""
        try:
            return self.answers.get(timeout=max(self.deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return Missing(f"no answer within {self.limit_s:g} s")

    def _run(self, look: Callable[[], T]) -> None:
        try:
            answer: T | Missing = look()
        except Exception as error:
            # The edge of a look: whatever went wrong there must not take the other findings with it.
            answer = Missing(f"{type(error).__name__}: {error}")
        self.answers.put(answer)
