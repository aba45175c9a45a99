"""The actor in this process: its engine and verifier fill orders directly, with no wire and no journal.

Used by `eval`, `curriculum`, some benchmarks and the tests.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actor.engines.engine import Engine
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from actor.wiring import build_engine, build_episodes, context_of
from launch.commands.votes import VoteCounter
from protocol.messages import FilledOrder, Order, Policy
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.lease import NoLease


@dataclass(frozen=True, kw_only=True)
class LocalActor:
    """The parts of an actor."""

    engine: Engine
    """Samples."""
    votes: VoteCounter
    """Scores, and remembers each final answer."""
    rollout: Rollout
    """Fills an order with both."""
    prompter: Prompter
    """Tokenizer and chat template."""


@contextmanager
def local_actor(config: Config) -> Iterator[LocalActor]:
    """The scoring workers end with the `with` block."""
    engine, prompter = build_engine(config)
    pool = ScorePool(config.verifier)
    votes = VoteCounter(pool, config.verifier.kind)
    episodes = build_episodes(config, prompter)
    try:
        rollout = Rollout(engine, votes, NoLease(), prompter.text, context=context_of(config), episodes=episodes)
        yield LocalActor(engine=engine, votes=votes, rollout=rollout, prompter=prompter)
    finally:
        pool.close()
        if episodes:
            episodes.close()


class LocalFiller:
    """The learner's OrderFiller without other processes: an order is filled when it is submitted."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.policies: dict[int, Policy] = {}
        self.filled: dict[str, FilledOrder] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        self.policies[policy.version] = policy

    def submit(self, orders: Iterable[Order]) -> None:
        for order in orders:
            policy = self.policies[order.policy_version]
            self.filled[order.order_id] = self.rollout.fill(order, policy, lambda phase: None)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        return [self.filled.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """Does nothing: there is no peer to serve."""
