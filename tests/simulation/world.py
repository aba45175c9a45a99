"""One simulated run: a learner, actors, a network and a disk. A process that is killed is started again.

`simulate(schedule)` returns the result of the run, or raises the violation. It is a function of schedule and build:
every random number comes from the schedule's seed, and threads run one at a time (virtual_time.py).
"""

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from learner.update.mismatch import Mismatch
from tests.simulation.build import REAL, Build
from tests.simulation.disk import Disk
from tests.simulation.hostile import run_as_hostile
from tests.simulation.invariants import Outcome, Violation, Watch, is_expected
from tests.simulation.network import Network
from tests.simulation.ports import ActorEnd, LearnerEnd
from tests.simulation.schedule import CALM_AT_S, CALM_S, Crash, Schedule, Shape, undisturbed
from tests.simulation.starts import LearnerStart, run_as_actor
from tests.simulation.trace import Trace
from tests.simulation.virtual_time import Killed, Process, Stuck, VirtualTime

LEARNER = -1
MEMORY = Path("/dev/shm")
RESTART_S = 0.5


class World:
    """Everybody in one run."""

    def __init__(self, schedule: Schedule, build: Build, expected: Outcome | None, folder: Path, traced: bool) -> None:
        self.schedule = schedule
        self.config = schedule.config
        self.build = build
        self.rng = random.Random(f"world {schedule.seed}")
        self.virtual_time = VirtualTime()
        self.trace = Trace(self.virtual_time.clock, traced)
        self.watch = Watch(self.config, expected)
        self.disk = Disk(folder, self.rng)
        self.machine = folder / "machine"
        self.network = Network(self.virtual_time, schedule, self.trace, self.rng)
        self.living: dict[int, Process] = {}
        self.armed: dict[int, list[Crash]] = {}
        self.deaths: dict[int, Crash] = {}
        self.points: dict[int, int] = {}
        self.actor_starts = 0
        self.stop_asked = False
        self.stale_left = schedule.stale
        self.resample_step: int | None = None
        self.outcome: Outcome | None = None

    def run(self) -> Outcome:
        """To the end of all, within the time allowed."""
        try:
            for crash in self.schedule.crashes:
                self.virtual_time.after(crash.at_s, partial(self.strike, crash))
            self.start_learner()
            for place in range(self.schedule.actors):
                self.virtual_time.after(self.rng.random(), partial(self.start_actor, place))
            if self.schedule.hostile:
                self.virtual_time.after(random.Random(f"hostile {self.schedule.seed}").random(), self.start_hostile)
            self.virtual_time.direct(CALM_AT_S + CALM_S)
            if self.living or self.outcome is None:
                alive = ", ".join(process.name for process in self.living.values()) or "nobody"
                raise Violation("liveness", f"not over after {CALM_S:.0f} s of calm; alive: {alive}")
        except Stuck as stuck:
            raise Violation("liveness", str(stuck)) from stuck
        finally:
            self.virtual_time.close(list(self.living.values()))
        self.watch.ended(self.outcome, self.rows(), self.config.run.steps)
        return self.outcome

    def start_learner(self) -> None:
        """One more start."""
        self.trace.say("learner", "starts")
        self.stop_asked = False
        self.living[LEARNER] = self.virtual_time.start("learner", self.learner, partial(self.ended, LEARNER))

    def start_actor(self, place: int) -> None:
        """One more start, under the old id or a new one."""
        if self.outcome is None:
            self.actor_starts += 1
            name = f"actor{place}" + (f".{self.actor_starts}" if self.schedule.new_names else "")
            self.trace.say(name, "starts")
            body = partial(self.actor, name, place)
            self.living[place] = self.virtual_time.start(name, body, partial(self.ended, place))

    def start_hostile(self) -> None:
        """The one start of the one who means harm."""
        place = self.schedule.actors
        self.trace.say("evil", "starts")
        self.living[place] = self.virtual_time.start("evil", partial(self.hostile, place), partial(self.ended, place))

    def hostile(self, place: int) -> None:
        """What its thread does."""
        wire = self.network.open_actor("evil", place)
        port = ActorEnd(self.network, wire, self.watch, partial(self.point, place), self.trace)
        try:
            run_as_hostile(port, random.Random(self.schedule.seed), self.trace, over=self.is_over)
        finally:
            wire.died_at = self.virtual_time.now

    def is_over(self) -> bool:
        """Whether there is nobody left to harm."""
        return self.outcome is not None or self.virtual_time.now >= CALM_AT_S

    def learner(self) -> None:
        """What its thread does."""
        point = partial(self.point, LEARNER)
        port = LearnerEnd(self.network, self.network.open_learner(), self.watch, point, self.trace)
        resample_step, self.resample_step = self.resample_step, None
        start = LearnerStart(
            self.config,
            self.build,
            self.disk,
            port,
            watch=self.watch,
            point=point,
            clock=self.virtual_time.clock,
            work=partial(self.work, 0.05, 0.4),
            stop=lambda: self.stop_asked,
            resample_step=resample_step,
        )
        try:
            self.outcome = start.run_once() or self.outcome
        except Mismatch:
            self.resample_step = max(start.publisher.versions) + 1
            self.trace.count("sampled again")
            raise
        finally:
            start.close()

    def actor(self, name: str, place: int) -> None:
        """What its thread does."""
        wire = self.network.open_actor(name, place)
        port = ActorEnd(self.network, wire, self.watch, partial(self.point, place), self.trace)
        work = partial(self.work, 0.05, 0.5)
        try:
            run_as_actor(
                name,
                self.config,
                self.build,
                port,
                watch=self.watch,
                clock=self.virtual_time.clock,
                work=work,
                stale=self.stale,
                passed_on=self.build.passed_on(self.machine) if self.schedule.one_machine else None,
            )
        finally:
            wire.died_at = self.virtual_time.now
            self.lose_files()

    def lose_files(self) -> None:
        """What actors pass on to each other is gone, as after a restart of their machine."""
        if self.schedule.loses_files:
            for path in self.machine.glob("*.safetensors"):
                path.unlink()

    def stale(self) -> bool:
        """Whether the next order is filled from a stale adapter."""
        self.stale_left -= 1
        return self.stale_left >= 0

    def work(self, least_s: float, most_s: float, progress: Callable[[], None]) -> None:
        """Time passes, now and then much of it, with a word of progress in the middle."""
        seconds = self.rng.uniform(least_s, most_s) * self.rng.choice((1, 1, 1, 1, 8))
        self.virtual_time.wait(seconds / 2)
        progress()
        self.virtual_time.wait(seconds / 2)

    def strike(self, crash: Crash) -> None:
        """The time of a crash has come: now, or at a point soon after."""
        if crash.death == "stop":
            self.trace.say("learner", "is asked to stop")
            self.stop_asked = True
            self.deaths[LEARNER] = crash
        elif crash.at_point:
            self.armed.setdefault(crash.victim, []).append(crash)
            self.points.setdefault(crash.victim, 0)
        elif process := self.living.get(crash.victim):
            self.trace.say(process.name, f"dies: {crash.death}")
            self.deaths[crash.victim] = crash
            self.virtual_time.kill(process)

    def point(self, who: int, where: str) -> None:
        """A named place: those who are dead stop here, and those who are to die do so."""
        if self.virtual_time.current.killed:
            raise Killed
        if not self.armed.get(who) or self.virtual_time.now >= CALM_AT_S:
            return
        self.points[who] += 1
        if self.points[who] >= self.armed[who][0].at_point:
            self.points[who] = 0
            self.deaths[who] = self.armed[who].pop(0)
            self.trace.say(self.virtual_time.current.name, f"dies {where}: {self.deaths[who].death}")
            self.virtual_time.die()

    def ended(self, who: int, process: Process) -> None:
        """Somebody's thread is at its end: start it again, or see that all is over."""
        del self.living[who]
        self.trace.say(process.name, f"ends: {'killed' if process.killed else process.error or 'on purpose'}")
        if isinstance(process.error, Violation):
            raise process.error
        if process.error and not is_expected(process.error):
            raise Violation("no error", f"{process.name}: {process.error!r}") from process.error
        crash = self.deaths.pop(who, None)
        if crash:
            self.trace.count(f"{'learner' if who == LEARNER else 'actor'}: {crash.death}")
        if who == LEARNER:
            self.network.close_learner()
            self.disk.die(crash.death if crash and process.killed else "stop")
        if self.outcome is None and who < self.schedule.actors:
            start = self.start_learner if who == LEARNER else partial(self.start_actor, who)
            self.virtual_time.after(crash.down_s if crash else RESTART_S, start)
        elif self.outcome is not None and not self.living:
            self.virtual_time.wake(self.virtual_time.director)

    def rows(self) -> list[int]:
        """The steps that metrics.jsonl has rows of."""
        return [json.loads(line)["step"] for line in self.disk.run.metrics.read_text().splitlines()]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of a run in which no invariant was broken."""

    outcome: Outcome
    """What it came to."""
    trace: tuple[str, ...]
    """A line an event, if it was asked for."""
    counts: Counter[str]
    """How often what happened."""
    seconds: float
    """Virtual time until all was over."""


def run_in(schedule: Schedule, build: Build, expected: Outcome | None, traced: bool) -> Report:
    """One world in a folder of its own, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    world = World(schedule, build, expected, folder, traced)
    try:
        outcome = world.run()
        trace = world.trace
        return Report(outcome=outcome, trace=tuple(trace.lines), counts=trace.counts, seconds=world.virtual_time.now)
    except Violation as violation:
        violation.add_note("\n".join(world.trace.lines))
        raise
    finally:
        shutil.rmtree(folder)


@lru_cache(maxsize=256)
def expected_of(shape: Shape, build: Build) -> Outcome:
    """What the undisturbed run comes to."""
    return run_in(undisturbed(shape), build, None, traced=False).outcome


def simulate(schedule: Schedule, build: Build = REAL, *, traced: bool = False) -> Report:
    """Raises Violation, with the trace as its note."""
    return run_in(schedule, build, expected_of(schedule.shape, build), traced)
