"""Processes that only follow a run, such as its tracker: whatever happens to them, the run goes on.

    dies               started again after a pause that doubles, at most 5 times in all; after that a note
    exits 2            a user error: a note with its sentence, not started again
    hangs, is stopped  nobody waits for it, until the run has ended
    run has ended      asked to finish (SIGTERM, or --ended if it has to be started again), killed after a grace period
                       -> a note. One that is awaited, the evaluator, has as much time as it needs, until the user
                       asks to stop

What a follower has not done is left for the next `resume`, also of a run that is done.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from launch.supervisor.child import Child
from launch.supervisor.endings import PREFIX, USER_ERROR
from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.starter import FreshStarter
from launch.supervisor.topology import Process
from shared.errors import UserError
from shared.process.children import how_it_ended
from shared.run.growing_file import last_lines


class Followers:
    """The followers of one run."""

    def __init__(self, processes: Sequence[Process], limits: SupervisorLimits, note: Callable[[str], None]) -> None:
        """note: tells the user."""
        self.processes = {process.name: process for process in processes}
        self.limits = limits
        # No step is counted here, so the limit is for the whole run.
        self.restarts = Restarts(limits)
        self.note = note
        # A new interpreter: it needs none of the libraries that the fork server has loaded.
        self.starter = FreshStarter()
        self.children: dict[str, Child] = {}
        self.run_has_ended = False

    def start(self) -> None:
        for name in self.processes:
            self.start_one(name)

    def start_one(self, name: str) -> None:
        process = self.processes[name]
        if self.run_has_ended:
            process = replace(process, argv=(*process.argv, "--ended"))
        try:
            self.children[name] = Child(process, self.starter)
        except (OSError, UserError) as error:
            self.note(f"{name} could not be started ({error}); the run goes on without it")

    def check(self) -> None:
        """Start again what has died, when that is due."""
        for name, child in list(self.children.items()):
            code = child.exit_code()
            if code is not None and not self.restarts.is_planned(name):
                self.handle_exit(child, code)
            if self.restarts.is_planned(name) and self.restarts.take_due(name, time.monotonic()):
                self.start_one(name)

    def handle_exit(self, child: Child, code: int) -> None:
        child.kill()
        if code == 0 and self.run_has_ended:
            self.children.pop(child.name)
            return
        may_restart = code != USER_ERROR and self.restarts.plan(child.name, code, time.monotonic())
        if may_restart:
            self.note(f"{child.name} {how_it_ended(code)}; starting it again, the run goes on")
            return
        self.children.pop(child.name)
        self.restarts.due.pop(child.name, None)
        said = last_lines(child.process.log, 1, child.output_start)
        why = f": {said[0].removeprefix(PREFIX)}" if said else ""
        self.note(f"{child.name} {how_it_ended(code)}{why} The run goes on without it; log: {child.process.log}")

    def finish(self, asked_to_stop: Callable[[], bool]) -> None:
        """Give them time for the rest. asked_to_stop: called while waiting; it may raise."""
        self.run_has_ended = True
        for child in self.children.values():
            child.ask_to_stop()
        self.wait(asked_to_stop)

    def start_after_end(self) -> None:
        """Of a run that had ended before: start them for what they had not done, and give them time for it."""
        self.run_has_ended = True
        self.start()
        self.wait(lambda: False)

    def wait(self, asked_to_stop: Callable[[], bool]) -> None:
        if not asked_to_stop() and any(child.process.awaited for child in self.children.values()):
            self.note("waiting for the last evaluations; Ctrl-C leaves them to `resume`")
        deadline = time.monotonic() + self.limits.followers_s
        self.check()
        while any(child.process.awaited or time.monotonic() < deadline for child in self.children.values()):
            if asked_to_stop():
                self.leave_awaited()
            time.sleep(self.limits.tick_s)
            self.check()
        for child in self.children.values():
            self.note(
                f"{child.name} was not ready {self.limits.followers_s:g} s after the end and was killed; `resume` lets"
                " it continue"
            )

    def leave_awaited(self) -> None:
        for child in [child for child in self.children.values() if child.process.awaited]:
            self.children.pop(child.name).kill()
            self.note("the last evaluations are left to `resume`")

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()
