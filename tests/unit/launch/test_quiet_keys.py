"""The terminal is changed by the job in its foreground, and by no other."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KEYS = """
import os, sys, termios
from launch.display.screens import LOCAL_FLAGS, quiet_keys
def echoes(): return bool(termios.tcgetattr(0)[LOCAL_FLAGS] & termios.ECHOCTL)
before = echoes()
with quiet_keys(0):
    inside = echoes()
print(before, inside, echoes(), flush=True)
"""
LEADER = """
import os, subprocess, sys
os.close(0)
os.set_inheritable(os.open(sys.argv[1], os.O_RDWR), True)
group = None if sys.argv[2] == "front" else 0
child = subprocess.Popen([sys.executable, "-c", sys.argv[3]], process_group=group)
_, status = os.waitpid(child.pid, os.WUNTRACED)
print("stopped" if os.WIFSTOPPED(status) else f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
if os.WIFSTOPPED(status):
    os.kill(child.pid, 9)
"""


def said(place: str) -> str:
    """What a job says that quiets its keys in the foreground or in the background of a terminal."""
    master, slave = pty.openpty()
    try:
        attributes = termios.tcgetattr(slave)
        attributes[3] |= termios.ECHOCTL
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        argv = [sys.executable, "-c", LEADER, os.ttyname(slave), place, KEYS]
        done = subprocess.run(argv, cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=60)
    finally:
        os.close(master)
        os.close(slave)
    return done.stdout + done.stderr


def test_the_job_in_the_foreground_prints_no_keys() -> None:
    assert said("front") == "True False True\nended 0\n"


def test_a_job_in_the_background_leaves_the_terminal_alone() -> None:
    assert said("background") == "True True True\nended 0\n"
