"""Everything a reward function can do wrong, one fault a time: its outcome, and the others' scores untouched."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actor.scoring.job_queue import JobQueue
from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig
from tests.support.runs import ROOT

# Each completion says what is to happen to the worker that scores it. The fragment goes into a function's body.
FAULTS = {
    "hang": "time.sleep(60)",
    "endless loop in C": "'a' * 40 + '!' and re.match(r'(a+)+$', 'a' * 60 + '!')",
    "segfault": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "_exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "exception": "1 / 0",
    "memory bomb": "kept.append(bytearray(400 << 20))",
    "shared memory bomb": "kept.append(mmap.mmap(-1, 4 << 30))",
    "file bomb": "open('bomb', 'wb').truncate(300 << 20)",
    "nan": "return math.nan",
    "infinity": "return math.inf",
    "type": "return 'one'",
    "none": "return None",
    "short": "raise Short",
    "close": "os.closerange(0, 64)",
    "garbage": "os.write(4, b'garbage' * 100)",
    "not UTF-8": r"os.write(4, b'\0\0\0\x09\x81\xa4type\xa2\xff\xfe'); time.sleep(60)",
    "lists without end": r"os.write(4, b'\0\0\x13\x97\x82\xa4type\xa5Ready\xa1x' + b'\x91' * 5000 + b'\xc0'); spin()",
    "huge frame": "os.write(4, bytes([255] * 8))",
    "limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); open('/dev/null')",
    "kill fork server": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
}
EXPECTED = {
    "hang": (Outcome.TIMEOUT, "stopped after"),
    "endless loop in C": (Outcome.TIMEOUT, "stopped after"),
    "segfault": (Outcome.ERROR, "SIGSEGV"),
    "abort": (Outcome.ERROR, "SIGABRT"),
    "_exit": (Outcome.ERROR, "exit code 0"),
    "sys.exit": (Outcome.ERROR, "SystemExit"),
    "exception": (Outcome.ERROR, "ZeroDivisionError"),
    "memory bomb": (Outcome.ERROR, "MemoryError"),
    "shared memory bomb": (Outcome.ERROR, "OSError"),
    "file bomb": (Outcome.ERROR, "OSError"),
    "nan": (Outcome.ERROR, "nan"),
    "infinity": (Outcome.ERROR, "inf"),
    "type": (Outcome.ERROR, "type str"),
    "none": (Outcome.ABSTAIN, "None"),
    "short": (Outcome.ERROR, "0 values for 1"),
    "close": (Outcome.ERROR, "exit code"),
    "garbage": (Outcome.ERROR, "no verdict"),
    "not UTF-8": (Outcome.ERROR, "no verdict"),
    "lists without end": (Outcome.ERROR, "no verdict"),
    "huge frame": (Outcome.ERROR, "no verdict"),
    "limits": (Outcome.ERROR, "OSError"),
    "kill fork server": (Outcome.ERROR, "lost its fork server"),
}
HEAD = """
import ctypes, math, mmap, os, re, resource, signal, sys, time
kept = []
class Short(Exception):
    pass
def spin():
    while True:
        pass
def act(text):
"""
TAIL = """
    return 0.75
def reward(completions, **_):
    try:
        return [act(text) for text in completions]
    except Short:
        return []
"""
HARMLESS = {
    "slow": "time.sleep(0.3)",
    "cwd": "os.chdir('/')",
    "environment": "os.environ.clear()",
    "umask": "os.umask(0)",
    "alarm": "signal.alarm(1)",
    "handlers": "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 10, 12, 13, 14, 15, 17)]",
    "soft limit": "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))",
    "stdin": "assert sys.stdin.read() == ''",
    "stdout": "sys.stdout.close(); sys.stderr.close()",
    "flood": "[os.write(1, b'x' * 65536) for _ in range(2000)]",
    "core": "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
    "fork": "os.fork() or time.sleep(60)",
    "double fork": "if os.fork() == 0:\n            os.setsid(); os.fork() and os._exit(0); time.sleep(60)",
}


def source(bodies: dict[str, str]) -> str:
    """A reward file with a branch for each."""
    branches = [f"    if text == {name!r}:\n        {body}\n" for name, body in bodies.items()]
    return HEAD + "".join(branches) + TAIL


def job(text: str) -> ScoreJob:
    return ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns={"answer": "18"})


def nothing() -> None:
    pass


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScorePool]:
    """Two workers; afterwards no process, descriptor or file of theirs is left."""
    # Apart from scratch folders of other programs on this machine.
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    file = tmp_path / "reward.py"
    file.write_text(source(FAULTS | HARMLESS))
    # What earlier tests have left must not be collected in between: a mapped file has a descriptor.
    gc.collect()
    before = footprint()
    config = VerifierConfig(kind="callable", function=f"{file}:reward", workers=2, limit_s=1.0, memory_mb=200)
    with contextlib.closing(ScorePool(config)) as pool:
        yield pool
    assert footprint() == before


def footprint() -> tuple[set[int], int, set[str]]:
    """Processes below this one (adopted ones and zombies too), open descriptors, scratch folders."""
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tandem-scoring-")}
    return below, len(os.listdir("/proc/self/fd")), folders


def around(pool: ScorePool, *texts: str) -> list[Verdict]:
    """The verdicts on these, after a check that others in the same batch have their scores."""
    jobs = [job(text) for text in ("a", *texts, "b", "c", "d")]
    verdicts = pool.score(jobs, nothing)
    inside = slice(1, 1 + len(texts))
    others = verdicts[:1] + verdicts[1 + len(texts) :]
    assert [(verdict.outcome, verdict.score) for verdict in others] == [(Outcome.CORRECT, 0.75)] * 4
    return verdicts[inside]


def test_every_fault_has_its_outcome_and_the_others_their_scores(pool: ScorePool) -> None:
    for name in FAULTS:
        outcome, note = EXPECTED[name]
        verdict = around(pool, name)[0]
        assert (name, verdict.outcome, verdict.score) == (name, outcome, 0.0)
        assert note in verdict.note


def test_all_faults_in_one_batch(pool: ScorePool) -> None:
    verdicts = around(pool, *FAULTS)
    assert [verdict.outcome for verdict in verdicts] == [outcome for outcome, _ in EXPECTED.values()]


def test_who_runs_beside_the_end_of_the_fork_server_is_not_blamed_for_it(pool: ScorePool) -> None:
    """Also if its call has crashed before, in which it was one of several, and its worker has done nothing else."""
    queue = JobQueue([job("kill fork server"), job("slow")], 2, one_by_one=False)
    queue.suspects |= {0, 1}
    killer, beside = pool.finish(queue, nothing)
    assert (killer.outcome, killer.note) == (Outcome.ERROR, "The scoring worker lost its fork server.")
    assert (beside.outcome, beside.score) == (Outcome.CORRECT, 0.75)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_call_leaves_behind_does_not_reach_the_next(pool: ScorePool, name: str) -> None:
    assert around(pool, name)[0].outcome is Outcome.CORRECT
    time.sleep(1.1 if name == "alarm" else 0.0)
    assert around(pool) == []
    # What hides in another session is in the tree of the fork server and goes with the pool: the fixture looks.


def test_a_flood_is_cut_in_the_log_and_its_last_line_is_kept(
    pool: ScorePool, capfd: pytest.CaptureFixture[str]
) -> None:
    around(pool, "flood")
    shown = capfd.readouterr().err
    assert 65_536 <= shown.count("x") <= 4 * 65_536
    assert "prints more than is shown" in shown


def test_processor_time_has_its_own_limit(tmp_path: Path) -> None:
    text = "resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY)); spin()"
    (tmp_path / "reward.py").write_text(source({"spin": text}))
    config = VerifierConfig(kind="callable", function=f"{tmp_path}/reward.py:reward", limit_s=60.0)
    with contextlib.closing(ScorePool(config)) as pool:
        verdict = around(pool, "spin")[0]
    assert (verdict.outcome, verdict.note) == (Outcome.TIMEOUT, "The scoring worker used up its processor time.")


def test_the_last_line_before_a_crash_is_in_the_note(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import os\ndef reward(**_):\n    print('one')\n    print('two', flush=True)\n    os._exit(9)\n")
    with contextlib.closing(ScorePool(VerifierConfig(kind="callable", function=f"{file}:reward"))) as pool:
        verdict = pool.score([job("a")], nothing)[0]
    assert verdict.note == "The scoring worker ended with exit code 9. It last printed: two"


def test_nothing_is_left_after_a_hundred_faults(pool: ScorePool) -> None:
    before = footprint()
    assert len(before[0]) == 3
    verdicts = pool.score([job("double fork" if n % 4 else "segfault") for n in range(100)], nothing)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.CORRECT, Outcome.ERROR}
    for slot in pool.slots:
        slot.worker.kill()
        slot.start()
    pool.wait_until_ready()
    settle(lambda: len(footprint()[0]) == len(before[0]))
    after = footprint()
    # The workers are others now, and as many.
    assert (len(after[0]), after[1], after[2]) == (len(before[0]), before[1], before[2])


def settle(is_so, within_s: float = 10.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + within_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_stopped_fork_server_does_not_keep_the_pool_from_closing(pool: ScorePool) -> None:
    os.kill(pool.fork_server.pid, signal.SIGSTOP)
    pool.close()
    assert not psutil.pid_exists(pool.fork_server.pid)


def test_one_hostile_completion_costs_a_builtin_verifier_only_itself() -> None:
    with contextlib.closing(ScorePool(VerifierConfig(workers=2))) as pool:
        victims = [worker.pid for worker in psutil.Process(pool.fork_server.pid).children()]
        jobs = [job(f"#### {18 + n % 2}") for n in range(500)]

        def kill_one() -> None:
            if victims:
                os.kill(victims.pop(), signal.SIGKILL)

        verdicts = pool.score(jobs, kill_one)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.CORRECT, Outcome.WRONG] * 250


LEAVES = """
import os, subprocess, sys
from actor.scoring.fork_server import leave_fork_server
from actor.scoring.worker import CALLS, REPLIES

pipes = [os.pipe() for _ in range(20)]
ranges, close = [], os.closerange
os.closerange = lambda low, high: (ranges.append(high), close(low, high))
pid = os.fork()
if pid == 0:
    leave_fork_server([pipes[0][0], pipes[1][1], 1], os.getppid())
    found = sorted(set(map(int, os.listdir("/proc/self/fd"))))
    print(found[:-1] == [0, 1, 2, CALLS, REPLIES], len(found), max(ranges) < 100, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_worker_closes_what_is_open_and_does_not_try_all_numbers() -> None:
    argv = [sys.executable, "-c", LEAVES]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "6", "True"], "the sixth is the look itself"
