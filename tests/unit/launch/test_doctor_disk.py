"""What doctor sees in the place of a run: the disk, the run directory, its keys and locks, the address of the wire.

Nothing is made up here: real files, modes, locks, sockets and file systems.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.commands.run import make_run
from launch.doctor import run_checks
from launch.doctor.disk import any_address, file_system, look_at_disk, look_at_folder, look_at_link, look_at_run
from shared.config.processes import LinkConfig
from shared.config.tree import Config
from shared.process.lease import Lease
from shared.run.run_dir import RunDir
from tests.support.machines import sound

ROOT = Path(__file__).resolve().parents[3]
MOUNTS = """22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /data rw shared:1 - nfs4 host:/data rw
24 23 0:6 / /data/my\\040disk rw - btrfs /dev/sdb rw
25 22 0:7 / /run rw - tmpfs tmpfs rw
26 22 0:8 / /run rw - ramfs ramfs rw
"""
LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from launch.doctor.disk import look_at_disk
print(look_at_disk(Path(sys.argv[1])).trouble)
"""
HOLD = """
import sys, time
from pathlib import Path
from shared.run.run_dir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(run_path: Path) -> RunDir:
    """A run that has just been made."""
    return make_run(run_path, Config())


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# --- the disk


def test_a_disk_is_tried_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    disk = look_at_disk(tmp_path / "runs" / "first")
    assert disk.folder.path == tmp_path / "runs" / "first"
    assert disk.folder.existing == tmp_path
    assert disk.folder.writable
    assert disk.folder.free > 0
    assert disk.sync_s > 0
    assert disk.keeps_modes
    assert disk.keeps_locks
    assert list(tmp_path.iterdir()) == []


def test_a_run_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = look_at_disk(tmp_path / "file" / "run")
    finding = run_checks.writable(replace(sound(), disk=disk))
    assert finding.level == "error"
    assert finding.found == f"{tmp_path / 'file'} cannot be written to: Not a directory"


def test_a_limit_that_stops_the_first_write_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nobody_may_make_files() -> None:
    disk = look_at_disk(Path("/proc/run"))
    assert disk.trouble
    assert run_checks.writable(replace(sound(), disk=disk)).level == "error"


def test_a_folder_is_the_nearest_one_that_is_there(tmp_path: Path) -> None:
    folder = look_at_folder(tmp_path / "a" / "b")
    assert (folder.path, folder.existing, folder.writable) == (tmp_path / "a" / "b", tmp_path, True)
    (tmp_path / "a").write_text("")
    assert not look_at_folder(tmp_path / "a" / "b").writable


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_a_real_tmpfs_is_known_for_what_it_is() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        disk = look_at_disk(Path(name) / "run")
    assert disk.kind == "tmpfs"
    assert run_checks.file_system(replace(sound(), disk=disk)).level == "warning"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/data/x", "nfs4"),
        ("/database", "ext4"),
        ("/data/my disk/x", "btrfs"),
        ("/run/x", "ramfs"),
    ],
)
def test_the_nearest_mount_and_the_last_one_on_it_counts(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert file_system(Path(path), tmp_path / "mounts") == kind
    assert file_system(Path(path), tmp_path / "none") == "unknown"


# --- the run directory


def test_a_folder_that_is_not_there_is_free(tmp_path: Path) -> None:
    seen = look_at_run(tmp_path / "none")
    assert (seen.state, seen.keys_trouble, seen.keys_mode) == ("new", "", None)
    assert (seen.lock_owner, seen.lease_holder) == ("", "")


def test_other_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    assert look_at_run(tmp_path).state == "new"
    (tmp_path / "deep" / "file").write_text("")
    assert look_at_run(tmp_path).state == "other"
    assert look_at_run(tmp_path / "deep" / "file").state == "other"


def test_a_fresh_run_has_nothing_against_it(run: RunDir) -> None:
    seen = look_at_run(run.path)
    assert (seen.state, seen.keys_trouble, seen.keys_mode) == ("run", "", 0o700)
    machine = replace(sound(), run_dir=run.path, run=seen)
    assert {check(machine).level for check in (run_checks.keys, run_checks.lock, run_checks.lease)} == {"ok"}


def test_a_run_that_failed_at_its_start_is_as_good_as_none(run: RunDir) -> None:
    run.summary.write_text('{"status": "failed"}')
    seen = look_at_run(run.path)
    assert (seen.state, seen.started) == ("new", False)
    (run.journal / "segment").write_bytes(b"x")
    assert look_at_run(run.path).state == "run"


def test_a_key_that_others_can_read(run: RunDir) -> None:
    (key, *_) = sorted(run.keys.glob("learner*.json"))
    key.chmod(0o644)
    finding = run_checks.keys(replace(sound(), run_dir=run.path, run=look_at_run(run.path)))
    assert finding.level == "error"
    assert f"{key} can be read by others" in finding.found
    assert f"chmod 600 {key}" in finding.remedy


def test_a_folder_of_keys_that_is_open(run: RunDir) -> None:
    run.keys.chmod(0o755)
    finding = run_checks.keys(replace(sound(), run_dir=run.path, run=look_at_run(run.path)))
    assert finding.level == "error"
    assert f"chmod 700 {run.keys}" in finding.remedy


def test_a_key_that_is_lost(run: RunDir) -> None:
    (key, *_) = sorted(run.keys.glob("learner*.json"))
    key.unlink()
    finding = run_checks.keys(replace(sound(), run_dir=run.path, run=look_at_run(run.path)))
    assert finding.level == "error"
    assert str(key) in finding.found


def test_a_run_that_a_live_process_has_locked(run: RunDir) -> None:
    argv = [sys.executable, "-c", HOLD, str(run.path)]
    holder = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        seen = look_at_run(run.path)
    finally:
        holder.kill()
        holder.communicate()
    assert seen.lock_owner == f"process {holder.pid}"
    finding = run_checks.lock(replace(sound(), run_dir=run.path, run=seen))
    assert (finding.level, finding.found) == ("error", f"{run.path} is in use by process {holder.pid}")
    # The file stays, the lock does not.
    assert run.lock.exists()
    assert look_at_run(run.path).lock_owner == ""


def test_looking_leaves_a_free_lock_free_and_makes_none(run: RunDir) -> None:
    run.lock.unlink()
    look_at_run(run.path)
    assert not run.lock.exists()
    with run.locked():
        pass
    look_at_run(run.path)
    with run.locked():
        assert look_at_run(run.path).lock_owner == f"process {os.getpid()}"


def test_a_process_that_computes_in_the_run_is_seen(run: RunDir) -> None:
    with Lease(run.lease).hold("actor0"):
        assert look_at_run(run.path).lease_holder == "another process"
        assert look_at_run(run.path).lease_holder == "another process"
    assert look_at_run(run.path).lease_holder == ""


# --- the wire


def test_a_local_socket_needs_no_port_and_no_folder_is_made(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    link = look_at_link(LinkConfig(), short / "run")
    assert (link.address, link.trouble) == ("ipc", "")
    assert list(short.iterdir()) == []


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        link = look_at_link(LinkConfig(endpoint=address), Path("run"))
    assert (link.address, link.busy) == (address, True)
    assert run_checks.address(replace(sound(), link=link)).level == "error"
    assert look_at_link(LinkConfig(endpoint=address), Path("run")).trouble == "", "free again, and not kept by the look"


@pytest.mark.parametrize(("family", "all_of_it"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_port_that_is_taken_for_one_kind_of_address(family: socket.AddressFamily, all_of_it: str) -> None:
    """`*` means both kinds."""
    if family == socket.AF_INET6 and any_address() != all_of_it:
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as other:
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind((all_of_it, 0))
        other.listen(1)
        port = other.getsockname()[1]
        link = look_at_link(LinkConfig(endpoint="tcp://host:5757", bind=f"tcp://*:{port}"), Path("run"))
    assert link.busy


@pytest.mark.parametrize("bind", ["tcp://*:0", "tcp://127.0.0.1:x", "tcp://127.0.0.1:65536", "tcp://127.0.0.1"])
def test_a_port_that_is_none(bind: str) -> None:
    link = look_at_link(LinkConfig(endpoint="tcp://host:5757", bind=bind), Path("run"))
    assert link.trouble == "the port must be a number from 1 to 65535"
    assert run_checks.address(replace(sound(), link=link)).level == "error"


def test_an_address_of_another_machine() -> None:
    # 203.0.113.0/24 is for documents; no machine has it.
    link = look_at_link(LinkConfig(endpoint="tcp://203.0.113.1:5757"), Path("run"))
    assert link.trouble
    assert not link.busy
    finding = run_checks.address(replace(sound(), link=link))
    assert finding.level == "error"
    assert "set link.bind" in finding.remedy


@pytest.mark.parametrize("host", ["*", "127.0.0.1", "localhost"])
def test_what_is_bound_counts_not_what_is_dialled(host: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    link = look_at_link(LinkConfig(endpoint="tcp://203.0.113.1:5757", bind=f"tcp://{host}:{port}"), Path("run"))
    assert (link.address, link.trouble) == (f"tcp://{host}:{port}", "")
