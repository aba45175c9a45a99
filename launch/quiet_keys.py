"""A terminal that does not print `^C` where it is pressed: the characters would shift the live picture by a line."""

import termios
from collections.abc import Iterator
from contextlib import contextmanager

LOCAL_FLAGS = 3
"""Index of the flags in what tcgetattr returns."""


@contextmanager
def quiet_keys(descriptor: int) -> Iterator[None]:
    """While this is open. Nothing to do where the descriptor is no terminal."""
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        yield
        return
    quiet = list(before)
    quiet[LOCAL_FLAGS] &= ~termios.ECHOCTL
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
