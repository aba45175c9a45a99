"""After a run ends in any way, no process of it is left: learner, actor, workers, or what a reward function started.

The reward function here starts a program in a session of its own and never waits for it.
"""

import os
import random
import signal
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from shared.process.lease import LEASE_BYTE
from shared.run.file_lock import open_lock, try_byte, try_lock
from tests.support.runs import SMALL, num_rows, processes_of, sets, start, wait_until

REWARD = """
import subprocess
from functools import partial
def reward(prompts, completions, completion_ids, **columns):
    subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
    return [float(len(text) % 2) for text in completions]
"""


def sleepers(seconds: str) -> list[psutil.Process]:
    """What the reward function has started: nobody else sleeps for so odd a time."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]]


def left(family: list[psutil.Process], seconds: str) -> list[psutil.Process]:
    """Those that still run, and zombies that nobody collects."""
    return [process for process in family if process.is_running()] + sleepers(seconds)


def end(how: str, launcher: "subprocess.Popen[str]", out: Path, family: list[psutil.Process]) -> None:
    match how:
        case "launcher killed":
            launcher.kill()
        case "learner killed":
            os.kill(processes_of(out, "learner")[0], signal.SIGKILL)
        case "actor and fork server killed, then the ordinary end":
            fork_servers = [process for process in family if "actor.scoring.fork_server" in process.cmdline()]
            assert fork_servers
            for process in fork_servers:
                process.kill()
            os.kill(processes_of(out, "actor")[0], signal.SIGKILL)
        case _:
            launcher.send_signal(signal.SIGINT)
            wait_until(lambda: "asked to stop" in (out / "logs" / "learner.log").read_text(), "the first")
            launcher.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("launcher killed", -signal.SIGKILL),
        pytest.param("learner killed", 1, marks=pytest.mark.long),
        pytest.param("actor and fork server killed, then the ordinary end", 0, marks=pytest.mark.long),
        ("Ctrl-C twice", None),
    ],
)
def test_nothing_of_a_run_is_left(tmp_path: Path, how: str, code: int | None) -> None:
    out, reward, seconds = tmp_path / "run", tmp_path / "reward.py", f"600.{random.randrange(10**9):09d}"
    reward.write_text(REWARD.format(seconds=seconds))
    verifier = {"verifier.kind": "callable", "verifier.form": "text", "verifier.function": f"{reward}:reward"}
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | verifier | {"run.steps": 8}))
    wait_until(lambda: num_rows(out) >= 2 and bool(sleepers(seconds)), "the second step")
    family = psutil.Process(launcher.pid).children(recursive=True)
    end(how, launcher, out, family)
    output, _ = launcher.communicate(timeout=100)
    assert code is None or launcher.returncode == code, output
    wait_until(
        lambda: not left(family, seconds) and not processes_of(out, "actor"), "the end of all processes", seconds=20
    )
    for name, take in (("lock", try_lock), ("lease/lock", partial(try_byte, place=LEASE_BYTE))):
        descriptor = open_lock(out / name)
        assert take(descriptor)
        os.close(descriptor)
