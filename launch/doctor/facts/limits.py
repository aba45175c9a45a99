"""Limits that the shell or a service manager put on this process; children inherit them."""

import resource
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The soft ones; None for unlimited."""

    open_files: int | None
    """Descriptors of one process."""
    file_bytes: int | None
    """Size of a file that a process may write."""
    address_bytes: int | None
    """Address space of one process, used or only reserved."""
    processes: int | None
    """Processes and threads of this user."""


def look_at_limits() -> Limits:
    """Of this process."""
    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        file_bytes=soft(resource.RLIMIT_FSIZE),
        address_bytes=soft(resource.RLIMIT_AS),
        processes=soft(resource.RLIMIT_NPROC),
    )


def soft(which: int) -> int | None:
    """The limit in force."""
    value = resource.getrlimit(which)[0]
    return None if value == resource.RLIM_INFINITY else value
