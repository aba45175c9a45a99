"""Files appear whole, appends are whole, and the disk's refusals are one sentence."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shared.errors import RunDirError
from shared.run.disk import write_all
from shared.run.files import (
    BLOCK,
    AppendFile,
    LineLog,
    cut,
    final_name,
    finish_writes,
    made_whole,
    make_folder,
    open_log,
    remove_tree_whole,
    remove_unfinished,
    sync_files,
    write_tree_whole,
    write_whole,
)
from tests.support.disk_faults import failing, kill_before_every_call, list_calls

REFUSALS = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_write_whole_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"first")
    write_whole(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2"
    assert names(tmp_path) == {"a"}


def test_write_whole_syncs_the_file_before_the_rename_and_the_folder_after(tmp_path: Path) -> None:
    calls = list_calls(lambda: write_whole(tmp_path / "a", b"x"))
    assert [call for call in calls if call in ("write", "fsync", "rename")] == ["write", "fsync", "rename", "fsync"]


def test_a_note_is_not_synced(tmp_path: Path) -> None:
    assert "fsync" not in list_calls(lambda: write_whole(tmp_path / "a", b"x", durable=False))


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    write_whole(tmp_path / "a", b"secret", 0o600)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_write_whole_refused_keeps_the_old_and_says_what_to_do(tmp_path: Path, call: str, refusal: int) -> None:
    write_whole(tmp_path / "a", b"old")
    with pytest.raises(RunDirError, match=r"^.*/a cannot be used \(.+\); .+\.$"), failing(call, refusal):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


def test_an_error_that_is_not_the_users_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "a", b"x")


def prepare_file(folder: Path) -> None:
    folder.mkdir()
    write_whole(folder / "a", b"old")


def overwrite(folder: Path) -> None:
    write_whole(folder / "a", b"new!")


def test_write_whole_killed_anywhere_leaves_old_or_new(tmp_path: Path) -> None:
    folders = kill_before_every_call(prepare_file, overwrite, tmp_path)
    contents = [(folder / "a").read_bytes() for folder in folders]
    assert set(contents) == {b"old", b"new!"}
    assert contents == sorted(contents, reverse=True), "once new, it stays new"


def test_os_write_may_be_short() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with pytest.raises(BlockingIOError):
        write_all(write_end, b"x" * 10_000_000, Path("pipe"))
    taken = len(os.read(read_end, 10_000_000))
    assert 0 < taken < 10_000_000, "the pipe took a part and the rest was tried again"
    os.close(read_end)
    os.close(write_end)


def test_tree_appears_with_exactly_its_files(tmp_path: Path) -> None:
    write_tree_whole(tmp_path / "t", {"a": (b"1",), "b": (b"2",)})
    write_tree_whole(tmp_path / "t", {"b": (b"3",)})
    assert names(tmp_path) == {"t"}
    assert names(tmp_path / "t") == {"b"}
    assert (tmp_path / "t" / "b").read_bytes() == b"3"


def test_tree_syncs_each_file_and_the_folder_before_the_rename(tmp_path: Path) -> None:
    calls = list_calls(lambda: write_tree_whole(tmp_path / "t", {"a": (b"1",), "b": (b"2",)}))
    order = [call for call in calls if call in ("write", "fsync", "rename")]
    assert order == ["write", "fsync", "write", "fsync", "fsync", "rename", "fsync"]


def prepare_tree(folder: Path) -> None:
    folder.mkdir()
    write_tree_whole(folder / "t", {"a": (b"old",), "b": (b"old",)})


def replace_tree(folder: Path) -> None:
    write_tree_whole(folder / "t", {"a": (b"new",), "c": (b"new",)})


def test_tree_killed_anywhere_is_old_or_new_after_finish_writes(tmp_path: Path) -> None:
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for folder in kill_before_every_call(prepare_tree, replace_tree, tmp_path):
        finish_writes(folder)
        assert names(folder) == {"t"}
        seen.add(tuple(sorted((path.name, path.read_bytes()) for path in (folder / "t").iterdir())))
    assert seen == {(("a", b"old"), ("b", b"old")), (("a", b"new"), ("c", b"new"))}


@pytest.mark.parametrize("nth", [1, 2])
def test_tree_refused_at_either_rename_is_still_there(tmp_path: Path, nth: int) -> None:
    write_tree_whole(tmp_path / "t", {"a": (b"old",)})
    with pytest.raises(RunDirError), failing("rename", errno.EACCES, nth=nth):
        write_tree_whole(tmp_path / "t", {"a": (b"new",)})
    finish_writes(tmp_path)
    assert (tmp_path / "t" / "a").read_bytes() == b"old"
    assert names(tmp_path) == {"t"}


def test_finish_writes_removes_unfinished_files_too_and_only_ours(tmp_path: Path) -> None:
    (tmp_path / ".a.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / "mine.tmp").write_bytes(b"keep")
    finish_writes(tmp_path)
    assert names(tmp_path) == {"mine.tmp"}


def test_final_name_undoes_beside() -> None:
    assert final_name(Path("x/.step-000010.0123abcd.old")) == "step-000010"
    assert final_name(Path("x/.hidden")) == ".hidden"
    assert final_name(Path("x/best.json")) == "best.json"


def remove_tree(folder: Path) -> None:
    remove_tree_whole(folder / "t")


def test_removed_tree_is_whole_or_gone(tmp_path: Path) -> None:
    folders = kill_before_every_call(prepare_tree, remove_tree, tmp_path)
    for folder in folders:
        left = names(folder / "t") if (folder / "t").exists() else {"a", "b"}
        assert left == {"a", "b"}
        finish_writes(folder)
        assert names(folder) <= {"t"}
    assert names(folders[-1]) == set()


def test_the_old_is_deleted_only_once_the_new_name_is_durable(tmp_path: Path) -> None:
    for act in (replace_tree, remove_tree):
        folder = tmp_path / act.__name__
        prepare_tree(folder)
        calls = list_calls(partial(act, folder))
        last_rename, first_delete = max(places(calls, "rename")), min(places(calls, "unlink"))
        assert "fsync" in calls[last_rename:first_delete]


def places(calls: list[str], name: str) -> list[int]:
    return [place for place, call in enumerate(calls) if call == name]


def test_make_folder_makes_parents_and_leaves_what_is_there(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", 0o700)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    make_folder(tmp_path / "a" / "b", 0o755)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_every_new_parent_is_durable(tmp_path: Path) -> None:
    calls = list_calls(lambda: make_folder(tmp_path / "a" / "b" / "c"))
    assert [call for call in calls if call != "open"] == ["mkdir", "fsync"] * 3


def test_no_folder_is_open_to_other_writers_under_any_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b", 0o700)
        write_tree_whole(tmp_path / "t", {"a": (b"1",)})
        open_log(tmp_path / "logs" / "l", "ab").close()
        with made_whole(tmp_path / "w") as work:
            (work / "a").write_bytes(b"1")
            sync_files(work)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o022]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folders")
def test_a_file_system_that_takes_no_folders_is_one_sentence() -> None:
    with pytest.raises(RunDirError, match=r"^/proc/x cannot be made there.*choose another --out\.$"):
        make_folder(Path("/proc/x"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize("write", [partial(write_whole, data=b""), partial(write_tree_whole, files={})])
def test_a_file_system_that_takes_no_files_is_named(write: Callable[[Path], None]) -> None:
    with pytest.raises(RunDirError, match=r"^/proc/x cannot be made there.*choose another --out\.$"):
        write(Path("/proc/x"))


def test_a_source_that_is_missing_is_not_taken_for_the_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), made_whole(tmp_path / "x"):
        (tmp_path / "source").read_bytes()


def test_a_name_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"name too long\); choose a shorter --out\.$"):
        make_folder(tmp_path / ("x" * 300))


def test_a_tree_that_others_write_is_durable_before_it_has_its_name(tmp_path: Path) -> None:
    def write() -> None:
        with made_whole(tmp_path / "t", "model.cache_dir") as work:
            (work / "a").write_bytes(b"1")
            sync_files(work)

    calls = [call for call in list_calls(write) if call in ("fsync", "rename")]
    assert calls == ["fsync", "fsync", "rename", "fsync"]
    assert (tmp_path / "t" / "a").read_bytes() == b"1" and names(tmp_path) == {"t"}


def test_a_tree_that_is_not_finished_leaves_nothing_and_names_what_to_choose(tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirError, match=r"/t cannot be used .*choose another model\.cache_dir\.$"),
        made_whole(tmp_path / "t", "model.cache_dir") as work,
    ):
        (work / "a").write_bytes(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == set()


def test_what_a_killed_writer_left_of_one_path_is_removed_alone(tmp_path: Path) -> None:
    for name in (".a.0123abcd.tmp", ".a.b.0123abcd.tmp", ".a.0123abcd.old", "a.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".a.89abcdef.tmp").mkdir()
    remove_unfinished(tmp_path / "a")
    assert names(tmp_path) == {".a.b.0123abcd.tmp", ".a.0123abcd.old", "a.tmp"}


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (errno.EMFILE, "`ulimit -n 1024`"),
        (errno.ENFILE, "end the program with too many open files"),
        (errno.ENOLCK, "choose an --out on a disk of this machine"),
    ],
)
def test_what_runs_short_is_named(tmp_path: Path, refusal: int, remedy: str) -> None:
    with pytest.raises(RunDirError, match=f"{re.escape(os.strerror(refusal))}.*{remedy}"), failing("open", refusal):
        write_whole(tmp_path / "a", b"x")


def test_cut_is_durable(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert list_calls(lambda: cut(tmp_path / "a", 2)) == ["open", "ftruncate", "fsync"]
    assert (tmp_path / "a").read_bytes() == b"12"


def test_append_file_goes_on_at_the_end_and_its_name_is_durable(tmp_path: Path) -> None:
    assert "fsync" in list_calls(lambda: AppendFile(tmp_path / "a").close())
    for data in (b"one", b"two"):
        file = AppendFile(tmp_path / "a")
        file.append(data)
        file.sync()
        assert file.end == (tmp_path / "a").stat().st_size
        file.close()
    assert (tmp_path / "a").read_bytes() == b"onetwo"


def test_full_device_is_a_sentence_and_ends_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/dev/full")
    file = AppendFile(tmp_path / "a")
    with pytest.raises(RunDirError, match=r"No space left on device.*free some space"):
        file.append(b"x")
    with pytest.raises(RunDirError, match="takes no more writes"):
        file.append(b"x")  # the device cannot be cut back, so nothing may follow
    file.close()


LIMITED = """
import resource, sys
from pathlib import Path
from shared.errors import RunDirError
from shared.run.files import AppendFile
file = AppendFile(Path(sys.argv[1]))
file.append(b"a" * 600)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    file.append(b"b" * 600)
except RunDirError as error:
    print(error)
file.append(b"c" * 100)
"""


def test_short_write_is_cut_off_and_the_file_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a")]
    child = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    assert "ulimit -f" in child.stdout
    assert (tmp_path / "a").read_bytes() == b"a" * 600 + b"c" * 100


def test_failed_sync_kills_the_file_though_the_next_sync_would_succeed(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a")
    file.append(b"x")
    with pytest.raises(RunDirError, match="Input/output error"), failing("fsync", errno.EIO):
        file.sync()
    for again in (file.sync, lambda: file.append(b"y")):
        with pytest.raises(RunDirError, match=r"failed earlier.*resume"):
            again()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"x"


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_log_shows_each_row_at_once(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "l")
    log.append({"step": 1, "text": "a\nb\r\u2028"})
    assert rows(tmp_path / "l") == [{"step": 1, "text": "a\nb\r\u2028"}]
    with pytest.raises(ValueError):
        log.append({"step": 2, "x": float("nan")})
    log.close()
    assert len(rows(tmp_path / "l")) == 1


def test_line_log_torn_at_every_byte_keeps_whole_rows(tmp_path: Path) -> None:
    whole = b'{"step":1}\n{"step":2}\n'
    for size in range(len(whole) + 1):
        (tmp_path / "l").write_bytes(whole[:size])
        log = LineLog(tmp_path / "l")
        log.append({"step": 9})
        log.close()
        assert [row["step"] for row in rows(tmp_path / "l")] == [*range(1, size // 11 + 1), 9]


def test_truncate_from_keeps_earlier_readable_rows_and_goes_on(tmp_path: Path) -> None:
    lines = [b'{"step":1}', b"\0\0\0", b"[1]", b'{"no":1}', b'{"step":2}', b'{"step":1,"again":true}', b'{"st']
    (tmp_path / "l").write_bytes(b"\n".join(lines))
    log = LineLog(tmp_path / "l")
    log.truncate_from(2)
    log.append({"step": 2})
    log.close()
    assert rows(tmp_path / "l") == [{"step": 1}, {"step": 1, "again": True}, {"step": 2}]
    assert names(tmp_path) == {"l"}


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_log_that_is_cut_is_a_new_file_and_goes_on(tmp_path: Path, size: int) -> None:
    path, content = tmp_path / "l", b"x" * 3 * BLOCK + b"\n"
    path.write_bytes(content)
    log, before = LineLog(path), path.stat().st_ino
    log.cut_to(size)
    assert path.read_bytes() == content[:size] and path.stat().st_ino != before and log.size == size
    log.append_line(b"on\n")
    log.close()
    assert path.read_bytes() == content[:size] + b"on\n" and names(tmp_path) == {"l"}


def test_a_log_longer_than_a_block_is_cut_and_kept_in_blocks(tmp_path: Path) -> None:
    path, text = tmp_path / "l", "x" * (BLOCK // 3)
    lines = [f'{{"step":{step},"text":"{text}"}}\n' for step in range(9)]
    path.write_text("".join(lines) + "y" * 3 * BLOCK)
    log = LineLog(path)
    assert [row["step"] for row in rows(path)] == list(range(9))
    log.truncate_from(7)
    log.append({"step": 7})
    log.close()
    assert [row["step"] for row in rows(path)] == list(range(8)) and rows(path)[6]["text"] == text
