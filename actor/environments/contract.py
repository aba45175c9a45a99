"""An environment of the user's, with TRL's contract, or an agent.

    class Env:
        def reset(self, **columns) -> str | None     begins an episode; its text is put behind the question
        def any_name(self, number: int) -> str       a tool: public, with types and a docstring in Google's style
        def get_reward(self) -> float | None         the score, if verifier.kind is 'environment'

An instance is made once for each process and reset for each episode. Plain functions can be tools too. All of them may
be async: a process has one event loop, so a connection stays usable. What a tool returns is shown with `str`; what it
raises is its answer, {"error": "..."}, as in TRL; `sys.exit` raises too.

`describe_in_process` runs the user's file in a process of its own and returns the tools as JSON, in the form that chat
templates expect. It is done once, when a run begins: the learner renders prompts, and runs none of the user's code.
Left out of TRL's contract: several environments in a run, images.

    def agent(base_url, api_key, **columns) -> float | None     plays an episode with any client of OpenAI's API
    class Agent:
        def run(self, base_url, api_key, **columns)             the same, made once for each process
        def get_reward(self) -> float | None                    the score, instead of what `run` returns
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from actor.scoring.fork_server_process import environment
from actor.verifiers.reward_arguments import accepted, as_in_the_data
from actor.verifiers.reward_function import EventLoop, as_coroutine, find_reward_function, in_words
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError

RESERVED = ("reset", "get_reward")
DESCRIBE_LIMIT_S = 120.0
FUNCTION = "environment.function"
TOOLS_PREFIX = "tools: "
"""Begins the line with the tools. The user's file may print others before it, and after it when it ends."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """What the model asks for."""

    name: str
    """Of the tool."""
    arguments: dict[str, Any]
    """By name, as the model wrote them."""


class Environment:
    """The user's instance, if there is one, and all tools."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """RewardError if the file cannot be used."""
        self.loop = EventLoop()
        self.instance = find_environment(config.function) if config.function else None
        functions = [find_reward_function(spec, "environment.tools") for spec in config.tools]
        methods = methods_of(self.instance) if self.instance is not None else []
        self.tools: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*functions, *methods)}
        if not self.tools:
            raise RewardError(f"{config.function} has no tools; give it a public method with a docstring.")

    def reset(self, columns: Mapping[str, str]) -> object:
        if self.instance is None:
            return None
        return result_of(self.instance.reset, accepted(self.instance.reset, as_in_the_data(columns)), self.loop)

    def use(self, call: ToolCall) -> str:
        """The tool's answer as text."""
        try:
            if call.name not in self.tools:
                raise ValueError(f"Tool {call.name} not found.")
            return str(result_of(self.tools[call.name], call.arguments, self.loop))
        except (Exception, SystemExit) as error:
            return str({"error": str(error)})

    def reward(self) -> object:
        return result_of(self.instance.get_reward, {}, self.loop) if self.instance is not None else None


def instance_of(found: Callable[[], Any], spec: str) -> Any:
    """found: the user's class, at `spec`. RewardError if it raises."""
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"environment.function = {spec!r} cannot be made ({in_words(error)}); fix the class."
        ) from error


def find_environment(spec: str) -> Any:
    """An instance of the user's class. RewardError if the file cannot be used."""
    instance = instance_of(find_reward_function(spec, FUNCTION), spec)
    if not callable(getattr(instance, "reset", None)):
        raise RewardError(f"environment.function = {spec!r} has no method `reset`; add `def reset(self, **columns)`.")
    return instance


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of the user's."""

    run: Callable[..., Any]
    """Plays one episode."""
    get_reward: Callable[..., Any] | None
    """Asked after it, where there is one."""


def find_program(spec: str) -> Program:
    """RewardError if the file cannot be used."""
    found: Any = find_reward_function(spec, FUNCTION)
    if not inspect.isclass(found):
        return Program(run=found, get_reward=None)
    instance = instance_of(found, spec)
    if not callable(getattr(instance, "run", None)):
        raise RewardError(
            f"environment.function = {spec!r} has no method `run`; add `def run(self, base_url, api_key, **columns)`."
        )
    return Program(run=instance.run, get_reward=getattr(instance, "get_reward", None))


def methods_of(instance: object) -> list[Callable[..., Any]]:
    """Found on the class: reading them from the instance would evaluate properties."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in RESERVED and not name.startswith("_")]


def result_of(function: Callable[..., Any], arguments: Mapping[str, Any], loop: EventLoop) -> Any:
    result = function(**arguments)
    return loop.run(as_coroutine(result)) if inspect.isawaitable(result) else result


def has_reward(environment: Environment) -> bool:
    return callable(getattr(environment.instance, "get_reward", None))


def describe(config: EnvironmentConfig, *, scores: bool) -> str:
    """JSON of the tools. scores: whether `get_reward` is needed. Of an agent there is nothing to describe, but its file
    is tried. Runs in the process that `describe_in_process` starts."""
    if config.is_agent:
        find_program(config.function)
        return ""
    from transformers.utils.chat_template_utils import get_json_schema

    environment = Environment(config)
    if scores and not has_reward(environment):
        raise RewardError(f"verifier.kind is 'environment', but {config.function or 'a tool'} has no `get_reward`.")
    found: list[Any] = []
    for name, tool in environment.tools.items():
        try:
            found.append(get_json_schema(tool))
        except Exception as error:
            raise RewardError(f"The tool `{name}` needs types and a docstring ({in_words(error)}).") from error
    return json.dumps(found)


def describe_in_process(config: EnvironmentConfig, *, scores: bool) -> str:
    """The same, from a process that is stopped if it takes too long."""
    command = [
        sys.executable,
        "-m",
        "actor.environments.contract",
        msgspec.json.encode(config).decode(),
        str(int(scores)),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment(config.variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DESCRIBE_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RewardError(
            f"Loading {key_and_value(config)} took more than {DESCRIBE_LIMIT_S:g} s; make it quicker."
        ) from error
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    found = [line.removeprefix(TOOLS_PREFIX) for line in done.stdout.splitlines() if line.startswith(TOOLS_PREFIX)]
    if done.returncode or not found:
        raise RewardError(
            last if done.returncode == 2 else f"{key_and_value(config)} ended its process while it was loaded ({last})."
        )
    return found[0]


def key_and_value(config: EnvironmentConfig) -> str:
    """What the user has given, for errors."""
    return f"{FUNCTION} = {config.function!r}" if config.function else f"environment.tools = {list(config.tools)}"


def main(arguments: Sequence[str]) -> int:
    try:
        tools = describe(msgspec.json.decode(arguments[0], type=EnvironmentConfig), scores=arguments[1] == "1")
        print(f"\n{TOOLS_PREFIX}{tools}")
    except RewardError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
