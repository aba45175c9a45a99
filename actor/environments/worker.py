"""The process of one environment: answers calls until it is killed. fork_server.py starts it like a scoring worker.

    Reset(columns)  -> Opened(text)             Use(calls) -> Answered(texts)           GetReward() -> Rewarded(value)
    each of them    -> Broken(note) if the environment raises, or returns what it may not

A tool that raises has answered. `exit` in a tool ends the process, which the pool notices.
"""

import os
import resource
import sys
import traceback
from pathlib import Path

import msgspec

from actor.environments.contract import Environment, ToolCall
from actor.scoring.fork_server import serve
from actor.scoring.pipe import LENGTH_BYTES, Ready, frame
from actor.scoring.worker import (
    CALLS,
    FOR_THE_USER_ONLY,
    REPLIES,
    SOFT_LIMITS,
    forbid_core_dumps,
    limit_cpu,
    limit_memory,
    reset,
)
from actor.verifiers.reward_function import in_words
from actor.verifiers.verdict import one_line
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError

MAX_ANSWER_CHARS = 65_536
MAX_SCORE_DIGITS = 400


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rollout begins."""

    columns: dict[str, str]
    """Of its task."""


class Use(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tools that one turn calls, in order."""

    calls: list[ToolCall]
    """At least one."""


class GetReward(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rollout has ended."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To put behind the question."""

    text: str
    """Empty if there is nothing."""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the tools said."""

    texts: list[str]
    """One for each call."""


class Rewarded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment's score."""

    value: float | None
    """None where it does not apply."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment failed; the process did not."""

    note: str
    """Why, in one sentence."""


Call = Reset | Use | GetReward
Answer = Opened | Answered | Rewarded | Broken
AnyReply = Ready | Opened | Answered | Rewarded | Broken


def work(config: EnvironmentConfig, folder: Path) -> None:
    """Load the environment, report the result, then answer calls until the pool closes the pipe."""
    calls, replies = os.fdopen(CALLS, "rb"), os.fdopen(REPLIES, "wb")

    def send(reply: AnyReply) -> None:
        replies.write(frame(reply))
        replies.flush()

    forbid_core_dumps()
    os.umask(FOR_THE_USER_ONLY)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
    try:
        environment = Environment(config)
    except RewardError as error:
        send(Ready(fault=str(error)))
        return
    os.chdir(folder)
    limit_memory(config.memory_mb)
    soft_limits = {which: resource_limit(which) for which in SOFT_LIMITS}
    send(Ready(fault=None))
    while len(length := calls.read(LENGTH_BYTES)) == LENGTH_BYTES:
        call = msgspec.msgpack.decode(calls.read(int.from_bytes(length, "big")), type=Call)
        limit_cpu(config.step_limit_s)
        reply = answer(environment, call)
        reset(folder, soft_limits)
        send(reply)


def main() -> None:
    descriptor, given, scratch = sys.argv[1:]
    config = msgspec.json.decode(given, type=EnvironmentConfig)
    serve(int(descriptor), lambda folder: work(config, folder), Path(scratch))


def resource_limit(which: int) -> int:
    return resource.getrlimit(which)[0]


def answer(environment: Environment, call: Call) -> Answer:
    try:
        match call:
            case Reset(columns=columns):
                return opened(environment.reset(columns))
            case Use(calls=calls):
                return answered([environment.use(one) for one in calls])
            case GetReward():
                return rewarded(environment.reward())
    except Exception as error:
        # The log gets the traceback, the verdict its last line.
        traceback.print_exc()
        return Broken(note=one_line(f"The environment raised {in_words(error)}."))


def opened(value: object) -> Answer:
    if value is None or isinstance(value, str):
        return answered([value or ""], opening=True)
    return Broken(note=f"`reset` returned a {type(value).__name__}; text or None is needed.")


def answered(texts: list[str], *, opening: bool = False) -> Answer:
    chars = sum(map(len, texts))
    if chars > MAX_ANSWER_CHARS:
        return Broken(note=f"The environment answered with {chars} characters; {MAX_ANSWER_CHARS} are allowed.")
    return Opened(text=texts[0]) if opening else Answered(texts=texts)


def rewarded(value: object) -> Answer:
    from actor.verifiers.reward_function import verdict
    from protocol.outcome import Outcome

    found = verdict(value, truncated=False)
    if found.outcome is Outcome.ERROR:
        return Broken(note=found.note.replace("The reward function", "`get_reward`"))
    return Rewarded(value=None if found.outcome is Outcome.ABSTAIN else found.score)


if __name__ == "__main__":
    main()
