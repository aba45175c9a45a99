"""The journal: everything actors ever answered, in order, on disk before anyone is told that it arrived.

Durable before acked: `append` hands the bytes to the kernel, `sync` returns once the disk has them, and only then may
an Ack be sent. If `append` raises, the record is not in the file. If `sync` raises, the journal takes nothing more:
stop, and let `Journal.open` find out what is there. One sync per append leaves one record at most for a crash to tear.

    journal/000001.log, 000002.log, ...   a full segment is synced before the next one is begun
    journal/start                         only if old segments were given up: where what is kept begins

`open` reads all of it and syncs what it found. A torn last record was never acked: it is cut off, its bytes are kept in
`<segment>.<offset>.torn`, and `recovered` tells of it. Any other damage stops the run with segment, offset and record
(DamageError): nothing that was acked is dropped in silence. `read` is for replay and changes nothing on disk; a torn
end is left out and told.
`drop_before` gives up old segments: `start` is durable first, then they go, and `open` ends what a crash cut short.
Left out on purpose: what a record means (bytes in, bytes out), which segments are needed (compaction.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One file of a journal, as it lay on disk when it was read."""

    path: Path
    """Where it lies."""
    first: int
    """Number of its first record, or of the record that comes next if it is empty."""
    records: tuple[Record, ...]
    """All whole ones."""

    @property
    def number(self) -> int:
        """Its place in the journal, from 1."""
        return segment_number(self.path)

    def payloads(self) -> Iterator[bytes]:
        """What its records hold, in order."""
        data = self.path.read_bytes()
        return (data[record.start : record.end] for record in self.records)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A journal as it lay on disk when it was read."""

    start: Start
    """Where it begins."""
    segments: tuple[Segment, ...]
    """In order."""
    next_record: int
    """Number of the record that comes next."""
    torn: Fault | None
    """What stands behind the last whole record of the last segment, if anything does."""

    def records(self) -> Iterator[bytes]:
        """The payloads in order; one segment at a time is in memory."""
        for segment in self.segments:
            yield from segment.payloads()


class JournalDamage(DamageError):
    """Bytes that were right once have changed: where, and the way out.

    Cutting there loses no work for good: the groups behind are sampled again, with the same seeds.
    """

    def __init__(self, path: Path, fault: Fault, whole: tuple[Segment, ...]) -> None:
        """whole: all that is right before the damage."""
        super().__init__(
            f"{path} is damaged at byte {fault.offset}, record {fault.number} ({fault.reason}), and this is no torn "
            f"end; restore the file from a copy, or give up this record and all later ones (`truncate -s "
            f"{fault.offset} {path}` and move later segments away) to have their groups sampled again."
        )
        self.whole = whole
        self.num_behind = sum(1 for _ in whole_records(path.read_bytes(), fault.offset + 1))
        """Whole records behind the damage in the same segment; they are of no use without the one that is missing."""


class Journal:
    """The journal of the one process that writes it; make it with `open`."""

    def __init__(self, folder: Path, reading: Reading, segment_bytes: int) -> None:
        self.firsts = {segment.number: segment.first for segment in reading.segments} or {1: 0}
        """Number of the first record of each segment, oldest first."""
        self.recovered = cut_torn(reading.segments[-1].path, reading.torn) if reading.torn else None
        """One sentence about a torn end that was cut off, or None."""
        self.next_record = reading.next_record
        """Number of the record that comes next."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._tail = AppendFile(segment_path(folder, self.tail))

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Check all there is, delete what was given up, cut a torn end off, and be ready to append.

        The last record's writer may have died before its sync, or because of it: it is written once more, and from then
        on counts as durable.
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
        """Check all there is and change nothing."""
        return read_journal(folder)

    @property
    def tail(self) -> int:
        """Number of the segment that the next record goes to, unless it is full."""
        return max(self.firsts)

    def append(self, payload: bytes) -> None:
        """Write one record whole, or raise and leave the file as it was. Not durable before `sync`."""
        if self._tail.end >= self._segment_bytes:
            self.begin_segment()
        self._tail.append(pack_record(self.next_record, payload))
        self.next_record += 1

    def sync(self) -> None:
        """All that was appended is on disk once this returns."""
        self._tail.sync()

    def reading(self) -> Reading:
        """All there is, what was appended since `open` included."""
        return read_journal(self._folder)

    def begin_segment(self) -> None:
        """The next record begins a segment. Sync first: only the last segment may ever have a torn end."""
        if self._tail.end == 0:
            return
        self._tail.sync()
        tail = AppendFile(segment_path(self._folder, self.tail + 1))
        self._tail.close()
        self._tail = tail
        self.firsts[self.tail + 1] = self.next_record

    def drop_before(self, segment: int, step: int) -> None:
        """Give up all segments before this one; none of them holds a record of `step` or later."""
        start = Start(segment=segment, step=step)
        write_start(self._folder, start, self.firsts[segment])
        drop_leftovers(self._folder, start)
        self.firsts = {number: first for number, first in self.firsts.items() if number >= segment}

    def close(self) -> None:
        """Sync, and give the descriptor back."""
        try:
            self.sync()
        finally:
            self._tail.close()


def segment_path(folder: Path, segment: int) -> Path:
    """000001.log is the first."""
    return folder / f"{segment:06d}.log"


def read_journal(folder: Path) -> Reading:
    """Check every record of every segment; only the end of the last one may be torn."""
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
    """In order from the start on, none missing between them."""
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
    """Keep the torn bytes aside, durably, before they are cut off."""
    data = path.read_bytes()[fault.offset :]
    aside = path.with_name(f"{path.name}.{fault.offset}.torn")
    write_whole(aside, data)
    cut(path, fault.offset)
    return (
        f"{path} ended in a torn record that was never acked ({len(data)} bytes from byte {fault.offset}, record "
        f"{fault.number}); it was cut off and kept in {aside.name}, and its groups will be sampled again."
    )
