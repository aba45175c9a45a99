"""The system calls that change a disk, each between two named points (failpoints.py) where tests make it fail.

files.py and file_lock.py use these, and nothing else of ours writes to a run. Left out on purpose: reading and closing.
"""

import errno
import os
import shutil
import signal
from pathlib import Path

from shared.run.failpoints import SHORT, TEAR, reach


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
    """os.open; the descriptor is not inherited by programs that are started."""
    reach("before open", path)
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    reach("after open", path)
    return fd


def open_plainly(path: str, flags: int) -> int:
    """An `opener` like os.open, but other users may not write, under any umask."""
    return os.open(path, flags, 0o644)


def write(fd: int, data: bytes | memoryview, path: Path) -> int:
    """os.write, which may write only a part. A torn write leaves its first half in the file."""
    act = reach("before write", path)
    if act in (SHORT, TEAR):
        os.write(fd, data[: len(data) // 2])
        if act == TEAR:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    taken = os.write(fd, data)
    reach("after write", path)
    return taken


def write_all(fd: int, data: bytes | memoryview, path: Path) -> None:
    """os.write may write only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[write(fd, rest, path) :]


def fsync(fd: int, path: Path) -> None:
    reach("before fsync", path)
    os.fsync(fd)
    reach("after fsync", path)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd, folder)
    finally:
        os.close(fd)


def truncate(fd: int, size: int, path: Path) -> None:
    reach("before truncate", path)
    os.ftruncate(fd, size)
    reach("after truncate", path)


def rename(source: Path, target: Path) -> None:
    """os.rename; the point has the name of the target."""
    reach("before rename", target)
    os.rename(source, target)
    reach("after rename", target)


def make(path: Path, mode: int = 0o755) -> None:
    reach("before mkdir", path)
    path.mkdir(mode=mode)
    reach("after mkdir", path)


def remove(path: Path) -> None:
    reach("before remove", path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    reach("after remove", path)
