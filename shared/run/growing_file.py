"""Reads a file that another process appends to, one whole line at a time.

A last line without its newline is still being written (or was torn by a crash) and is left for the next call.
If a file was replaced, became shorter or was deleted, reading starts over, and it counts as a new generation.
"""

import os
from pathlib import Path


class GrowingFile:
    """A file and how far it has been read."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.position = start
        self.inode = 0
        self.generation = 0

    def new_lines(self, limit: int = -1) -> list[str]:
        """Whole lines written since the last call. limit: about how many bytes to read at once, for a long file."""
        if not self.path.is_file():
            self.notice_loss()
            return []
        with self.path.open("rb") as file:
            self.notice_replacement(os.fstat(file.fileno()))
            file.seek(self.position)
            data = file.read(limit)
            whole, newline, _torn = (data if b"\n" in data else data + file.readline()).rpartition(b"\n")
        self.position += len(whole) + len(newline)
        return whole.decode(errors="replace").split("\n") if newline else []

    def notice_replacement(self, state: os.stat_result) -> None:
        """A resumed run drops rows by writing a new file under the same name."""
        if self.inode not in (0, state.st_ino) or state.st_size < self.position:
            self.start_again()
        self.inode = state.st_ino

    def notice_loss(self) -> None:
        """A run was deleted, and another may begin under the same name."""
        if self.inode:
            self.start_again()

    def start_again(self) -> None:
        self.position = self.inode = 0
        self.generation += 1


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last lines of a file after byte `start`, a torn line included."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        # Far enough back for `count` lines of usual length.
        file.seek(max(start, file.seek(0, 2) - 4096 * count))
        return file.read().decode(errors="replace").splitlines()[-count:]
