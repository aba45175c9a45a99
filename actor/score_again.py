"""Scores filled orders once more, for a learner that checks its actors: `python -m actor.score_again --run DIR`.

    stdin    4 bytes of length and an Order, as packed frames of the wire; the same of its FilledOrder
    stdout   the same of that FilledOrder with the outcomes and scores found here

Text, verifier and killable workers are those of an actor. It ends when stdin is closed.
"""

import argparse
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from msgspec import structs

from actor.engines.engine import Completion, EndedCompletion
from actor.rollout import OrderScoring
from actor.scoring.pool import ScorePool
from actor.scoring.scores import Scorer
from protocol.codec import decode, encode, pack, unpack
from protocol.messages import AnyMessage, FilledOrder, Group, Order
from shared.base.cache import cached_base
from shared.config.load import config_from_json
from shared.model.prompt import Prompter, load_prompter
from shared.process.entry_point import run_process
from shared.run.run_dir import RunDir

LENGTH = struct.Struct("<I")


def score_again(order: Order, filled: FilledOrder, scorer: Scorer, prompter: Prompter) -> FilledOrder:
    """The same completions with the scores found here."""
    scoring = OrderScoring(order.groups, scorer.begin(), prompter.text, beat=lambda _: None)
    completions = [completions_of(group) for group in filled.groups]
    for place, group in enumerate(completions):
        scoring.on_ended([EndedCompletion(group=place, index=index, completion=one) for index, one in enumerate(group)])
    return structs.replace(filled, groups=scoring.groups(completions))


def completions_of(group: Group) -> list[Completion]:
    ends = np.cumsum(group.lengths)[:-1]
    rows = zip(np.split(group.completion_ids, ends), np.split(group.logprobs, ends), group.finishes, strict=True)
    return [Completion(ids=ids, logprobs=logprobs, entropies=None, finish=finish) for ids, logprobs, finish in rows]


def messages(stream: IO[bytes]) -> Iterator[AnyMessage]:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        yield decode(unpack(stream.read(LENGTH.unpack(head)[0])))


def main(run: RunDir, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until the learner is done."""
    config = config_from_json(run.config.read_bytes())
    prompter = load_prompter(cached_base(config.model).folder)
    # The rewards of functions are not compared.
    pool, found = ScorePool(structs.replace(config.verifier, rewards={})), messages(requests)
    try:
        for order, filled in zip(found, found, strict=False):
            assert isinstance(order, Order) and isinstance(filled, FilledOrder)
            data = pack(encode(score_again(order, filled, pool, prompter)))
            replies.write(LENGTH.pack(len(data)) + data)
            replies.flush()
    finally:
        pool.close()


def start(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m actor.score_again", description="Scores filled orders again.")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    arguments = parser.parse_args(argv)
    # What a library prints must not come between two replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return run_process("scores again", lambda: main(RunDir.open(arguments.run), sys.stdin.buffer, replies))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
