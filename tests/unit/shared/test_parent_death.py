"""Children that end with their parent, also when they come too late."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from shared.process.parent_death import PARENT_PID

ROOT = Path(__file__).resolve().parents[3]

PARENT = """
import os, subprocess, sys, time
from shared.process.parent_death import PARENT_PID
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {PARENT_PID: str(os.getpid())},
                         stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""

CHILD = """
import time
from shared.process.parent_death import die_with_parent
die_with_parent()
print("tied", flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, said = parent.stdout.readline().split()
        assert said == "tied"
        process = psutil.Process(int(pid))
        time.sleep(0.1)
        assert process.is_running()
        parent.kill()
        deadline = time.monotonic() + 2.0
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def run(code: str, parent_pid: int | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != PARENT_PID}
    named = {} if parent_pid is None else {PARENT_PID: str(parent_pid)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | named, capture_output=True, text=True, timeout=20
    )


ONCE = "import os; from shared.process.parent_death import *; die_with_parent(); print(PARENT_PID in os.environ)"


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    assert run(ONCE, parent_pid=1 if os.getpid() != 1 else 2).returncode == -signal.SIGKILL


def test_the_name_is_not_handed_on() -> None:
    assert run(ONCE, parent_pid=os.getpid()).stdout == "False\n"


def test_a_process_started_by_hand_is_tied_to_nothing() -> None:
    assert run(ONCE, parent_pid=None).returncode == 0
