"""Processes forked off the zygote: real ones, on runs that are small or not there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.attend import starter_for
from launch.errors import ProcessFailed
from launch.run import make_run
from launch.starter import ForkedProcess, FreshStarter, Starter, ZygoteStarter
from launch.topology import Process, Topology, topology
from shared.config_load import load_config
from tests.runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forking is for Linux alone")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """A prepared run: its actor, started alone, waits for a learner."""
    out = tmp_path_factory.mktemp("zygote") / "run"
    config = load_config("embedded", ["eval.problems=0"])
    return topology(make_run(out, config).path, config)


@pytest.fixture(scope="module")
def zygote(plan: Topology) -> Iterator[ZygoteStarter]:
    starter = starter_for(plan)
    assert isinstance(starter, ZygoteStarter)
    yield starter
    starter.close()


def start(starter: Starter, process: Process) -> ForkedProcess:
    process.log.parent.mkdir(exist_ok=True)
    with process.log.open("ab") as log:
        child = starter.start(process, log)
    assert isinstance(child, ForkedProcess)
    return child


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def born(child: ForkedProcess) -> int:
    """Its process id, once it has one."""
    until(lambda: child.exit_code() is not None or child.pid is not None)
    assert child.pid is not None
    return child.pid


def ended(child: ForkedProcess) -> int:
    """Its exit code."""
    until(lambda: child.exit_code() is not None)
    code = child.exit_code()
    assert code is not None
    return code


def nowhere(plan: Topology, folder: Path) -> Process:
    """A learner of a run that does not exist."""
    argv = (*plan.learner.argv[:4], str(folder / "none"))
    return Process(name="learner", argv=argv, environment={}, threads=1, log=folder / "learner.log")


def test_what_a_child_says_and_how_it_ends_arrive(zygote: ZygoteStarter, plan: Topology, tmp_path: Path) -> None:
    process = nowhere(plan, tmp_path)
    child = start(zygote, process)
    assert ended(child) == 2
    said = process.log.read_text()
    assert "error: " in said and "Traceback" not in said


def test_a_path_that_is_no_text_is_a_path_all_the_same(zygote: ZygoteStarter, plan: Topology, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    process = nowhere(plan, folder)
    assert ended(start(zygote, process)) == 2
    assert "is not a run directory" in process.log.read_text()


def test_a_child_looks_like_a_process_of_its_own(zygote: ZygoteStarter, plan: Topology) -> None:
    child = start(zygote, plan.actors[0])
    process = psutil.Process(born(child))
    until(lambda: f"-m actor --run {plan.run_dir}" in " ".join(process.cmdline()))
    assert os.getpgid(process.pid) == process.pid == os.getsid(process.pid)
    assert process.ppid() == zygote.popen.pid
    child.kill_group()
    assert child.exit_code() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_the_libraries_are_in_memory_once(zygote: ZygoteStarter, plan: Topology) -> None:
    child = start(zygote, plan.actors[0])
    until(lambda: b"computes with" in plan.actors[0].log.read_bytes())
    memory = psutil.Process(born(child)).memory_full_info()
    assert memory.pss < 0.75 * memory.rss
    child.kill_group()


def test_a_signal_reaches_a_process_that_was_not_born_yet(zygote: ZygoteStarter, plan: Topology) -> None:
    os.kill(zygote.popen.pid, signal.SIGSTOP)
    try:
        child = start(zygote, plan.actors[0])
        child.send_signal(signal.SIGTERM)
        assert child.exit_code() is None
    finally:
        os.kill(zygote.popen.pid, signal.SIGCONT)
    assert ended(child) == -signal.SIGTERM


def test_without_the_zygote_there_is_nothing(plan: Topology) -> None:
    starter = starter_for(plan)
    assert isinstance(starter, ZygoteStarter)
    child = start(starter, plan.actors[0])
    pid = born(child)
    starter.popen.kill()
    with pytest.raises(ProcessFailed, match=r"process that starts learner and actor ended[^$]*zygote\.log"):
        until(lambda: child.exit_code() is not None)
    until(lambda: not psutil.pid_exists(pid))
    child.kill_group()
    starter.close()


def test_closing_ends_what_is_left(plan: Topology) -> None:
    starter = starter_for(plan)
    pid = born(start(starter, plan.actors[0]))
    starter.close()
    until(lambda: not psutil.pid_exists(pid))


def test_killing_the_launcher_ends_its_zygote(plan: Topology) -> None:
    code = """
import sys
from launch.attend import starter_for
from launch.topology import topology
from pathlib import Path
from shared.config_load import load_config
starter = starter_for(topology(Path(sys.argv[1]), load_config("embedded", [])))
print(starter.popen.pid, flush=True)
starter.listen(60)
"""
    argv = [sys.executable, "-c", code, str(plan.run_dir)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    until(lambda: not psutil.pid_exists(pid))


def test_a_fresh_process_needs_no_zygote(plan: Topology, tmp_path: Path) -> None:
    process = nowhere(plan, tmp_path)
    with process.log.open("wb") as log:
        child = FreshStarter().start(process, log)
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 2
