"""Every way of stopping a run ends it at a finished step, with a checkpoint, and loses nothing."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from launch.presets.load import load_config
from shared.config.load import config_from_json
from shared.process.lease import Lease
from shared.run.run_dir import RunDir
from tests.support.runs import (
    ROOT,
    SMALL,
    launch,
    num_rows,
    processes_of,
    replayed,
    sets,
    start,
    summary,
    train,
    wait_until,
)

STEPS = 24
FEW: dict[str, Any] = SMALL | {"run.steps": STEPS, "checkpoint.every": 1000}
ENDLESS: dict[str, Any] = FEW | {"run.steps": 100_000}
CORES = len(os.sched_getaffinity(0))
HELD_S = 16.0
WAIT_S = 110.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The adapter of a run that nobody disturbs."""
    return train(tmp_path_factory.mktemp("runs") / "undisturbed", **underscored(FEW))["adapter_sha256"]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A run directory; no process of it may be left when the test ends."""
    out = tmp_path / "run"
    yield out
    left = processes_of(out, "learner") + processes_of(out, "actor")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def underscored(overrides: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in overrides.items()}


def begun(out: Path, overrides: dict[str, Any], steps: int = 2) -> "subprocess.Popen[str]":
    """A run in which some steps are done."""
    launcher = start("run", "embedded", "--out", out, *sets(overrides))
    wait_until(lambda: num_rows(out) >= steps or launcher.poll() is not None, "the first steps")
    return launcher


def ended(launcher: "subprocess.Popen[str]") -> str:
    """What a run that was stopped said; it must end well."""
    output, _ = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 0, output
    return output


def check_stopped(out: Path) -> None:
    """At a finished step, which is in a checkpoint."""
    found = summary(out)
    assert found["status"] == "stopped" and found["steps"] == num_rows(out)
    assert (out / "checkpoints" / f"step-{found['steps']:06d}").is_dir()


def check_resumed(out: Path, steps: int, expected: str) -> None:
    resumed = launch("resume", out, "--steps", str(steps))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(out)["adapter_sha256"] == expected


def fork_server_of(launcher: "subprocess.Popen[str]") -> psutil.Process:
    (fork_server,) = [
        p for p in psutil.Process(launcher.pid).children() if "launch.supervisor.fork_server" in " ".join(p.cmdline())
    ]
    return fork_server


def test_sigterm_to_every_process_of_a_run(out: Path, expected: str) -> None:
    """As systemd stops a unit, and a batch system a job."""
    launcher = begun(out, FEW)
    root = psutil.Process(launcher.pid)
    processes = [root, *root.children(recursive=True)]
    # The fork server and its workers, which have its name.
    (scratch,) = {Path(p.cmdline()[-1]) for p in processes if "actor.scoring.fork_server" in p.cmdline()}
    assert scratch.is_dir()
    for process in processes:
        process.send_signal(signal.SIGTERM)
    output = ended(launcher)
    assert "starting it again" not in output
    assert not scratch.exists()
    check_stopped(out)
    check_resumed(out, STEPS, expected)


@pytest.mark.parametrize("who", [pytest.param("launcher", marks=pytest.mark.long), "learner"])
def test_sigterm_to_one_process(out: Path, who: str) -> None:
    launcher = begun(out, ENDLESS)
    pid = launcher.pid if who == "launcher" else processes_of(out, "learner")[0]
    os.kill(pid, signal.SIGTERM)
    ended(launcher)
    check_stopped(out)


@pytest.mark.long
def test_the_processes_of_two_containers_stopped_one_after_the_other(out: Path, expected: str) -> None:
    """As `docker compose down` does: first who depends on the other. There is no launcher, so the learner chooses what
    the prepared run left open, and the actor waits for it."""
    assert launch("run", "embedded", "--prepare", "--out", out, *sets(FEW)).returncode == 0
    actor = subprocess.Popen([sys.executable, "-m", "actor", "--run", str(out)], cwd=ROOT)
    learner = subprocess.Popen([sys.executable, "-m", "learner", "--run", str(out)], cwd=ROOT)
    try:
        wait_until(lambda: num_rows(out) >= 2, "the second step")
        chosen = config_from_json(RunDir(out).config.read_bytes()).compute
        assert chosen == load_config("embedded", [f"{key}={json.dumps(value)}" for key, value in FEW.items()]).compute
        assert RunDir(out).read_info().compute == structs.asdict(chosen)
        actor.terminate()
        actor.wait(WAIT_S)
        learner.terminate()
        assert learner.wait(WAIT_S) == 0
    finally:
        actor.kill()
        learner.kill()
    check_stopped(out)
    check_resumed(out, STEPS, expected)


@pytest.mark.long
def test_a_learner_that_nobody_has_joined_can_be_stopped(out: Path) -> None:
    assert launch("run", "embedded", "--prepare", "--out", out, *sets(FEW)).returncode == 0
    log = out / "learner.txt"
    with log.open("w") as file:
        learner = subprocess.Popen([sys.executable, "-m", "learner", "--run", str(out)], cwd=ROOT, stderr=file)
    try:
        wait_until(lambda: "begins at step 0" in log.read_text(), "the begin of training")
        learner.terminate()
        assert learner.wait(WAIT_S) == 0, log.read_text()
    finally:
        learner.kill()
    assert (summary(out)["status"], summary(out)["steps"]) == ("stopped", 0)


ASKED_WHILE_IT_LOADS = """
import logging, os, signal, sys
from learner.__main__ import start

class Asks(logging.Handler):
    def emit(self, record):
        if "computes with" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)

logging.getLogger("learner").addHandler(Asks())
sys.exit(start(["--run", sys.argv[1]]))
"""


@pytest.mark.long
def test_a_learner_that_is_asked_to_stop_while_it_loads_begins_no_step(out: Path) -> None:
    """In a warm start, since its orders are filled without an actor."""
    assert launch("sft", "embedded", "--prepare", "--out", out, *sets(FEW)).returncode == 0
    argv = [sys.executable, "-c", ASKED_WHILE_IT_LOADS, str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert (summary(out)["status"], summary(out)["steps"], num_rows(out)) == ("stopped", 0, 0)


@pytest.mark.long
def test_an_evaluation_that_was_given_up_is_made_by_the_next_start(out: Path) -> None:
    """The first and the last; test_dispatch.py has one between two steps."""
    words = ["run", "embedded", "--out", out, *sets(FEW | {"run.steps": 1, "eval.problems": 64})]
    for steps, label in enumerate(("base", "final")):
        launcher = start(*words)
        wait_until_logged(out, launcher, f"evaluates the {label} policy", "joined: hf engine")
        launcher.send_signal(signal.SIGTERM)
        ended(launcher)
        assert (summary(out)["status"], summary(out)["steps"], num_rows(out)) == ("stopped", steps, steps)
        assert not (out / "eval" / f"{label}.json").exists()
        words = ["resume", out]
    assert launch("resume", out).returncode == 0
    assert (summary(out)["status"], summary(out)["steps"], num_rows(out)) == ("done", 1, 1)
    assert sorted(path.stem for path in (out / "eval").glob("*.json")) == ["base", "final"]


def wait_until_logged(out: Path, launcher: "subprocess.Popen[str]", *sentences: str) -> None:
    """By the learner."""
    log = RunDir(out).logs / "learner.log"

    def all_there() -> bool:
        return log.exists() and all(sentence in log.read_text() for sentence in sentences)

    wait_until(lambda: all_there() or launcher.poll() is not None, " and ".join(sentences))


@pytest.mark.long
def test_a_run_in_the_background_of_an_interactive_shell(out: Path) -> None:
    master, slave = pty.openpty()
    terminal = os.ttyname(slave)
    # A session leader that opens a terminal has it as its own from then on.
    argv = ["bash", "-c", f"exec bash --norc --noprofile -i <{terminal} >{terminal} 2>&1"]
    shell = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, env=os.environ | {"TERM": "dumb"})
    words = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *sets(FEW | {"run.steps": 2})]
    try:
        os.write(master, f"{shlex.join(words)} &\n".encode())
        os.write(master, b"wait $!; echo it ended with code=$?\n")
        said = heard(master, r"with code=\d+")
    finally:
        shell.kill()
        shell.wait()
        os.close(master)
        # Open until here: a terminal that nobody has open gives an error to its reader.
        os.close(slave)
    assert "with code=0" in said, said
    assert summary(out)["status"] == "done"


def heard(master: int, pattern: str) -> str:
    """All that a terminal shows until the pattern comes."""
    said, end = "", time.monotonic() + WAIT_S
    while not re.search(pattern, said):
        assert time.monotonic() < end, said
        if select.select([master], [], [], 1.0)[0]:
            said += os.read(master, 1 << 16).decode(errors="replace")
    return said


def test_a_reader_that_has_seen_enough(out: Path) -> None:
    words = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *sets(ENDLESS)]
    script = f"{shlex.join(words)} | head -4; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr
    check_stopped(out)


@pytest.mark.long
def test_a_stopped_fork_server_does_not_keep_the_launcher(out: Path) -> None:
    launcher = begun(out, ENDLESS)
    fork_server_of(launcher).suspend()
    launcher.send_signal(signal.SIGINT)
    ended(launcher)
    check_stopped(out)


@pytest.mark.long
def test_a_fork_server_cannot_be_asked_to_end(out: Path) -> None:
    launcher = begun(out, ENDLESS)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        fork_server_of(launcher).send_signal(number)
    rows = num_rows(out)
    wait_until(lambda: num_rows(out) >= rows + 2 or launcher.poll() is not None, "two further steps")
    launcher.send_signal(signal.SIGTERM)
    ended(launcher)
    check_stopped(out)


@pytest.mark.long
def test_a_long_wait_for_the_lease_is_no_silence(out: Path) -> None:
    """Learner and actor both wait, for longer than either may be silent."""
    turns = {"compute.learner_threads": CORES, "compute.actor_threads": CORES}
    patient = {"link.silence_s": HELD_S / 2, "pipeline.max_lag": 1}
    launcher = begun(out, ENDLESS | turns | patient)
    with Lease(RunDir(out).lease).hold("the test"):
        rows = num_rows(out)
        time.sleep(HELD_S)
        # The step that had been computed may still have been written.
        assert num_rows(out) <= rows + 1
    wait_until(lambda: num_rows(out) >= rows + 3 or launcher.poll() is not None, "further steps")
    launcher.send_signal(signal.SIGINT)
    output = ended(launcher)
    assert "starting it again" not in output
    check_stopped(out)
    assert replayed(out)["match"] is True
