"""The file system under the run directory, the directory where it exists, and the address that its learner binds.

A few small files are written in a folder of their own beside the run and removed again; a free lock is taken for an
instant; an address is bound and let go.
"""

import errno
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from protocol.access.keys import load_learner_keys
from protocol.errors import SecurityError
from shared.config.processes import LinkConfig, bind_address
from shared.run.file_lock import open_lock, signature, try_lock
from shared.run.run_dir import RunDir

MOUNTS = Path("/proc/self/mountinfo")
SYNCS = 8
ENOUGH_S = 1.0
BLOCK = b"x" * 4096
WILDCARD = "*"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that something is to be written into."""

    path: Path
    """The one that was meant."""
    existing: Path
    """The nearest one that exists."""
    writable: bool
    """Whether this user may make files there."""
    free: int
    """Bytes this user may still write."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What lies under the run directory."""

    folder: Folder
    """Where it will be."""
    trouble: str
    """Why nothing can be written there; empty if it can."""
    free_files: int | None
    """Names it has room for; None where the file system makes them as needed."""
    kind: str
    """File system, such as `ext4`."""
    sync_s: float = 0.0
    """Median of a 4 KiB write with fsync."""
    keeps_modes: bool = True
    """A file made with 0600 has 0600."""
    keeps_locks: bool = True
    """A held flock keeps a second one out."""


def look_at_folder(path: Path) -> Folder:
    """Writes nothing."""
    existing = next(level for level in (path, *path.parents) if level.exists())
    found = os.statvfs(existing)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Folder(path=path, existing=existing, writable=writable, free=found.f_bavail * found.f_frsize)


def look_at_disk(run_dir: Path) -> Disk:
    """Tries it. Where nothing can be written, what could not be tried is taken to be well."""
    folder = look_at_folder(run_dir.absolute())
    found = os.statvfs(folder.existing)
    names = found.f_favail if found.f_files else None
    kind = file_system(folder.existing.resolve())
    untried = Disk(folder=folder, trouble="", free_files=names, kind=kind)
    try:
        with tempfile.TemporaryDirectory(prefix=".tandem-doctor-", dir=folder.existing) as name:
            return tried(untried, Path(name))
    except OSError as error:
        return replace(untried, trouble=error.strerror or str(error))


def tried(disk: Disk, trial: Path) -> Disk:
    """With what comes out in an empty folder there."""
    return replace(
        disk,
        sync_s=time_of_sync(trial / "sync"),
        keeps_modes=keeps_modes(trial / "mode"),
        keeps_locks=keeps_locks(trial / "lock"),
    )


def time_of_sync(file: Path) -> float:
    """Median of a few, in seconds; fewer on a slow disk."""
    times: list[float] = []
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        while len(times) < SYNCS and sum(times) < ENOUGH_S:
            start = time.perf_counter()
            os.write(fd, BLOCK)
            os.fsync(fd)
            times.append(time.perf_counter() - start)
    finally:
        os.close(fd)
    return statistics.median(times)


def keeps_modes(file: Path) -> bool:
    """As a key file needs it."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return file.stat().st_mode & 0o077 == 0


def keeps_locks(file: Path) -> bool:
    """As the run's lock needs it."""
    first, second = open_lock(file), open_lock(file)
    try:
        return try_lock(first) and not try_lock(second)
    finally:
        os.close(first)
        os.close(second)


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The kind of the mount that a path lies on: the last of the longest mount points above it."""
    best, kind = -1, "unknown"
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []:
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), source.split()[0]
    return kind


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What lies there."""

    state: Literal["new", "run", "other"]
    """Nothing, a run, or files of another kind."""
    keys_trouble: str
    """What is wrong with the keys; empty if nothing is, or there are none yet. `found; remedy`."""
    keys_mode: int | None
    """Permissions of the keys' folder; None if there is none."""
    lock_holder: str
    """Who writes this run; empty if nobody does."""
    lease_holder: str
    """Who computes in it; empty if nobody does."""


def look_at_run(path: Path) -> RunFolder:
    """Takes a free lock for an instant, and nothing else."""
    run = RunDir(path)
    is_run = run.config.is_file()
    return RunFolder(
        state="run" if is_run else "other" if holds_files(path) else "new",
        keys_trouble=keys_trouble(run.keys) if is_run else "",
        keys_mode=run.keys.stat().st_mode & 0o777 if run.keys.is_dir() else None,
        lock_holder=holder(run.lock),
        lease_holder=holder(run.lease),
    )


def holds_files(path: Path) -> bool:
    """The path is a file itself, or a folder with one somewhere below."""
    return path.is_file() or any(entry.is_file() for entry in path.rglob("*"))


def keys_trouble(keys: Path) -> str:
    """As a learner would find out."""
    try:
        load_learner_keys(keys)
    except SecurityError as error:
        return str(error)
    return ""


def holder(lock: Path) -> str:
    """Whoever has this lock, in words."""
    if not lock.is_file():
        return ""
    fd = open_lock(lock)
    try:
        return "" if try_lock(fd) else signature(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What was tried."""

    address: str
    """`ipc`, or the tcp address that the learner binds."""
    trouble: str
    """Why it cannot be bound; empty if it can."""
    busy: bool
    """It is somebody else's, or this run's learner is up."""


def look_at_link(link: LinkConfig, run_dir: Path) -> Link:
    """Binds and lets go."""
    local = link.endpoint == "ipc" and not link.bind
    address = "ipc" if local else bind_address(link, run_dir)
    error = try_bind(address) if address.startswith("tcp://") else None
    return Link(
        address=address,
        trouble=str(error.strerror or error) if error else "",
        busy=error is not None and error.errno == errno.EADDRINUSE,
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
