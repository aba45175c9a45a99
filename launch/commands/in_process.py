"""The actor in this process: its engine and verifier fill orders directly, with no wire and no journal.

Used by `eval`, `curriculum`, the evaluator beside a run, some benchmarks and the tests.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actor.engines.engine import Engine
from actor.rollout import Beat, Rollout
from actor.scoring.pool import ScorePool
from actor.scoring.scores import Scorer
from actor.scoring.votes import casting
from actor.wiring import build_engine, build_episodes, close_engine, context_of
from protocol.messages import FilledOrder, Order, Policy
from shared.config.data import VerifierKind
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.lease import ComputeLease, NoLease

NO_LEASE = NoLease()
Filled = Callable[[int, int], None]
"""Called with the number of groups that are filled, and of all that were asked for together."""


@dataclass(frozen=True, kw_only=True)
class LocalActor:
    """The parts of an actor."""

    engine: Engine
    """Samples."""
    scorer: Scorer
    """Scores."""
    kind: VerifierKind
    """Of the verifier."""
    rollout: Rollout
    """Fills an order with both."""
    prompter: Prompter
    """Tokenizer and chat template."""


@contextmanager
def local_actor(config: Config, lease: ComputeLease = NO_LEASE) -> Iterator[LocalActor]:
    """The scoring workers end with the `with` block, and servers keep nothing of it. lease: what its rollout holds
    while it decodes."""
    engine, prompter = build_engine(config)
    pool = ScorePool(config.verifier)
    votes = casting(config.verifier.kind, pool)
    episodes = build_episodes(config, prompter)
    try:
        context = context_of(config)
        rollout = Rollout(engine, pool, lease, prompter.text, context=context, episodes=episodes, votes=votes)
        yield LocalActor(engine=engine, scorer=pool, kind=config.verifier.kind, rollout=rollout, prompter=prompter)
    finally:
        pool.close()
        if episodes:
            episodes.close()
        close_engine(engine)


class LocalFiller:
    """The learner's OrderFiller without other processes: an order is filled when it is submitted."""

    def __init__(
        self, rollout: Rollout, beat: Beat = lambda phase: None, on_filled: Filled = lambda filled, wanted: None
    ) -> None:
        """beat: called while an order is filled, and while results are counted; it may raise. on_filled: called after
        each order."""
        self.rollout = rollout
        self.beat = beat
        self.on_filled = on_filled
        self.policies: dict[int, Policy] = {}
        self.filled: dict[str, FilledOrder] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        kept = {version: known for version, known in self.policies.items() if version >= oldest_needed}
        self.policies = kept | {policy.version: policy}

    def submit(self, orders: Iterable[Order]) -> None:
        waiting, filled = list(orders), 0
        wanted = sum(len(order.groups) for order in waiting)
        for order in waiting:
            policy = self.policies[order.policy_version]
            self.filled[order.order_id] = self.rollout.fill(order, policy, self.beat)
            filled += len(order.groups)
            self.on_filled(filled, wanted)

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        return [self.filled.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        """There is no peer to serve; called between the parts of an evaluation."""
        self.beat("evaluating")
