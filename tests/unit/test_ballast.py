"""The ballast: how much it takes, and that it never outlives what needs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.ballast import GIB, ballast, to_take
from shared.process.parent_death import PARENT_PID

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu.ballast", "--device", "cpu", "--leave-gib", "8", "--deadline-s"]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "benchmarks.gpu.ballast" in " ".join(child.cmdline())]


def test_all_but_what_is_left_is_taken() -> None:
    assert to_take(140 * GIB, 8 * GIB) == 132 * GIB
    assert to_take(8 * GIB, 8 * GIB) == 0
    with pytest.raises(SystemExit, match=r"only 5\.50 GiB are free on this card, and 8 GiB"):
        to_take(int(5.5 * GIB), 8 * GIB)


def test_it_is_there_for_the_block_alone() -> None:
    with ballast(8, 60, "cpu") as taken:
        assert taken == {"taken_gib": 0.0, "free_gib": 0.0}
        assert len(children()) == 1
    assert children() == []


def test_it_ends_at_its_deadline() -> None:
    done = subprocess.run([*COMMAND, "1"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM
    assert json.loads(done.stdout) == {"taken_gib": 0.0, "free_gib": 0.0}


def test_it_dies_with_its_parent() -> None:
    code = f"""
import os, subprocess
environment = os.environ | {{{PARENT_PID!r}: str(os.getpid())}}
child = subprocess.Popen({[*COMMAND, "60"]!r}, env=environment, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the ballast outlived the process that started it")
