"""OpenMP's threads spin less while other processes compute.

The threads that share a product wait for each other at its end. They spin at first, because waking a thread takes
longer than most products; determinism.py sets for how long. Beside busy processes, spinning does harm: a thread that
spins uses up its share of the core, and has to wait for the core when there is work. Then each of the thousand products
of a step may take as long as the scheduler lets another process run. A step of 135 million parameters took up to twenty
times as long as on a quiet machine.

PyTorch's OpenMP library, libgomp, reads how long to spin once, when it is loaded. But it hardly spins while it has more
threads than there are cores. It makes threads for each thread that computes: so one more thread computes a little, and
then all of them sleep. As many threads as before share a product, so the bits stay as they are.

With two OpenMP libraries, the threads of the other one go on spinning.
"""

import re
import threading

import torch

OPENMP = re.compile(r"\S*/lib(?:gomp|omp|iomp5)[^/\s]*$", re.MULTILINE)
"""A library in /proc/PID/maps."""
LARGE = 2**17
"""Elements that PyTorch divides among threads."""


class SleepingThreads:
    """More threads of libgomp. It keeps them as long as the thread lives for which it has made them, their owner."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.made = threading.Event()
        self.owner: threading.Thread | None = None

    def begin(self) -> None:
        """Nothing if they are there or on their way."""
        if self.owner is None or not self.owner.is_alive():
            self.ended.clear()
            self.owner = threading.Thread(target=self.make_threads, daemon=True)
            self.owner.start()

    def make_threads(self) -> None:
        # A thread computes with as many others as PyTorch was set to when it began. That may have been one for a
        # moment (canary.py); then the next look begins again.
        if torch.get_num_threads() == 1:
            return
        torch.zeros(LARGE).add_(1)
        self.made.set()
        self.ended.wait()

    def have_begun(self) -> bool:
        return self.made.is_set()

    def end(self) -> None:
        if self.owner is not None:
            self.ended.set()
            self.owner.join()
            self.owner = None
            self.made.clear()


def num_openmp_libraries(maps: str) -> int:
    """maps: /proc/PID/maps."""
    return len(set(OPENMP.findall(maps)))
