"""A run over real sockets in threads, with one faultless actor, while another peer does what it likes."""

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actor.link import Link
from actor.loop import serve
from actor.rollout import Rollout
from learner.orders.dispatch import Dispatcher
from learner.orders.orders import NO_FRAMES
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.messages import FilledOrder, Order, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from shared.process.lease import Lease
from tests.support.fakes import (
    CHECK,
    RULES,
    ScriptedEngine,
    ScriptedScorer,
    filled,
    hello_of,
    scripted_identity,
    spelled,
    toy_orders,
    toy_policy,
)

ORDERS_A_STEP = 4
WAIT_S = 30.0


class OnceRecorder:
    """Keeps what it is given, and finds nothing."""

    def __init__(self) -> None:
        self.recorded: list[FilledOrder] = []

    def find(self, order: Order) -> FilledOrder | None:
        return None

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        self.recorded += filled

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        self.record(filled, frames)

    def is_durable(self, order_id: str) -> bool:
        return any(filled_order.order_id == order_id for filled_order in self.recorded)


@dataclass(kw_only=True)
class LiveRun:
    """What an attacker can know of a run, and what the run has done."""

    port: ZmqLearnerPort
    keys: Path
    recorder: OnceRecorder = field(default_factory=OnceRecorder)
    steps: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return self.port.endpoint

    def train(self) -> None:
        """Steps until told to stop; the learner's thread."""
        welcome = Welcome(run_id="run-1", heartbeat_s=0.1, silence_s=WAIT_S, mark=0)
        dispatcher = Dispatcher(self.port, self.recorder, hello_of(scripted_identity()), welcome, CHECK)
        try:
            while not self.stop.is_set():
                dispatcher.publish(toy_policy(self.steps), oldest_needed=self.steps)
                orders = toy_orders(self.steps, count=ORDERS_A_STEP, version=self.steps)
                dispatcher.submit(orders)
                dispatcher.collect([order.order_id for order in orders])
                self.steps += 1
                # No actor that decodes is quicker; one that is would count as flooding.
                self.stop.wait(0.02)
        finally:
            dispatcher.end_run(1.0)

    def act(self) -> None:
        """The faultless actor."""
        engine = ScriptedEngine()
        port = ZmqActorPort(self.endpoint, load_actor_key(self.keys / "actor0.json"))
        try:
            link = Link(port, "the test", "actor0", engine.identity, credits=2, rules_digest=RULES)
            link.join(WAIT_S)
            serve(link, Rollout(engine, ScriptedScorer(), Lease(self.keys.with_name("lease")), spelled))
        finally:
            port.close()

    def goes_on(self) -> None:
        """Two more steps are done."""
        wanted, moment = self.steps + 2, threading.Event()
        for _ in range(round(WAIT_S / 0.02)):
            if self.steps >= wanted:
                return
            moment.wait(0.02)
        raise AssertionError(f"the run makes no progress at step {self.steps}")

    def check(self) -> None:
        """Every order was filled once, by the faultless actor's numbers."""
        expected = [
            filled(order, toy_policy(step))
            for step in range(self.steps)
            for order in toy_orders(step, count=ORDERS_A_STEP, version=step)
        ]
        found = {filled_order.order_id: filled_order for filled_order in self.recorder.recorded}
        assert len(found) == len(self.recorder.recorded) == len(expected) > 0
        for filled_order in expected:
            (got,), (wanted,) = found[filled_order.order_id].groups, filled_order.groups
            assert got.completion_ids.tolist() == wanted.completion_ids.tolist()
            assert got.logprobs.tolist() == wanted.logprobs.tolist()


@contextmanager
def live_run(folder: Path, kind: str = "tcp", **options: Any) -> Iterator[LiveRun]:
    """A run that goes on as long as the block lasts, and must then have gone as if nobody else had been there."""
    keys = folder / "keys"
    create_keys(keys, ["actor0", "other"])
    with tempfile.TemporaryDirectory() as sockets, ThreadPoolExecutor(2) as pool:
        endpoint = f"ipc://{sockets}/socket" if kind == "ipc" else "tcp://127.0.0.1:*"
        run = LiveRun(port=ZmqLearnerPort(endpoint, load_learner_keys(keys), **options), keys=keys)
        learner, actor = pool.submit(run.train), pool.submit(run.act)
        try:
            run.goes_on()
            yield run
            run.goes_on()
        finally:
            run.stop.set()
            learner.result(2 * WAIT_S)
            actor.result(2 * WAIT_S)
            run.port.close()
    run.check()
