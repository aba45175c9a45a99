"""Ctrl-C and SIGTERM, counted instead of obeyed at once: the first asks for an orderly end, the second for any end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """How often the user asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    def received(self, *_: object) -> None:
        """The handler only counts; a loop that looks at `count` answers."""
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While this is open, signals are counted; afterwards they do again what they did before."""
        before = {number: signal.signal(number, self.received) for number in CAUGHT}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
