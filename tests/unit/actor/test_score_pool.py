"""The pool with real worker processes, which hang, crash, lie and get killed."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from actor.scoring.job_queue import JobQueue
from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.messages import Outcome
from shared.config.data import VerifierConfig
from shared.errors import RewardError

ROOT = Path(__file__).resolve().parents[3]

# Each completion says what is to happen to the worker that scores it.
REWARD = """
import ctypes, math, os, signal, subprocess, sys, time

def act(text):
    if text == "hang":
        while True:
            pass
    if text == "sleep":
        time.sleep(60)
    if text == "exit":
        os._exit(3)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "leave":
        sys.exit(4)
    if text == "raise":
        raise ValueError("no luck")
    if text == "hidden child" and os.fork() == 0:
        time.sleep(60)
    if text == "hidden child":
        os._exit(5)
    if text.startswith("program"):
        child = subprocess.Popen(["sleep", "60"])
        open(text.split()[1], "w").write(str(child.pid))
        if text.endswith("hang"):
            time.sleep(60)
    return {"nan": math.nan, "none": None, "text": "1.0"}.get(text, 1.0)

def reward(completions, **_):
    values = [act(text) for text in completions]
    return values[:-1] if "short" in completions else values
"""


@pytest.fixture
def stray() -> Iterator[None]:
    """Fails the test if it leaves a process behind, a zombie included."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


pytestmark = pytest.mark.usefixtures("stray")


def job(text: str, answer: str = "18", *, truncated: bool = False) -> ScoreJob:
    return ScoreJob(prompt="", completion=text, completion_ids=[1, 2], truncated=truncated, columns={"answer": answer})


def jobs_of(*texts: str) -> list[ScoreJob]:
    return [job(text) for text in texts]


def nothing() -> None:
    pass


def outcomes(verdicts: list[Verdict]) -> list[Outcome]:
    return [verdict.outcome for verdict in verdicts]


Open = Callable[..., ScorePool]


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[Open]:
    """Pools with a reward function of the test's own; closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(
            text: str = REWARD, *, limit_s: float = 10.0, start_limit_s: float = 30.0, **verifier: Any
        ) -> ScorePool:
            file = tmp_path / "reward.py"
            file.write_text(text)
            config = VerifierConfig(kind="callable", function=f"{file}:reward", limit_s=limit_s, **verifier)
            return stack.enter_context(contextlib.closing(ScorePool(config, start_limit_s)))

        yield start


def pids(pool: ScorePool) -> list[int]:
    return [worker.pid for worker in psutil.Process(pool.fork_server.pid).children()]


def gone(pid: int, within_s: float) -> bool:
    """Whether the process ends in time; a zombie that its new parent has not yet collected has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


# Scoring


@pytest.mark.parametrize("workers", [1, 2])
def test_verdicts_come_in_the_order_of_the_jobs(workers: int) -> None:
    jobs = [job(f"#### {n}", str(n - n % 2)) for n in range(200)] + [job("none"), job("#### 18", truncated=True)]
    with contextlib.closing(ScorePool(VerifierConfig(workers=workers))) as pool:
        verdicts = pool.score(jobs, nothing)
        assert outcomes(verdicts[:200]) == [Outcome.CORRECT, Outcome.WRONG] * 100
        assert outcomes(verdicts[200:]) == [Outcome.UNPARSABLE, Outcome.TRUNCATED]
        assert [verdict.final_answer for verdict in verdicts[:200]] == [str(n) for n in range(200)]
        assert pool.score(jobs[:1], nothing) == verdicts[:1]
        assert pool.score([], nothing) == []


def test_exact_is_its_own_kind() -> None:
    with contextlib.closing(ScorePool(VerifierConfig(kind="exact"))) as pool:
        assert outcomes(pool.score(jobs_of("It is 18."), nothing)) == [Outcome.CORRECT]


@pytest.mark.parametrize(("workers", "seen"), [(1, [5.0] * 5), (2, [2.0] * 2 + [3.0] * 3), (3, [1.0] * 2)])
def test_a_function_sees_as_much_of_the_batch_as_there_is(open_pool: Open, workers: int, seen: list[float]) -> None:
    pool = open_pool("def reward(prompts, **_):\n    return [len(prompts)] * len(prompts)\n", workers=workers)
    jobs = [structs.replace(job(text), prompt=text) for text in "abcde"[: len(seen)]]
    assert [verdict.score for verdict in pool.score(jobs, nothing)] == seen


def test_batches_larger_than_a_pipe_pass(open_pool: Open) -> None:
    pool = open_pool("def reward(completions, **_):\n    return [len(text) for text in completions]\n")
    verdicts = pool.score(jobs_of("x" * 3_000_000, "y", "z" * 2_000_000), nothing)
    assert [verdict.score for verdict in verdicts] == [3_000_000, 1, 2_000_000]


# Functions that misbehave


def test_a_hanging_job_is_a_timeout_and_costs_the_others_nothing(open_pool: Open) -> None:
    pool = open_pool(limit_s=0.5)
    calls = [time.monotonic()]
    verdicts = pool.score(jobs_of("a", "hang", "b", "sleep", "c"), lambda: calls.append(time.monotonic()))
    ok, late = Outcome.CORRECT, Outcome.TIMEOUT
    assert outcomes(verdicts) == [ok, late, ok, late, ok]
    assert "0.5 s" in verdicts[1].note
    assert verdicts[1].score == 0.0
    # The chunk and the two guilty ones wait for the limit; each costs a fresh worker besides.
    assert 1.5 <= calls[-1] - calls[0] < 20.0
    assert max(after - before for before, after in pairwise(calls)) < 1.0
    assert outcomes(pool.score(jobs_of("a"), nothing)) == [ok]


@pytest.mark.parametrize(
    ("text", "note"),
    [("exit", "ended with exit code 3"), ("segfault", "ended by SIGSEGV"), ("hidden child", "ended with exit code 5")],
)
def test_a_crashing_job_is_an_error_and_costs_the_others_nothing(open_pool: Open, text: str, note: str) -> None:
    pool = open_pool(workers=2, limit_s=60.0)
    start = time.monotonic()
    verdicts = pool.score(jobs_of("a", "b", text, "c", "d"), nothing)
    ok = Outcome.CORRECT
    assert outcomes(verdicts) == [ok, ok, Outcome.ERROR, ok, ok]
    assert note in verdicts[2].note
    assert time.monotonic() - start < 30.0


def test_wrong_results_of_a_function_leave_the_worker_alive(open_pool: Open) -> None:
    pool = open_pool()
    before = pids(pool)
    ok, error = Outcome.CORRECT, Outcome.ERROR
    assert outcomes(pool.score(jobs_of("a", "none", "nan", "text"), nothing)) == [ok, Outcome.ABSTAIN, error, error]
    for text, note in [("leave", "SystemExit: 4"), ("raise", "ValueError: no luck"), ("short", "0 values for 1")]:
        verdicts = pool.score(jobs_of("a", text, "b"), nothing)
        assert outcomes(verdicts) == [ok, error, ok]
        assert note in verdicts[1].note
    assert pids(pool) == before


def test_prints_go_to_the_log_and_disturb_nothing(open_pool: Open, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "import os, sys\n"
        "def reward(prompts, **_):\n"
        "    for _ in range(10):\n"
        "        print('x' * 1000)\n"
        "    os.write(1, b'straight')\n"
        "    os.system('echo from a shell')\n"
        "    return [len(sys.stdin.read())] * len(prompts)\n"
    )
    assert [verdict.score for verdict in open_pool(text).score(jobs_of("a", "b"), nothing)] == [0.0, 0.0]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("x" * 1000) == 10
    assert "straight" in captured.err
    assert "from a shell" in captured.err


def test_a_worker_knows_no_secret_and_imports_nothing_heavy(open_pool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NAMELESS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("REWARD_LANGUAGE", "en")
    text = (
        "import os, sys\n"
        "def reward(prompts, **_):\n"
        "    heavy = {'torch', 'transformers', 'zmq', 'asyncio', 'sympy'} & set(sys.modules)\n"
        "    return [not heavy, 'secret' not in os.environ.values(), os.environ.get('REWARD_LANGUAGE') == 'en',\n"
        "            'PATH' in os.environ,\n"
        "            os.environ['HOME'] == os.environ['TMPDIR'] == os.path.dirname(os.getcwd())]\n"
    )
    pool = open_pool(text, environment=("REWARD_LANGUAGE",))
    assert [verdict.score for verdict in pool.score(jobs_of(*"abcde"), nothing)] == [1.0] * 5


def test_a_worker_finds_the_models_of_the_user(
    open_pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its HOME is another, and HF_HOME has a token."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wanted = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_HOME": None}
    text = (
        "import os\n"
        "def reward(prompts, **_):\n"
        f"    return [os.environ.get(name) == value for name, value in {wanted}.items()]\n"
    )
    assert [verdict.score for verdict in open_pool(text).score(jobs_of(*"abc"), nothing)] == [1.0] * 3


@pytest.mark.parametrize(("path", "advice"), [("words.txt", True), ("/nowhere/words.txt", False), ("lean", False)])
def test_a_relative_path_that_is_no_program_is_told_where_it_starts(open_pool: Open, path: str, advice: bool) -> None:
    (found,) = open_pool(f"def reward(prompts, **_):\n    open({path!r})\n").score(jobs_of("a"), nothing)
    assert f"No such file or directory: {path!r}" in found.note
    assert found.note.endswith("in an empty folder, so build the paths of files from __file__.") == advice


def test_a_package_in_the_working_folder_is_not_taken_for_ours(open_pool: Open, tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "__init__.py").write_text("open('taken', 'w').close()")
    (tmp_path / "msgspec.py").write_text("open('taken', 'w').close()")
    with contextlib.chdir(tmp_path):
        assert outcomes(open_pool().score(jobs_of("a"), nothing)) == [Outcome.CORRECT]
    assert not (tmp_path / "taken").exists()


def test_programs_that_a_function_starts_do_not_get_the_pipes(open_pool: Open) -> None:
    text = (
        "import os\n"
        "def inherited(fd):\n"
        "    try:\n"
        "        return os.get_inheritable(fd)\n"
        "    except OSError:\n"
        "        return False\n"
        "def reward(prompts, **_):\n"
        "    return [sum(map(inherited, range(3, 64)))] * len(prompts)\n"
    )
    assert [verdict.score for verdict in open_pool(text).score(jobs_of("a"), nothing)] == [0.0]


# Starting


def test_a_slow_start_does_not_count_against_the_limit(open_pool: Open) -> None:
    pool = open_pool("import time\ntime.sleep(0.8)\n" + REWARD, limit_s=0.5)
    assert outcomes(pool.score(jobs_of("a", "hang"), nothing)) == [Outcome.CORRECT, Outcome.TIMEOUT]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "defines no such name"),
        ("reward = 1", "of type int"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(7)", "ended with exit code 7 while it was loaded"),
        ("import time; time.sleep(60)", "stopped after 1 s while it was loaded"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(open_pool: Open, text: str, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        open_pool(text, start_limit_s=1.0 if "sleep" in text else 30.0)


# Killing and closing


def test_a_worker_killed_during_a_call_costs_nothing(open_pool: Open) -> None:
    pool = open_pool("import time\ndef reward(prompts, **_):\n    time.sleep(0.4)\n    return [1.0] * len(prompts)\n")
    victims = pids(pool)

    def kill_once() -> None:
        if victims:
            os.kill(victims.pop(), signal.SIGKILL)

    assert outcomes(pool.score(jobs_of(*"abc"), kill_once)) == [Outcome.CORRECT] * 3
    assert victims == []


def test_a_worker_killed_between_calls_costs_nothing(open_pool: Open) -> None:
    pool = open_pool(workers=2)
    # So that the pool gives out calls before it hears that the workers have ended.
    os.kill(pool.fork_server.pid, signal.SIGSTOP)
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
        assert gone(pid, 2.0)
    queue = JobQueue(jobs_of(*"abcd"), 2, one_by_one=False)
    go_on = functools.partial(os.kill, pool.fork_server.pid, signal.SIGCONT)
    assert outcomes(pool.finish(queue, go_on)) == [Outcome.CORRECT] * 4
    assert queue.suspects == set()


@pytest.mark.parametrize("ending", ["close", "hang"])
def test_what_a_function_started_ends_with_its_worker(open_pool: Open, tmp_path: Path, ending: str) -> None:
    pool = open_pool(limit_s=0.5)
    note = tmp_path / "program.pid"
    pool.score(jobs_of(f"program {note} {ending}"), nothing)
    pid = int(note.read_text())
    if ending == "close":
        assert psutil.pid_exists(pid)
        pool.close()
    assert gone(pid, 2.0)


def test_closing_ends_a_worker_in_the_middle_of_a_call(open_pool: Open) -> None:
    pool = open_pool(workers=2, limit_s=60.0)

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        pool.score(jobs_of("hang", "sleep"), give_up)
    workers = pids(pool)
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in workers)


OWNER = """
import sys
import psutil
from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob
from shared.config.tree import VerifierConfig

pool = ScorePool(VerifierConfig(kind="callable", function=sys.argv[1], workers=3, limit_s=60.0))
print(*[worker.pid for worker in psutil.Process(pool.fork_server.pid).children()], flush=True)
jobs = [ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns={}) for text in sys.argv[2:]]
pool.score(jobs, lambda: None)
"""


def test_workers_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    # Three workers, three jobs: one is busy, one asleep, one done.
    argv = [sys.executable, "-c", OWNER, f"{tmp_path / 'reward.py'}:reward", "hang", "sleep", "done"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        workers = [int(pid) for pid in owner.stdout.readline().split()]
        time.sleep(0.3)
        assert len(workers) == 3
        assert all(psutil.pid_exists(pid) for pid in workers)
        owner.kill()
        assert all(gone(pid, 2.0) for pid in workers)
