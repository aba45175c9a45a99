"""A follower that dies, cannot start or refuses to end: a note each time, and never an error."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.supervisor.followers import Followers
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.topology import Process

QUICK = SupervisorLimits(tick_s=0.01, pause_s=0.01, restarts=2, followers_s=0.5)


def followers(folder: Path, argv: tuple[str, ...], notes: list[str], *, awaited: bool = False) -> Followers:
    log = folder / "tracker.log"
    process = Process(name="tracker", argv=argv, environment={}, threads=1, log=log, awaited=awaited)
    return Followers([process], QUICK, notes.append)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def check_until(made: Followers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        made.check()
        time.sleep(0.01)


def test_one_that_always_dies_is_given_up_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("print('no network.'); raise SystemExit(1)"), notes)
    made.start()
    check_until(made, lambda: not made.children)
    assert [("starting it again" in note) for note in notes] == [True, True, False]
    assert "no network. The run goes on without it" in notes[-1]


def test_a_user_error_is_not_tried_again(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, python("print('error: No key.'); raise SystemExit(2)"), notes)
    made.start()
    check_until(made, lambda: not made.children)
    assert len(notes) == 1
    assert "No key. The run goes on without it" in notes[0]


def test_one_that_cannot_be_started_is_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    made = followers(tmp_path, ("/no/such/program",), notes)
    made.start()
    made.check()
    made.finish(lambda: None)
    assert len(notes) == 1
    assert "could not be started" in notes[0]


def test_one_that_does_not_end_is_killed_after_its_time(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    made = followers(tmp_path, python(f"{code}; time.sleep(600)"), notes)
    made.start()
    check_until(made, lambda: "deaf" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: None)
    made.kill()
    assert ["was not ready" in note for note in notes] == [True]
    assert made.children["tracker"].exit_code() == -9


def test_one_that_dies_after_the_end_is_started_again_and_told(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(0 if sys.argv[1:] == ['--ended'] else 600)"
    made = followers(tmp_path, python(code), notes)
    made.start()
    check_until(made, lambda: "[]" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: None)
    assert "['--ended']" in (tmp_path / "tracker.log").read_text()
    assert made.children == {} and ["starting it again" in note for note in notes] == [True]


def test_one_that_is_awaited_has_as_much_time_as_it_needs(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    made = followers(tmp_path, python(f"{code}; time.sleep(2 * {QUICK.followers_s})"), notes, awaited=True)
    made.start()
    check_until(made, lambda: "deaf" in (tmp_path / "tracker.log").read_text())
    made.finish(lambda: None)
    assert notes == ["waiting for the last evaluations"] and made.children == {}
