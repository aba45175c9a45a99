"""A learner without a model, for `scale_sim`: dispatcher, journal, checks and orders are the project's, and the time of
each part is noted. Left out on purpose: sockets, as in simulated_actors.py, and what an update computes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated_actors import HEARTBEAT_S, SILENCE_S, VOCABULARY, Clock, Load, SimulatedPort
from learner.durable.journal import Journal
from learner.durable.recorder import JournalRecorder
from learner.objective.judged import Admission
from learner.orders.dispatch import Dispatcher
from learner.orders.order_check import OrderCheck
from learner.orders.orders import build_orders
from learner.tasks.tasks import Task
from learner.update.publisher import policy_message
from protocol.messages import FilledOrder, Order, Policy, Sampling, Welcome
from shared.config.load import resolve
from tests.support.fakes import hello_of, scripted_identity

SAMPLES, PROMPT, GROUPS = 8, 100, 8
"""Completions of a group, tokens of a prompt, groups of an order."""
LATE_S, PUMP_EVERY_S = 120.0, 0.05
LAG = 1
WELCOME = Welcome(run_id="scale", heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S, mark=0)


class TimedJournal:
    """The real journal; the time of its syncs and its bytes are noted."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.journal = journal
        self.clock = clock
        self.bytes = self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.journal, name)

    def append(self, *parts: bytes) -> None:
        self.bytes += sum(map(len, parts))
        self.end_sync()
        with self.clock.counts("write"):
            self.journal.append(*parts)

    def sync(self) -> None:
        self.syncs += 1
        with self.clock.waits("fsync"):
            self.journal.sync()

    def begin_sync(self) -> None:
        self.syncs += 1
        self.journal.begin_sync()

    def end_sync(self) -> None:
        with self.clock.waits("fsync"):
            self.journal.end_sync()


class TimedCheck:
    """The real check."""

    def __init__(self, clock: Clock) -> None:
        self.check = OrderCheck(vocabulary=VOCABULARY, rewards=frozenset(), built_in=True)
        self.clock = clock

    def fault(self, order: Order, policy: Policy, filled: FilledOrder) -> str:
        with self.clock.counts("check"):
            return self.check.fault(order, policy, filled)


class Bench:
    """A learner without a model, and its actors."""

    def __init__(self, folder: Path, load: Load, groups_per_order: int = GROUPS, adapter_mb: float = 1.0) -> None:
        self.load = load
        self.groups_per_order = groups_per_order
        self.clock = Clock()
        self.port = SimulatedPort(load, self.clock)
        config = resolve({})
        self.journal: Any = TimedJournal(Journal.open(folder), self.clock)
        self.recorder = JournalRecorder(self.journal, 0, Admission.of(config.verifier, config.reward))
        check: Any = TimedCheck(self.clock)
        expected = hello_of(scripted_identity())
        self.dispatcher = Dispatcher(
            self.port, self.recorder, expected, WELCOME, check, now=self.clock.now, late_s=LATE_S
        )
        self.adapter = np.zeros(round(adapter_mb * 10**6), np.uint8)
        self.published: dict[int, float] = {}
        prompt = np.arange(PROMPT, dtype=np.int32)
        self.tasks = [
            Task(prompt_ids=prompt + number, columns={"question": "How many coins now? " * 8, "answer": str(number)})
            for number in range(64)
        ]

    def publish(self, version: int) -> None:
        with self.clock.stands():
            self.adapter[:8] = np.frombuffer(np.int64(version).tobytes(), np.uint8)
            policy = policy_message(version, self.adapter.tobytes())
        self.dispatcher.publish(policy, oldest_needed=version - LAG)
        self.published[version] = self.clock.now()

    def orders(self, step: int, version: int, count: int) -> list[Order]:
        tasks = [self.tasks[number % len(self.tasks)] for number in range(count * self.groups_per_order)]
        with self.clock.counts("build orders"):
            return build_orders(
                tasks,
                seed=0,
                lane="train",
                step=step,
                first_slot=0,
                samples=SAMPLES,
                version=version,
                sampling=Sampling(temperature=1.0, max_new_tokens=2 * self.load.tokens),
                groups_per_order=self.groups_per_order,
            )

    def all_join(self) -> None:
        while len(self.dispatcher.peers.by_address) < self.load.actors:
            self.dispatcher.pump(0.1)

    def update(self, seconds: float) -> None:
        """The learner computes, and serves its actors meanwhile."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.dispatcher.pump()
            # The pump's own time is part of the update's.
            self.clock.skipped += PUMP_EVERY_S

    def forget(self, step: int) -> None:
        """As after a checkpoint."""
        self.recorder.checkpointed(step)
        self.recorder.forget_before(step)

    def close(self) -> None:
        self.journal.close()
