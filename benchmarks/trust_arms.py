"""A training step with all safety checks, and the same step without any.

    on    CURVE over a real socket, dispatcher with its checks, journal with fsync, digests, check of the base, canary,
          verifier in killable workers, lease
    off   the actor's groups are handed over in memory: no wire, no journal, no digest, no check of the base, no canary,
          verifier in process

Policy, engine, threads, orders and update are one and the same object in both. The actor's half runs in a thread of its
own, as a stand-in for its process. Nothing here is a switch of the product: `off` is put together from its parts.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from actor.engines.hf_engine import HFEngine
from actor.installer import Installer
from actor.link import Link
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from actor.scoring.scores import Scores, ScoresTogether
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.verifiers.verifier import score_job
from learner.durable.journal import Journal
from learner.durable.recorder import JournalRecorder
from learner.objective.judged import Admission
from learner.orders.dispatch import Dispatcher
from learner.update.publisher import Publisher
from learner.wiring import Model
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.endpoint import local_endpoint
from protocol.messages import FilledOrder, Order, Policy, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from shared.model.adapter_file import adapter_bytes, install_adapter
from shared.model.canary import canary_ids, canary_of
from shared.process.lease import ComputeLease, Lease, NoLease

WELCOME = Welcome(run_id="trust-cost", heartbeat_s=2.0, silence_s=120.0, mark=0)


class Arm(Protocol):
    """One way of doing a step."""

    lease: ComputeLease
    """Who computes."""

    def publish(self, version: int) -> Policy:
        """Make the adapter as it is available to the actor."""
        ...

    def collect(self, orders: Sequence[Order]) -> list[FilledOrder]:
        """Have these filled."""
        ...

    def pump(self) -> None:
        """Called wherever the update makes progress."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class DirectScorer:
    """The built-in verifier, called."""

    def begin(self) -> Scores:
        """Scored when all are there."""
        return ScoresTogether(self.score)

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """As a worker does it."""
        return [score_job("gsm8k", job, strict=True) for job in jobs]


class BareInstaller:
    """Installs what it is given, without a look at it or at the base."""

    def __init__(self, engine: HFEngine) -> None:
        self.engine = engine

    def install(self, policy: Policy, *, woken: bool) -> None:
        """The same work as the engine's."""
        install_adapter(self.engine.policy.adapter, policy.adapter.tobytes())
        self.engine.prepare()


class Off:
    """Nothing but the work."""

    def __init__(self, model: Model, engine: HFEngine, actor: ThreadPoolExecutor) -> None:
        self.model = model
        self.actor = actor
        self.lease: ComputeLease = NoLease()
        self.rollout = Rollout(engine, DirectScorer(), NoLease(), model.prompter.text)
        self.rollout.installer = BareInstaller(engine)  # pyright: ignore[reportAttributeAccessIssue]
        self.policy: Policy | None = None

    def publish(self, version: int) -> Policy:
        """Bytes, and no more."""
        adapter = np.frombuffer(adapter_bytes(self.model.policy.adapter), np.uint8)
        nothing = np.zeros(0, np.int32)
        self.policy = Policy(
            version=version, adapter=adapter, sha256="", canary_ids=nothing, canary_logprobs=nothing.astype(np.float32)
        )
        return self.policy

    def collect(self, orders: Sequence[Order]) -> list[FilledOrder]:
        """In the actor's thread."""
        assert self.policy is not None
        futures = [self.actor.submit(self.rollout.fill, order, self.policy, lambda phase: None) for order in orders]
        return [future.result() for future in futures]

    def pump(self) -> None:
        """Nobody to talk to."""

    def close(self) -> None:
        """Nothing is open."""


class On:
    """As in a run."""

    def __init__(self, model: Model, engine: HFEngine, actor: ThreadPoolExecutor, folder: Path) -> None:
        config, keys = model.config, folder / "keys"
        keys.mkdir(mode=0o700)
        create_keys(keys)
        self.actor = actor
        self.lease: ComputeLease = Lease(folder / "lease")
        self.journal = Journal.open(folder / "journal")
        self.port = ZmqLearnerPort(local_endpoint(folder), load_learner_keys(keys))
        recorder = JournalRecorder(self.journal, 0, Admission.of(config.verifier, config.reward))
        self.dispatcher = Dispatcher(self.port, recorder, model.expected(), WELCOME, model.order_check())
        ids = canary_ids(config.run.seed, len(model.policy.head), config.guard.canary_tokens)
        self.publisher = Publisher(model.policy.adapter, lambda: canary_of(model.policy, ids))
        arrival = actor.submit(ActorSide, model, engine, folder)
        while not arrival.done():
            self.pump()
        self.actor_side = arrival.result()

    def publish(self, version: int) -> Policy:
        """Bytes, digest, canary."""
        policy = self.publisher.snapshot(version)
        self.publisher.forget_before(version)
        self.dispatcher.publish(policy, oldest_needed=version)
        return policy

    def collect(self, orders: Sequence[Order]) -> list[FilledOrder]:
        """Over the wire and through the journal."""
        self.dispatcher.submit(orders)
        work = [self.actor.submit(self.actor_side.fill_one) for _ in orders]
        filled = self.dispatcher.collect([order.order_id for order in orders])
        for future in work:
            future.result()
        return filled

    def pump(self) -> None:
        """Heartbeats."""
        self.dispatcher.pump()

    def close(self) -> None:
        """The actor's end first."""
        self.actor.submit(self.actor_side.close).result()
        self.port.close()
        self.journal.close()


class ActorSide:
    """The actor's half; made and used in the actor's thread."""

    def __init__(self, model: Model, engine: HFEngine, folder: Path) -> None:
        self.scorer: ScorePool = ScorePool(model.config.verifier)
        endpoint = local_endpoint(folder)
        self.port = ZmqActorPort(endpoint, load_actor_key(folder / "keys" / "actor0.json"))
        rules = model.expected().rules_digest
        self.link = Link(self.port, endpoint, "actor0", engine.identity, model.config.link.credits, rules)
        self.link.join(60.0)
        self.rollout = Rollout(engine, self.scorer, Lease(folder / "lease"), model.prompter.text)
        assert isinstance(self.rollout.installer, Installer)
        self.installer = self.rollout.installer

    def fill_one(self) -> None:
        """One pass of the actor's loop. The engine is the other arm's as well, so it is installed in every time."""
        work = self.link.next_order()
        assert work is not None
        self.installer.forget()
        self.link.deliver(self.rollout.fill(*work, self.link.beat))

    def close(self) -> None:
        """Workers, then the socket."""
        self.scorer.close()
        self.port.close()
