"""A process without progress: in Python, in native code, stopped, or asked while it works; and one that does not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.errors import PeerTimeout
from protocol.messages import Heartbeat
from shared.process.watchdog import ASK, FIRED, Watchdog, WatchedActorPort, WatchedLearnerPort, open_stacks
from tests.support.memory_transport import MemoryHub

ROOT = Path(__file__).resolve().parents[3]

BODY = """
import ctypes, sys, time
from pathlib import Path
from shared.process.watchdog import Watchdog, open_stacks
def busy():
    print("ready", flush=True)
    {line}
with open_stacks(Path(sys.argv[1])) as stacks:
    watchdog = Watchdog({limit_s}, stacks)
    busy()
"""
GET_ON = """time.sleep(1.2)
    for _ in range(12):
        watchdog.progress()
        time.sleep(0.1)
    watchdog.rest()
    time.sleep(1.2)"""
LOOP = "watchdog.progress()\n    while True: pass"
# PyDLL keeps the interpreter's lock, so no other Python code runs meanwhile.
NATIVE = "watchdog.progress()\n    ctypes.PyDLL(None).sleep(600)"


class Clock(Watchdog):
    """Counts instead of arming anything."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def progress(self) -> None:
        self.calls.append("progress")

    def rest(self) -> None:
        self.calls.append("rest")


@contextmanager
def started(file: Path, line: str, limit_s: float = 0.3) -> Iterator[subprocess.Popen[str]]:
    """A process that does this, once it is ready."""
    argv = [sys.executable, "-c", BODY.format(limit_s=limit_s, line=line), str(file)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("line", [LOOP, NATIVE], ids=["python", "native"])
def test_a_stall_writes_the_stacks_and_ends_the_process(tmp_path: Path, line: str) -> None:
    file = tmp_path / "stacks.txt"
    with started(file, line) as process:
        assert process.wait(30) == 1
    header, *dump = file.read_text().splitlines()
    assert header.startswith(f"== process {process.pid}, started ")
    assert dump[0].startswith(FIRED) and any("in busy" in frame for frame in dump)


def test_progress_keeps_a_process_alive_and_before_the_first_nothing_is_watched(tmp_path: Path) -> None:
    with started(tmp_path / "stacks.txt", GET_ON, limit_s=1.0) as process:
        assert process.wait(30) == 0
    assert FIRED not in (tmp_path / "stacks.txt").read_text()


@pytest.mark.parametrize("before", [(), (signal.SIGSTOP,)], ids=["running", "stopped"])
def test_who_is_asked_says_where_it_is_and_goes_on(tmp_path: Path, before: tuple[signal.Signals, ...]) -> None:
    file = tmp_path / "stacks.txt"
    with started(file, "time.sleep(600)") as process:
        for number in (*before, ASK, signal.SIGCONT):
            os.kill(process.pid, number)
        deadline = time.monotonic() + 30
        while "in busy" not in file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None
        process.kill()
    assert FIRED not in file.read_text()


def test_a_wait_in_vain_leaves_its_stack_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    with pytest.raises(PeerTimeout), open_stacks(file):
        raise PeerTimeout("Every actor", "a reply", 3.0)
    said = file.read_text()
    assert "Traceback" in said and "test_a_wait_in_vain" in said
    with pytest.raises(ValueError, match="other"), open_stacks(file):
        raise ValueError("other")
    assert file.read_text().count("Traceback") == 1


def test_sending_and_receiving_is_progress_at_either_end() -> None:
    hub = MemoryHub()
    clocks = Clock(), Clock()
    actor = hub.actor_port("actor0")
    ends = WatchedLearnerPort(hub.learner_port(), clocks[0]), WatchedActorPort(actor, clocks[1])
    ends[1].send(Heartbeat(phase="here"))
    heard = ends[0].receive(1.0)
    assert heard is not None and heard[:2] == (actor.peer, Heartbeat(phase="here"))
    ends[0].send(actor.peer, Heartbeat(phase="there"))
    assert ends[1].receive(1.0) == Heartbeat(phase="there")
    for end in ends:
        end.close()
    assert [clock.calls for clock in clocks] == [["progress", "progress", "rest"]] * 2
