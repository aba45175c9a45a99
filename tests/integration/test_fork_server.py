"""Processes forked off the fork_server: real ones, on runs that are small or not there."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.commands.run import make_run
from launch.presets.load import load_config
from launch.supervisor.starter import ForkedProcess, ForkServerStarter, FreshStarter, Starter
from launch.supervisor.topology import Process, ProcessFailed, Topology, topology
from shared.base.cache import cached_base
from shared.embedded import EMBEDDED_DIR
from tests.support.runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forking is for Linux alone")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """A prepared run: its actor, started alone, waits for a learner."""
    out = tmp_path_factory.mktemp("fork_server") / "run"
    config = load_config("embedded", ["eval.problems=0"])
    return topology(make_run(out, config).path, config)


@pytest.fixture(scope="module")
def fork_server(plan: Topology) -> Iterator[ForkServerStarter]:
    starter = starter_of(plan)
    yield starter
    starter.close()


def starter_of(plan: Topology) -> ForkServerStarter:
    log = plan.learner.log.with_name("fork_server.log")
    return ForkServerStarter(plan.learner.environment, plan.run_dir, log)


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


def test_output_and_exit_code_arrive(fork_server: ForkServerStarter, plan: Topology, tmp_path: Path) -> None:
    process = nowhere(plan, tmp_path)
    child = start(fork_server, process)
    assert ended(child) == 2
    said = process.log.read_text()
    assert "error: " in said and "Traceback" not in said


def test_a_path_need_not_be_text(fork_server: ForkServerStarter, plan: Topology, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    process = nowhere(plan, folder)
    assert ended(start(fork_server, process)) == 2
    assert "is not a run directory" in process.log.read_text()


def test_a_child_looks_like_a_process_of_its_own(fork_server: ForkServerStarter, plan: Topology) -> None:
    child = start(fork_server, plan.actors[0])
    process = psutil.Process(born(child))
    until(lambda: f"-m actor --run {plan.run_dir}" in " ".join(process.cmdline()))
    assert os.getpgid(process.pid) == process.pid == os.getsid(process.pid)
    assert process.ppid() == fork_server.popen.pid
    assert not channels(process.pid) & channels(fork_server.popen.pid)
    child.kill_group()
    assert child.exit_code() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def channels(pid: int) -> set[str]:
    """Its pipes and sockets."""
    links = [os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {Path(link).name for link in links if re.search(r"(pipe|socket):", link)}


def test_the_libraries_are_in_memory_once(fork_server: ForkServerStarter, plan: Topology) -> None:
    child = start(fork_server, plan.actors[0])
    until(lambda: b"computes with" in plan.actors[0].log.read_bytes())
    memory = psutil.Process(born(child)).memory_full_info()
    assert memory.pss < 0.75 * memory.rss
    child.kill_group()


def test_a_signal_reaches_a_process_that_was_not_born_yet(fork_server: ForkServerStarter, plan: Topology) -> None:
    os.kill(fork_server.popen.pid, signal.SIGSTOP)
    try:
        child = start(fork_server, plan.actors[0])
        child.send_signal(signal.SIGTERM)
        assert child.exit_code() is None
    finally:
        os.kill(fork_server.popen.pid, signal.SIGCONT)
    assert ended(child) == -signal.SIGTERM


@pytest.mark.long
def test_without_the_fork_server_there_is_nothing(plan: Topology) -> None:
    starter = starter_of(plan)
    child = start(starter, plan.actors[0])
    pid = born(child)
    starter.popen.kill()
    with pytest.raises(ProcessFailed, match=r"process that starts learner and actor ended[^$]*fork_server\.log"):
        until(lambda: child.exit_code() is not None)
    until(lambda: not psutil.pid_exists(pid))
    child.kill_group()
    starter.close()


@pytest.mark.long
def test_closing_ends_what_is_left(plan: Topology) -> None:
    starter = starter_of(plan)
    pid = born(start(starter, plan.actors[0]))
    starter.close()
    until(lambda: not psutil.pid_exists(pid))


SELDOM = """
import os, sys
from pathlib import Path
vars(os).pop("pidfd_open", None)
from launch.supervisor import fork_server
fork_server.LOOK_EVERY_S = 600.0
fork_server.preload = lambda run: None
sys.exit(fork_server.main(Path(), int(sys.argv[1])))
"""


def test_an_end_is_noticed_at_once_also_by_a_python_without_pidfds(plan: Topology, tmp_path: Path) -> None:
    process = nowhere(plan, tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    request = {"child": 7, "argv": process.argv, "environment": {}, "log": str(process.log)}
    argv = [sys.executable, "-c", SELDOM, str(theirs.fileno())]
    with subprocess.Popen(argv, cwd=ROOT, pass_fds=(theirs.fileno(),)) as server, ours, theirs:
        theirs.close()
        ours.send(json.dumps(request).encode())
        assert json.loads(ours.recv(4096))["child"] == 7
        assert json.loads(ours.recv(4096)) == {"child": 7, "code": 2}
        ours.close()
        assert server.wait(DEADLINE_S) == 0


def test_killing_the_launcher_ends_its_fork_server(plan: Topology) -> None:
    code = """
import sys
from launch.supervisor.topology import topology
from pathlib import Path
from launch.presets.load import load_config
from tests.integration.test_fork_server import starter_of
starter = starter_of(topology(Path(sys.argv[1]), load_config("embedded", [])))
print(starter.popen.pid, flush=True)
starter.listen(60)
"""
    argv = [sys.executable, "-c", code, str(plan.run_dir)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    until(lambda: not psutil.pid_exists(pid))


def test_a_fresh_process_needs_no_fork_server(plan: Topology, tmp_path: Path) -> None:
    process = nowhere(plan, tmp_path)
    with process.log.open("wb") as log:
        child = FreshStarter().start(process, log)
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_asks_a_process_to_end_is_not_for_the_fork_server_but_for_its_children(
    fork_server: ForkServerStarter, plan: Topology, number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests were started in the background: they and their children ignore this signal")
    fork_server.popen.send_signal(number)
    child = start(fork_server, plan.actors[0])
    os.kill(born(child), number)
    assert ended(child) == -number
    assert fork_server.popen.poll() is None


PRELOADED = """
import sys
from pathlib import Path
from launch.supervisor.fork_server import preload
preload(Path(sys.argv[1]))
from shared.model.prompt import load_tokenizer
print(load_tokenizer.cache_info().currsize)
if sys.argv[2]:
    load_tokenizer(Path(sys.argv[2]))
    print(load_tokenizer.cache_info().hits)
"""


def preloaded(run: Path, base: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PRELOADED, str(run), base], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.long
def test_the_tokenizer_is_in_memory_once_the_base_is_there(plan: Topology, tmp_path: Path) -> None:
    made = cached_base(load_config("embedded", []).model).folder
    assert preloaded(plan.run_dir, str(made)) == "1\n1\n"
    elsewhere = load_config("embedded", [f"model.cache_dir={tmp_path / 'cache'}"])
    assert preloaded(make_run(tmp_path / "run", elsewhere).path, "") == "0\n"


@pytest.mark.parametrize(
    "damaged",
    ["config.json", *(pytest.param(more, marks=pytest.mark.long) for more in ("tokenizer.json", "a link", "no run"))],
)
def test_what_is_wrong_with_a_run_is_for_its_processes_to_say(tmp_path: Path, damaged: str) -> None:
    model = shutil.copytree(EMBEDDED_DIR, tmp_path / "model")
    config = load_config("embedded", [f"model.path={model}", f"model.cache_dir={tmp_path / 'cache'}"])
    run = make_run(tmp_path / "run", config)
    base = cached_base(config.model).folder
    if damaged == "a link":
        (model / "more.json").symlink_to(tmp_path / "nowhere")
    elif damaged == "no run":
        shutil.rmtree(run.path)
    else:
        (run.path if damaged == "config.json" else base).joinpath(damaged).write_text("{")
    assert preloaded(run.path, "") == "0\n"


# --- a process in the fork server's place; it is the first thing that a fork server imports


def in_its_place(plan: Topology, folder: Path, script: str) -> ForkServerStarter:
    """A fork server whose first import does something else."""
    (folder / "setproctitle.py").write_text(script)
    return ForkServerStarter({"PYTHONPATH": str(folder)}, plan.run_dir, folder / "fork_server.log", cleanup_s=1.0)


def test_a_fork_server_that_dies_as_it_loads_is_told_in_a_sentence(plan: Topology, tmp_path: Path) -> None:
    script = "import pathlib, time\nwhile not pathlib.Path(__file__).with_name('asked').exists(): time.sleep(0.01)\n"
    starter = in_its_place(plan, tmp_path, script + "raise MemoryError('no room')")
    child = start(starter, plan.actors[0])
    (tmp_path / "asked").touch()
    with pytest.raises(ProcessFailed, match=r"process that starts learner and actor ended[^$]*MemoryError: no room"):
        until(lambda: child.exit_code() is not None)
    starter.popen.wait()
    with pytest.raises(ProcessFailed, match="MemoryError: no room"):
        start(starter, plan.actors[0])
    starter.close()


def test_a_fork_server_that_tells_nothing_more_is_killed(plan: Topology, tmp_path: Path) -> None:
    script = """
import json, os, signal, socket, sys, time
control = socket.socket(fileno=int(sys.argv[-1]))
control.recv(65536)
pid = os.fork()
if pid:
    control.send(json.dumps({"child": 0, "pid": pid}).encode())
else:
    os.setsid()
time.sleep(600)
"""
    starter = in_its_place(plan, tmp_path, script)
    child = start(starter, plan.actors[0])
    pid = born(child)
    child.kill_group()
    assert starter.popen.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    starter.close()


def test_a_fork_server_that_cannot_end_is_killed(plan: Topology, tmp_path: Path) -> None:
    script = "import json, socket, sys, time\ncontrol = socket.socket(fileno=int(sys.argv[-1]))\n"
    tell = "control.send(json.dumps({'child': 0, 'pid': 2**22 + 1}).encode())\ntime.sleep(600)\n"
    starter = in_its_place(plan, tmp_path, script + tell)
    born(start(starter, plan.actors[0]))
    starter.close()
    assert starter.popen.returncode == -signal.SIGKILL


def test_a_stopped_fork_server_is_continued(fork_server: ForkServerStarter, plan: Topology) -> None:
    child = start(fork_server, plan.actors[0])
    born(child)
    fork_server.popen.send_signal(signal.SIGSTOP)
    child.kill_group()
    assert child.exit_code() == -signal.SIGKILL


def test_a_group_is_ended_before_its_process_is_collected(plan: Topology, tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    process = Process(
        name="learner", argv=(sys.executable, "-c", code), environment={}, threads=1, log=tmp_path / "log"
    )
    with process.log.open("wb") as log:
        child = FreshStarter().start(process, log)
    until(lambda: child.exit_code() is not None)
    left = int(process.log.read_text())
    until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)
