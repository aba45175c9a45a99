"""A run directory is made once, opened by name, and locked by one process."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from shared.errors import DamageError, RunDirError
from shared.process.lease import Lease
from shared.run.files import UNFINISHED, beside
from shared.run.run_dir import RunDir
from tests.support.disk_faults import failing

CONFIG = b'{"run": {}}\n'
HOLDER = """
import sys, time
from pathlib import Path
from shared.run.run_dir import RunDir
with RunDir.open(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_create_makes_every_folder_and_open_finds_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "deep" / "run", CONFIG)
    assert RunDir.open(run.path) == run
    assert run.config.read_bytes() == CONFIG
    for folder in (run.keys, run.journal, run.checkpoints, run.eval, run.logs):
        assert folder.is_dir()
    assert stat.S_IMODE(run.keys.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    made = sorted(path.name for path in run.path.iterdir())
    assert made == ["checkpoints", "config.json", "eval", "journal", "keys", "lease", "lock", "logs", "run.json"]


def test_paths_are_the_contract(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files = (run.lock, run.lease, run.metrics, run.rollouts, run.summary)
    names = ["lock", "lease/lock", "metrics.jsonl", "rollouts.jsonl", "summary.json"]
    assert (run.trace, run.trace_of("actor0")) == (tmp_path / "trace.json", tmp_path / "logs" / "trace-actor0.json")
    assert [str(path.relative_to(tmp_path)) for path in files] == names


def test_run_info_says_what_it_ran_on(tmp_path: Path) -> None:
    runs = [RunDir.create(tmp_path / name, CONFIG) for name in "ab"]
    info = runs[0].read_info()
    assert len(info.run_id) == 32
    assert info.run_id != runs[1].read_info().run_id
    assert info.packages == {name: version(name) for name in ("torch", "transformers", "bitsandbytes", "pyzmq")}
    assert info.cpu_count == os.cpu_count()
    assert info.cpu
    assert info.platform
    assert json.loads(runs[0].run_info.read_bytes())["python"] == sys.version.split()[0]
    assert info.card == {}
    card = {"learner": "H200", "actor": "H200", "driver": "580.65.06", "cuda": "13.0"}
    assert RunDir.create(tmp_path / "c", CONFIG, card=card).read_info().card == card


def test_making_a_run_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shared.run.run_dir import RunDir; "
        "RunDir.create(Path(sys.argv[1]), b''); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=30)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_unreadable_run_info_is_named(tmp_path: Path, content: bytes | None) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    run.run_info.unlink()
    if content is not None:
        run.run_info.write_bytes(content)
    with pytest.raises(DamageError, match=r"run\.json cannot be read"):
        run.read_info()


def test_a_run_is_not_made_over_another(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    before = run.run_info.read_bytes()
    with pytest.raises(
        RunDirError, match="has a run that has not begun; begin it with `resume`, or for another one rem"
    ):
        RunDir.create(run.path, b"other")
    with run.locked(), pytest.raises(RunDirError, match="has a run already"):
        RunDir.create(run.path, b"other")
    for status in ("stopped", "failed"):
        run.summary.write_text(json.dumps({"status": status}))
        for begun in (run.journal / "segment", run.checkpoints / "step-000001", run.eval / "base.json"):
            begun.write_bytes(b"x")
            with pytest.raises(RunDirError, match="has a run already; continue it with `resume`"):
                RunDir.create(run.path, b"other")
            begun.unlink()
    assert (run.config.read_bytes(), run.run_info.read_bytes()) == (CONFIG, before)


def failed_at_start(path: Path) -> RunDir:
    """As a mistake leaves it that an actor found when the learner had loaded already."""
    run = RunDir.create(path, CONFIG)
    for file in (run.tasks, run.plan, run.report, run.logs / "actor0.log", run.lease, run.journal / "000001.log"):
        file.write_bytes(b"" if file.parent == run.journal else b"old")
    run.summary.write_text(json.dumps({"status": "failed"}))
    return run


def test_a_run_that_failed_at_its_start_is_replaced(tmp_path: Path) -> None:
    run = failed_at_start(tmp_path / "run")
    before, notes = run.read_info().run_id, run.path / "notes.txt"
    notes.write_text("mine")
    RunDir.create(run.path, b"other")
    files = {path for path in run.path.rglob("*") if path.is_file()}
    assert files == {run.config, run.run_info, run.lock, notes}
    assert run.config.read_bytes() == b"other" and run.read_info().run_id != before


def test_where_a_file_vanishes_somebody_works(tmp_path: Path) -> None:
    run = failed_at_start(tmp_path / "run")
    (run.eval / "listed-but-gone").symlink_to("nowhere")
    assert run.has_begun() and not run.failed_at_start()


@pytest.mark.parametrize("summary", ['{"status": "running"}', '{"status": "stopped"}', "{}", ""])
def test_a_run_that_did_not_fail_is_not_replaced(summary: str, tmp_path: Path) -> None:
    run = failed_at_start(tmp_path / "run")
    with run.locked(), pytest.raises(RunDirError, match="has a run already"):
        RunDir.create(run.path, b"other")
    run.summary.write_text(summary)
    with pytest.raises(RunDirError, match="has a run that has not begun"):
        RunDir.create(run.path, b"other")
    assert run.config.read_bytes() == CONFIG and run.tasks.exists()


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "thesis.tex").write_text("x")
    with pytest.raises(RunDirError, match="not empty and has no run"):
        RunDir.create(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {"sub"}


def test_empty_folders_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    assert RunDir.create(tmp_path, CONFIG).config.exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirError, match="choose an --out"):
            RunDir.create(path, CONFIG)


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["mkdir", "write"])
def test_a_disk_that_refuses(tmp_path: Path, call: str, refusal: int) -> None:
    with pytest.raises(RunDirError, match="cannot be used"), failing(call, refusal):
        RunDir.create(tmp_path / "run", CONFIG)
    with pytest.raises(RunDirError, match="is not a run directory"):
        RunDir.open(tmp_path / "run")


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"MiB free, at least \d+ MiB are needed; free some space"):
        RunDir.create(tmp_path / "run", CONFIG, min_free_bytes=2**62)
    assert list((tmp_path / "run").iterdir()) == []


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirError, match=r"is not a run directory \(it has no config\.json\)"):
            RunDir.open(path)


def test_second_holder_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(RunDirError, match=rf"is in use by process {child.pid};"), run.locked():
        pass
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with run.locked(), pytest.raises(RunDirError, match=f"process {os.getpid()};"), run.locked():
        pass
    run.lock.write_text("12345678901234567890")
    with run.locked():
        assert run.lock.read_text() == str(os.getpid()), "nothing of a longer pid is left"


def test_a_holder_that_is_about_to_let_go_is_waited_for(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    first = run.locked()
    first.__enter__()
    release = threading.Timer(0.1, first.__exit__, (None, None, None))
    release.start()
    with run.locked():
        assert run.lock.read_text() == str(os.getpid())
    release.join()


def test_holder_that_has_not_signed_yet(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with run.locked():
        run.lock.write_bytes(b"")
        with pytest.raises(RunDirError, match="in use by another process"), run.locked():
            pass


def test_keys_are_there_before_a_run_can_be_found(tmp_path: Path) -> None:
    """A crash in between would leave a run that nobody may speak in."""

    def fails(folder: Path) -> None:
        assert folder == tmp_path / "run" / "keys" and not (tmp_path / "run" / "config.json").exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunDirError, match="keys cannot be used"):
        RunDir.create(tmp_path / "run", CONFIG, create_keys=fails)
    with pytest.raises(RunDirError, match="is not a run directory"):
        RunDir.open(tmp_path / "run")


def test_nobody_else_can_hold_the_locks(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with run.locked(), Lease(run.lease).hold("learner"):
        assert {stat.S_IMODE(path.stat().st_mode) for path in (run.lock, run.lease)} == {0o600}


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    left = [beside(path, UNFINISHED) for path in (run.metrics, run.rollouts, run.summary, run.config)]
    note = beside(Lease(run.lease).note, UNFINISHED)
    for path in (*left, note):
        path.write_bytes(b"half")
    with run.locked(), Lease(run.lease).hold("learner"):
        assert not list(run.path.rglob(".*"))
