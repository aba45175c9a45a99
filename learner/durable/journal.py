"""The journal: a log of records that are durable before their senders are told so.

`append` writes a record, `sync` returns once it is on disk, and only then may it be acknowledged. If `append` raises,
the record is not in the file. If `sync` raises, the journal accepts nothing more: stop, and let `Journal.open` find out
what is on disk. With one sync per append a crash can tear only the last record. `begin_sync` does it in a thread, for
callers that work meanwhile.

    journal/000001.log, 000002.log, ...   segments; one is synced before the next begins
    journal/start                         only if old segments were deleted: where the journal begins now

`open` checks all records and syncs the last one. A torn last record was never acknowledged: it is cut off, its bytes
are kept in `<segment>.<offset>.torn`, and `recovered` says so. Any other damage raises DamageError with segment, offset
and record, so that nothing acknowledged is lost silently. `read` is for replay: it changes nothing on disk, and reports
a torn end without returning it.
`drop_before` deletes old segments. It writes `start` first, and `open` finishes a deletion that a crash interrupted.
Left out on purpose: what a record means, and which segments are needed (recorder.py).
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from learner.durable.journal_format import (
    HEADER_BYTES,
    Fault,
    Record,
    Start,
    drop_leftovers,
    pack_record,
    read_start,
    scan,
    segment_number,
    whole_records,
    write_start,
)
from shared.errors import DamageError
from shared.run.files import AppendFile, cut, make_folder, write_again, write_whole

SEGMENT_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where some bytes of a journal are. A long journal has many, so they stay on disk until they are needed."""

    path: Path
    """The segment."""
    start: int
    """The first byte."""
    end: int
    """The byte after the last one."""

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One file of a journal, as it was when it was read."""

    path: Path
    """The file."""
    first: int
    """Number of its first record; of the next record if it is empty."""
    records: tuple[Record, ...]
    """All complete records."""

    @property
    def number(self) -> int:
        return segment_number(self.path)

    def payloads(self) -> Iterator[bytes]:
        data = self.path.read_bytes()
        return (data[record.start : record.end] for record in self.records)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A whole journal, as it was when it was read."""

    start: Start
    """Where the journal begins."""
    segments: tuple[Segment, ...]
    """In order."""
    next_record: int
    """Number of the record that comes next."""
    torn: Fault | None
    """What follows the last complete record of the last segment; None if nothing does."""

    def records(self) -> Iterator[bytes]:
        """The payloads, in order. One segment at a time is in memory."""
        for segment in self.segments:
            yield from segment.payloads()


class JournalDamage(DamageError):
    """Bytes of a complete record have changed. The message says where, and what the user can do.

    Cutting the file there loses no result: the groups after it are sampled again with the same seeds.
    """

    def __init__(self, path: Path, fault: Fault, whole: tuple[Segment, ...]) -> None:
        """whole: all undamaged segments and records before the damage."""
        super().__init__(
            f"{path} is damaged at byte {fault.offset}, record {fault.number} ({fault.reason}), and this is no torn "
            f"end; restore the file from a copy, or give up this record and all later ones (`truncate -s "
            f"{fault.offset} {path}` and move later segments away) to have their groups sampled again."
        )
        self.whole = whole
        self.num_behind = sum(1 for _ in whole_records(path.read_bytes(), fault.offset + 1))
        """Complete records after the damage in the same segment. Without the damaged one they cannot be used."""


class Journal:
    """A journal that is open for writing, by one process; created by `open`."""

    def __init__(self, folder: Path, reading: Reading, segment_bytes: int) -> None:
        self.firsts = {segment.number: segment.first for segment in reading.segments} or {1: 0}
        """Number of the first record of each segment, oldest first."""
        self.recovered = cut_torn(reading.segments[-1].path, reading.torn) if reading.torn else None
        """A sentence about the torn end that was cut off; None if there was none."""
        self.next_record = reading.next_record
        """Number of the record that comes next."""
        self._opened: Reading | None = replace(reading, torn=None)
        """What `open` has read, until that is no longer all."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._tail = AppendFile(segment_path(folder, self.tail))
        self._thread = ThreadPoolExecutor(1, "journal")
        """Started by the first `begin_sync`."""
        self._syncing: Future[None] | None = None

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Check all records, finish a deletion, and cut off a torn end.

        The last record is written once more, because its writer may have died before the sync.
        """
        make_folder(folder)
        reading = read_journal(folder)
        drop_leftovers(folder, reading.start)
        journal = cls(folder, reading, segment_bytes)
        if reading.segments and reading.segments[-1].records:
            last = reading.segments[-1].records[-1]
            write_again(journal._tail.path, last.start - HEADER_BYTES, last.end)
        return journal

    @staticmethod
    def read(folder: Path) -> Reading:
        """Check all records and change nothing."""
        return read_journal(folder)

    @property
    def tail(self) -> int:
        return max(self.firsts)

    def append(self, *parts: bytes) -> None:
        """Write one complete record, or raise and leave the file unchanged. Durable after `sync`. parts: of the
        payload."""
        self.end_sync()
        self._opened = None
        if self._tail.end >= self._segment_bytes:
            self.begin_segment()
        self._tail.append(pack_record(self.next_record, *parts))
        self.next_record += 1

    def sync(self) -> None:
        """Everything appended is on disk when this returns."""
        self.end_sync()
        self._tail.sync()

    def begin_sync(self) -> None:
        """Sync in a thread. Whatever else is done with the journal waits for its end first."""
        self._syncing = self._thread.submit(self._tail.sync)

    def end_sync(self) -> None:
        """What `begin_sync` has begun is done when this returns; raises what it raised."""
        syncing, self._syncing = self._syncing, None
        if syncing:
            syncing.result()

    def reading(self) -> Reading:
        """All records, including those appended since `open`, which has checked the others."""
        return self._opened or read_journal(self._folder)

    def begin_segment(self) -> None:
        """Let the next record begin a new segment. Sync first: only the last segment may have a torn end."""
        if self._tail.end == 0:
            return
        self._opened = None
        self.sync()
        tail = AppendFile(segment_path(self._folder, self.tail + 1))
        self._tail.close()
        self._tail = tail
        self.firsts[self.tail + 1] = self.next_record

    def drop_before(self, segment: int, step: int) -> None:
        """Delete all segments before this one. None of them may have a record of `step` or later."""
        self._opened = None
        start = Start(segment=segment, step=step)
        write_start(self._folder, start, self.firsts[segment])
        drop_leftovers(self._folder, start)
        self.firsts = {number: first for number, first in self.firsts.items() if number >= segment}

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._thread.shutdown()
            self._tail.close()


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:06d}.log"


def read_journal(folder: Path) -> Reading:
    """Check every record of every segment. Only the last segment may have a torn end."""
    segments: list[Segment] = []
    start, number = read_start(folder)
    torn = None
    for path in segment_paths(folder, start):
        if torn:
            raise JournalDamage(segments[-1].path, torn, tuple(segments))
        records, fault = scan(path.read_bytes(), number)
        if fault and not fault.torn:
            raise JournalDamage(path, fault, (*segments, Segment(path=path, first=number, records=tuple(records))))
        segments.append(Segment(path=path, first=number, records=tuple(records)))
        number, torn = number + len(records), fault
    return Reading(start=start, segments=tuple(segments), next_record=number, torn=torn)


def segment_paths(folder: Path, start: Start) -> list[Path]:
    """From the start, in order; DamageError if one is missing."""
    paths = sorted(folder.glob("[0-9]*.log"), key=segment_number)
    paths = [path for path in paths if segment_number(path) >= start.segment]
    if start.segment > 1 and segment_path(folder, start.segment) not in paths:
        raise DamageError(
            f"{segment_path(folder, start.segment)} is missing though the journal begins with it; restore it from a"
            " copy, or move the whole journal away to have all groups since the last checkpoint sampled again."
        )
    for segment, path in enumerate(paths, start=start.segment):
        if path != segment_path(folder, segment):
            raise DamageError(
                f"{segment_path(folder, segment)} is missing though {path.name} exists; restore it from a copy, "
                f"or move {path.name} and all later segments away to have their groups sampled again."
            )
    return paths


def cut_torn(path: Path, fault: Fault) -> str:
    """Cut off the torn bytes, after they were saved to another file durably."""
    data = path.read_bytes()[fault.offset :]
    aside = path.with_name(f"{path.name}.{fault.offset}.torn")
    write_whole(aside, data)
    cut(path, fault.offset)
    return (
        f"{path} ended in a torn record that was never acked ({len(data)} bytes from byte {fault.offset}, record "
        f"{fault.number}); it was cut off and kept in {aside.name}, and its groups will be sampled again."
    )
