"""Finds the groups of rollouts.jsonl by their place in the file, while the learner appends to it.

A line says how long it is (rollouts.py), so a look at a file of 2 GB reads half a kilobyte of each line. Kept of a line
are four numbers: where it begins, its length, step and task. Everything else is read when it is asked for.

A group is named by its step and its number, which is its place among the lines of the step, from 0. One that cannot be
read keeps its number and is left out.

    a line that does not begin as ours, or lies about its length    skipped up to the next newline, counted
    zeros of a power cut, bytes changed in the middle               the same, the latter when the group is read
    a last line without its newline                                 still being written, or torn: left for the next look
    a file that was replaced or became shorter                      read again from its start

Left out on purpose: an index on the disk. It would have to be checked against the file, which costs as much.
"""

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from shared.run.rollouts import (
    GroupHead,
    GroupTask,
    RolloutGroup,
    line_bytes,
    unpack_group,
    unpack_head,
    unpack_task,
)

Group = TypeVar("Group", GroupHead, GroupTask, RolloutGroup)
BEGINNING = re.compile(rb'\{"bytes": *\d+,"step":(\d{1,9}),"group_id":"[^"\\]*","task":"([0-9a-f]{16})"')
LOOKED_AT = 512
"""Bytes of a line that have its step and task."""
HEAD_BYTES = 8192
"""And its head, if the group is no larger than usual."""
BLOCK = 2**20
AROUND = 60
"""Characters that are shown before and after a hit."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A text that was looked for."""

    step: int
    """Of the group."""
    number: int
    """Of the group in its step."""
    sample: int | None
    """Which of its answers; None for the prompt."""
    text: str
    """The words around it."""


class RolloutIndex:
    """The groups of one run. Each call looks at the file again first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode = 0
        self.forget()

    def forget(self) -> None:
        """As if nothing had been read."""
        self.end = 0
        """Of what is known."""
        self.broken: set[int] = set()
        """Places of lines that were skipped."""
        self.offsets, self.lengths = array("q"), array("q")
        self.tasks = array("Q")
        self.places: dict[int, list[int]] = {}
        """By step."""

    @property
    def damaged(self) -> int:
        """Lines that were skipped until now."""
        return len(self.broken)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def __len__(self) -> int:
        self.look()
        return len(self.offsets)

    def steps(self) -> list[int]:
        """Those that have groups, ascending."""
        self.look()
        return sorted(self.places)

    def end_before(self, step: int) -> int:
        """Where the lines of earlier steps end in the file. Damage behind them is not counted."""
        self.look()
        later = [places[0] for found, places in self.places.items() if found >= step]
        last = min(later, default=len(self.offsets)) - 1
        return self.offsets[last] + self.lengths[last] if last >= 0 else 0

    def heads(self, step: int) -> dict[int, GroupHead]:
        """The groups of a step by number, without texts."""
        return self.of_step(step, self.head)

    def tasks_of(self, step: int) -> dict[int, GroupTask]:
        """The same with prompts and answers."""
        return self.of_step(step, self.task)

    def groups(self, step: int) -> dict[int, RolloutGroup]:
        """The same in full."""
        return self.of_step(step, self.at)

    def of_step(self, step: int, read: Callable[[int], Group | None]) -> dict[int, Group]:
        self.look()
        places = self.places.get(step, [])
        return {number: found for number, place in enumerate(places) if (found := read(place)) is not None}

    def group(self, step: int, number: int) -> RolloutGroup | None:
        """None if there is no such group, or if it cannot be read."""
        self.look()
        places = self.places.get(step, [])
        return self.at(places[number]) if 0 <= number < len(places) else None

    def find(self, group_id: str) -> tuple[int, int] | None:
        """Step and number of a group by its id, `lane/step/slot` with the step counted from 0."""
        parts = group_id.split("/")
        step = int(parts[1]) + 1 if len(parts) == 3 and parts[1].isdecimal() else 0
        numbers = [number for number, head in self.heads(step).items() if head.group_id == group_id]
        return (step, numbers[0]) if numbers else None

    def history(self, task: str, most: int | None = None) -> list[tuple[int, GroupHead]]:
        """The same task in all steps, each group with its number. most: only so many, the last ones."""
        self.look()
        if not re.fullmatch(r"[0-9a-f]{16}", task) or not self.tasks:
            return []
        same = np.flatnonzero(np.frombuffer(self.tasks, np.uint64) == np.uint64(int(task, 16))).tolist()
        heads = ((place, self.head(place)) for place in same[-most if most else 0 :])
        return [(bisect_left(self.places[head.step], place), head) for place, head in heads if head]

    def search(self, text: str, *, first: int = 1, last: int | None = None) -> Iterator[Found]:
        """Groups with this text in prompt, answer or completion, capitals or not, one after another as they are found.
        first, last: steps to look in."""
        for _, found in self.search_steps(text, first=first, last=last):
            yield from found

    def search_steps(self, text: str, *, first: int = 1, last: int | None = None) -> Iterator[tuple[int, list[Found]]]:
        """The same step by step, those without a hit too, so that a search may pause between two."""
        wanted = re.compile(re.escape(text), re.IGNORECASE)
        # As it is in the file, so that most groups need not be decoded; bytes are compared ten times as fast as texts.
        written = msgspec.json.encode(text.lower())[1:-1] if text.isascii() else b""
        steps = self.steps()
        for step in steps[bisect_left(steps, first) : len(steps) if last is None else bisect_right(steps, last)]:
            found: list[Found] = []
            for number, place in enumerate(self.places.get(step, [])):
                line = self.read(place, self.lengths[place])
                group = unpack_group(line) if written in line.lower() else None
                found += self.hits(wanted, step, number, group) if group else ()
            yield step, found

    def hits(self, wanted: re.Pattern[str], step: int, number: int, group: RolloutGroup) -> Iterator[Found]:
        texts = [(None, group.prompt), *enumerate(sample.text for sample in group.samples)]
        for sample, text in texts:
            if hit := wanted.search(text):
                around = text[max(0, hit.start() - AROUND) : hit.end() + AROUND]
                yield Found(step=step, number=number, sample=sample, text=around)

    def head(self, place: int) -> GroupHead | None:
        return self.noted(place, self.beginning(place, unpack_head))

    def task(self, place: int) -> GroupTask | None:
        return self.noted(place, self.beginning(place, unpack_task))

    def beginning(self, place: int, unpack: Callable[[bytes], Group | None]) -> Group | None:
        """From the first bytes of the line if they are enough."""
        start = self.read(place, min(HEAD_BYTES, self.lengths[place]))
        return unpack(start) or unpack(self.read(place, self.lengths[place]))

    def at(self, place: int) -> RolloutGroup | None:
        return self.noted(place, unpack_group(self.read(place, self.lengths[place])))

    def noted(self, place: int, found: Group | None) -> Group | None:
        """Counts a line that cannot be read."""
        if found is None:
            self.broken.add(self.offsets[place])
        return found

    def read(self, place: int, size: int) -> bytes:
        with opened(self.path) as fd:
            return os.pread(fd, size, self.offsets[place]) if fd >= 0 else b""

    def look(self) -> None:
        """Add the lines that were written since the last look."""
        with opened(self.path) as fd:
            if fd < 0:
                return self.forget()
            state = os.fstat(fd)
            if state.st_ino != self.inode or state.st_size < self.end:
                self.forget()
            self.inode = state.st_ino
            while self.end < state.st_size and self.add_line(fd, state.st_size):
                pass
        return None

    def add_line(self, fd: int, size: int) -> bool:
        """The line at the end of what is known; False if it is not whole yet."""
        start = os.pread(fd, LOOKED_AT, self.end)
        length = line_bytes(start)
        known = BEGINNING.match(start) if length else None
        whole = known is not None and os.pread(fd, 1, self.end + length - 1) == b"\n"
        if not whole:
            return self.skip_line(fd, size)
        assert known is not None
        self.places.setdefault(int(known[1]), []).append(len(self.offsets))
        self.offsets.append(self.end)
        self.lengths.append(length)
        self.tasks.append(int(known[2], 16))
        self.end += length
        return True

    def skip_line(self, fd: int, size: int) -> bool:
        """Up to the next newline; False if there is none."""
        place = self.end
        while place < size:
            block = os.pread(fd, BLOCK, place)
            found = block.find(b"\n")
            if found >= 0:
                self.broken.add(self.end)
                self.end = place + found + 1
                return True
            place += max(1, len(block))
        return False


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from; -1 where there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield -1
        return
    try:
        yield fd
    finally:
        os.close(fd)
