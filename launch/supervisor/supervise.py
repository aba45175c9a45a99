"""Starts the processes of a run, keeps the actors alive, and ends everything together.

    learner exits 0         actors are asked to stop, killed after a grace  -> returns
    learner exits otherwise everything is killed                            -> its error, with its last log lines
    actor dies              started again after a pause, at most 5 times without a step in between
    actor exits 2           a user error: not started again, everything is killed -> its sentence
    actor stopped too long  killed and started again
    learner stopped, hung   all stacks are written, everything is killed    -> who stood still, where the stacks lie
    first Ctrl-C, SIGTERM   the learner is asked to stop: it finishes the step and exits 0 -> returns
                            an actor that dies meanwhile is not started again: the learner can do without
    second                  everything is killed                            -> KeyboardInterrupt
    nobody reads our output as at the first Ctrl-C                          -> BrokenPipeError, at the end

One thread, one loop: a tick every 0.1 s looks at the processes, forwards log lines and drives the display.

Ctrl-C and SIGTERM, counted instead of obeyed at once: the first asks for an orderly end, the second for any end.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from launch.supervisor.child import Child
from launch.supervisor.endings import USER_ERROR, failure, stall, stalled, stopped
from launch.supervisor.restarts import Patience, Restarts
from launch.supervisor.starter import Starter
from launch.supervisor.topology import Process, ProcessFailed, Topology
from shared.process.children import how_it_ended

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """How often the user asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    def received(self, *_: object) -> None:
        """The handler only counts; a loop that looks at `count` answers."""
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While this is open, signals are counted; afterwards they do again what they did before."""
        before = {number: signal.signal(number, self.received) for number in CAUGHT}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


LAST_PATIENCE = 2.0
"""A stopped learner is left this many times link.silence_s, so that the actors' own words come first."""


class Audience(Protocol):
    """Who watches the run: a live display, plain lines, a test."""

    def tick(self) -> int:
        """Called every tick; returns the steps done so far."""
        ...

    def note(self, text: str) -> None:
        """Something the user should know."""
        ...

    def log_line(self, name: str, line: str) -> None:
        """A line that a process wrote."""
        ...


class Supervisor:
    """The processes of one run."""

    def __init__(self, plan: Topology, audience: Audience, starter: Starter, patience: Patience | None = None) -> None:
        self.plan = plan
        self.starter = starter
        self.audience = audience
        self.patience = patience or Patience()
        self.restarts = Restarts(self.patience)
        self.interrupts = Interrupts()
        self.stopping = False
        self.unheard: BrokenPipeError | None = None
        self.children: dict[str, Child] = {}

    def run(self) -> None:
        """Until the learner is done; raises if anything failed. Afterwards nothing of the run is left."""
        with self.interrupts.caught():
            try:
                for process in self.plan.processes:
                    self.start(process)
                while not self.learner_done():
                    self.tick()
                self.send_actors_home()
            finally:
                self.kill_all()
        if self.unheard:
            raise self.unheard

    def tick(self) -> None:
        """One look at everything."""
        self.answer_interrupts()
        for actor in self.plan.actors:
            self.look_after(actor)
        self.inform()
        time.sleep(self.patience.tick_s)

    def start(self, process: Process) -> None:
        """Start, or start again."""
        self.children[process.name] = Child(process, self.starter)

    @property
    def learner(self) -> Child:
        """The process that decides when the run is over."""
        return self.children[self.plan.learner.name]

    def learner_done(self) -> bool:
        """Whether it exited well; raises if it failed."""
        code = self.learner.exit_code()
        if code is None:
            self.bear_with_learner()
            return False
        if sentence := stall(self.learner, code):
            raise self.standstill(sentence)
        # A learner that is still loading has no handler for SIGTERM yet, and nothing to finish.
        if code != 0 and not (self.stopping and code == -signal.SIGTERM):
            raise failure(self.learner, code, self.restarts.steps_done)
        return True

    def bear_with_learner(self) -> None:
        """A stopped learner has no other cure; its actors, whose wait ends first, say what they waited for."""
        stopped_s = self.learner.stopped_s()
        if stopped_s is not None and stopped_s > LAST_PATIENCE * self.patience.silence_s:
            raise self.standstill(stopped(self.learner, stopped_s))

    def standstill(self, sentence: str) -> ProcessFailed:
        """The error for a run in which nothing moves."""
        return stalled(sentence, self.restarts.steps_done, list(self.children.values()))

    def look_after(self, actor: Process) -> None:
        """Notice a death, and start again what is due."""
        child = self.children[actor.name]
        code = child.exit_code()
        if code is None:
            self.give_up_if_stopped(child)
            return
        # Not `stopping`: a signal to all processes may end an actor within the tick that the request to stop comes in.
        if self.interrupts.count > 0:
            return
        if not self.restarts.noticed(actor.name):
            self.mourn(child, code)
        if self.restarts.take_due(actor.name, time.monotonic()):
            self.start(actor)

    def give_up_if_stopped(self, actor: Child) -> None:
        """The learner has forgotten an actor that was stopped for so long."""
        stopped_s = actor.stopped_s()
        if stopped_s is not None and stopped_s > self.patience.silence_s:
            actor.given_up = stopped(actor, stopped_s)
            actor.write_stacks()
            actor.kill()

    def mourn(self, child: Child, code: int) -> None:
        """Clear up after a dead actor and plan its next life, if it gets one."""
        child.kill()
        sentence = child.given_up or stall(child, code)
        stopped_s = self.learner.stopped_s()
        if sentence and stopped_s is not None:
            raise self.standstill(f"{sentence}; {stopped(self.learner, stopped_s)}")
        may_live = self.restarts.plan(child.name, code, time.monotonic())
        if code == USER_ERROR or not may_live:
            raise failure(child, code, self.restarts.steps_done)
        if code != 0:
            count, limit = self.restarts.deaths[child.name], self.patience.restarts
            how = f"{sentence} (stacks: {child.process.stacks})" if sentence else f"{child.name} {how_it_ended(code)}"
            self.note(f"{how}; starting it again ({count} of {limit})")

    def note(self, text: str) -> None:
        """Something the user should know."""
        self.say(lambda: self.audience.note(text))

    def inform(self) -> None:
        """News to the audience."""
        self.say(self.tell_news)

    def say(self, news: Callable[[], None]) -> None:
        """As long as somebody reads it. A reader who has seen enough (`| head`) wants no more of the run either."""
        if self.unheard:
            return
        try:
            news()
        except BrokenPipeError as error:
            self.unheard = error
            self.interrupts.received()

    def tell_news(self) -> None:
        """Log lines, then the picture."""
        for child in self.children.values():
            for line in child.output.new_lines():
                self.audience.log_line(child.name, line)
        self.restarts.steps(self.audience.tick())

    def answer_interrupts(self) -> None:
        """First: stop after this step. Second: stop now."""
        if self.interrupts.count >= 2:
            raise KeyboardInterrupt
        if self.interrupts.count == 1 and not self.stopping:
            self.stopping = True
            self.learner.ask_to_stop()
            self.note("finishing the step; Ctrl-C again stops at once")

    def send_actors_home(self) -> None:
        """The learner is done, so nobody needs the actors any more."""
        actors = [self.children[actor.name] for actor in self.plan.actors]
        for actor in actors:
            actor.ask_to_stop()
        deadline = time.monotonic() + self.patience.grace_s
        while any(actor.exit_code() is None for actor in actors) and time.monotonic() < deadline:
            self.answer_interrupts()
            time.sleep(self.patience.tick_s)
        self.inform()

    def kill_all(self) -> None:
        """SIGKILL to every process group of the run."""
        for child in self.children.values():
            child.kill()
        self.starter.close()
