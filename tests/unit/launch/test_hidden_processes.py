"""Where /proc hides what keeps its memory to itself, as learner and actor do, from all but root (hidepid)."""

import subprocess
import sys

import pytest

from tests.support.runs import ROOT

SHELL = (
    'mount -t proc -o hidepid=1 proc /proc && exec setpriv --bounding-set=-sys_ptrace --regid 65534 --clear-groups "$@"'
)
IN_A_CHILD_OF_ITS_OWN = """
import os, signal, sys, tempfile
from pathlib import Path
from launch.ui.control import learner_of
from shared.errors import UserError
from shared.process.children import is_stopped
from shared.process.entry_point import keep_to_itself

asks, answer = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    keep_to_itself()
    os.write(answer, b"hidden")
    signal.pause()
os.read(asks, 100)
try:
    Path(f"/proc/{pid}/stat").read_text()
    os.kill(pid, signal.SIGKILL)
    sys.exit("nothing is hidden here")
except PermissionError:
    pass
print(is_stopped(pid))
with tempfile.TemporaryDirectory() as folder:
    run = Path(folder)
    (run / "lock").write_text(str(pid))
    try:
        learner_of(run)
    except UserError as error:
        print(error)
os.kill(pid, signal.SIGKILL)
"""


def test_a_hidden_process_counts_as_not_stopped_and_the_window_says_that_it_cannot_be_seen() -> None:
    wrapped = ["unshare", "--mount", "sh", "-c", SHELL, "sh"]
    if subprocess.run([*wrapped, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a /proc that hides processes")
    argv = [*wrapped, sys.executable, "-c", IN_A_CHILD_OF_ITS_OWN]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    stopped, sentence = done.stdout.splitlines()
    assert stopped == "False"
    assert "which cannot be seen from here; stop it where it was started." in sentence
