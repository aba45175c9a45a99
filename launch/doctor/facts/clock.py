"""The date, and whether the two clocks of this machine go alike."""

import time
from dataclasses import dataclass

PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Two readings of each clock, a moment apart."""

    now: float
    """Seconds since 1970, at the second reading."""
    monotonic_s: float
    """What passed by the clock that deadlines go by."""
    wall_s: float
    """What passed by the date."""


def look_at_clock(pause_s: float = PAUSE_S) -> Clock:
    """Reads both, waits, reads both."""
    monotonic, wall = time.monotonic(), time.time()
    time.sleep(pause_s)
    return Clock(now=time.time(), monotonic_s=time.monotonic() - monotonic, wall_s=time.time() - wall)
