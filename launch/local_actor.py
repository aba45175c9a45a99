"""The actor's parts in this process, without a wire."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actor.rollout import Rollout
from actor.score_pool import ScorePool
from actor.wiring import build_engine
from shared.config import Config
from shared.gpu_lease import Lease
from shared.prompt import Prompter


@contextmanager
def local_actor(config: Config) -> Iterator[tuple[Rollout, Prompter]]:
    """A rollout and its tokenizer; scoring workers end with the block."""
    engine, prompter = build_engine(config)
    scorer = ScorePool(config.verifier)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Rollout(engine, scorer, Lease(Path(folder) / "lease"), prompter.text), prompter
    finally:
        scorer.close()
