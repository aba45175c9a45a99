"""Many steps with actors coming and going leave nothing behind: open files, threads, objects and journal are flat.

The real wire, dispatcher, journal, checkpoints and actors' loops in one process; policy and engine are scripted, so
that what is counted is ours and not a library's. `benchmarks/soak.py` does it with real processes and memory.
"""

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from actor.engines.engine import Completion, Progress
from actor.link import Link
from actor.loop import serve
from actor.rollout import Rollout
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import Compaction, JournalRecorder
from learner.orders.dispatch import Dispatcher
from protocol.access.keys import ActorKey, create_keys, load_actor_key, load_learner_keys
from protocol.endpoint import local_endpoint
from protocol.messages import AnyMessage, GroupOrder, Sampling, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from shared.config.processes import JournalConfig
from shared.process.lease import NoLease
from tests.support.fakes import (
    CHECK,
    RULES,
    ScriptedEngine,
    ScriptedScorer,
    hello_of,
    scripted_identity,
    spelled,
    toy_orders,
    toy_policy,
)

WARM, END = 220, 820
FURTHER_EVERY = 20
ORDERS_A_STEP = 3
CHECKPOINT_EVERY = 10
LOOKS = 20
WELCOME = Welcome(run_id="run-1", heartbeat_s=0.05, silence_s=60.0, mark=0)


class Gone(Exception):
    """A further actor dies without a word."""


class MortalEngine(ScriptedEngine):
    """Dies in the middle of an order when told to."""

    def __init__(self, dying: threading.Event) -> None:
        super().__init__()
        self.dying = dying

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """As scripted, until it is to die; what it noted is not kept, since it would grow."""
        if self.dying.is_set():
            raise Gone
        self.filled, self.installed = [], []
        return super().generate(groups, sampling, progress)


class MortalPort(ZmqActorPort):
    """Dies when told to and no order comes: those with a higher pace may get all of them."""

    def __init__(self, endpoint: str, key: ActorKey, dying: threading.Event) -> None:
        super().__init__(endpoint, key)
        self.dying = dying

    def receive(self, timeout_s: float) -> AnyMessage | None:
        message = super().receive(timeout_s)
        if message is None and self.dying.is_set():
            raise Gone
        return message


class ActorThread:
    """An actor in a thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self.dying = threading.Event()
        self.engine = MortalEngine(self.dying)
        self.thread = threading.Thread(target=self.run, args=(folder, name))
        self.thread.start()

    def run(self, folder: Path, name: str) -> None:
        """Until it dies or is drained."""
        key = load_actor_key(folder / "keys" / f"{name}.json")
        port = MortalPort(local_endpoint(folder), key, self.dying)
        try:
            link = Link(port, "the test", name, self.engine.identity, credits=2, rules_digest=RULES)
            link.join(60.0)
            serve(link, Rollout(self.engine, ScriptedScorer(), NoLease(), spelled))
        except Gone:
            pass
        finally:
            port.close()


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the process uses while one further actor is connected."""

    fds: int
    threads: int
    objects: int
    journal_files: int


def resources(folder: Path) -> Resources:
    gc.collect()
    return Resources(
        fds=open_files(),
        threads=len(os.listdir("/proc/self/task")),
        objects=len(gc.get_objects()),
        journal_files=len(list((folder / "journal").iterdir())),
    )


def open_files() -> int:
    """The fewest of several looks: a thread of ZeroMQ closes the socket of an actor that is gone a moment later."""
    found = []
    for _ in range(LOOKS):
        found.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.05)
    return min(found)


class SoakRun:
    """A learner without a policy, an actor that stays, and further actors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "keys").mkdir(mode=0o700)
        create_keys(folder / "keys", ["stays", "further0", "further1", "further2"])
        keys = load_learner_keys(folder / "keys")
        # Orders here cost nothing, so that an allowance made for actors that decode would be spent.
        self.port = ZmqLearnerPort(local_endpoint(folder), keys, allowance=float("inf"))
        self.store = CheckpointStore(folder / "checkpoints", keep=2)
        self.journal = Journal.open(folder / "journal")
        recorder = JournalRecorder(self.journal, 0, lambda group: None)
        self.compaction = Compaction(JournalConfig(keep="checkpoints"), self.store, recorder)
        self.dispatcher = Dispatcher(self.port, recorder, hello_of(scripted_identity()), WELCOME, CHECK)
        self.resident = ActorThread(folder, "stays")
        self.further: ActorThread | None = None
        self.ended = 0

    def step(self, step: int) -> None:
        """Order, collect, save when due; further actors come one after another, and die later."""
        if step % (2 * FURTHER_EVERY) == FURTHER_EVERY:
            self.further = ActorThread(self.folder, f"further{step % 3}")
        elif step % (2 * FURTHER_EVERY) == 0 and self.further:
            while len(self.dispatcher.peers.by_address) < 2:
                self.dispatcher.pump(0.01)
            self.further.dying.set()
        self.dispatcher.publish(toy_policy(step), oldest_needed=step)
        orders = toy_orders(step, count=ORDERS_A_STEP, version=step)
        self.dispatcher.submit(orders)
        self.dispatcher.collect([order.order_id for order in orders])
        if (step + 1) % CHECKPOINT_EVERY == 0:
            self.store.save(Checkpoint(step=step + 1, files={"state": b"x"}))
            self.compaction.after_checkpoint(step + 1)

    def await_further_end(self) -> None:
        """Wait until the last further actor has ended and is removed."""
        if self.further:
            self.further.thread.join(30.0)
            assert not self.further.thread.is_alive()
            self.further, self.ended = None, self.ended + 1
        while len(self.dispatcher.peers.by_address) > 1:
            self.dispatcher.pump(0.01)

    def close(self) -> None:
        self.dispatcher.end_run(30.0)
        self.resident.thread.join(30.0)
        self.port.close()
        self.journal.close()


def test_nothing_grows(tmp_path: Path) -> None:
    run = SoakRun(tmp_path)
    before: Resources | None = None
    for step in range(END):
        if step % (2 * FURTHER_EVERY) == FURTHER_EVERY:
            run.await_further_end()
        if step == WARM:
            before = resources(tmp_path)
        run.step(step)
    run.await_further_end()
    after = resources(tmp_path)
    run.close()
    assert before is not None
    assert run.ended >= (END - WARM) // (2 * FURTHER_EVERY)
    assert (after.fds, after.threads, after.journal_files) == (before.fds, before.threads, before.journal_files)
    # One object leaked every ten steps would be sixty.
    assert after.objects - before.objects < 50
