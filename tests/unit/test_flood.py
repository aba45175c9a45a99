"""One actor of the run does all it can to fill the learner's memory and time; the other one's run goes on."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.live_run import live_run

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1.5
BACKLOG = 64 * 2**20
ENDINGS = {
    "heartbeats": "other floods",
    "garbage": "other was refused too often",
    "hellos": "other was refused too often",
    "connections": "its actor connects too often: other",
    "unasked groups": "",
    "huge frames": "",
    "endless message": "bytes that the learner has not taken yet",
}


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


NARROW = """
import json, os, resource, select, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from tests.support.live_run import live_run

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

with live_run(Path(sys.argv[1])) as run:
    seen, memory = [], resident()
    print(run.endpoint, flush=True)
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        run.goes_on()
        (Path(sys.argv[1]) / "a file of the run").write_text("can be written")
        seen.append(len(os.listdir("/proc/self/fd")))
    grown = resident() - memory
print(json.dumps({"descriptors": max(seen), "memory": grown, "steps": run.steps, "counts": run.port.sparse_log.counts}))
"""
"""A run of its own in a process that may have no more descriptors than most systems give, until stdin says stop."""


@pytest.mark.parametrize("kind", [pytest.param("connects", marks=pytest.mark.long), "all"])
def test_unauthenticated_peers_leave_a_run_its_descriptors(tmp_path: Path, kind: str) -> None:
    argv = [sys.executable, "-c", NARROW, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as run:
        assert run.stdout is not None
        host, port = run.stdout.readline().strip().removeprefix("tcp://").split(":")
        attack = [sys.executable, "-m", "tests.support.unauthenticated", kind, host, port, str(2 * SECONDS)]
        tried = int(subprocess.run(attack, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        out, log = run.communicate("stop\n", timeout=100)
    assert run.returncode == 0, log
    found = json.loads(out)
    assert tried > 1000 and found["steps"] > 4
    assert found["descriptors"] < 1000, found
    assert found["memory"] < BACKLOG, found
    assert len(log.splitlines()) < 100, log


@contextmanager
def watched() -> Iterator[list[int]]:
    """Resident memory, looked at all the time."""
    seen, stop = [resident()], threading.Event()

    def look() -> None:
        while not stop.wait(0.01):
            seen.append(resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_flood_starves_nobody_and_fills_nothing(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with live_run(tmp_path, max_backlog_bytes=BACKLOG, allowance=500.0) as run, watched() as memory:
        argv = [
            sys.executable,
            "-m",
            "tests.support.flooder",
            kind,
            run.endpoint,
            str(run.keys / "other.json"),
            str(SECONDS),
        ]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as flooder:
            while flooder.poll() is None:
                run.goes_on()
            assert flooder.stdout is not None
            assert flooder.returncode == 0 and int(flooder.stdout.read()) > 0
        assert max(memory) - memory[0] < 4 * BACKLOG, f"grew by {(max(memory) - memory[0]) >> 20} MiB"
    assert ENDINGS[kind] in caplog.text
    assert not run.port.allowances.is_banned("actor0")
