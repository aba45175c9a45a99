"""The supervisor with real processes: small scripts that crash, hang, refuse to stop, or behave."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.starter import FreshStarter
from launch.supervisor.supervise import Supervisor
from launch.supervisor.topology import LearnerKilled, Process, ProcessFailed, Topology
from shared.errors import UserError
from shared.run.history import restarts
from tests.support.runs import ROOT, alive, wait_until
from tests.support.supervised import (
    DEADLINE_S,
    DEAF,
    ON_TERM,
    QUICK,
    SERVE,
    WITH_WORKER,
    Listener,
    child,
    pids,
    plan,
    starts,
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """No process of a test may be left when it ends."""
    yield tmp_path
    try:
        wait_until(lambda: not any(map(alive, pids(tmp_path))), "the end of all processes", DEADLINE_S)
    finally:
        for pid in filter(alive, pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)


# --- the ordinary end


def test_when_the_learner_is_done_the_actor_is_asked_to_stop(folder: Path) -> None:
    listener = Listener()
    learner = "print('hello')\nwait_for('actor0.ready')"
    Supervisor(plan(folder, learner, ON_TERM + SERVE), listener, FreshStarter(), QUICK).run()
    assert "learner | hello" in listener.lines
    assert "actor0 | asked to stop" in listener.lines
    assert listener.notes == []


def test_an_actor_that_leaves_by_itself_may_clean_up(folder: Path) -> None:
    cleaning = ON_TERM + "time.sleep(0.5)\nprint('cleaned up')"
    listener, patient = Listener(), replace(QUICK, leaving_s=20.0)
    Supervisor(plan(folder, "wait_for('actor0.ready')", cleaning), listener, FreshStarter(), patient).run()
    assert listener.lines == ["actor0 | cleaned up"]


def test_an_actor_that_does_not_stop_is_killed_with_its_workers(folder: Path) -> None:
    begin = time.monotonic()
    Supervisor(plan(folder, "wait_for('actor0.ready')", WITH_WORKER + DEAF), Listener(), FreshStarter(), QUICK).run()
    assert time.monotonic() - begin >= QUICK.grace_s
    assert starts(folder, "worker") == 1


def test_children_have_a_session_of_their_own_and_know_their_parent(folder: Path) -> None:
    learner = "print(os.getsid(0) == os.getpid(), os.getppid())"
    listener = Listener()
    Supervisor(plan(folder, learner), listener, FreshStarter(), QUICK).run()
    assert f"learner | True {os.getpid()}" in listener.lines


# --- failures


def test_a_crash_of_the_learner_stops_all_and_shows_its_last_words(folder: Path) -> None:
    learner = "wait_for('actor0.ready')\nfor n in range(40): print('line', n)\nraise RuntimeError('lost')"
    with pytest.raises(ProcessFailed) as failed:
        Supervisor(plan(folder, learner, ON_TERM + SERVE), Listener(steps=lambda: 7), FreshStarter(), QUICK).run()
    text = str(failed.value)
    assert "learner ended with exit code 1 after step 7" in text
    assert str(folder / "logs" / "learner.log") in text
    assert "learner | RuntimeError: lost" in text
    assert "learner | line 39" in text
    assert "line 20" not in text
    assert text.count("\n") == 15


def test_a_learner_killed_from_outside_is_named_with_the_signal(folder: Path) -> None:
    def kill(_: Listener) -> None:
        if (folder / "learner.ready").exists():
            os.kill(int((folder / "learner.pids").read_text()), signal.SIGKILL)

    with pytest.raises(LearnerKilled, match="learner was ended by SIGKILL"):
        Supervisor(plan(folder, ON_TERM + SERVE), Listener(kill), FreshStarter(), QUICK).run()


@pytest.mark.parametrize("who", ["learner", "actor0"])
def test_a_user_error_comes_up_as_its_own_sentence_and_nothing_is_restarted(folder: Path, who: str) -> None:
    wrong = (
        "print('INFO loading')\nprint('error: there is no model at x; check model.path.', file=sys.stderr)\nsys.exit(2)"
    )
    scripts = {"learner": SERVE, "actor0": SERVE} | {who: wrong}
    with pytest.raises(UserError) as failed:
        Supervisor(plan(folder, scripts["learner"], scripts["actor0"]), Listener(), FreshStarter(), QUICK).run()
    assert str(failed.value) == "there is no model at x; check model.path."
    assert starts(folder, who) == 1


def test_a_program_that_cannot_be_started_leaves_nothing_behind(folder: Path) -> None:
    broken = Process(
        name="actor0", argv=("/no/such/program",), environment={}, threads=1, log=folder / "logs" / "actor0.log"
    )
    topology = Topology(run_dir=folder, endpoint="ipc", learner=child(folder, "learner", SERVE), actors=(broken,))
    with pytest.raises(FileNotFoundError):
        Supervisor(topology, Listener(), FreshStarter(), QUICK).run()


def test_the_words_of_an_earlier_session_are_not_shown(folder: Path) -> None:
    log = folder / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("error: stale words\n")
    listener = Listener()
    with pytest.raises(ProcessFailed) as failed:
        Supervisor(plan(folder, "print('now'); sys.exit(3)"), listener, FreshStarter(), QUICK).run()
    assert "stale" not in str(failed.value)
    assert not any("stale" in line for line in listener.lines)
    assert log.read_text().startswith("error: stale words\n")


# --- several ranks

LOST = "print('error: Another rank of the learner is gone; its log says why.', file=sys.stderr)\nsys.exit(3)"


def ranked(folder: Path, *scripts: str) -> Topology:
    """A learner whose ranks run these."""
    first, *others = (child(folder, f"learner{rank or ''}", script) for rank, script in enumerate(scripts))
    actor = child(folder, "actor0", SERVE)
    return Topology(run_dir=folder, endpoint="ipc", learner=first, actors=(actor,), ranks=tuple(others))


def ended(folder: Path, *scripts: str) -> str:
    """What is said of it."""
    with pytest.raises((ProcessFailed, UserError)) as failed:
        Supervisor(ranked(folder, *scripts), Listener(steps=lambda: 4), FreshStarter(), QUICK).run()
    return str(failed.value)


def test_ranks_end_with_rank_0(folder: Path) -> None:
    listener = Listener()
    Supervisor(ranked(folder, "wait_for('learner1.ready')", DEAF, "pass"), listener, FreshStarter(), QUICK).run()
    assert listener.notes == [] and starts(folder, "learner2") == 1


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it(folder: Path, victim: int) -> None:
    # The kill comes a while after the file.
    scripts = [f"wait_for('dead')\ntime.sleep(0.5)\n{LOST}"] * 3
    # Long enough for the launcher to have looked at the steps.
    scripts[victim] = "time.sleep(1.0)\n(here / 'dead').touch()\nos.kill(os.getpid(), signal.SIGKILL)"
    name = f"learner{victim or ''}"
    assert ended(folder, *scripts).startswith(f"{name} was ended by SIGKILL after step 4; the end of")


def test_a_sentence_that_all_ranks_have_is_that_of_rank_0_also_if_it_takes_longer(folder: Path) -> None:
    stops = "print('error: step 3 is refused ({}).', file=sys.stderr)\nsys.exit(2)"
    slow = "wait_for('learner1.gone')\ntime.sleep(0.2)\n" + stops.format("kept in a file")
    assert ended(folder, slow, "(here / 'learner1.gone').touch()\n" + stops.format("kept nowhere")) == (
        "step 3 is refused (kept in a file)."
    )


def test_a_crash_of_one_rank_is_shown_and_not_that_rank_0_lost_it(folder: Path) -> None:
    said = ended(folder, f"wait_for('learner1.gone')\n{LOST}", "(here / 'learner1.gone').touch()\nraise KeyError('x')")
    assert "learner1 ended with exit code 1 after step 4" in said and "learner1 | KeyError: 'x'" in said


# --- restarts


def test_a_dead_actor_is_started_again_and_its_workers_are_cleared(folder: Path) -> None:
    actor = WITH_WORKER + "if starts < 3: os._exit(1)\n(here / 'third').touch()\n" + SERVE
    listener = Listener()
    Supervisor(plan(folder, "wait_for('third')", actor), listener, FreshStarter(), QUICK).run()
    assert starts(folder, "actor0") == 3
    assert listener.notes == [
        "actor0 ended with exit code 1; starting it again (1 of 5)",
        "actor0 ended with exit code 1; starting it again (2 of 5)",
    ]
    assert starts(folder, "worker") == 3


def test_an_actor_killed_by_a_signal_is_started_again(folder: Path) -> None:
    actor = "if starts == 1: os.kill(os.getpid(), signal.SIGKILL)\n(here / 'second').touch()\n" + SERVE
    listener = Listener()
    Supervisor(plan(folder, "wait_for('second')", actor), listener, FreshStarter(), QUICK).run()
    assert listener.notes == ["actor0 was ended by SIGKILL; starting it again (1 of 5)"]
    (event,) = restarts((folder / "logs" / "supervisor.log").read_text().splitlines())
    assert (event.kind, event.text) == ("restart", listener.notes[0]), "pages show it as an event"


def test_an_actor_that_keeps_dying_ends_the_run(folder: Path) -> None:
    listener = Listener()
    with pytest.raises(ProcessFailed) as failed:
        Supervisor(plan(folder, SERVE, "sys.exit('no luck')"), listener, FreshStarter(), QUICK).run()
    assert "actor0 ended with exit code 1 after step 0" in str(failed.value)
    assert "actor0 | no luck" in str(failed.value)
    assert len(listener.notes) == 5
    assert starts(folder, "actor0") == 6


def test_steps_in_between_forgive_earlier_deaths(folder: Path) -> None:
    actor = "if starts <= 8: sys.exit(1)\n(here / 'ninth').touch()\n" + SERVE
    listener = Listener(steps=lambda: starts(folder, "actor0"))
    Supervisor(plan(folder, "wait_for('ninth')", actor), listener, FreshStarter(), QUICK).run()
    assert starts(folder, "actor0") == 9


def test_an_actor_that_left_in_peace_is_started_again_only_if_the_learner_goes_on(folder: Path) -> None:
    actor = "if starts == 1: sys.exit(0)\n(here / 'second').touch()\n" + SERVE
    listener = Listener()
    Supervisor(plan(folder, "wait_for('second')", actor), listener, FreshStarter(), QUICK).run()
    assert starts(folder, "actor0") == 2
    assert listener.notes == []


def test_pauses_double() -> None:
    restarts = Restarts(SupervisorLimits(pause_s=0.5, restarts=5))
    due = []
    for _ in range(4):
        assert restarts.plan("actor0", 1, now=100.0)
        due.append(restarts.due["actor0"] - 100.0)
    assert due == [0.5, 1.0, 2.0, 4.0]
    assert not restarts.take_due("actor0", now=103.9)
    assert restarts.take_due("actor0", now=104.0)
    assert not restarts.is_planned("actor0")


# --- interrupts


def interrupt_when(ready: Path, times: int) -> Callable[[Listener], None]:
    """Ctrl-C, as the launcher gets it, once the learner is there; again once the first has had an effect."""
    sent = []

    def act(listener: Listener) -> None:
        if ready.exists() and len(sent) < times and len(listener.notes) == len(sent):
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    return act


def test_the_first_interrupt_lets_the_learner_finish(folder: Path) -> None:
    listener = Listener(interrupt_when(folder / "learner.ready", times=1))
    Supervisor(plan(folder, ON_TERM + SERVE, ON_TERM + SERVE), listener, FreshStarter(), QUICK).run()
    assert listener.notes == ["finishing the step; Ctrl-C again stops at once"]
    assert "learner | asked to stop" in listener.lines


def test_the_second_interrupt_stops_at_once(folder: Path) -> None:
    listener = Listener(interrupt_when(folder / "learner.ready", times=2))
    with pytest.raises(KeyboardInterrupt):
        Supervisor(plan(folder, DEAF, WITH_WORKER + DEAF), listener, FreshStarter(), QUICK).run()


def test_a_learner_that_is_still_loading_is_simply_stopped(folder: Path) -> None:
    listener = Listener(interrupt_when(folder / "learner.ready", times=1))
    Supervisor(plan(folder, "(here / 'learner.ready').touch()\n" + SERVE), listener, FreshStarter(), QUICK).run()
    assert listener.notes == ["finishing the step; Ctrl-C again stops at once"]


def test_a_signal_to_all_processes_is_no_crash_of_a_learner_that_is_still_loading(folder: Path) -> None:
    def terminate_all(_: Listener) -> None:
        learner = int((folder / "learner.pids").read_text()) if (folder / "learner.ready").exists() else None
        if learner and alive(learner):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(learner, signal.SIGTERM)
            wait_until(lambda: not alive(learner), "the end of the learner", DEADLINE_S)

    topology = plan(folder, "(here / 'learner.ready').touch()\n" + SERVE)
    Supervisor(topology, Listener(terminate_all), FreshStarter(), QUICK).run()


class Impatient(Listener):
    """Does not want to wait for evaluations."""

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("waiting"):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_after_the_end_leaves_the_last_evaluations(folder: Path) -> None:
    # Not for ever, so that the test ends if nothing leaves it.
    evaluator = child(folder, "evaluator", DEAF.replace("600", "20"))
    topology = plan(folder, "wait_for('evaluator.ready')", ON_TERM + SERVE)
    listener = Impatient()
    Supervisor(replace(topology, followers=(replace(evaluator, awaited=True),)), listener, FreshStarter(), QUICK).run()
    assert listener.notes == [
        "waiting for the last evaluations; Ctrl-C leaves them to `resume`",
        "the last evaluations are left to `resume`",
    ]


def test_handlers_are_put_back(folder: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Supervisor(plan(folder, "pass"), Listener(), FreshStarter(), QUICK).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- the launcher's own death

LAUNCHER = """
import sys
from pathlib import Path
from launch.supervisor.starter import FreshStarter
from launch.supervisor.supervise import Supervisor
from tests.integration.test_supervise import DEAF, QUICK, WITH_WORKER, Listener, plan
folder = Path(sys.argv[1])
Supervisor(plan(folder, DEAF, DEAF), Listener(), FreshStarter(), QUICK).run()
"""


def start_launcher(folder: Path) -> subprocess.Popen[bytes]:
    """In a process of its own, up and running."""
    argv = [sys.executable, "-c", LAUNCHER, str(folder)]
    launcher = subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    wait_until(
        lambda: (folder / "learner.ready").exists() and (folder / "actor0.ready").exists(),
        "the start of both",
        DEADLINE_S,
    )
    return launcher


def test_a_killed_launcher_leaves_no_orphan(folder: Path) -> None:
    launcher = start_launcher(folder)
    assert all(map(alive, pids(folder)))
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(alive, pids(folder))), "the end of the orphans", DEADLINE_S)


def test_two_terminations_stop_a_run_that_does_not_listen(folder: Path) -> None:
    launcher = start_launcher(folder)
    launcher.terminate()
    time.sleep(0.3)
    assert launcher.poll() is None
    launcher.terminate()
    # An uncaught KeyboardInterrupt here; the command line makes 130 of it.
    assert launcher.wait(DEADLINE_S) != 0
