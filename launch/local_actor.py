"""The actor's parts in this process, without a wire."""

from collections.abc import Iterator
from contextlib import contextmanager

from actor.rollout import Rollout
from actor.score_pool import ScorePool
from actor.wiring import build_engine
from shared.config import Config
from shared.prompt import Prompter
from shared.turns import NoTurns


@contextmanager
def local_actor(config: Config) -> Iterator[tuple[Rollout, Prompter]]:
    """A rollout and its tokenizer; scoring workers end with the block."""
    engine, prompter = build_engine(config)
    scorer = ScorePool(config.verifier)
    try:
        yield Rollout(engine, scorer, NoTurns(), prompter.text), prompter
    finally:
        scorer.close()
