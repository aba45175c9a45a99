"""A run on Ray: its hosts and restarts without Ray, and on a real cluster whose workers and nodes are killed.

The cluster is one of several Ray nodes on this machine; the run's folder is the disk that they share.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launch.on_ray.cluster import supervise_again
from launch.on_ray.host import Host
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.starter import FreshStarter
from launch.supervisor.topology import LearnerKilled, Process, Topology
from learner.durable.journal import Journal
from learner.durable.recorder import read
from tests.support.runs import (
    ROOT,
    SMALL,
    alive,
    num_rows,
    processes_of,
    replayed,
    rows,
    sets,
    start,
    summary,
    train,
    wait_until,
)

NODES, STEPS = 4, 16
QUICK = SupervisorLimits(tick_s=0.02, leaving_s=0.2, grace_s=1.0, pause_s=0.02, after_exit_s=0.2)
needs_ray = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed; it is an extra")


class Notes:
    """A screen that remembers what it is told. The run makes a step whenever `done` says so."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done = 0

    def tick(self) -> int:
        return self.done

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log_line(self, name: str, line: str) -> None:
        pass


def python(folder: Path, name: str, script: str) -> Process:
    return Process(
        name=name,
        argv=(sys.executable, "-c", script),
        environment={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        threads=1,
        log=folder / f"{name}.log",
    )


# --- without Ray


def test_a_host_runs_the_program_with_its_address_and_ends_it(tmp_path: Path) -> None:
    host = Host()
    before = Path.cwd()
    try:
        script = "import os, sys, time; print(sys.argv[1:], os.getcwd()); time.sleep(600)"
        host.start(python(tmp_path, "actor0", script), "--connect", "tcp://10.0.0.7:20001", tmp_path)
        wait_until(lambda: b"\n" in (tmp_path / "actor0.log").read_bytes(), "its first line")
        assert host.exit_code(0.0) is None
        host.send_signal(signal.SIGUSR1)
        wait_until(lambda: host.exit_code(0.1) is not None, "its end")
    finally:
        os.chdir(before)
        host.kill_group()
    assert host.exit_code(0.0) == -signal.SIGUSR1
    assert (tmp_path / "actor0.log").read_text() == f"['--connect', 'tcp://10.0.0.7:20001'] {tmp_path}\n"


KILLED_TWICE = """
import os, pathlib, signal, sys
starts = pathlib.Path({file!r})
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= {kills}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def plan_with(folder: Path, kills: int) -> Topology:
    learner = KILLED_TWICE.format(file=str(folder / "starts"), kills=kills)
    return Topology(
        run_dir=folder,
        endpoint="ipc",
        learner=python(folder, "learner", learner),
        actors=(python(folder, "actor0", "import time; time.sleep(600)"),),
    )


def test_a_learner_that_was_killed_is_started_again(tmp_path: Path) -> None:
    screen = Notes()
    supervise_again(plan_with(tmp_path, 2), screen, QUICK, FreshStarter)
    assert (tmp_path / "starts").read_text() == "xxx"
    assert screen.notes == [f"learner was killed or lost; restarting everything ({n} of 5)" for n in (1, 2)]


def test_a_learner_that_is_killed_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LearnerKilled, match="SIGKILL"):
        supervise_again(plan_with(tmp_path, 99), Notes(), QUICK, FreshStarter)
    assert (tmp_path / "starts").read_text() == "x" * (1 + QUICK.restarts)


class InterruptedAtTheEnd(FreshStarter):
    """The user asks to stop while what a lost learner left is being killed."""

    def close(self) -> None:
        super().close()
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_should_stop_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(LearnerKilled, match="SIGKILL"):
        supervise_again(plan_with(tmp_path, 1), Notes(), QUICK, InterruptedAtTheEnd)
    assert (tmp_path / "starts").read_text() == "x"


# --- on a cluster


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster on this machine."""

    address: str
    raylets: tuple[int, ...]
    """Process ids, one for each node with a CPU."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    argv = [sys.executable, "-m", "tests.support.ray_nodes", str(NODES)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as helper:
        assert helper.stdout
        told = json.loads(helper.stdout.readline())
        yield Cluster(address=told["address"], raylets=tuple(told["raylets"]))


def worker_of(pid: int) -> int:
    """The Ray worker that started this process."""
    return psutil.Process(pid).ppid()


def node_of(pid: int, cluster: Cluster) -> int:
    """The raylet above this process."""
    (raylet,) = {parent.pid for parent in psutil.Process(pid).parents()} & {*cluster.raylets}
    return raylet


def the(out: Path, module: str) -> int:
    """The one process of this kind, once it is there."""
    wait_until(lambda: len(processes_of(out, module)) == 1, f"one {module}", seconds=400.0)
    return processes_of(out, module)[0]


def wait_for_step(out: Path, step: int) -> None:
    wait_until(lambda: num_rows(out) >= step, f"step {step}", seconds=400.0)


def kill_and_see_it_end(pid: int, program: int) -> None:
    """Kill a worker or a raylet; the program below it must end without anyone else's help."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(program), f"the end of process {program}", seconds=60.0)


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_workers_and_nodes_are_killed_and_each_group_is_applied_once(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL | {"run.steps": STEPS}
    undisturbed = train(tmp_path / "undisturbed", run__steps=STEPS)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--on", "ray", "--out", out, *sets(settings))
    try:
        wait_for_step(out, 2)
        actor = the(out, "actor")
        kill_and_see_it_end(worker_of(actor), actor)
        wait_for_step(out, 5)
        learner = the(out, "learner")
        kill_and_see_it_end(worker_of(learner), learner)
        wait_for_step(out, 8)
        actor = the(out, "actor")
        assert node_of(actor, cluster) != node_of(the(out, "learner"), cluster), "a node has one CPU"
        kill_and_see_it_end(node_of(actor, cluster), actor)
        wait_for_step(out, 11)
        learner = the(out, "learner")
        kill_and_see_it_end(node_of(learner, cluster), learner)
    finally:
        if num_rows(out) < 11:
            launcher.kill()
        output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert sum(map(alive, cluster.raylets)) == NODES - 2
    ended = summary(out)
    assert (ended["status"], ended["steps"]) == ("done", STEPS)
    assert ended["adapter_sha256"] == undisturbed["adapter_sha256"]
    assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))
    orders = [read(payload) for payload in Journal.read(out / "journal").records()]
    groups = [group.group_id for order in orders for group in order.groups]
    assert len(groups) == len(set(groups)) == STEPS * SMALL["rollout.prompts"]
    assert replayed(out)["match"] is True
    assert "actor0 was ended by SIGKILL; starting it again" in output
    assert "learner was killed or lost; restarting everything (1 of 5)" in output
    wait_until(lambda: not processes_of(out, "learner") and not processes_of(out, "actor"), "the end of all", 60.0)


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_cluster_without_room_is_refused_and_nothing_is_made(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    threads = {"compute.learner_threads": 2, "compute.actor_threads": 1}
    launcher = start("run", "embedded", "--on", "ray", "--out", tmp_path / "run", *sets(threads))
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 2, output
    assert output.startswith("error: learner needs 2 CPUs on one node") and output.count("\n") == 1
    assert not (tmp_path / "run").exists()


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_first_interrupt_finishes_the_step_and_leaves_nothing_on_the_cluster(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--on", "ray", "--out", out, *sets(SMALL | {"run.steps": 200}))
    wait_for_step(out, 1)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert summary(out)["status"] == "stopped" and "resume" in output
    wait_until(lambda: not processes_of(out, "learner") and not processes_of(out, "actor"), "the end of all", 60.0)
