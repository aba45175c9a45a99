"""The address of the wire: whether the learner could listen on it."""

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from protocol.endpoint import make_private, socket_path
from protocol.errors import SecurityError
from shared.config import LinkConfig
from shared.wire_address import bind_address

WILDCARD = "*"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What was tried."""

    address: str
    """`ipc`, or the tcp address that the learner binds."""
    trouble: str
    """Why it cannot be bound; empty if it can."""
    busy: bool
    """It is somebody else's, or this run's learner is up."""
    socket_path: Path
    """Of the local socket."""
    folder_trouble: str
    """Why the local socket's folder cannot be used; empty if it can. `found; remedy`."""


def look_at_link(link: LinkConfig, run_dir: Path) -> Link:
    """Binds and lets go; makes no folder."""
    path = socket_path(run_dir)
    local = link.endpoint == "ipc" and not link.bind
    address = "ipc" if local else bind_address(link, run_dir)
    error = try_bind(address) if address.startswith("tcp://") else None
    return Link(
        address=address,
        trouble=str(error.strerror or error) if error else "",
        busy=error is not None and error.errno == errno.EADDRINUSE,
        socket_path=path,
        folder_trouble=folder_trouble(path.parent) if local else "",
    )


def try_bind(address: str) -> OSError | None:
    """What the kernel or the resolver says against it. As ZeroMQ does it, a port in TIME_WAIT counts as free."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return OSError(errno.EINVAL, "the port must be a number from 1 to 65535")
    name = "0.0.0.0" if host == WILDCARD else host.strip("[]")
    try:
        family, kind, proto, _, target = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(target)
            trial.listen(1)
    except OSError as error:
        return error
    return None


def folder_trouble(folder: Path) -> str:
    """Of the folder of local sockets, which is made by a run if it is not there."""
    if not os.path.lexists(folder):
        writable = os.access(folder.parent, os.W_OK | os.X_OK)
        return "" if writable else f"{folder.parent} cannot be written to; set XDG_RUNTIME_DIR to a folder of yours"
    try:
        make_private(folder)
    except SecurityError as error:
        return str(error)
    return ""
