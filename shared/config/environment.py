"""The section [environment]: tools, environments and agents that the model talks to over several turns."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.config.data import CurriculumConfig, TasksConfig
from shared.config.training import TeacherConfig
from shared.config.types import NonNegative, PositiveFloat, Section, check_function_name
from shared.errors import ConfigError


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """What answers the model between its turns. Without `function` and `tools` a completion is one turn."""

    kind: Literal["tools", "agent"] = "tools"
    """`tools`: we call the model, and the tools that it asks for. `agent`: a program of yours calls the model, over an
    OpenAI-compatible endpoint of its own, and writes all that the model reads."""
    function: str = ""
    """`tools`: `path/to/file.py:Name`, a class with TRL's contract: `reset(**columns)`, public methods as tools, and
    `get_reward()` if verifier.kind is 'environment'. `agent`: a function `name(base_url, api_key, **columns)`, or a
    class with `run` of these arguments; the reward is what it returns, or what `get_reward()` does. A file that does
    not exist is looked for in launch/examples."""
    tools: tuple[str, ...] = ()
    """More tools, each `path/to/file.py:name`: a function with types and a docstring. An agent has none here."""
    described: str = ""
    """JSON of the tools, as the chat template shows them. Left empty it is filled in when a run begins, so that the
    learner never runs the file, and `replay` needs no environment."""
    max_turns: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Largest number of the model's turns in a completion, from 1 to 1024. Calls in the last turn are not made, and a
    request of an agent after it is refused."""
    step_limit_s: PositiveFloat = 10.0
    """Wall-clock limit in seconds for `reset`, for the tools that one turn calls, and for `get_reward`; for what an
    agent does before, between and after its requests. A process that takes longer is killed, and the outcome of its
    completion is a timeout."""
    at_once: Annotated[int, Meta(ge=1, le=64)] = 4
    """How many environments compute at the same time, from 1 to 64. Each completion has a process of its own."""
    memory_mb: NonNegative = 1024
    """Private memory in MB that a process may take beyond what it has after loading the file. 0 sets no limit."""
    variables: tuple[str, ...] = ()
    """Names of more environment variables that an environment may read, as in verifier.environment."""

    @property
    def is_used(self) -> bool:
        return bool(self.function or self.tools)

    @property
    def is_agent(self) -> bool:
        return self.kind == "agent"

    @property
    def in_turns(self) -> bool:
        """Whether a completion may have several of the model's turns."""
        return self.is_used and self.max_turns > 1


NO_ENVIRONMENT = EnvironmentConfig()


def check_functions(environment: EnvironmentConfig) -> None:
    if environment.function:
        check_function_name("environment.function", environment.function)
    for tool in environment.tools:
        check_function_name("environment.tools", tool)


def check_agent(
    environment: EnvironmentConfig, tasks: TasksConfig, curriculum: CurriculumConfig, teacher: TeacherConfig
) -> None:
    """Refuse keys about prompts, all of which an agent writes."""
    if not environment.function:
        raise ConfigError(
            "environment.kind is 'agent' but environment.function is empty; set it to path/to/file.py:name, a function"
            " of base_url, api_key and the task's columns."
        )
    written = {
        "environment.tools": environment.tools,
        "tasks.system_prompt": tasks.system_prompt,
        "tasks.few_shot": tasks.few_shot,
        "teacher.prompt": teacher.prompt,
        "curriculum.kind = 'sent'": curriculum.kind == "sent",
    }
    if given := [key for key, value in written.items() if value]:
        raise ConfigError(
            f"{given[0]} is for prompts that we write, but environment.kind is 'agent', which writes all that the model"
            " reads; remove it, and let the agent do it."
        )


def check_semantic_entropy(environment: EnvironmentConfig) -> None:
    """Refuse one where semantic entropy is to be measured or used."""
    if environment.is_used:
        raise ConfigError(
            "semantic entropy is measured on replies to the question alone, but [environment] is set and answers the"
            " model between its turns; remove it, or set curriculum.kind to 'shuffled', 'pass_rate' or 'levels'."
        )
