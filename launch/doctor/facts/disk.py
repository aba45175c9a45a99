"""The file system under the run directory: room, what kind it is, how long a sync takes, what it can and cannot do.

A few small files are written in a folder of their own beside the run and removed again.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shared.file_lock import open_lock, try_lock

MOUNTS = Path("/proc/self/mountinfo")
SYNCS = 8
ENOUGH_S = 1.0
BLOCK = b"x" * 4096


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
    ahead_s: float = 0.0
    """How far a new file's time is ahead of this machine's clock."""


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
        ahead_s=ahead(trial / "time"),
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


def ahead(file: Path) -> float:
    """The file system's clock minus ours; it may be another machine's."""
    before = time.time()
    file.write_bytes(BLOCK)
    return file.stat().st_mtime - (before + time.time()) / 2


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The kind of the mount that a path lies on: the last of the longest mount points above it."""
    best, kind = -1, "unknown"
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []:
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), source.split()[0]
    return kind
