"""A terminal that does not print `^C` where it is pressed: the characters would shift the live picture by a line.

Only the job in the foreground may change its terminal: the kernel stops any other one that tries (SIGTTOU), so a run in
the background leaves it alone. Nobody presses keys for that one either.
"""

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager

LOCAL_FLAGS = 3
"""Index of the flags in what tcgetattr returns."""


@contextmanager
def quiet_keys(descriptor: int) -> Iterator[None]:
    """While this is open. Nothing to do where the descriptor is no terminal, or not ours to change."""
    if not in_foreground(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    quiet = list(before)
    quiet[LOCAL_FLAGS] &= ~termios.ECHOCTL
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        if in_foreground(descriptor):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def in_foreground(descriptor: int) -> bool:
    """Whether this is our terminal, and our process group has it."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False
