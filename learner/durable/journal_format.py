"""The bytes of the journal: its records, how a torn record is told from damage, and where the journal begins.

    record = magic[4] number[u32] length[u32] crc[u32] check[u32] payload[length]     little-endian
    crc    = crc32(payload)       check = crc32(the 16 bytes before it)

`number` counts from 0 over all segments, so a missing, repeated or foreign record is found. The header has its own
checksum, so the length can be trusted before the payload is read.

Torn or damaged? A process that dies leaves a prefix of its last write; a power failure may also leave sectors of zeros
in it. So a bad record is `torn` if no complete record follows it, and the file ends before the record does or one of
its sectors is all zero. Anything else is damage: bytes that were correct have changed, and a person must decide.

    journal/start    exists once old segments were deleted. One record in the same format: its number is that of the
                     first record left, its payload {"segment": 5, "step": 20} has the first segment, and the first
                     step of which no record was deleted

Without this file the journal begins at segment 1, record 0, step 0. The file is written before a segment is deleted. So
a missing segment at or after `segment` was lost, and an existing one before it is a leftover of a crash.
Left out on purpose: compression (token ids and log-probs hardly shrink), repair of damage, and which segments may be
deleted (recorder.py).
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from shared.errors import DamageError
from shared.run.files import remove_files, write_whole

MAGIC = b"TJ1\n"
BODY = struct.Struct("<4sIII")
CHECK = struct.Struct("<I")
HEADER_BYTES = BODY.size + CHECK.size
SECTOR_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class Record:
    """Position of a complete record in its segment."""

    number: int
    """Counts from 0 over all segments."""
    start: int
    """First byte of the payload."""
    end: int
    """Byte after the payload, where the next record begins."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why reading stopped before the end of a segment."""

    offset: int
    """Where the bad record begins, which is the end of the last good one."""
    number: int
    """Number of the record that was expected there."""
    reason: str
    """What is wrong with it, in words."""
    torn: bool
    """Whether it is an interrupted write with no complete record after it."""


def pack_record(number: int, *parts: bytes) -> bytes:
    """parts: of the payload, which may be long and so is joined once only."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    body = BODY.pack(MAGIC, number, sum(map(len, parts)), crc)
    return b"".join((body, CHECK.pack(zlib.crc32(body)), *parts))


def scan(data: bytes, number: int) -> tuple[list[Record], Fault | None]:
    """The complete records from the beginning, the first with this number, and what ended the scan."""
    records: list[Record] = []
    offset = 0
    while offset < len(data):
        record = record_at(data, offset)
        if record is None or record.number != number:
            return records, find_fault(data, offset, number)
        records.append(record)
        offset, number = record.end, number + 1
    return records, None


def header_at(data: bytes, offset: int) -> tuple[Record, int] | None:
    """The record that a header at `offset` announces, and its payload's checksum; None if there is no valid header."""
    start = offset + HEADER_BYTES
    if start > len(data) or not data.startswith(MAGIC, offset):
        return None
    body = data[offset : offset + BODY.size]
    if CHECK.unpack_from(data, offset + BODY.size) != (zlib.crc32(body),):
        return None
    _, number, length, crc = BODY.unpack(body)
    return Record(number=number, start=start, end=start + length), crc


def record_at(data: bytes, offset: int) -> Record | None:
    """The record at `offset`; None unless it is complete."""
    header = header_at(data, offset)
    if header is None:
        return None
    record, crc = header
    whole = record.end <= len(data) and zlib.crc32(memoryview(data)[record.start : record.end]) == crc
    return record if whole else None


def find_fault(data: bytes, offset: int, number: int) -> Fault:
    header = header_at(data, offset)
    if header is None:
        reason, torn = "no record begins there", looks_torn(data, offset, len(data), behind=offset + 1)
    elif header[0].number != number:
        reason, torn = f"record {header[0].number} is there", False
    elif header[0].end > len(data):
        reason, torn = "the file ends before the record does", True
    else:
        end = header[0].end
        reason, torn = "its checksum does not match", looks_torn(data, offset, end, behind=end)
    return Fault(offset=offset, number=number, reason=reason, torn=torn)


def looks_torn(data: bytes, offset: int, end: int, *, behind: int) -> bool:
    """Too short for a header or with a sector of zeros, and with no complete record from `behind` on."""
    cut_short = len(data) - offset < HEADER_BYTES
    return (cut_short or has_zero_sector(data, offset, end)) and not any(whole_records(data, behind))


def has_zero_sector(data: bytes, offset: int, end: int) -> bool:
    """Whether the part of any sector inside data[offset:end] is all zero."""
    bounds = [offset, *range(offset - offset % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    return any(not any(data[low:high]) for low, high in pairwise(bounds))


def whole_records(data: bytes, offset: int) -> Iterator[Record]:
    """Complete records from `offset` on, wherever they begin."""
    while (offset := data.find(MAGIC, offset)) >= 0:
        if record := record_at(data, offset):
            yield record
        offset += 1


START = "start"


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the journal begins."""

    segment: int = 1
    """Number of the first segment."""
    step: int = 0
    """No record of this step or a later one was deleted."""


def read_start(folder: Path) -> tuple[Start, int]:
    """The start, and the number of the first record."""
    file = folder / START
    if not file.exists():
        return Start(), 0
    data = file.read_bytes()
    record = record_at(data, 0)
    if record is None or record.end != len(data):
        raise DamageError(
            f"{file} is damaged, so where the journal begins is unknown; restore it from a copy,"
            " or move the whole journal away to have all groups since the last checkpoint sampled again."
        )
    return msgspec.json.decode(data[record.start :], type=Start), record.number


def write_start(folder: Path, start: Start, first_record: int) -> None:
    write_whole(folder / START, pack_record(first_record, msgspec.json.encode(start)))


def drop_leftovers(folder: Path, start: Start) -> None:
    """Delete the files of segments before the start, including saved torn ends."""
    remove_files(folder, sorted(leftovers(folder, start)))


def leftovers(folder: Path, start: Start) -> Iterator[Path]:
    for path in folder.glob("[0-9]*.log*"):
        if segment_number(path) < start.segment:
            yield path


def segment_number(path: Path) -> int:
    """`000007.log`, `000007.log.1234.torn` -> 7"""
    return int(path.name.partition(".")[0])
