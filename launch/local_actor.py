"""The actor's parts in this process, without a wire."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actor.engines.engine import Engine
from actor.rollout import Rollout
from actor.scoring.pool import ScorePool
from actor.wiring import build_engine
from launch.ballots import Ballots
from shared.config.tree import Config
from shared.model.prompt import Prompter
from shared.process.lease import NoTurns


@dataclass(frozen=True, kw_only=True)
class LocalActor:
    """What fills orders here."""

    engine: Engine
    """Samples."""
    ballots: Ballots
    """Scores, and remembers what was extracted."""
    rollout: Rollout
    """Both."""
    prompter: Prompter
    """Tokenizer and template."""


@contextmanager
def local_actor(config: Config) -> Iterator[LocalActor]:
    """Scoring workers end with the block."""
    engine, prompter = build_engine(config)
    pool = ScorePool(config.verifier)
    ballots = Ballots(pool, config.verifier.kind)
    try:
        rollout = Rollout(engine, ballots, NoTurns(), prompter.text)
        yield LocalActor(engine=engine, ballots=ballots, rollout=rollout, prompter=prompter)
    finally:
        pool.close()
