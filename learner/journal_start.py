"""Where a journal begins, once its oldest segments have been given up.

    journal/start    one record in the journal's own format: its number is that of the first record still there, its
                     payload {"segment": 5, "step": 20} names the first segment, and the first step kept whole

A journal without this file begins at segment 1, record 0, step 0. The file is durable before the first segment goes,
so a segment that is missing from `segment` on was lost, not given up; one before it is a leftover that a crash spared.
Left out on purpose: what may be given up (compaction.py decides).
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from learner.journal_format import pack_record, record_at
from shared.errors import DamageError
from shared.run.files import remove_files, write_whole

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
