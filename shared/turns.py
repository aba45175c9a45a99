"""Whether the two processes take turns, and on what.

On a card they always do. On a CPU they do unless the threads of both fit its cores side by side: then neither waits,
and with `pipeline.max_lag` above zero sampling and learning overlap.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from shared.config import ComputeConfig
from shared.gpu_lease import Lease, nothing


class Turns(Protocol):
    """Held while computing."""

    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> AbstractContextManager[float]:
        """Wait for one's turn; gives the seconds that were waited. meanwhile: called again and again in the wait."""
        ...


class NoTurns:
    """There is room for both."""

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[float]:
        """Go ahead."""
        yield 0.0


def turns(compute: ComputeConfig, device: str, lease: Path) -> Turns:
    """A lease where the two would be in each other's way."""
    fits = compute.learner_threads + compute.actor_threads <= len(os.sched_getaffinity(0))
    return NoTurns() if device == "cpu" and fits else Lease(lease)
