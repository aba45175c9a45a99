"""Lines that a stranger can cause as often as he likes: counted all, written at the 1st, 2nd, 4th, 8th ... time."""

import logging
from collections import Counter

log = logging.getLogger("protocol")


class Tally:
    """How often each thing has happened. Its kinds are ours, so that nobody can make it grow."""

    def __init__(self, log: logging.Logger = log) -> None:
        self.log = log
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, detail: str = "", level: int = logging.WARNING) -> None:
        """One more of a kind; detail tells this one from the others."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if count & (count - 1) == 0:
            self.log.log(level, "%s%s (%d so far)", kind, detail and f": {detail}", count)
