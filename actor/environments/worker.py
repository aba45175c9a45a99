"""The process of one environment: answers calls until it is killed. fork_server.py starts it like a scoring worker.

    Reset(columns)  -> Opened(text)             Use(calls) -> Answered(texts)           GetReward() -> Rewarded(value)
    Act(columns)    -> Asked(messages) or Acted(value)      Say(reply) -> the same, until the agent has ended
    each of them    -> Broken(note) if the environment raises, or returns what it may not

A tool that raises has answered, and so has one that says too much: the model chose its arguments, so the episode goes
on. What ends the process is noticed by the pool. An agent runs in the main thread. While it waits for its endpoint, the
endpoint's thread sends Asked and reads Say.
"""

import os
import resource
import sys
import traceback
from pathlib import Path

import msgspec

from actor.environments.chat_api import Asked, Refused, Said
from actor.environments.contract import Environment, ToolCall, find_program
from actor.environments.endpoint import Agent
from actor.scoring.fork_server import serve
from actor.scoring.pipe import LENGTH_BYTES, Ready, frame
from actor.scoring.worker import (
    CALLS,
    FOR_THE_USER_ONLY,
    REPLIES,
    SOFT_LIMITS,
    empty,
    enter_working_folder,
    forbid_core_dumps,
    limit_cpu,
    limit_memory,
    restore_process,
)
from actor.verifiers.reward_function import in_words, relative_path_advice
from actor.verifiers.verdict import one_line
from protocol.plain_text import for_wire
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError

MAX_ANSWER_CHARS = 65_536
"""Of all answers to one turn."""
CUT = "... (cut)"
MAX_SCORE_DIGITS = 400


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An episode begins."""

    columns: dict[str, str]
    """Of its task."""


class Use(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tools that one turn calls, in order."""

    calls: list[ToolCall]
    """At least one."""


class GetReward(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An episode has ended."""


class Act(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent begins an episode."""

    columns: dict[str, str]
    """Of its task."""
    scores: bool
    """Whether its reward is wanted."""


class Say(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an agent has waited for."""

    reply: Said | Refused
    """The model's turn, or why there is none."""


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


class Acted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent has ended its episode."""

    value: float | None
    """Its reward. None where it does not apply, or is not wanted."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment failed; the process did not."""

    note: str
    """Why, in one sentence."""


Call = Reset | Use | GetReward | Act | Say
Answer = Opened | Answered | Rewarded | Asked | Acted | Broken
AnyReply = Ready | Opened | Answered | Rewarded | Asked | Acted | Broken


class Pipe:
    """To the pool and back."""

    def __init__(self, step_limit_s: float) -> None:
        self.calls, self.replies = os.fdopen(CALLS, "rb"), os.fdopen(REPLIES, "wb")
        self.step_limit_s = step_limit_s

    def send(self, reply: AnyReply) -> None:
        self.replies.write(frame(reply))
        self.replies.flush()

    def next_call(self) -> Call | None:
        """None when the pool has closed the pipe."""
        length = self.calls.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return None
        call: Call = msgspec.msgpack.decode(self.calls.read(int.from_bytes(length, "big")), type=Call)
        limit_cpu(self.step_limit_s)
        return call

    def ask(self, asked: Asked) -> Said | Refused:
        """For the agent, which waits."""
        self.send(asked)
        call = self.next_call()
        return call.reply if isinstance(call, Say) else Refused(reason="The actor has ended.", code="ended")


def work(config: EnvironmentConfig, folder: Path) -> None:
    """Load the environment, report the result, then answer calls until the pool closes the pipe."""
    pipe = Pipe(config.step_limit_s)
    forbid_core_dumps()
    os.umask(FOR_THE_USER_ONLY)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
    try:
        environment = Agent(find_program(config.function), pipe.ask) if config.is_agent else Environment(config)
    except RewardError as error:
        pipe.send(Ready(fault=str(error)))
        return
    folder = enter_working_folder(folder)
    limit_memory(config.memory_mb)
    soft_limits = {which: resource_limit(which) for which in SOFT_LIMITS}
    pipe.send(Ready(fault=None))
    while (call := pipe.next_call()) is not None:
        if isinstance(call, Reset | Act):
            empty(folder)
        reply = answer(environment, call)
        restore_process(folder, soft_limits)
        pipe.send(reply)


def main() -> None:
    descriptor, given, scratch = sys.argv[1:]
    config = msgspec.json.decode(given, type=EnvironmentConfig)
    serve(int(descriptor), lambda folder: work(config, folder), Path(scratch))


def resource_limit(which: int) -> int:
    return resource.getrlimit(which)[0]


def answer(environment: Environment | Agent, call: Call) -> Answer:
    try:
        match environment, call:
            case Environment(), Reset(columns=columns):
                return opened(environment.reset(columns))
            case Environment(), Use(calls=calls):
                return answered([environment.use(one) for one in calls])
            case Environment(), GetReward():
                return rewarded(environment.reward(), "`get_reward`")
            case Agent(), Act(columns=columns, scores=scores):
                value = environment.play(columns, scores=scores)
                return acted(rewarded(value, "The agent") if scores else Rewarded(value=None))
            case _:
                return Broken(note="The call is not for this kind of environment.")
    except Exception as error:
        # The log gets the traceback, the verdict its last line.
        traceback.print_exc()
        return Broken(note=one_line(f"The environment raised {in_words(error)}{relative_path_advice(error)}."))


def opened(value: object) -> Answer:
    if value is None or isinstance(value, str):
        text = value or ""
        if len(text) <= MAX_ANSWER_CHARS:
            return Opened(text=for_wire(text))
        return Broken(note=f"`reset` answered with {len(text)} characters; {MAX_ANSWER_CHARS} are allowed.")
    return Broken(note=f"`reset` returned a {type(value).__name__}; text or None is needed.")


def answered(texts: list[str]) -> Answered:
    """Where they are too long together, each gets an equal part."""
    room = MAX_ANSWER_CHARS if sum(map(len, texts)) <= MAX_ANSWER_CHARS else MAX_ANSWER_CHARS // len(texts)
    return Answered(texts=[for_wire(text if len(text) <= room else text[:room] + CUT) for text in texts])


def acted(reward: Rewarded | Broken) -> Answer:
    return Acted(value=reward.value) if isinstance(reward, Rewarded) else reward


def rewarded(value: object, who: str) -> Rewarded | Broken:
    from actor.verifiers.reward_function import verdict
    from protocol.outcome import Outcome

    found = verdict(value, truncated=False)
    if found.outcome is Outcome.ERROR:
        return Broken(note=found.note.replace("The reward function", who))
    return Rewarded(value=None if found.outcome is Outcome.ABSTAIN else found.score)


if __name__ == "__main__":
    main()
