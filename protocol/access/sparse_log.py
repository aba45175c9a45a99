"""A log for events that an unauthenticated peer can cause at will: every one is counted, powers of two are logged."""

import logging
from collections import Counter

log = logging.getLogger("protocol")


class SparseLog:
    """Counts events by kind and logs the 1st, 2nd, 4th, 8th ... of each. All kinds are chosen by our own code or by
    allowed actors, so a peer cannot make the table of counts grow."""

    def __init__(self, log: logging.Logger = log) -> None:
        self.log = log
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, detail: str = "", level: int = logging.WARNING) -> None:
        """Count one event; `detail` describes this event and is not part of the kind."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if count & (count - 1) == 0:
            self.log.log(level, "%s%s (%d so far)", kind, detail and f": {detail}", count)
