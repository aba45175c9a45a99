"""Facts about the file system under the run directory, the directory itself, and the address that its learner binds.

To try the disk, a few small files are written into a temporary folder beside the run and removed again. A lock that is
free is taken and released at once, and so is the address.
"""

import errno
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from protocol.access.keys import load_learner_keys
from protocol.errors import SecurityError
from shared.config.load import config_from_json
from shared.config.processes import LinkConfig, bind_address
from shared.process.lease import LEASE_BYTE
from shared.process.processor import is_open
from shared.run.file_lock import open_lock, signature, try_byte, try_lock
from shared.run.run_dir import RunDir, has_other_files

MOUNTS = Path("/proc/self/mountinfo")
SYNCS = 8
ENOUGH_S = 1.0
BLOCK = b"x" * 4096
WILDCARD = "*"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a run will write into."""

    path: Path
    """As configured."""
    existing: Path
    """The nearest folder above it that exists, or the folder itself."""
    writable: bool
    """Whether this user may create files there."""
    free: int
    """Bytes that this user may still write."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system that the run directory is on."""

    folder: Folder
    """The run directory."""
    trouble: str
    """Why nothing can be written there; empty if files can be written."""
    free_files: int | None
    """Files it has room for (inodes); None if the file system has no such limit."""
    kind: str
    """Such as `ext4`."""
    sync_s: float = 0.0
    """Median seconds of a 4 KiB write with fsync."""
    keeps_modes: bool = True
    """A file created with mode 0600 has mode 0600."""
    keeps_locks: bool = True
    """While one process has a lock, a second one cannot take it."""


def look_at_folder(path: Path) -> Folder:
    """Writes nothing."""
    existing = next(level for level in (path, *path.parents) if level.exists())
    found = os.statvfs(existing)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Folder(path=path, existing=existing, writable=writable, free=found.f_bavail * found.f_frsize)


def look_at_disk(run_dir: Path) -> Disk:
    """Writes a few small files. If that fails, what could not be tried counts as good: `trouble` says enough."""
    folder = look_at_folder(run_dir.absolute())
    found = os.statvfs(folder.existing)
    free_files = found.f_favail if found.f_files else None
    kind = file_system(folder.existing.resolve())
    untried = Disk(folder=folder, trouble="", free_files=free_files, kind=kind)
    try:
        with tempfile.TemporaryDirectory(prefix=".tandem-doctor-", dir=folder.existing) as name:
            return measured(untried, Path(name))
    except OSError as error:
        return replace(untried, trouble=error.strerror or str(error))


def measured(disk: Disk, trial: Path) -> Disk:
    """`trial`: an empty folder on that disk."""
    return replace(
        disk,
        sync_s=time_of_sync(trial / "sync"),
        keeps_modes=keeps_modes(trial / "mode"),
        keeps_locks=keeps_locks(trial / "lock"),
    )


def time_of_sync(file: Path) -> float:
    """Median of up to SYNCS writes, in seconds; fewer writes on a slow disk."""
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
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return file.stat().st_mode & 0o077 == 0


def keeps_locks(file: Path) -> bool:
    first, second = open_lock(file), open_lock(file)
    try:
        return try_lock(first) and not try_lock(second)
    finally:
        os.close(first)
        os.close(second)


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the mount that a path is on. The longest mount point above it counts, and of equal ones the last."""
    best, kind = -1, "unknown"
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []:
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), source.split()[0]
    return kind


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The run directory."""

    state: Literal["new", "run", "other"]
    """`new`: a run can be made there. `run`: it has a run. `other`: it has other files."""
    started: bool
    """Whether the run has started, so that its sizes stay what they are."""
    keys_trouble: str
    """What is wrong with the keys, as `found; remedy`; empty if nothing is wrong or there are no keys yet."""
    keys_mode: int | None
    """Permissions of the folder of keys; None if there is no such folder."""
    lock_owner: str
    """The process that writes this run; empty if there is none."""
    lease_holder: str
    """The process that computes in it; empty if there is none."""


def look_at_run(path: Path) -> RunFolder:
    """Writes nothing. A lock that is free is taken and released at once."""
    run = RunDir(path)
    is_replaced = run.failed_at_start()
    is_run = run.config.is_file() and not is_replaced
    has_others = path.is_file() or (not is_replaced and has_other_files(run))
    return RunFolder(
        state="run" if is_run else "other" if has_others else "new",
        started=is_run and not is_open(config_from_json(run.config.read_bytes())),
        keys_trouble=keys_trouble(run.keys) if is_run else "",
        keys_mode=run.keys.stat().st_mode & 0o777 if run.keys.is_dir() else None,
        lock_owner=lock_owner(run.lock, try_lock),
        lease_holder=lock_owner(run.lease, partial(try_byte, place=LEASE_BYTE)),
    )


def keys_trouble(keys: Path) -> str:
    try:
        load_learner_keys(keys)
    except SecurityError as error:
        return str(error)
    return ""


def lock_owner(lock: Path, take: Callable[[int], bool]) -> str:
    """`process 12`; empty if the lock is free. take: tries to, and says whether it could."""
    if not lock.is_file():
        return ""
    fd = open_lock(lock)
    try:
        return "" if take(fd) else signature(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The address that the learner binds."""

    address: str
    """`ipc`, or a tcp address."""
    trouble: str
    """Why it cannot be bound; empty if it can."""
    busy: bool
    """Another program uses it, or this run's learner."""


def look_at_link(link: LinkConfig, run_dir: Path) -> Link:
    """Binds the address and releases it."""
    local = link.endpoint == "ipc" and not link.bind
    address = "ipc" if local else bind_address(link, run_dir)
    error = try_bind(address) if address.startswith("tcp://") else None
    return Link(
        address=address,
        trouble=str(error.strerror or error) if error else "",
        busy=error is not None and error.errno == errno.EADDRINUSE,
    )


def try_bind(address: str) -> OSError | None:
    """The error of the kernel or the resolver. A port in TIME_WAIT counts as free, as it does for ZeroMQ."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return OSError(errno.EINVAL, "the port must be a number from 1 to 65535")
    name = any_address() if host == WILDCARD else host.strip("[]")
    try:
        family, kind, proto, _, target = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as trial:
            if name == "::":
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(target)
            trial.listen(1)
    except OSError as error:
        return error
    return None


def any_address() -> str:
    """Where ZeroMQ listens for `*`: at all addresses of both kinds, where the system has IPv6."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return "0.0.0.0"
    return "::"
