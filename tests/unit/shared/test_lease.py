"""One holder at a time, between real processes, however they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.process.free_memory import LONG_TURN_S
from shared.process.lease import PLACES, Holder, Lease
from shared.run.file_lock import open_lock, try_lock

HOLDER = """
import sys, time
from pathlib import Path
from shared.process.lease import Lease
with Lease(Path(sys.argv[1])).hold("actor0"):
    print("held", flush=True)
    time.sleep(60)
"""
COUNTER = """
import sys, time
from pathlib import Path
from shared.process.lease import Lease
path = Path(sys.argv[1])
counter = path.with_name("counter")
for _ in range(40):
    with Lease(path).hold("counter"):
        value = int(counter.read_text())
        time.sleep(0.0005)
        counter.write_text(str(value + 1))
"""


class GaveUpWaiting(Exception):
    """Raised in a wait, to end it."""


def give_up() -> None:
    raise GaveUpWaiting


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def wait_until_held(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"


def holder(lease: Lease) -> Any:
    """What lease.json says; None if there is none."""
    return msgspec.json.decode(lease.note.read_bytes(), type=Holder) if lease.note.exists() else None


def test_a_free_lease_costs_no_wait_and_leaves_no_note(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner", meanwhile=give_up) as turn:
        assert 0 <= turn.waited_s < 0.5
        assert (holder(lease).role, holder(lease).pid) == ("learner", os.getpid())
    assert {path.name for path in tmp_path.iterdir()} == {"lease"}


def test_the_note_says_only_what_is_known(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        assert set(msgspec.json.decode(lease.note.read_bytes())) == {"role", "pid", "since"}


def test_released_when_the_block_raises(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with pytest.raises(KeyError), lease.hold("learner"):
        raise KeyError
    assert holder(lease) is None
    with lease.hold("learner", meanwhile=give_up):
        pass


def test_two_takers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with (
        Lease(tmp_path / "lease").hold("learner"),
        pytest.raises(GaveUpWaiting),
        Lease(tmp_path / "lease").hold("evaluator", meanwhile=give_up),
    ):
        pass


def test_a_python_that_does_not_know_the_lock_takes_it_too(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    child = start("import fcntl\nvars(fcntl).pop('F_OFD_SETLK', None)\n" + HOLDER, lease.path)
    try:
        wait_until_held(child)
        with pytest.raises(GaveUpWaiting), lease.hold("actor0", meanwhile=give_up):
            pass
    finally:
        child.kill()
        child.communicate()


def test_a_wait_that_is_given_up_leaves_the_holder_alone(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        with pytest.raises(GaveUpWaiting), lease.hold("actor0", meanwhile=give_up):
            pass
        assert holder(lease).role == "learner"


def test_who_waits_can_go_on_with_other_work(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    child = start(HOLDER, lease.path)
    wait_until_held(child)
    beats: list[float] = []

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 20:
            child.kill()

    with lease.hold("learner", meanwhile=beat) as turn:
        assert len(beats) >= 20 and turn.waited_s > 0
    child.communicate()


def test_sigkill_of_the_holder_frees_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    child = start(HOLDER, lease.path)
    wait_until_held(child)
    assert (holder(lease).role, holder(lease).pid) == ("actor0", child.pid)
    child.send_signal(signal.SIGKILL)
    with lease.hold("learner"):
        assert holder(lease).role == "learner", "the dead one's note is replaced"
    child.communicate()


def test_a_wait_is_told(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    child = start(HOLDER.replace("60", "0.3"), lease.path)
    wait_until_held(child)
    with lease.hold("learner") as turn:
        assert 0.1 < turn.waited_s < 10
    child.communicate()


def test_never_two_at_once_among_processes(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    children = [start(COUNTER, tmp_path / "lease") for _ in range(2)]
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0
    assert (tmp_path / "counter").read_text() == "80"


TAKER = """
import os, sys, time
from pathlib import Path
from shared.process.lease import Lease
path, name, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
log = os.open(path.with_name("turns"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("ready", flush=True)
sys.stdin.readline()
lease = Lease(path)
for _ in range(turns):
    with lease.hold(name):
        os.write(log, name.encode())
        time.sleep(0.004)
"""
MOST_IN_A_ROW = 0.1
"""Share of the turns that may follow one of the same process: a busy machine may keep it from asking in time."""


def turns_of(folder: Path, names: str, turns: int) -> str:
    """Who had the turns, in their order, while all of these wanted them without a pause."""
    argv = [sys.executable, "-c", TAKER, folder / "lease"]
    pipe = subprocess.PIPE
    children = [subprocess.Popen([*argv, name, str(turns)], text=True, stdin=pipe, stdout=pipe) for name in names]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=60)
        assert child.returncode == 0
    text = (folder / "turns").read_text()
    assert {name: text.count(name) for name in names} == dict.fromkeys(names, turns)
    # Before its last turn begins, each wants to go on; the beginning is left out too, where one was first.
    return text[2 * len(names) : min(text.rindex(name) for name in names)]


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_turns_go_round(tmp_path: Path, names: str) -> None:
    """With two runs of two processes each, no pair takes the turns from the other."""
    turns = turns_of(tmp_path, names, turns=40)
    assert len(turns) > 20 * len(names)
    rounds = [turns[place : place + len(names)] for place in range(len(turns) - len(names) + 1)]
    broken = sum(len(set(each)) < len(names) for each in rounds)
    assert broken <= MOST_IN_A_ROW * len(rounds), turns


def test_the_lease_has_locks_of_one_kind(tmp_path: Path) -> None:
    """NFS and CIFS make flock a lock of all bytes: a place in the line and flock would wait for each other there."""
    lease = Lease(tmp_path / "lease")
    fd = open_lock(lease.path)
    assert try_lock(fd)
    with lease.hold("learner", meanwhile=give_up):
        pass
    os.close(fd)


def test_who_gave_up_or_died_in_the_line_holds_nobody_up(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        dead = start(HOLDER, lease.path)
        for _ in range(3):
            with pytest.raises(GaveUpWaiting), lease.hold("actor0", meanwhile=give_up):
                pass
        time.sleep(0.5)
        dead.kill()
        dead.communicate()
    with lease.hold("learner", meanwhile=give_up):
        pass


def test_more_may_wait_than_have_a_place(tmp_path: Path) -> None:
    path, had = tmp_path / "lease", list[int]()

    def wait(number: int) -> None:
        with Lease(path).hold("one of many"):
            had.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(PLACES + 4)]
    with Lease(path).hold("learner"):
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert had == []
    for thread in threads:
        thread.join(30)
    assert sorted(had) == list(range(PLACES + 4))


def test_an_executed_program_does_not_keep_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with lease.hold("learner"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with lease.hold("learner", meanwhile=give_up):
        child.kill()
    child.wait()


FREES = """
import re, sys, time
from pathlib import Path
from shared.process.lease import Lease, NoLease

def resident_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

file, megabytes, turn_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
before = resident_mb()
lease = Lease(file) if sys.argv[5] == "a lease" else NoLease(overlaps=sys.argv[5] == "at once")
with lease.hold("learner"):
    blocks = [bytearray(50_000) for _ in range(20 * megabytes)]
    # It lies behind the others, so that the heap cannot shrink.
    last = bytearray(50_000)
    del blocks
    within = resident_mb() - before
    time.sleep(turn_s)
until = time.monotonic() + (30 if sys.argv[4] == "returned" else 1)
while resident_mb() - before >= within / 4 and time.monotonic() < until:
    time.sleep(0.01)
print(within, resident_mb() - before)
"""


@pytest.mark.parametrize(
    ("megabytes", "turn_s", "what", "lease"),
    [
        (400, 0.0, "returned", "a lease"),
        (60, LONG_TURN_S, "returned", "a lease"),
        (60, 0.0, "kept", "a lease"),
        (60, LONG_TURN_S, "returned", "in turns"),
        (60, LONG_TURN_S, "kept", "at once"),
    ],
    ids=["much", "little after a long turn", "little after a short turn", "cores for all", "at once"],
)
def test_memory_that_was_freed_in_a_turn_is_the_others_afterwards(
    tmp_path: Path, megabytes: int, turn_s: float, what: str, lease: str
) -> None:
    child = start(FREES, tmp_path / "lease", str(megabytes), str(turn_s), what, lease)
    said, _ = child.communicate(timeout=60)
    within, after = map(int, said.split())
    assert within > 0.75 * megabytes
    assert (after < within / 4) == (what == "returned")
