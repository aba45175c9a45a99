"""How much memory this process has held at most."""

import resource
import sys


def peak_memory_mb() -> float:
    """Largest resident size so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)
