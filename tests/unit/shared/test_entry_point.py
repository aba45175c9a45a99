"""The entry point of a process: errors become an exit code, and one sentence if the user can fix them."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.free_memory import peak_memory_mb

BODY = """
import logging, sys
from protocol.errors import AddressError, PeerTimeout, SecurityError
from shared.errors import ConfigError
from shared.process.entry_point import run_process

def body():
    logging.getLogger("part").info("begins")
    {line}

sys.exit(run_process("learner", body))
"""


def run(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BODY.format(line=line)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("raise ConfigError('run.steps is 0; give at least 1.')", "run.steps is 0; give at least 1."),
        ("raise SecurityError('The key k is exposed.')", "The key k is exposed."),
        ("raise AddressError('It cannot listen at x; choose another.')", "It cannot listen at x; choose another."),
    ],
)
def test_what_a_user_can_fix_is_one_sentence_and_code_2(line: str, sentence: str) -> None:
    done = run(line)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {sentence}"
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_silent_peer_is_one_sentence_and_code_1_so_that_an_actor_is_started_again() -> None:
    done = run("raise PeerTimeout('Every actor', 'filled order x', 3.0)")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = "error: Every actor said nothing for 3.0 s while filled order x was awaited."
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize(("before", "after"), [("-Sn 256 -Hn 4096", 4096), ("-Sn 256", 8192), ("-Sn 9000", 9000)])
def test_a_process_may_have_as_many_descriptors_as_it_needs(before: str, after: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 9000:
        pytest.skip(f"this machine allows {hard} descriptors")
    body = BODY.format(line="import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    limits = "; ".join(f"ulimit -{limit.strip()}" for limit in before.split("-") if limit)
    argv = ["bash", "-c", f'{limits}; exec "$0" -c "$1"', sys.executable, body]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == after


def test_too_few_descriptors_are_named_before_anything_fails_for_want_of_them() -> None:
    argv = ["bash", "-c", 'ulimit -n 24; exec "$0" -c "$1"', sys.executable, BODY.format(line="pass")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = "error: A process may open 24 files and connections here, but needs at least 40; "
    assert done.stderr.splitlines()[-1] == said + "raise the limit with `ulimit -n 1024`."


def test_a_crash_shows_its_traceback_and_code_1() -> None:
    done = run("raise RuntimeError('a bug')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1] == "RuntimeError: a bug"


def test_a_good_end_is_code_0_and_logs_name_the_process() -> None:
    done = run("pass")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].endswith(" learner begins")


def test_peak_memory_is_in_mebibytes_and_only_grows() -> None:
    before = peak_memory_mb()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    after = peak_memory_mb()
    assert 10 < before <= after < 100_000


READER = """
import ctypes, os, signal, sys
from shared.process.entry_point import keep_to_itself
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
    # A change of user has closed it already.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
ready, told = os.pipe()
child = os.fork()
if child == 0:
    {line}
    os.write(told, b"x")
    signal.pause()
os.read(ready, 1)
try:
    print(len(open(f"/proc/{{child}}/environ", "rb").read()) > 0)
except PermissionError:
    print("refused")
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize(("line", "found"), [("pass", "True"), ("keep_to_itself()", "refused")])
def test_another_process_of_the_same_user_does_not_see_our_environment(line: str, found: str) -> None:
    command = [sys.executable, "-c", READER.format(line=line)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == f"{found}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_learner_and_actor_keep_to_themselves() -> None:
    done = run("import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))")
    assert (done.returncode, done.stdout) == (0, "0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_without_room_for_the_sentence_does_not_change_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", BODY.format(line="raise ConfigError('x')")]
        assert subprocess.run(command, stderr=full, timeout=60, check=False).returncode == 2
