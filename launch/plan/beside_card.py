"""What a run takes of the machine's memory while its processes compute on a card.

started   learner and actor, each with CUDA's runtime;  adapter, gradient and two moments where AdamW steps here
total     with the file that is read while they load
"""

from dataclasses import dataclass

from launch.plan.memory import MIB, adapter_bytes
from launch.plan.shape import ModelShape
from shared.config.processes import Parallel

CUDA_RUNTIME_BYTES = 1500 * MIB
"""A process on a card, in host memory."""
STEPPED_COPIES = 4
"""Of the adapter with compute.parallel = "zero2": values, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class MemoryBesideCard:
    """Of both processes."""

    started: int
    """From their start to their end. With less, a run cannot start."""
    total: int
    """At the peak."""


def memory_beside_card(shape: ModelShape, rank: int, parallel: Parallel) -> MemoryBesideCard:
    """rank: of the adapter."""
    stepped = STEPPED_COPIES * adapter_bytes(rank, shape) if parallel == "zero2" else 0
    started = 2 * CUDA_RUNTIME_BYTES + stepped
    return MemoryBesideCard(started=started, total=started + shape.file_bytes)
