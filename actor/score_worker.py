"""A scoring process: `python -m actor.score_worker FD KIND FUNCTION`, started by score_pool.py only.

Requests come in on standard input, replies go out on the inherited descriptor FD. Before any of the user's code runs,
both pipes move out of its reach: standard input becomes empty, and standard output goes to standard error, which is
the actor's log. So a reward function may print, read and start programs without harm to what is said here.

It imports neither torch nor transformers, and dies with the actor. Left out on purpose: a sandbox and memory limits.
"""

import os
import sys
from collections.abc import Callable
from typing import BinaryIO, Literal, cast

import msgspec

from actor.reward_function import load_reward_function, score_with
from actor.score_pipe import LENGTH_BYTES, Ready, ScoreReply, ScoreRequest, frame
from actor.verdict import ScoreJob, Verdict
from actor.verifier import score_job
from shared.errors import RewardError
from shared.lifeline import die_with_parent

Score = Callable[[list[ScoreJob]], list[Verdict]]


def main() -> None:
    """Load the verifier, say so, then answer requests until there are no more."""
    die_with_parent()
    reply_fd, kind, function = sys.argv[1:]
    requests, replies = private_pipes(int(reply_fd))
    try:
        score = build_score(cast(Literal["gsm8k", "exact", "callable"], kind), function)
    except RewardError as error:
        say(replies, Ready(fault=str(error)))
        return
    say(replies, Ready(fault=None))
    while (request := next_request(requests)) is not None:
        say(replies, ScoreReply(number=request.number, verdicts=score(request.jobs)))


def private_pipes(reply_fd: int) -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under descriptors that no print reaches and no child inherits."""
    requests = os.dup(0)
    os.set_inheritable(reply_fd, False)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(reply_fd, "wb")


def build_score(kind: Literal["gsm8k", "exact", "callable"], function: str) -> Score:
    """How jobs are scored."""
    if kind == "callable":
        reward = load_reward_function(function)
        return lambda jobs: score_with(reward, jobs)
    return lambda jobs: [score_job(kind, job) for job in jobs]


def next_request(requests: BinaryIO) -> ScoreRequest | None:
    """The next request; None when the pool has closed the pipe."""
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(requests.read(int.from_bytes(length, "big")), type=ScoreRequest)


def say(replies: BinaryIO, record: Ready | ScoreReply) -> None:
    """Hand one record to the pool."""
    replies.write(frame(record))
    replies.flush()


if __name__ == "__main__":
    main()
