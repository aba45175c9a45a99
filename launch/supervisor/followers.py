"""Processes that only follow a run, such as its tracker: whatever happens to them, the run goes on.

    dies               started again after a pause that doubles, up to ten minutes: a network may come back after hours.
                       One that has lived for five minutes has short pauses again. The evaluator, for which the run
                       waits at its end, is started again 5 times at most, then there is a note: a start takes time
                       from the run
    exits 2            a user error: a note with its sentence, not started again
    hangs, is stopped  nobody waits for it, until the run has ended
    run has ended      asked to finish (SIGTERM, or --ended if it has to be started again), killed after a grace period
                       -> a note. One that is awaited has as much time as it needs, until the user asks to stop, and the
                       others are asked when it has ended: the tracker sends the last evaluation
    run has failed     the same, but with seconds to finish, and awaited ones are left to `resume`

What a follower has not done is left for the next `resume`, also of a run that is done.
"""

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from launch.supervisor.child import Child
from launch.supervisor.endings import PREFIX, USER_ERROR
from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.starter import FreshStarter
from launch.supervisor.topology import Process
from protocol.plain_text import for_log
from shared.errors import UserError
from shared.process.children import how_it_ended
from shared.run.growing_file import last_lines

ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Of a colour or a move of the cursor."""
LOOKED_AT = 10
"""Lines at the end of a log, of which the last one with several words says why."""


class Followers:
    """The followers of one run."""

    def __init__(self, processes: Sequence[Process], limits: SupervisorLimits, note: Callable[[str], None]) -> None:
        """note: tells the user."""
        self.processes = {process.name: process for process in processes}
        self.limits = limits
        # No step is counted here.
        self.restarts = Restarts(limits)
        self.note = note
        # A new interpreter: it needs none of the libraries that the fork server has loaded.
        self.starter = FreshStarter()
        self.children: dict[str, Child] = {}
        self.started_at: dict[str, float] = {}
        self.asked_to_finish: set[str] = set()

    def start(self) -> None:
        for name in self.processes:
            self.start_one(name)

    def start_one(self, name: str) -> None:
        process = self.processes[name]
        if name in self.asked_to_finish:
            process = replace(process, argv=(*process.argv, "--ended"))
        self.started_at[name] = time.monotonic()
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
        if code == 0 and child.name in self.asked_to_finish:
            self.children.pop(child.name)
            return
        is_always_tried_again = not child.process.awaited and child.name not in self.asked_to_finish
        if is_always_tried_again and time.monotonic() - self.started_at[child.name] > self.limits.steady_s:
            del self.restarts.deaths[child.name]
        is_within_limit = code != USER_ERROR and self.restarts.plan(child.name, code, time.monotonic())
        how = f"{child.name} {how_it_ended(code)}"
        if is_within_limit:
            self.note(f"{how}; starting it again, the run goes on")
        elif code != USER_ERROR and is_always_tried_again:
            self.note_at_limit(child, how)
        else:
            self.children.pop(child.name)
            self.restarts.due.pop(child.name, None)
            self.note(f"{how}{why(child)} The run goes on without it; log: {child.process.log}")

    def note_at_limit(self, child: Child, how: str) -> None:
        """Once, and again when it has lived for a while."""
        if self.restarts.deaths[child.name] == self.limits.restarts + 1:
            often = f"It is tried again, at the latest every {self.limits.longest_pause_s / 60:g} minutes"
            self.note(f"{how}{why(child)} {often}, and the run goes on; log: {child.process.log}")

    def finish(self, asked_to_stop: Callable[[], bool]) -> None:
        """Give them time for the rest. asked_to_stop: called while waiting; it may raise."""
        for names in self.awaited_first():
            self.ask_to_finish(names)
            self.wait(names, self.limits.followers_s, asked_to_stop)

    def finish_after_failure(self, asked_to_stop: Callable[[], bool]) -> None:
        """The run has failed, and may never be resumed. asked_to_stop: as in `finish`."""
        _, names = self.awaited_first()
        self.ask_to_finish(names)
        self.wait(names, self.limits.grace_s, asked_to_stop)

    def ask_to_finish(self, names: set[str]) -> None:
        self.asked_to_finish.update(names)
        for name in names & self.children.keys():
            self.children[name].ask_to_stop()
            # One that waits for its next start has it now.
            if self.restarts.is_planned(name):
                self.restarts.due[name] = time.monotonic()

    def start_after_end(self) -> None:
        """Of a run that had ended before: start them for what they had not done, and give them time for it."""
        for names in self.awaited_first():
            self.asked_to_finish.update(names)
            for name in names:
                self.start_one(name)
            self.wait(names, self.limits.followers_s, lambda: False)

    def awaited_first(self) -> tuple[set[str], set[str]]:
        """Those that are awaited, then the others."""
        awaited = {name for name, process in self.processes.items() if process.awaited}
        return awaited, self.processes.keys() - awaited

    def wait(self, names: Collection[str], longest_s: float, asked_to_stop: Callable[[], bool]) -> None:
        """For these, which were asked to finish."""
        self.check()
        if not asked_to_stop() and any(child.process.awaited for child in self.children_named(names)):
            self.note("waiting for the last evaluations; Ctrl-C leaves them to `resume`")
        deadline = time.monotonic() + longest_s
        while any(child.process.awaited or time.monotonic() < deadline for child in self.children_named(names)):
            if asked_to_stop():
                self.give_up_awaited()
            time.sleep(self.limits.tick_s)
            self.check()
        for child in self.children_named(names):
            self.note(
                f"{child.name} was not ready {longest_s:g} s after the end and was killed; `resume` lets it continue"
            )

    def give_up_awaited(self) -> None:
        for child in [child for child in self.children.values() if child.process.awaited]:
            self.children.pop(child.name).kill()
            self.note("the last evaluations are left to `resume`")

    def children_named(self, names: Collection[str]) -> list[Child]:
        return [child for name, child in self.children.items() if name in names]

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()


def why(child: Child) -> str:
    """What it said last, as the end of a sentence. Libraries colour their output, and may end it with a bare prefix."""
    lines = [ESCAPE.sub("", line).strip() for line in last_lines(child.process.log, LOOKED_AT, child.output_start)]
    said = [line for line in lines if len(line.split()) > 1] or [line for line in lines if line]
    return f": {for_log(said[-1].removeprefix(PREFIX)).rstrip('.')}." if said else "."
