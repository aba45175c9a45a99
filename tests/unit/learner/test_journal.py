"""No acked record is lost in silence: every truncation, every flipped bit, every kill, every refusal of the disk."""

import errno
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.durable.journal import Journal
from learner.durable.journal_format import HEADER_BYTES, SECTOR_BYTES, pack_record, scan
from shared.errors import DamageError, RunDirError
from tests.support.disk_faults import failing, kill_before_every_call, list_calls

PAYLOADS = [b"first", b"", b"the third, with some bytes more", b"4"]
"""Small, one of them empty, and without a zero byte."""


def written(folder: Path, payloads: list[bytes], *, segment_bytes: int = 2**20) -> Path:
    """A journal with these records; gives its first segment."""
    journal = Journal.open(folder, segment_bytes=segment_bytes)
    for payload in payloads:
        journal.append(payload)
        journal.sync()
    journal.close()
    return folder / "000001.log"


def contents(folder: Path) -> list[bytes]:
    return list(Journal.read(folder).records())


def bounds(payloads: list[bytes]) -> list[int]:
    """Where each record ends."""
    ends = [0]
    for payload in payloads:
        ends.append(ends[-1] + HEADER_BYTES + len(payload))
    return ends


def test_what_goes_in_comes_out_in_order_also_after_reopening(tmp_path: Path) -> None:
    written(tmp_path, PAYLOADS)
    journal = Journal.open(tmp_path)
    assert journal.recovered is None
    assert journal.next_record == 4
    journal.append(b"fifth")
    assert list(journal.reading().records()) == [*PAYLOADS, b"fifth"]
    journal.close()
    assert contents(tmp_path) == [*PAYLOADS, b"fifth"]


def test_the_format_is_pinned() -> None:
    body = b"TJ1\n" + (7).to_bytes(4, "little") + (3).to_bytes(4, "little") + zlib.crc32(b"abc").to_bytes(4, "little")
    assert pack_record(7, b"abc") == body + zlib.crc32(body).to_bytes(4, "little") + b"abc"


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    assert contents(tmp_path / "none") == []
    assert not (tmp_path / "none").exists(), "reading makes nothing"
    assert list(Journal.open(tmp_path / "new").reading().records()) == []


def test_what_open_has_checked_is_not_read_again(tmp_path: Path) -> None:
    file = written(tmp_path, PAYLOADS)
    file.write_bytes(file.read_bytes()[:-1])
    journal = Journal.open(tmp_path)
    reading = journal.reading()
    assert journal.recovered and journal.reading() is reading and reading == Journal.read(tmp_path)
    journal.close()


@pytest.mark.parametrize(
    "change",
    [lambda journal: journal.append(b"b"), Journal.begin_segment, lambda journal: journal.drop_before(2, 1)],
    ids=["append", "begin_segment", "drop_before"],
)
def test_a_reading_has_what_changed_since_open(tmp_path: Path, change: Callable[[Journal], None]) -> None:
    written(tmp_path, PAYLOADS, segment_bytes=1)
    journal = Journal.open(tmp_path)
    before = journal.reading()
    change(journal)
    assert journal.reading() == Journal.read(tmp_path) != before
    journal.close()


def test_append_writes_once_and_sync_syncs_once(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    assert list_calls(lambda: journal.append(b"x")) == ["write"]
    assert list_calls(journal.sync) == ["fsync"]
    journal.close()


def test_truncated_at_every_byte_keeps_whole_records_and_the_torn_bytes_aside(tmp_path: Path) -> None:
    data = written(tmp_path / "whole", PAYLOADS).read_bytes()
    ends = bounds(PAYLOADS)
    for size in range(len(data) + 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "000001.log").write_bytes(data[:size])
        kept = PAYLOADS[: sum(end <= size for end in ends) - 1]
        whole = max(end for end in ends if end <= size)
        reading = Journal.read(folder)
        assert list(reading.records()) == kept
        assert (reading.torn is None) == (size in ends)
        assert (folder / "000001.log").stat().st_size == size, "reading changes nothing"

        journal = Journal.open(folder)
        assert (journal.recovered is None) == (size in ends)
        journal.append(b"next")
        journal.close()
        assert contents(folder) == [*kept, b"next"]
        asides = {path.name: path.read_bytes() for path in folder.glob("*.torn")}
        assert asides == ({} if size in ends else {f"000001.log.{whole}.torn": data[whole:size]})


def test_recovery_is_told_in_one_sentence(tmp_path: Path) -> None:
    segment = written(tmp_path, PAYLOADS)
    with segment.open("ab") as file:
        file.write(pack_record(4, b"lost")[:-1])
    recovered = Journal.open(tmp_path).recovered
    assert recovered is not None
    end = bounds(PAYLOADS)[-1]
    for part in (str(segment), f"from byte {end}", "23 bytes", "record 4", f"000001.log.{end}.torn", "sampled again"):
        assert part in recovered


def open_journal(folder: Path) -> None:
    Journal.open(folder)


def prepare_torn(folder: Path) -> None:
    segment = written(folder, PAYLOADS)
    segment.write_bytes(segment.read_bytes()[:-1])


def test_recovery_killed_anywhere_can_be_done_again(tmp_path: Path) -> None:
    for folder in kill_before_every_call(prepare_torn, open_journal, tmp_path):
        Journal.open(folder).close()
        assert contents(folder) == PAYLOADS[:3]
        assert [path.read_bytes() for path in folder.glob("000001.log.*.torn")] == [pack_record(3, b"4")[:-1]]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_any_flipped_bit_of_any_record_is_damage(tmp_path: Path, number: int) -> None:
    data = written(tmp_path, PAYLOADS).read_bytes()
    start, end = bounds(PAYLOADS)[number : number + 2]
    for position in range(start, end):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            records, fault = scan(bytes(flipped), 0)
            assert len(records) == number
            assert fault is not None
            assert (fault.offset, fault.number, fault.torn) == (start, number, False)


def test_damage_names_segment_offset_and_record_and_changes_nothing(tmp_path: Path) -> None:
    segment = written(tmp_path, PAYLOADS)
    data = bytearray(segment.read_bytes())
    start = bounds(PAYLOADS)[2]
    sentence = rf"000001\.log is damaged at byte {start}, record 2 .*truncate -s {start}"
    for position in range(start, start + HEADER_BYTES + len(PAYLOADS[2])):
        flipped = bytearray(data)
        flipped[position] ^= 1
        segment.write_bytes(flipped)
        for opening in (Journal.open, Journal.read):
            with pytest.raises(DamageError, match=sentence):
                opening(tmp_path)
        assert segment.read_bytes() == flipped
    assert {path.name for path in tmp_path.iterdir()} == {"000001.log"}


def test_the_remedy_works(tmp_path: Path) -> None:
    segment = written(tmp_path, PAYLOADS * 4, segment_bytes=100)
    data = bytearray(segment.read_bytes())
    data[bounds(PAYLOADS)[2] + HEADER_BYTES] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DamageError) as caught:
        Journal.open(tmp_path)
    command = str(caught.value).split("`")[1]
    subprocess.run(command.split(), check=True)
    for later in sorted(tmp_path.glob("*.log"))[1:]:
        later.unlink()
    written(tmp_path, [b"again"])
    assert contents(tmp_path) == [*PAYLOADS[:2], b"again"]


def test_zero_sector_at_the_end_is_torn_and_before_a_whole_record_is_damage(tmp_path: Path) -> None:
    payload = b"x" * (4 * SECTOR_BYTES)
    record = bytearray(pack_record(0, payload))
    record[SECTOR_BYTES : 2 * SECTOR_BYTES] = bytes(SECTOR_BYTES)
    for whole_tail, torn in ((b"", True), (pack_record(1, b"y"), False)):
        fault = scan(bytes(record) + whole_tail, 0)[1]
        assert fault is not None
        assert fault.torn is torn
    for tail in (b"", b"TJ1\n and then no record"):
        fault = scan(pack_record(0, b"x") + bytes(3 * SECTOR_BYTES) + tail, 0)[1]
        assert fault is not None
        assert (fault.torn, fault.number) == (True, 1), "a file that grew before its bytes came"


def test_a_torn_record_that_contains_a_record_is_still_torn() -> None:
    """The header tells where the record ends, so bytes inside it cannot be taken for a later one."""
    fault = scan(pack_record(0, pack_record(1, b"inner") + b"rest")[:-1], 0)[1]
    assert fault is not None
    assert fault.torn


def test_segments_rotate_and_are_read_in_order(tmp_path: Path) -> None:
    payloads = [b"%03d" % number for number in range(40)]
    written(tmp_path, payloads[:20], segment_bytes=60)
    written(tmp_path, payloads[20:], segment_bytes=60)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{n:06d}.log" for n in range(1, 15)]
    assert contents(tmp_path) == payloads


def test_a_full_segment_is_synced_before_the_next_begins(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)
    journal.append(b"a")
    calls = [call for call in list_calls(lambda: journal.append(b"b")) if call in ("fsync", "write")]
    assert calls == ["fsync", "fsync", "write"], "the old segment, the folder with the new name, the record"
    journal.close()


def prepare_segments(folder: Path) -> None:
    written(folder, PAYLOADS, segment_bytes=1)


def append_fifth(folder: Path) -> None:
    written(folder, [b"fifth"], segment_bytes=1)


def test_rotation_killed_anywhere(tmp_path: Path) -> None:
    for folder in kill_before_every_call(prepare_segments, append_fifth, tmp_path):
        assert contents(folder) in (PAYLOADS, [*PAYLOADS, b"fifth"])
        written(folder, [b"sixth"], segment_bytes=1)
        assert contents(folder)[-1] == b"sixth"


def test_a_torn_end_before_the_last_segment_is_damage(tmp_path: Path) -> None:
    segment = written(tmp_path, PAYLOADS, segment_bytes=1)
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(DamageError, match=r"000001\.log is damaged at byte 0, record 0 \(the file ends before"):
        Journal.open(tmp_path)


def test_a_record_that_vanished_whole_is_damage(tmp_path: Path) -> None:
    segment = written(tmp_path, PAYLOADS, segment_bytes=1)
    segment.write_bytes(b"")
    with pytest.raises(DamageError, match=r"000002\.log is damaged at byte 0, record 0 \(record 1 is there\)"):
        Journal.open(tmp_path)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    written(tmp_path, PAYLOADS, segment_bytes=1)
    (tmp_path / "000002.log").unlink()
    with pytest.raises(DamageError, match=r"000002\.log is missing though 000003\.log exists"):
        Journal.open(tmp_path)


def test_failed_sync_ends_the_journal_and_reopening_begins_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(b"a")
    with pytest.raises(RunDirError, match="Input/output error"), failing("fsync", errno.EIO):
        journal.sync()
    for again in (journal.sync, lambda: journal.append(b"b"), journal.sync, journal.close):
        with pytest.raises(RunDirError, match="failed earlier"):
            again()
    assert list(Journal.open(tmp_path).reading().records()) == [b"a"]


@pytest.mark.parametrize(
    "then",
    [lambda journal: journal.append(b"b"), Journal.sync, Journal.end_sync, Journal.begin_segment, Journal.close],
    ids=["append", "sync", "end_sync", "begin_segment", "close"],
)
def test_whatever_follows_waits_for_a_sync_in_the_thread(tmp_path: Path, then: Callable[[Journal], None]) -> None:
    journal = Journal.open(tmp_path)
    journal.append(b"a")
    with failing("fsync", errno.EIO), pytest.raises(RunDirError, match="Input/output error"):
        journal.begin_sync()
        then(journal)
    assert contents(tmp_path) == [b"a"]


def test_failed_sync_at_rotation_ends_it_too(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)
    journal.append(b"a")
    with pytest.raises(RunDirError), failing("fsync", errno.EIO):
        journal.append(b"b")
    with pytest.raises(RunDirError, match="failed earlier"):
        journal.append(b"b")
    assert contents(tmp_path) == [b"a"]


def test_what_a_dead_writer_left_unsynced_is_written_again_and_synced_by_open(tmp_path: Path) -> None:
    Journal.open(tmp_path).append(b"whole, not synced")
    before = (tmp_path / "000001.log").read_bytes()
    assert list_calls(lambda: Journal.open(tmp_path))[-3:] == ["open", "write", "fsync"]
    assert (tmp_path / "000001.log").read_bytes() == before


LIMITED = """
import resource, sys
from pathlib import Path
from learner.durable.journal import Journal
from shared.errors import RunDirError
journal = Journal.open(Path(sys.argv[1]))
journal.append(b"a" * 600)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    journal.append(b"b" * 600)
except RunDirError as error:
    print(error)
journal.append(b"c" * 100)
journal.sync()
"""


def test_a_short_write_leaves_no_half_record(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    child = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    assert "cannot be used (File too large)" in child.stdout
    journal = Journal.open(tmp_path)
    assert (list(journal.reading().records()), journal.recovered) == ([b"a" * 600, b"c" * 100], None)


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_no_room_for_a_new_segment_keeps_all_and_may_be_tried_again(tmp_path: Path, call: str) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1)
    journal.append(b"a")
    nth = 2 if call == "fsync" else 1
    with pytest.raises(RunDirError, match="free some space"), failing(call, errno.ENOSPC, nth=nth):
        journal.append(b"b")
    journal.append(b"b")
    journal.close()
    assert contents(tmp_path) == [b"a", b"b"]


WRITER = """
import sys
from itertools import count
from pathlib import Path
from learner.durable.journal import Journal
journal = Journal.open(Path(sys.argv[1]), segment_bytes=20_000)
for number in count():
    journal.append(b"%d," % number * 500)
    journal.sync()
    print(number, flush=True)
"""


@pytest.mark.parametrize("acks", [1, 40])
def test_sigkilled_writer_loses_nothing_that_was_acked(tmp_path: Path, acks: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(acks):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    acked = acks + len(child.communicate()[0].splitlines())
    found = list(Journal.open(tmp_path).reading().records())
    assert len(found) in (acked, acked + 1), "one record may be on disk that was not acked yet"
    assert found == [b"%d," % number * 500 for number in range(len(found))]
