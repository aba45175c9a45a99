"""An unreliable wire in memory: delays, losses, duplicates, late messages, cut links, dead ends.

In order per direction unless a message is drawn to be late, as over a real socket. A cut takes what is on its way. All
faults are drawn from the run's seed, and stop when the calm begins.
"""

import random
from collections import deque
from functools import partial

from protocol.codec import decode, encode
from protocol.errors import PeerGone
from protocol.messages import AnyMessage
from tests.simulation.schedule import CALM_AT_S, QUIET, Cut, LineFaults, Schedule
from tests.simulation.trace import Trace
from tests.simulation.virtual_time import Process, VirtualTime

LATE_S = 3.0


class Mailbox:
    """What has come for one start of one process, and who waits for it."""

    def __init__(self, virtual_time: VirtualTime) -> None:
        self.virtual_time = virtual_time
        self.messages: deque[tuple[bytes, AnyMessage]] = deque()
        self.reader: Process | None = None

    def put(self, peer: bytes, message: AnyMessage) -> None:
        """It has come."""
        self.messages.append((peer, message))
        if self.reader:
            self.virtual_time.wake(self.reader)

    def get(self, timeout_s: float) -> tuple[bytes, AnyMessage] | None:
        """The oldest; waits for one if there is none."""
        if not self.messages and timeout_s > 0:
            self.reader = self.virtual_time.current
            try:
                self.virtual_time.wait(timeout_s)
            finally:
                self.reader = None
        return self.messages.popleft() if self.messages else None


class Wire:
    """Between the learner and one start of one actor."""

    def __init__(self, address: bytes, place: int, mailbox: Mailbox) -> None:
        self.address = address
        self.place = place
        self.mailbox = mailbox
        self.died_at: float | None = None
        self.last_arrival = {True: 0.0, False: 0.0}


class Network:
    """All wires of a run."""

    def __init__(self, virtual_time: VirtualTime, schedule: Schedule, trace: Trace, rng: random.Random) -> None:
        self.virtual_time = virtual_time
        self.schedule = schedule
        self.trace = trace
        self.rng = rng
        self.learner: Mailbox | None = None
        self.learner_starts = 0
        self.kept: list[tuple[bytes, AnyMessage]] = []
        self.wires: dict[bytes, Wire] = {}
        self.breaks = [0] * (schedule.actors + 1)
        for cut in schedule.cuts:
            virtual_time.after(cut.at_s, lambda cut=cut: self.break_link(cut))

    @property
    def line_faults(self) -> LineFaults:
        """Of this moment."""
        return self.schedule.line_faults if self.virtual_time.now < CALM_AT_S else QUIET

    def open_learner(self) -> Mailbox:
        """A start of the learner listens."""
        self.learner = Mailbox(self.virtual_time)
        self.learner_starts += 1
        for peer, message in self.kept:
            self.learner.put(peer, message)
        self.kept = []
        return self.learner

    def close_learner(self) -> None:
        """It does not any more, and what it had not read is gone."""
        self.learner = None

    def open_actor(self, name: str, place: int) -> Wire:
        """A start of an actor dials."""
        address = f"{name}-{len(self.wires):08x}".encode()
        self.wires[address] = Wire(address, place, Mailbox(self.virtual_time))
        return self.wires[address]

    def break_link(self, cut: Cut) -> None:
        """What is on its way is lost."""
        self.breaks[cut.actor] += 1
        self.trace.count("links cut")
        self.trace.say(f"link {cut.actor}", f"is cut for {cut.for_s:.2f} s")

    def cut_now(self, place: int) -> Cut | None:
        """The cut that this actor's link suffers, if any."""
        now = self.virtual_time.now
        found = (c for c in self.schedule.cuts if c.actor == place and c.at_s <= now < c.at_s + c.for_s)
        return next(found, None)

    def to_actor(self, address: bytes, message: AnyMessage) -> None:
        """From the learner; PeerGone if it can tell."""
        wire = self.wires[address]
        now, cut = self.virtual_time.now, self.cut_now(wire.place)
        dead = wire.died_at is not None and now - wire.died_at >= self.line_faults.notices_gone_s
        if dead or (cut and cut.noticed):
            raise PeerGone(f"{address.decode()} is not connected.")
        self.carry(wire, message, to_learner=False)

    def carry(self, wire: Wire, message: AnyMessage, *, to_learner: bool) -> None:
        """Decide what becomes of a message."""
        line_faults, draw = self.line_faults, self.rng.random
        if line_faults.real_bytes:
            message = decode(encode(message))
        if self.cut_now(wire.place) or draw() < line_faults.drop:
            self.lose("loses", message)
            return
        copies = 2 if draw() < line_faults.double else 1
        self.trace.counts["messages"] += copies
        self.trace.counts["doubled"] += copies - 1
        for _ in range(copies):
            at = self.virtual_time.now + draw() * line_faults.delay_s
            if draw() < line_faults.late:
                at += draw() * LATE_S
                self.trace.count("late")
            else:
                at = wire.last_arrival[to_learner] = max(at, wire.last_arrival[to_learner])
            sent = (self.breaks[wire.place], self.learner_starts)
            self.virtual_time.after(at - self.virtual_time.now, partial(self.arrive, wire, message, to_learner, *sent))

    def arrive(self, wire: Wire, message: AnyMessage, to_learner: bool, breaks: int, starts: int) -> None:
        """At the other end, if there still is one."""
        lost = breaks != self.breaks[wire.place]
        if not to_learner:
            lost = lost or wire.died_at is not None
        elif not self.line_faults.keeps_for_next_start:
            lost = lost or self.learner is None or starts != self.learner_starts
        if lost:
            self.lose("loses on the way", message)
        elif not to_learner:
            wire.mailbox.put(wire.address, message)
        elif self.learner:
            self.learner.put(wire.address, message)
        else:
            self.kept.append((wire.address, message))

    def lose(self, how: str, message: AnyMessage) -> None:
        """It never arrives."""
        self.trace.count("lost")
        self.trace.say("network", how, message)
