"""One actor of the run does all it can to fill the learner's memory and time; the other one's run goes on."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live_run import live_run

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1.5
BACKLOG = 64 * 2**20
ENDINGS = {
    "heartbeats": "other floods",
    "garbage": "other was refused too often",
    "hellos": "other was refused too often",
    "connections": "its actor makes too many: other",
    "unasked groups": "",
    "huge frames": "",
    "endless message": "bytes came that could not be taken in",
}


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


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
        argv = [sys.executable, "-m", "tests.flooder", kind, run.endpoint, str(run.keys / "other.json"), str(SECONDS)]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as flooder:
            while flooder.poll() is None:
                run.goes_on()
            assert flooder.stdout is not None
            assert flooder.returncode == 0 and int(flooder.stdout.read()) > 0
        assert max(memory) - memory[0] < 4 * BACKLOG, f"grew by {(max(memory) - memory[0]) >> 20} MiB"
    assert ENDINGS[kind] in caplog.text
    assert not run.port.conduct.is_shut_out("actor0")
