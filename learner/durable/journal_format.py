"""The journal's bytes: records one after another, and what to think of a file that does not end as it should.

    record = magic[4] number[u32] length[u32] crc[u32] check[u32] payload[length]     little-endian
    crc    = crc32(payload)       check = crc32(the 16 bytes before it)

`number` counts from 0 over all segments, so a record that is missing, doubled or of another file is found. The header
has its own checksum, so a length can be trusted before the payload is looked at.

Torn or damaged? A process that dies leaves a prefix of its last write; a power cut may also leave sectors of zeros in
it. So a bad record is `torn` if no whole record lies behind it and either the file ends before the record does or a
sector of it is all zero. Everything else is damage: bytes that were once right have changed, and a person must decide.
Left out on purpose: compression (token ids and log-probs give little), and repair of what is damaged.

Where a journal begins, once its oldest segments have been given up.

    journal/start    one record in the journal's own format: its number is that of the first record still there, its
                     payload {"segment": 5, "step": 20} names the first segment, and the first step kept whole

A journal without this file begins at segment 1, record 0, step 0. The file is durable before the first segment goes,
so a segment that is missing from `segment` on was lost, not given up; one before it is a leftover that a crash spared.
Left out on purpose: what may be given up (compaction.py decides).
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
    """Where a whole record lies."""

    number: int
    """Its place in the journal, from 0."""
    start: int
    """First byte of the payload."""
    end: int
    """Byte after the payload, where the next record begins."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a segment's reading ended before its bytes did."""

    offset: int
    """Where the bad record begins: the end of the last good one."""
    number: int
    """The record that was expected there."""
    reason: str
    """What is wrong with it, in words."""
    torn: bool
    """It looks like a write that was cut short, and nothing whole lies behind it."""


def pack_record(number: int, payload: bytes) -> bytes:
    """Header and payload."""
    body = BODY.pack(MAGIC, number, len(payload), zlib.crc32(payload))
    return body + CHECK.pack(zlib.crc32(body)) + payload


def scan(data: bytes, number: int) -> tuple[list[Record], Fault | None]:
    """The whole records from the front, the first of them `number`, and what stopped the reading."""
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
    """Where the record at `offset` should lie, and its payload's checksum; None if that is no header."""
    start = offset + HEADER_BYTES
    if start > len(data) or not data.startswith(MAGIC, offset):
        return None
    body = data[offset : offset + BODY.size]
    if CHECK.unpack_from(data, offset + BODY.size) != (zlib.crc32(body),):
        return None
    _, number, length, crc = BODY.unpack(body)
    return Record(number=number, start=start, end=start + length), crc


def record_at(data: bytes, offset: int) -> Record | None:
    """The record at `offset` if it is whole."""
    header = header_at(data, offset)
    if header is None:
        return None
    record, crc = header
    whole = record.end <= len(data) and zlib.crc32(memoryview(data)[record.start : record.end]) == crc
    return record if whole else None


def find_fault(data: bytes, offset: int, number: int) -> Fault:
    """Tell a torn end from damage."""
    header = header_at(data, offset)
    if header is None:
        reason, torn = "no record begins there", looks_torn(data, offset, len(data), behind=offset + 1)
    elif header[0].number != number:
        reason, torn = f"record {header[0].number} stands there", False
    elif header[0].end > len(data):
        reason, torn = "the file ends before the record does", True
    else:
        end = header[0].end
        reason, torn = "its checksum does not match", looks_torn(data, offset, end, behind=end)
    return Fault(offset=offset, number=number, reason=reason, torn=torn)


def looks_torn(data: bytes, offset: int, end: int, *, behind: int) -> bool:
    """Too short for a header, or with a sector of zeros; and with nothing whole from `behind` on."""
    cut_short = len(data) - offset < HEADER_BYTES
    return (cut_short or has_zero_sector(data, offset, end)) and not any(whole_records(data, behind))


def has_zero_sector(data: bytes, offset: int, end: int) -> bool:
    """Whether a sector's share of data[offset:end] is all zero."""
    bounds = [offset, *range(offset - offset % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    return any(not any(data[low:high]) for low, high in pairwise(bounds))


def whole_records(data: bytes, offset: int) -> Iterator[Record]:
    """Whole records anywhere from `offset` on."""
    while (offset := data.find(MAGIC, offset)) >= 0:
        if record := record_at(data, offset):
            yield record
        offset += 1


START = "start"


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first of what is kept."""

    segment: int = 1
    """Number of the first segment."""
    step: int = 0
    """No record of this step or a later one was given up."""


def read_start(folder: Path) -> tuple[Start, int]:
    """Where the journal begins, and the number of its first record."""
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
    """Durable once this returns."""
    write_whole(folder / START, pack_record(first_record, msgspec.json.encode(start)))


def drop_leftovers(folder: Path, start: Start) -> None:
    """Delete what lies before the start, torn ends that were kept aside included."""
    remove_files(folder, sorted(leftovers(folder, start)))


def leftovers(folder: Path, start: Start) -> Iterator[Path]:
    """Files of segments that have been given up."""
    for path in folder.glob("[0-9]*.log*"):
        if segment_number(path) < start.segment:
            yield path


def segment_number(path: Path) -> int:
    """`000007.log`, `000007.log.1234.torn` -> 7"""
    return int(path.name.partition(".")[0])
