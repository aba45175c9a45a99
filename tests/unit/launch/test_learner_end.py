"""The end of a learner, seen at any moment: what ended with an error is never taken for a run that is done."""

import math
from pathlib import Path
from typing import IO

import pytest

from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.supervise import Supervisor
from launch.supervisor.topology import Process, ProcessFailed, Topology

QUICK = SupervisorLimits(tick_s=0.0, leaving_s=0.0, grace_s=0.0)


class Scripted:
    """A process that runs for so many looks at it, and then has ended."""

    pid = None

    def __init__(self, looks: float, code: int) -> None:
        self.looks = looks
        self.code = code

    def exit_code(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else self.code

    def send_signal(self, number: int) -> None:
        pass

    def kill_group(self) -> None:
        pass


class ScriptedStarter:
    """Its learner ends; actors serve for ever."""

    def __init__(self, looks: int, code: int) -> None:
        self.learner = Scripted(looks, code)

    def start(self, process: Process, log: IO[bytes]) -> Scripted:
        return self.learner if process.name == "learner" else Scripted(math.inf, 0)

    def close(self) -> None:
        pass


class NoScreen:
    def tick(self) -> int:
        return 0

    def note(self, text: str) -> None:
        pass

    def log_line(self, name: str, line: str) -> None:
        pass


def supervisor(folder: Path, looks: int, code: int) -> Supervisor:
    def process(name: str) -> Process:
        return Process(name=name, argv=(), environment={}, threads=1, log=folder / f"{name}.log")

    plan = Topology(run_dir=folder, endpoint="ipc", learner=process("learner"), actors=(process("actor0"),))
    return Supervisor(plan, NoScreen(), ScriptedStarter(looks, code), QUICK)


@pytest.mark.parametrize("looks", range(8))
def test_a_learner_that_fails_between_two_looks_has_failed(looks: int, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="learner ended with exit code 1"):
        supervisor(tmp_path, looks, 1).run()


@pytest.mark.parametrize("looks", range(8))
def test_a_learner_that_is_done_ends_the_run(looks: int, tmp_path: Path) -> None:
    supervisor(tmp_path, looks, 0).run()
