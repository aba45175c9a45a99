"""The journal: everything actors ever answered, in order, on disk before anyone is told that it arrived.

Durable before acked: `append` hands the bytes to the kernel, `sync` returns once the disk has them, and only then may
an Ack be sent. If `append` raises, the record is not in the file. If `sync` raises, the journal takes nothing more:
stop, and let `Journal.open` find out what is there. One sync per append leaves one record at most for a crash to tear.

    journal/000001.log, 000002.log, ...   a full segment is synced before the next one is begun

`open` reads all of it and syncs what it found. A torn last record was never acked: it is cut off, its bytes are kept in
`<segment>.<offset>.torn`, and `recovered` tells of it. Any other damage stops the run with segment, offset and record
(DamageError): nothing that was acked is dropped in silence. `read` is for replay and changes nothing on disk; a torn
end is left out and told.
Left out on purpose: what a record means (bytes in, bytes out), deleting old segments (replay needs all of them).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from learner.journal_format import Fault, Record, pack_record, scan
from shared.errors import DamageError
from shared.files import AppendFile, cut, make_folder, write_whole

SEGMENT_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A journal as it lay on disk when it was read."""

    segments: tuple[tuple[Path, tuple[Record, ...]], ...]
    """Each segment with its whole records."""
    torn: Fault | None
    """What stands behind the last whole record of the last segment, if anything does."""

    @property
    def num_records(self) -> int:
        """Of all segments."""
        return sum(len(records) for _, records in self.segments)

    def records(self) -> Iterator[bytes]:
        """The payloads in order; one segment at a time is in memory."""
        for path, records in self.segments:
            data = path.read_bytes()
            yield from (data[record.start : record.end] for record in records)


class Journal:
    """The journal of the one process that writes it; make it with `open`."""

    def __init__(self, folder: Path, segment: int, num_records: int, recovered: str | None, segment_bytes: int) -> None:
        self.recovered = recovered
        """One sentence about a torn end that was cut off, or None."""
        self.num_records = num_records
        """Records written so far; the next one has this number."""
        self._folder = folder
        self._segment = segment
        self._segment_bytes = segment_bytes
        self._tail = AppendFile(segment_path(folder, segment))

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Check all there is, cut a torn end off, and be ready to append.

        The sync is for a whole record whose writer died before its own sync: from now on it counts as durable.
        """
        make_folder(folder)
        reading = read_journal(folder)
        segment = max(1, len(reading.segments))
        recovered = cut_torn(segment_path(folder, segment), reading.torn) if reading.torn else None
        journal = cls(folder, segment, reading.num_records, recovered, segment_bytes)
        journal.sync()
        return journal

    @staticmethod
    def read(folder: Path) -> Reading:
        """Check all there is and change nothing."""
        return read_journal(folder)

    def append(self, payload: bytes) -> None:
        """Write one record whole, or raise and leave the file as it was. Not durable before `sync`."""
        if self._tail.end >= self._segment_bytes:
            self._rotate()
        self._tail.append(pack_record(self.num_records, payload))
        self.num_records += 1

    def sync(self) -> None:
        """All that was appended is on disk once this returns."""
        self._tail.sync()

    def records(self) -> Iterator[bytes]:
        """All payloads, oldest first, those appended since `open` included."""
        return read_journal(self._folder).records()

    def close(self) -> None:
        """Sync, and give the descriptor back."""
        try:
            self.sync()
        finally:
            self._tail.close()

    def _rotate(self) -> None:
        """Sync first: only the last segment may ever have a torn end."""
        self._tail.sync()
        tail = AppendFile(segment_path(self._folder, self._segment + 1))
        self._tail.close()
        self._tail = tail
        self._segment += 1


def segment_path(folder: Path, segment: int) -> Path:
    """000001.log is the first."""
    return folder / f"{segment:06d}.log"


def read_journal(folder: Path) -> Reading:
    """Check every record of every segment; only the end of the last one may be torn."""
    segments: list[tuple[Path, tuple[Record, ...]]] = []
    number, torn = 0, None
    for path in segment_paths(folder):
        if torn:
            raise damage(segments[-1][0], torn)
        records, fault = scan(path.read_bytes(), number)
        if fault and not fault.torn:
            raise damage(path, fault)
        segments.append((path, tuple(records)))
        number, torn = number + len(records), fault
    return Reading(segments=tuple(segments), torn=torn)


def segment_paths(folder: Path) -> list[Path]:
    """In order, none missing between them."""
    paths = sorted(folder.glob("[0-9]*.log"), key=lambda path: int(path.stem))
    for segment, path in enumerate(paths, start=1):
        if path != segment_path(folder, segment):
            raise DamageError(
                f"{segment_path(folder, segment)} is missing though {path.name} exists; restore it from a copy, "
                f"or move {path.name} and all later segments away to have their groups sampled again."
            )
    return paths


def damage(path: Path, fault: Fault) -> DamageError:
    """Where it is, and the way out: cutting there loses no work for good, for the groups behind are sampled again."""
    return DamageError(
        f"{path} is damaged at byte {fault.offset}, record {fault.number} ({fault.reason}), and this is no torn end; "
        f"restore the file from a copy, or give up this record and all later ones (`truncate -s {fault.offset} {path}` "
        "and move later segments away) to have their groups sampled again."
    )


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
