"""One holder at a time, between real processes, whatever becomes of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.gpu_lease import Holder, Lease

HOLDER = """
import sys, time
from pathlib import Path
from shared.gpu_lease import Lease
with Lease(Path(sys.argv[1])).hold("actor0", num_bytes=123):
    print("held", flush=True)
    time.sleep(60)
"""
COUNTER = """
import sys, time
from pathlib import Path
from shared.gpu_lease import Lease
path, deadline_s = Path(sys.argv[1]), float(sys.argv[2]) or None
counter = path.with_name("counter")
for _ in range(40):
    with Lease(path).hold("counter", deadline_s=deadline_s):
        value = int(counter.read_text())
        time.sleep(0.0005)
        counter.write_text(str(value + 1))
"""


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def wait_until_held(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"


def test_free_lease_costs_no_wait_and_leaves_no_note(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner", num_bytes=7) as waited_s:
        assert 0 <= waited_s < 0.5
        holder = lease.holder()
        assert isinstance(holder, Holder)
        assert (holder.role, holder.pid, holder.num_bytes) == ("learner", os.getpid(), 7)
        assert (tmp_path / "lease.json").exists()
    assert lease.holder() is None
    assert {path.name for path in tmp_path.iterdir()} == {"lease"}


def test_released_when_the_block_raises(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with pytest.raises(KeyError), lease.hold("learner"):
        raise KeyError
    assert lease.holder() is None
    with lease.hold("learner", deadline_s=0.0):
        pass


def test_two_takers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with (
        Lease(tmp_path / "lease").hold("learner"),
        pytest.raises(TimeoutError, match=r"evaluator waited 0\.1 s .*learner \(process \d+, since "),
        Lease(tmp_path / "lease").hold("evaluator", deadline_s=0.1),
    ):
        pass


def test_timeout_without_a_note_still_says_why(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        lease.note.unlink()
        with pytest.raises(TimeoutError, match="another process holds"), lease.hold("actor0", deadline_s=0.0):
            pass


@pytest.mark.parametrize("deadline_s", [None, 30.0])
def test_sigkill_of_the_holder_frees_it(tmp_path: Path, deadline_s: float | None) -> None:
    lease = Lease(tmp_path / "lease")
    child = start(HOLDER, lease.path)
    wait_until_held(child)
    with pytest.raises(TimeoutError, match=rf"actor0 \(process {child.pid}, "), lease.hold("learner", deadline_s=0.05):
        pass
    holder = lease.holder()
    assert holder is not None
    assert holder.num_bytes == 123
    killed_at = time.monotonic()
    child.send_signal(signal.SIGKILL)
    with lease.hold("learner", deadline_s=deadline_s):
        assert time.monotonic() - killed_at < 5
        holder = lease.holder()
        assert holder is not None
        assert holder.role == "learner", "the dead one's note is replaced"
    child.communicate()


def test_a_wait_is_told(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    child = start(HOLDER.replace("60", "0.3"), lease.path)
    wait_until_held(child)
    with lease.hold("learner") as waited_s:
        assert 0.1 < waited_s < 10
    child.communicate()


@pytest.mark.parametrize("deadline_s", [0, 30])
def test_never_two_at_once_among_processes(tmp_path: Path, deadline_s: int) -> None:
    (tmp_path / "counter").write_text("0")
    children = [start(COUNTER, tmp_path / "lease", deadline_s) for _ in range(2)]
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0
    assert (tmp_path / "counter").read_text() == "80"


def test_an_executed_program_does_not_keep_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with lease.hold("learner", deadline_s=0.0):
        child.kill()
    child.wait()
