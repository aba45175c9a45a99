"""Thousands of actors that take no processor time of the learner's, for `scale_sim`: a LearnerPort in memory.

What the learner's side does is real and takes real time: it decodes and encodes every message (protocol/codec.py). What
an actor does is drawn from distributions and takes no time: when nothing has come, the clock jumps to the next event.

    clock     seconds of processor time that the learner's thread worked + seconds that it waited for the disk + seconds
              that were skipped; what the simulation itself needs is left out, and so is what other programs take
    order     takes seconds_an_order times an actor's own factor (lognormal), and HANG times as long with HANG_SHARE
    line      each message takes delay_s / 2 to 3/2 of it
    failures  an actor dies after a time with mean mean_life_s, and is back after down_s under a new address
    talk      a Heartbeat each HEARTBEAT_S while an actor has orders, a Hello if it has none

Left out on purpose: encryption and sockets, which ZeroMQ does in a thread of its own (benchmarks/publishing.py).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from time import perf_counter, thread_time

import numpy as np

from protocol.codec import decode, encode, encode_again
from protocol.errors import PeerGone
from protocol.messages import (
    AnyMessage,
    FilledOrder,
    Finish,
    Group,
    Heartbeat,
    Order,
    Outcome,
    Policy,
    Welcome,
)
from protocol.transport import Inbound, Outbound
from tests.support.fakes import hello_of, scripted_identity
from tests.support.wire_examples import timings

HEARTBEAT_S = 2.0
SILENCE_S = 60.0
HANG, HANG_SHARE = 10.0, 0.002
OWN_FACTOR, EACH_FACTOR = 0.3, 0.3
"""Standard deviations of the logarithms: of an actor's speed, and of each order's time."""
VOCABULARY = 32_000
HEARTBEAT = encode(Heartbeat(phase="decoding"))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the actors are like."""

    actors: int
    """How many."""
    credits: int
    """Orders that each has at most."""
    seconds_an_order: float
    """Median; 0 for actors that always have an answer ready."""
    tokens: int
    """Mean length of a completion; lengths are even between half and one and a half of it."""
    delay_s: float = 0.05
    """Of a message, on its way."""
    mean_life_s: float = 1800.0
    """Until an actor dies."""
    down_s: float = 60.0
    """Until it is back."""


class Clock:
    """The learner's seconds."""

    def __init__(self) -> None:
        self.skipped = self.outside = self.waited = 0.0
        self.started = thread_time()
        self.parts: defaultdict[str, float] = defaultdict(float)
        """Seconds of the learner's work, by part."""

    def worked(self) -> float:
        return thread_time() - self.started - self.outside + self.waited

    def now(self) -> float:
        return self.worked() + self.skipped

    def stands(self) -> "Standing":
        """While the simulation itself works."""
        return Standing(self)

    @contextmanager
    def waits(self, part: str) -> Iterator[None]:
        """For the disk, by the clock on the wall."""
        began, computed = perf_counter(), thread_time()
        yield
        self.waited += (perf_counter() - began) - (thread_time() - computed)
        self.parts[part] += perf_counter() - began

    def counts(self, part: str) -> "Counting":
        """The learner's time in here belongs to this part."""
        return Counting(self, part)


class Standing:
    """No generator, since each message is measured several times and this counts as the learner's work."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.began = thread_time()

    def __exit__(self, *_: object) -> None:
        self.clock.outside += thread_time() - self.began


class Counting:
    """The same for a part of the learner's work."""

    def __init__(self, clock: Clock, part: str) -> None:
        self.clock = clock
        self.part = part

    def __enter__(self) -> None:
        self.began = self.clock.worked()

    def __exit__(self, *_: object) -> None:
        self.clock.parts[self.part] += self.clock.worked() - self.began


class SimulatedActor:
    """One process of an actor."""

    def __init__(self, name: str, start: int, factor: float) -> None:
        self.name = name
        self.address = f"{name}-{start:032x}".encode()
        self.factor = factor
        self.num_orders = 0
        self.free_at = 0.0
        self.mark = 0
        self.version: int | None = None
        self.sha256 = ""
        self.joined = False


class SimulatedPort:
    """LearnerPort, and all actors behind it."""

    def __init__(self, load: Load, clock: Clock, seed: int = 0) -> None:
        self.load = load
        self.clock = clock
        self.rng = random.Random(seed)
        self.answers = Answers(load.tokens)
        self.outbound = Outbound()
        self.events: list[tuple[float, int, Callable[[], tuple[bytes, list[bytes]] | None]]] = []
        self.num_events = self.num_starts = 0
        self.living: dict[bytes, SimulatedActor] = {}
        self.deaths = 0
        for number in range(load.actors):
            self.at(self.rng.random(), lambda name=f"actor{number}": self.start(name))

    def at(self, when: float, event: Callable[[], tuple[bytes, list[bytes]] | None]) -> None:
        """An event gives a message for the learner, or nothing."""
        self.num_events += 1
        heappush(self.events, (when, self.num_events, event))

    def receive(self, timeout_s: float) -> Inbound | None:
        with self.clock.stands():
            found = self.next_message(timeout_s)
        if found is None:
            return None
        with self.clock.counts("decode"):
            return Inbound(found[0], decode(found[1]), found[1])

    def next_message(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        now = self.clock.now()
        deadline = now + timeout_s
        while self.events and self.events[0][0] <= deadline:
            when, _, event = heappop(self.events)
            if when > now:
                self.clock.skipped += when - now
                now = when
            if message := event():
                return message
        self.clock.skipped += max(deadline - now, 0.0)
        return None

    def send(self, peer: bytes, message: AnyMessage) -> None:
        part = type(message).__name__.lower()
        with self.clock.counts(f"send {part}"):
            self.outbound.frames(message)
        with self.clock.stands():
            actor = self.living.get(peer)
            if actor:
                self.arrives(actor, message)
        if actor is None:
            raise PeerGone(f"{peer.decode()} is not connected.")

    def close(self) -> None:
        """Nothing to close."""

    def start(self, name: str) -> None:
        self.num_starts += 1
        actor = SimulatedActor(name, self.num_starts, self.rng.lognormvariate(0.0, OWN_FACTOR))
        self.living[actor.address] = actor
        now = self.clock.now()
        self.at(now, lambda: self.talk(actor))
        if self.load.mean_life_s < float("inf"):
            self.at(now + self.rng.expovariate(1.0 / self.load.mean_life_s), lambda: self.die(actor))

    def die(self, actor: SimulatedActor) -> None:
        self.deaths += 1
        del self.living[actor.address]
        self.at(self.clock.now() + self.load.down_s, lambda: self.start(actor.name))

    def talk(self, actor: SimulatedActor) -> tuple[bytes, list[bytes]] | None:
        """What it says every now and then."""
        if actor.address not in self.living:
            return None
        pause = HEARTBEAT_S if actor.joined and actor.num_orders else 3 * HEARTBEAT_S if actor.joined else 1.0
        self.at(self.clock.now() + pause, lambda: self.talk(actor))
        return actor.address, HEARTBEAT if actor.joined and actor.num_orders else self.hello(actor)

    def hello(self, actor: SimulatedActor) -> list[bytes]:
        hello = hello_of(scripted_identity(), actor.name, self.load.credits, mark=actor.mark, version=actor.version)
        return encode(hello)

    def arrives(self, actor: SimulatedActor, message: AnyMessage) -> None:
        """The actor reads it at once; its time on the line is in that of the answer."""
        if isinstance(message, Welcome):
            actor.mark, actor.joined = message.mark, True
        elif isinstance(message, Policy):
            actor.version, actor.sha256 = message.version, message.sha256
        elif isinstance(message, Order):
            actor.num_orders += 1
            begin = max(actor.free_at, self.clock.now() + self.line_s())
            actor.free_at = begin + self.seconds(actor)
            sha256 = actor.sha256
            self.at(actor.free_at + self.line_s(), lambda: self.filled(actor, message, sha256))

    def filled(self, actor: SimulatedActor, order: Order, sha256: str) -> tuple[bytes, list[bytes]] | None:
        if actor.address not in self.living:
            return None
        actor.num_orders -= 1
        return actor.address, self.answers.frames(order, sha256)

    def line_s(self) -> float:
        return self.load.delay_s * self.rng.uniform(0.5, 1.5)

    def seconds(self, actor: SimulatedActor) -> float:
        if not self.load.seconds_an_order:
            return 0.0
        hang = HANG if self.rng.random() < HANG_SHARE else 1.0
        return self.load.seconds_an_order * actor.factor * hang * self.rng.lognormvariate(0.0, EACH_FACTOR)


class Answers:
    """Filled orders of made-up tokens."""

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(tokens // 2, 3 * tokens // 2 + 1, 4096)
        most = 3 * tokens * 64
        self.ids = rng.integers(0, VOCABULARY, most).astype(np.int32)
        self.logprobs = -rng.exponential(1.0, most).astype(np.float32)
        self.entropies = rng.random(most).astype(np.float32)
        self.place = 0

    def frames(self, order: Order, sha256: str) -> list[bytes]:
        filled = FilledOrder(
            order_id=order.order_id,
            policy_version=order.policy_version,
            adapter_sha256=sha256,
            groups=tuple(self.group(one.group_id, one.prompt_ids, len(one.seeds)) for one in order.groups),
            timings=timings(rollout_s=1.0),
        )
        return encode_again(filled)

    def group(self, group_id: str, prompt_ids: np.ndarray, samples: int) -> Group:
        self.place = (self.place + samples) % (len(self.lengths) - samples)
        lengths = tuple(self.lengths[self.place : self.place + samples].tolist())
        total = sum(lengths)
        right = [(self.place + number) % 2 for number in range(samples)]
        return Group(
            group_id=group_id,
            prompt_ids=prompt_ids,
            completion_ids=self.ids[self.place : self.place + total],
            trained=None,
            lengths=lengths,
            logprobs=self.logprobs[self.place : self.place + total],
            entropies=self.entropies[self.place : self.place + total],
            finishes=(Finish.STOP,) * samples,
            outcomes=tuple(Outcome.CORRECT if one else Outcome.WRONG for one in right),
            scores=tuple(map(float, right)),
            rewards={},
        )
