"""Starts the processes of a run, keeps the actors alive, and ends all processes together.

    learner exits 0         actors are asked to stop, and killed after a grace period  -> returns
    learner exits otherwise everything is killed                 -> its error, with its last log lines. When a
                            run ends with an error, its tracker first gets some seconds to send the rest
    one of several ranks    the others lose it and end, everything is killed -> the error of the one that was first
    actor dies              started again after a pause, at most 5 times without a step in between
    actor exits 2           a user error: not started again, everything is killed -> its sentence
    actor stopped too long  killed and started again
    tracker dies, hangs     nothing happens to the run (followers.py); the same for the evaluator of eval.beside
    learner stopped, hung   all processes write their stacks, everything is killed -> which process, and its stacks
    first Ctrl-C, SIGTERM   the learner is asked to stop: it finishes the step and exits 0 -> returns.
                            An actor that dies after this is not started again: the learner can finish without it.
                            The last evaluations are left to `resume`, also if the learner has ended before
    second                  everything is killed                 -> KeyboardInterrupt
    output is closed        as at the first Ctrl-C               -> BrokenPipeError, at the end

One thread, one loop: every 0.1 s it checks the processes, forwards log lines and updates the screen. Ctrl-C and SIGTERM
are only counted when they arrive; the loop then acts on the count.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from launch.supervisor.child import Child
from launch.supervisor.endings import USER_ERROR, failure, later, stall_error, stall_sentence, stopped_sentence
from launch.supervisor.followers import Followers
from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.starter import Starter
from launch.supervisor.topology import LearnerKilled, Process, ProcessFailed, Topology
from shared.errors import RunDirError, UserError
from shared.process.children import how_it_ended
from shared.run.files import open_log
from shared.run.history import noted

CAUGHT = (signal.SIGINT, signal.SIGTERM)
LEARNER_STOP_FACTOR = 2.0
"""A stopped learner is given up after this many times link.silence_s. Its actors time out before, and say so."""


class Interrupts:
    """Counts how often the user asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    def received(self, *_: object) -> None:
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Count signals in this block; afterwards the old handlers are back."""
        before = {number: signal.signal(number, self.received) for number in CAUGHT}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Screen(Protocol):
    """Shows the run: a live display, plain lines, a test."""

    def tick(self) -> int:
        """Called at every tick; returns the steps done so far."""
        ...

    def note(self, text: str) -> None:
        """Something the user should know."""
        ...

    def log_line(self, name: str, line: str) -> None:
        """A line that a process wrote."""
        ...


Supervise = Callable[[Topology, Screen, SupervisorLimits], None]
"""Starts the processes of a run and returns when it has ended, as Supervisor.run does."""


class Supervisor:
    """Runs the processes of one run."""

    def __init__(
        self, plan: Topology, screen: Screen, starter: Starter, limits: SupervisorLimits | None = None
    ) -> None:
        self.plan = plan
        self.starter = starter
        self.screen = screen
        self.limits = limits or SupervisorLimits()
        self.restarts = Restarts(self.limits)
        self.interrupts = Interrupts()
        self.stopping = False
        """Whether the learner was asked to stop. A signal to all processes may end others before the loop has seen the
        request, so what has died is judged by `interrupts`."""
        self.output_error: BrokenPipeError | None = None
        self.children: dict[str, Child] = {}
        self.followers = Followers(plan.followers, self.limits, self.note)

    def run(self) -> None:
        """Return when the learner is done; raise if anything failed. Afterwards no process of the run is left."""
        with self.interrupts.caught():
            try:
                for process in (self.plan.learner, *self.plan.ranks, *self.plan.actors):
                    self.start(process)
                self.followers.start()
                while not self.learner_done():
                    self.tick()
                self.stop_actors()
                self.followers.finish(self.asked_to_stop)
            except (ProcessFailed, UserError):
                # Before the first step there is nothing to send.
                if self.restarts.steps_done:
                    self.finish_after_failure()
                raise
            finally:
                self.kill_all()
        if self.output_error:
            raise self.output_error

    def tick(self) -> None:
        self.handle_interrupts()
        for actor in self.plan.actors:
            self.check_actor(actor)
        self.followers.check()
        self.update_screen()
        time.sleep(self.limits.tick_s)

    def start(self, process: Process) -> None:
        self.children[process.name] = Child(process, self.starter)

    @property
    def learner(self) -> Child:
        return self.children[self.plan.learner.name]

    @property
    def ranks(self) -> list[Child]:
        """All processes of the learner."""
        return [self.children[process.name] for process in (self.plan.learner, *self.plan.ranks)]

    def learner_done(self) -> bool:
        """Whether it ended well; raises if it failed, or one of its ranks."""
        # Once: if it fails between two looks, the next call raises.
        code = self.learner.exit_code()
        if code == 0:
            return True
        if self.failures():
            self.raise_failure()
        for rank in self.ranks:
            self.fail_if_learner_stopped(rank)
        return code is not None

    def failures(self) -> list[tuple[Child, int]]:
        """Ranks that ended with an error, and their exit codes."""
        codes = [(rank, rank.exit_code() or 0) for rank in self.ranks]
        # A learner that is still loading has no handler for SIGTERM yet, and nothing to finish.
        fine = (0, -signal.SIGTERM) if self.interrupts.count else (0,)
        return [(rank, code) for rank, code in codes if code not in fine]

    def raise_failure(self) -> None:
        """Of the rank that failed first. What it has to say may need a moment more than that the others lost it."""
        deadline = time.monotonic() + self.limits.grace_s
        while any(rank.exit_code() is None for rank in self.ranks) and time.monotonic() < deadline:
            if any(code < 0 for _, code in self.failures()):
                break
            self.handle_interrupts()
            time.sleep(self.limits.tick_s)
        first, code = min(self.failures(), key=lambda failed: later(failed[1]))
        if sentence := stall_sentence(first, code):
            raise self.stall_error(sentence)
        error = failure(first, code, self.restarts.steps_done)
        raise LearnerKilled(str(error)) if code < 0 and not self.interrupts.count else error

    def fail_if_learner_stopped(self, rank: Child) -> None:
        """Give up on a stopped learner. Its actors time out first, so that their message is reported."""
        stopped_s = rank.stopped_s() if rank.exit_code() is None else None
        if stopped_s is not None and stopped_s > LEARNER_STOP_FACTOR * self.limits.silence_s:
            raise self.stall_error(stopped_sentence(rank, stopped_s))

    def stall_error(self, sentence: str) -> ProcessFailed:
        return stall_error(sentence, self.restarts.steps_done, list(self.children.values()))

    def check_actor(self, actor: Process) -> None:
        """Handle its exit, and start it again when that is due."""
        child = self.children[actor.name]
        code = child.exit_code()
        if code is None:
            self.give_up_if_stopped(child)
            return
        if self.interrupts.count > 0:
            return
        if not self.restarts.is_planned(actor.name):
            self.handle_actor_exit(child, code)
        if self.restarts.take_due(actor.name, time.monotonic()):
            self.start(actor)

    def give_up_if_stopped(self, actor: Child) -> None:
        """Kill an actor that has been stopped for so long that the learner has given it up."""
        stopped_s = actor.stopped_s()
        if stopped_s is not None and stopped_s > self.limits.silence_s:
            actor.given_up = stopped_sentence(actor, stopped_s)
            actor.write_stacks()
            actor.kill()

    def handle_actor_exit(self, child: Child, code: int) -> None:
        """Kill what the actor left behind, then plan its restart or raise."""
        child.kill()
        sentence = child.given_up or stall_sentence(child, code)
        stopped_s = self.learner.stopped_s()
        if sentence and stopped_s is not None:
            raise self.stall_error(f"{sentence}; {stopped_sentence(self.learner, stopped_s)}")
        may_restart = self.restarts.plan(child.name, code, time.monotonic())
        if code == USER_ERROR or not may_restart:
            raise failure(child, code, self.restarts.steps_done)
        if code != 0:
            count, limit = self.restarts.deaths[child.name], self.limits.restarts
            how = f"{sentence} (stacks: {child.process.stacks})" if sentence else f"{child.name} {how_it_ended(code)}"
            self.note(f"{how}; starting it again ({count} of {limit})")

    def note(self, text: str) -> None:
        self.show(lambda: self.screen.note(text))
        # A note is no reason to end a run whose disk is full.
        with suppress(RunDirError, OSError), open_log(self.plan.notes, "ab") as file:
            file.write(f"{noted(self.restarts.steps_done, text)}\n".encode())

    def update_screen(self) -> None:
        self.show(self.show_progress)

    def show(self, action: Callable[[], None]) -> None:
        """Show something. If the output is closed (`| head`), stop the run as for Ctrl-C."""
        if self.output_error:
            return
        try:
            action()
        except BrokenPipeError as error:
            self.output_error = error
            self.interrupts.received()

    def show_progress(self) -> None:
        for child in self.children.values():
            for line in child.output.new_lines():
                self.screen.log_line(child.name, line)
        self.restarts.count_steps(self.screen.tick())

    def handle_interrupts(self) -> None:
        """First: stop after this step. Second: stop at once."""
        if self.interrupts.count >= 2:
            raise KeyboardInterrupt
        if self.interrupts.count == 1 and not self.stopping and self.learner.exit_code() is None:
            self.stopping = True
            self.learner.ask_to_stop()
            self.note("finishing the step; Ctrl-C again stops at once")

    def asked_to_stop(self) -> bool:
        self.handle_interrupts()
        return self.interrupts.count > 0

    def stop_actors(self) -> None:
        """The learner has told them to leave. SIGTERM, which would cut short what they clean up, is for one that had
        not joined."""
        actors = [self.children[actor.name] for actor in self.plan.actors]
        self.wait_for(actors, self.limits.leaving_s)
        for actor in actors:
            actor.ask_to_stop()
        self.wait_for(actors, self.limits.grace_s)
        self.update_screen()

    def wait_for(self, actors: list[Child], longest_s: float) -> None:
        deadline = time.monotonic() + longest_s
        while any(actor.exit_code() is None for actor in actors) and time.monotonic() < deadline:
            self.handle_interrupts()
            time.sleep(self.limits.tick_s)

    def finish_after_failure(self) -> None:
        """Let the tracker send the rest, since the run may never be resumed. A Ctrl-C ends the wait, and the error of
        the run is still what is said."""
        for child in self.children.values():
            child.kill()
        before = self.interrupts.count

        def stop_at_interrupt() -> bool:
            if self.interrupts.count > before:
                raise KeyboardInterrupt
            return False

        with suppress(KeyboardInterrupt):
            self.followers.finish_after_failure(stop_at_interrupt)

    def kill_all(self) -> None:
        for child in self.children.values():
            child.kill()
        self.followers.kill()
        self.starter.close()
