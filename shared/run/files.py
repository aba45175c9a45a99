"""Every byte of a run goes to the disk through this module, except the pid in a lock file (file_lock.py).

The system calls are in disk.py, where tests make them fail.

Three contracts:
- whole: `write_whole`, `write_tree_whole` and `made_whole` leave the old content or the new one, never a part of it.
  They write beside the target, fsync, rename, and fsync the folder, in this order. Readers may trust names.
- append: an `AppendFile` has whole appends only. A write that fails half-way is cut off again. Bytes are durable once
  `sync` has returned. After a sync that failed the file takes no more writes, because the kernel may have marked lost
  pages as clean.
- lines: `LineLog` is JSON lines for people and tools. A row is not synced by itself, because it can be derived again
  from the journal. `sync` is for rows that will not be derived again, because a checkpoint has their steps.

A disk that is full, read-only or forbidden becomes one sentence (RunDirError). Any other OSError is raised as it is.
Each path must have one writer, which the run's lock ensures. Other users may write nothing, under any umask.
Left out on purpose: `F_FULLFSYNC` of macOS; there a power cut may take what an fsync promised.
"""

import errno
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from shared.errors import RunDirError
from shared.run import disk
from shared.run.disk import sync_folder, write_all

OUT = "--out"
REMEDIES = {
    errno.ENOSPC: "free some space on that disk, or choose another {place}",
    errno.EDQUOT: "free some of your quota, or choose another {place}",
    errno.EFBIG: "raise the file size limit (`ulimit -f unlimited`)",
    errno.EROFS: "choose {a_place} on a disk that is not read-only",
    errno.EACCES: "choose {a_place} you may write to, or change its permissions",
    errno.EPERM: "choose {a_place} you may write to, or change its permissions",
    errno.ENOTDIR: "choose {a_place} whose parents are all folders",
    errno.EEXIST: "choose {a_place} that is not a file",
    errno.ENAMETOOLONG: "choose a shorter {place}",
    errno.EMFILE: "raise the number of descriptors that a process may have (`ulimit -n 1024`)",
    errno.ENFILE: "the machine has no descriptors left: end the program with too many open files",
    errno.ENOLCK: "its file system has no more locks: choose {a_place} on a disk of this machine",
    errno.EIO: "the disk reports a fault: copy the run to another disk, then use `resume` there",
}
BLOCK = 2**20
"""Bytes of a long file that are in memory at a time."""
FileParts = Sequence[bytes | memoryview]
"""The content of a file, in pieces that are written one after the other."""
UNFINISHED = ".tmp"
MOVED_ASIDE = ".old"


@contextmanager
def disk_errors(path: Path, place: str = OUT) -> Iterator[None]:
    """Turn an error of the disk into one sentence with a remedy. `place` is the key or option that the user may set."""
    try:
        yield
    except OSError as error:
        refuse_if_it_takes_no_files(error, path, place)
        remedy = REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        remedy = remedy.format(place=place, a_place=f"{'an' if place == OUT else 'a'} {place}")
        raise RunDirError(f"{path} cannot be used ({error.strerror}); {remedy}.") from error


def refuse_if_it_takes_no_files(error: OSError, path: Path, place: str) -> None:
    """For a file system such as /proc: it has no blocks, and says that a new name does not exist. path: that name."""
    folder = path.parent
    if error.errno == errno.ENOENT and folder.is_dir() and os.statvfs(folder).f_blocks == 0:
        why = f"the file system of {folder} takes no files"
        raise RunDirError(f"{path} cannot be made there: {why}; choose another {place}.") from error


def make_folder(path: Path, mode: int = 0o755, place: str = OUT) -> None:
    """Make a folder and its parents, each with a durable name. A folder that exists is left as it is."""
    with disk_errors(path, place):
        missing = [level for level in (path, *path.parents) if not level.is_dir()]
        for level in reversed(missing):
            make_level(level, mode if level == path else 0o755, place)


def make_level(path: Path, mode: int, place: str) -> None:
    try:
        disk.make(path, mode)
    except FileNotFoundError as error:
        refuse_if_it_takes_no_files(error, path, place)
        raise
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def open_log(path: Path, mode: Literal["ab", "wb"]) -> IO[bytes]:
    """Open a file for the output of a process, which is neither whole nor durable. Makes its folder."""
    make_folder(path.parent)
    with disk_errors(path):
        return open(path, mode, opener=disk.open_plainly)


def write_whole(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True, place: str = OUT) -> None:
    """Replace `path` by `data`, whole. `durable=False` skips the fsyncs, for notes that a power cut may take."""
    write_whole_of(path, (data,), mode, durable=durable, place=place)


def write_whole_of(
    path: Path, parts: Iterable[bytes], mode: int = 0o644, *, durable: bool = True, place: str = OUT
) -> None:
    """The same of a file that is too large to be in memory."""
    tmp = beside(path, UNFINISHED)
    with disk_errors(path, place):
        try:
            write_new(tmp, parts, mode, durable=durable)
            disk.rename(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)
        if durable:
            sync_folder(path.parent)


def write_tree_whole(folder: Path, files: Mapping[str, FileParts]) -> None:
    """Make or replace `folder` with exactly these files, whole. See `finish_writes`."""
    with made_whole(folder) as tmp:
        for name, parts in files.items():
            write_new(tmp / name, parts, 0o644)


@contextmanager
def made_whole(folder: Path, place: str = OUT) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` if the block succeeds and is removed if not. A block that does not
    sync its files itself must call `sync_files` at its end."""
    tmp = beside(folder, UNFINISHED)
    with disk_errors(folder, place):
        try:
            disk.make(tmp)
            yield tmp
            sync_folder(tmp)
            put_in_place(tmp, folder)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)


def sync_files(folder: Path) -> None:
    """Make durable what libraries wrote into this folder, and remove other users' right to write it."""
    for path in sorted(folder.rglob("*")):
        fd = disk.open_file(path, os.O_RDONLY)
        try:
            os.fchmod(fd, os.fstat(fd).st_mode & 0o755)
            disk.fsync(fd, path)
        finally:
            os.close(fd)


def put_in_place(tmp: Path, folder: Path) -> None:
    """Rename `tmp` to `folder`. rename(2) replaces no folder that has content, so an old one is moved aside first."""
    old = beside(folder, MOVED_ASIDE)
    if folder.exists():
        disk.rename(folder, old)
    disk.rename(tmp, folder)
    sync_folder(folder.parent)
    if old.exists():
        disk.remove(old)


def remove_tree_whole(folder: Path) -> None:
    """Delete a folder so that no reader sees a part of it under its name."""
    doomed = beside(folder, UNFINISHED)
    with disk_errors(folder):
        disk.rename(folder, doomed)
        sync_folder(folder.parent)
        disk.remove(doomed)


def remove_files(folder: Path, paths: Sequence[Path]) -> None:
    """Delete files of one folder in this order; gone for good once this returns."""
    with disk_errors(folder):
        for path in paths:
            disk.remove(path)
        if paths:
            sync_folder(folder)


def finish_writes(parent: Path) -> None:
    """After a crash: put back what was moved aside and not replaced, and delete what was not finished."""
    with disk_errors(parent):
        for old in parent.glob(f".*{MOVED_ASIDE}"):
            folder = parent / final_name(old)
            if folder.exists():
                disk.remove(old)
            else:
                disk.rename(old, folder)
        for tmp in parent.glob(f".*{UNFINISHED}"):
            disk.remove(tmp)
        sync_folder(parent)


def remove_unfinished(path: Path) -> None:
    """Remove what killed writers of this path left beside it. Only the path's one writer may call this."""
    with disk_errors(path):
        for tmp in path.parent.glob(f".{glob.escape(path.name)}.*{UNFINISHED}"):
            if final_name(tmp) == path.name:
                disk.remove(tmp)


def beside(path: Path, suffix: str) -> Path:
    """A hidden name in the same folder, so that the rename stays on one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def final_name(path: Path) -> str:
    """The inverse of `beside`. Any other name is returned unchanged."""
    if path.name.startswith(".") and path.suffix in (MOVED_ASIDE, UNFINISHED):
        return path.name[1:].rsplit(".", 2)[0]
    return path.name


def write_new(path: Path, parts: Iterable[bytes | memoryview], mode: int, *, durable: bool = True) -> None:
    """Make a file that does not exist yet. It has its mode from the first byte on, for keys."""
    fd = disk.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        for part in parts:
            write_all(fd, part, path)
        if durable:
            disk.fsync(fd, path)
    finally:
        os.close(fd)


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file, durably."""
    with disk_errors(path):
        fd = disk.open_file(path, os.O_WRONLY)
        try:
            disk.truncate(fd, size, path)
            disk.fsync(fd, path)
        finally:
            os.close(fd)


def write_again(path: Path, start: int, end: int) -> None:
    """Write the same bytes again, durably.

    A sync that failed in an earlier process may have left pages that the kernel takes for clean. Another sync would
    skip them, and reading them proves nothing.
    """
    with disk_errors(path):
        fd = disk.open_file(path, os.O_RDWR)
        try:
            data = os.pread(fd, end - start, start)
            os.lseek(fd, start, os.SEEK_SET)
            write_all(fd, data, path)
            disk.fsync(fd, path)
        finally:
            os.close(fd)


class AppendFile:
    """A file that grows by whole appends. It is made, with a durable name, if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dead = ""
        with disk_errors(path):
            self._fd = disk.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self.end = os.fstat(self._fd).st_size
            # Always: an earlier process may have made the name and died before it was durable.
            sync_folder(path.parent)

    def append(self, data: bytes) -> None:
        self._refuse_if_dead()
        try:
            with disk_errors(self.path):
                write_all(self._fd, data, self.path)
        except BaseException:
            self._cut_back()
            raise
        self.end += len(data)

    def sync(self) -> None:
        """All appends are durable once this returns. If it raises, nothing is certain, even after another try."""
        self._refuse_if_dead()
        try:
            with disk_errors(self.path):
                disk.fsync(self._fd, self.path)
        except BaseException as error:
            self._dead = str(error)
            raise

    def close(self) -> None:
        """Close without a sync."""
        os.close(self._fd)

    def _cut_back(self) -> None:
        """Cut back to the last good end. If that fails, no more appends are allowed: they would follow half a one."""
        try:
            disk.truncate(self._fd, self.end, self.path)
        except OSError as error:
            self._dead = str(error)

    def _refuse_if_dead(self) -> None:
        if self._dead:
            raise RunDirError(
                f"{self.path} failed earlier ({self._dead}) and takes no more writes, because its content is unknown; "
                "fix the disk and use `resume`, which reads the file again."
            )


class LineLog:
    """JSON lines, one object per row. Opening drops a last line that a crash has torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            drop_torn_line(path)
        self._file = AppendFile(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one whole line, which readers see at once. NaN and infinity are not JSON and raise ValueError."""
        self.append_line(json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def append_line(self, line: bytes) -> None:
        """The same of a line that has its newline."""
        self._file.append(line)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.end

    def sync(self) -> None:
        self._file.sync()

    def cut_to(self, size: int) -> None:
        """Keep the first bytes, in a new file, so that readers notice. On a full disk the file itself is cut; then they
        notice unless it has grown again before they look."""
        with self.path.open("rb") as file:
            try:
                write_whole_of(self.path, head_of(file, size))
            except RunDirError as error:
                if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                cut(self.path, size)
        self._file.close()
        self._file = AppendFile(self.path)

    def truncate_from(self, step: int) -> None:
        """Keep the rows before `step`, for a run that continues there. Unreadable rows are dropped too."""
        with self.path.open("rb") as file:
            write_whole_of(self.path, rows_before(file, step))
        self._file.close()
        self._file = AppendFile(self.path)

    def close(self) -> None:
        self._file.close()


def drop_torn_line(path: Path) -> None:
    with path.open("rb") as file:
        size = start = file.seek(0, os.SEEK_END)
        whole = -1
        while whole < 0 < start:
            end, start = start, max(0, start - BLOCK)
            file.seek(start)
            whole = file.read(end - start).rfind(b"\n")
    if start + whole + 1 < size:
        cut(path, start + whole + 1)


def head_of(file: IO[bytes], size: int) -> Iterator[bytes]:
    while part := file.read(min(BLOCK, size - file.tell())):
        yield part


def rows_before(file: IO[bytes], step: int) -> Iterator[bytes]:
    """The lines that are rows of earlier steps, in blocks."""
    while lines := file.readlines(BLOCK):
        yield b"".join(line for line in lines if is_before(line, step))


class Stepped(msgspec.Struct, frozen=True):
    """What every row has."""

    step: int


def is_before(line: bytes, step: int) -> bool:
    """Whether a line is a row of an earlier step. After a power cut there may be zeros in place of a row."""
    try:
        return msgspec.json.decode(line, type=Stepped).step < step
    except (ValueError, RecursionError):
        return False
