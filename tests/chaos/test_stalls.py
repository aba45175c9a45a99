"""Real processes that are stopped or hang: which one is named, where the stacks are, and what the run does.

Small scripts replace learner and actor where only their end matters; the last two tests stop those themselves.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.starter import FreshStarter
from launch.supervisor.supervise import Supervisor
from launch.supervisor.topology import ProcessFailed, Topology
from tests.integration.test_supervise import SERVE, Listener, pids, plan, starts
from tests.support.runs import SMALL, num_rows, processes_of, rows, sets, start, summary, train, wait_until

SILENCE_S = 0.5
LIMITS = SupervisorLimits(tick_s=0.02, grace_s=1.0, pause_s=0.02, after_exit_s=0.2, silence_s=SILENCE_S)
WATCHED = f"""
from shared.process.watchdog import Watchdog, open_stacks
opened = open_stacks(here / "logs" / f"stacks-{{me}}.txt")
watchdog = Watchdog({SILENCE_S}, opened.__enter__())
def waits_here():
    (here / f"{{me}}.ready").touch()
    while True:
        watchdog.progress()
        time.sleep(0.01)
def hangs_here():
    (here / f"{{me}}.ready").touch()
    watchdog.progress()
    while True:
        pass
"""
IN_VAIN = """
print("error: The learner at ipc:///x said nothing for 0.5 s while an order was awaited.", file=sys.stderr)
sys.exit(1)
"""


def supervise(topology: Topology, listener: Listener | None = None, limits: SupervisorLimits = LIMITS) -> str:
    """The error that ends it."""
    with pytest.raises(ProcessFailed) as failed:
        Supervisor(topology, listener or Listener(), FreshStarter(), limits).run()
    return str(failed.value)


def stop_when_ready(folder: Path, name: str) -> Callable[[Listener], None]:
    """SIGSTOP, once, at its first start."""
    done: list[int] = []

    def act(_: Listener) -> None:
        if not done and (folder / f"{name}.ready").exists():
            done.append(int((folder / f"{name}.pids").read_text()))
            os.kill(done[0], signal.SIGSTOP)
            (folder / f"{name}.stopped").touch()

    return act


def stacks(folder: Path, name: str) -> str:
    return (folder / "logs" / f"stacks-{name}.txt").read_text()


def test_a_learner_that_hangs_ends_the_run_and_both_say_where_they_stood(tmp_path: Path) -> None:
    learner = WATCHED + "wait_for('actor0.ready')\nhangs_here()"
    said = supervise(plan(tmp_path, learner, WATCHED + "waits_here()"))
    assert said.startswith("after step 0, learner made no progress within link.silence_s and ended itself. Stacks of")
    assert "\n" not in said
    for name, place in (("learner", "hangs_here"), ("actor0", "waits_here")):
        assert str(tmp_path / "logs" / f"stacks-{name}.txt") in said
        assert f"in {place}" in stacks(tmp_path, name)


def test_an_actor_that_hangs_is_started_again_and_the_note_says_where_it_stood(tmp_path: Path) -> None:
    actor = WATCHED + "if starts == 1: hangs_here()\n(here / 'second').touch()\n" + SERVE
    listener = Listener()
    Supervisor(plan(tmp_path, "wait_for('second')", actor), listener, FreshStarter(), LIMITS).run()
    (note,) = listener.notes
    assert note.startswith("actor0 made no progress within link.silence_s and ended itself (stacks: ")
    assert note.endswith("; starting it again (1 of 5)")
    assert "in hangs_here" in stacks(tmp_path, "actor0")


def test_a_stopped_actor_is_replaced_and_said_where_it_stood(tmp_path: Path) -> None:
    actor = WATCHED + "if starts > 1: (here / 'second').touch()\nwaits_here()"
    listener = Listener(stop_when_ready(tmp_path, "actor0"))
    Supervisor(plan(tmp_path, "wait_for('second')", actor), listener, FreshStarter(), LIMITS).run()
    (note,) = listener.notes
    first = pids(tmp_path)
    assert any(note.startswith(f"actor0 (process {pid}) was stopped (SIGSTOP) for ") for pid in first)
    assert starts(tmp_path, "actor0") == 2 and "in waits_here" in stacks(tmp_path, "actor0")


def test_an_actor_that_was_continued_in_time_is_left_alone(tmp_path: Path) -> None:
    seen: list[float] = []

    def stop_and_go_on(listener: Listener) -> None:
        if (tmp_path / "actor0.ready").exists() and not (tmp_path / "enough").exists():
            seen.append(time.monotonic())
            number = signal.SIGSTOP if len(seen) % 10 < 5 else signal.SIGCONT
            os.kill(int((tmp_path / "actor0.pids").read_text()), number)
            if number == signal.SIGCONT and seen[-1] - seen[0] > 3 * SILENCE_S:
                (tmp_path / "enough").touch()

    listener = Listener(stop_and_go_on)
    limits = SupervisorLimits(tick_s=0.02, grace_s=1.0, silence_s=SILENCE_S)
    Supervisor(
        plan(tmp_path, "wait_for('enough')", "(here / 'actor0.ready').touch()\n" + SERVE),
        listener,
        FreshStarter(),
        limits,
    ).run()
    assert listener.notes == [] and starts(tmp_path, "actor0") == 1


def test_a_stopped_learner_ends_the_run(tmp_path: Path) -> None:
    listener = Listener(stop_when_ready(tmp_path, "learner"))
    said = supervise(plan(tmp_path, WATCHED + "waits_here()", WATCHED + "waits_here()"), listener)
    assert "learner (process " in said and "was stopped (SIGSTOP) for " in said
    assert "in waits_here" in stacks(tmp_path, "learner") and "in waits_here" in stacks(tmp_path, "actor0")


def test_an_actor_that_waits_in_vain_for_a_stopped_learner_says_for_what(tmp_path: Path) -> None:
    listener = Listener(stop_when_ready(tmp_path, "learner"))
    patient = replace(LIMITS, silence_s=20.0)
    said = supervise(
        plan(tmp_path, WATCHED + "waits_here()", "wait_for('learner.stopped')" + IN_VAIN), listener, patient
    )
    awaited = "actor0: The learner at ipc:///x said nothing for 0.5 s while an order was awaited; learner (process "
    assert awaited in said and "was stopped (SIGSTOP) for " in said
    assert "in waits_here" in stacks(tmp_path, "learner")


# --- the real two


QUICK = {"link.silence_s": 5.0}


@pytest.mark.long
def test_a_stopped_actor_is_replaced_and_changes_nothing(tmp_path: Path) -> None:
    # More than the actor can finish in the moment in which it is continued to write its stacks.
    steps = 40
    expected = train(tmp_path / "undisturbed", run__steps=steps)["adapter_sha256"]
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | QUICK | {"run.steps": steps}))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    os.kill(processes_of(out, "actor")[0], signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, output
    assert "was stopped (SIGSTOP) for 5." in output and "starting it again (1 of 5)" in output
    assert summary(out)["adapter_sha256"] == expected
    assert [row["step"] for row in rows(out)] == list(range(1, steps + 1))
    # Of its own accord once it is continued, or asked for: launcher, watchdog and its own wait have the same limit.
    assert re.search(r"\(most recent call (first|last)\)", stacks(out, "actor0"))
    assert '/actor/loop.py", line ' in stacks(out, "actor0"), "where it stood"


def test_a_stopped_learner_is_named_with_what_was_awaited(tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | QUICK | {"run.steps": 1000}))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    os.kill(processes_of(out, "learner")[0], signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    said = output.strip().splitlines()[-1]
    assert said.startswith("error: after step ") and "; learner (process " in said
    assert "actor0: The learner at ipc://" in said
    for name in ("learner", "actor0"):
        assert f"stacks-{name}.txt" in said
    assert "(most recent call first)" in stacks(out, "learner")
    assert "in wait_once\n" in stacks(out, "actor0")
    assert not processes_of(out, "learner") + processes_of(out, "actor")
