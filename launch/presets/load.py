"""Presets: configurations that ship with Tandem, one TOML file each in launch/presets/.

Wherever a command takes a configuration, it takes the name of a preset or the path of a TOML or YAML file. `check_data`
looks at the data that a configuration names before anything starts, in milliseconds: no library of data sets is loaded,
and nothing is fetched.
"""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from actor.environments.contract import describe_in_process
from learner.tasks.sources import (
    GENERATED,
    as_configured,
    known,
    local_columns,
    needs_answers,
    place_of,
    refuse_without_columns,
    without_examples,
)
from shared.config.data import SftConfig, TasksConfig, VerifierKind
from shared.config.environment import EnvironmentConfig
from shared.config.load import read_config
from shared.config.tree import Config
from shared.errors import ConfigError
from shared.process.processor import settled_config
from shared.run.run_dir import RunDir

PRESETS_DIR = Path(__file__).parent
EXAMPLES_DIR = PRESETS_DIR.parent / "examples"


def load_config(source: str, overrides: Iterable[str] = (), *, here: bool = True) -> Config:
    """source: a preset's name or a file. overrides: `section.key=value`, applied on top. What is left open
    (number type, threads, what is sampled from) is chosen for this machine; not here: when the run starts."""
    config = with_tools(read_config(find_source(source), overrides))
    return settled_config(config) if here else config


def with_tools(config: Config) -> Config:
    """With its tools described, for which the user's file runs once."""
    if not config.environment.is_used or config.environment.described:
        return config
    environment = located(config.environment)
    tools = describe_in_process(environment, scores=config.verifier.kind == "environment")
    return structs.replace(config, environment=structs.replace(environment, described=tools))


def located(environment: EnvironmentConfig) -> EnvironmentConfig:
    """A file that does not exist is looked for among the examples."""
    file, _, name = environment.function.rpartition(":")
    if not file or Path(file).exists() or not (EXAMPLES_DIR / file).is_file():
        return environment
    return structs.replace(environment, function=f"{EXAMPLES_DIR / file}:{name}")


def find_source(source: str) -> Path:
    preset = PRESETS_DIR / f"{source}.toml"
    if os.path.isfile(preset):  # a Path raises for a name that is too long, or in a folder that may not be read
        return preset
    path = Path(source)
    if os.path.isfile(path):
        return path
    if os.path.isfile(RunDir(path).config):
        raise ConfigError(f"{source} is a run, expected a preset or a file; `resume {source}` continues it.")
    known = sorted(p.stem for p in PRESETS_DIR.glob("*.toml"))
    near = difflib.get_close_matches(source, known, n=1)
    meant = f"did you mean '{near[0]}'? Presets" if near else "presets"
    raise ConfigError(f"There is no preset and no file named '{source}'; {meant} are: {', '.join(known)}.")


def check_data(tasks: TasksConfig, sft: SftConfig, kind: VerifierKind, *, warm: bool, evaluated: bool) -> None:
    """DataError if local data of a run are not there, or lack a column. warm: of a warm start, which reads [tasks] too
    if it is evaluated."""
    if warm and sft.source:
        check_examples(tasks, sft)
    if evaluated or not (warm and sft.source):
        check_tasks(tasks, kind)


def check_examples(tasks: TasksConfig, sft: SftConfig) -> None:
    split = tasks.split or as_configured(sft.source, tasks).split
    found = local_columns("sft.source", sft.source, split)
    if found and sft.chats not in found and not {sft.question, sft.solution} <= set(found):
        raise without_examples(sft, found)


def check_tasks(tasks: TasksConfig, kind: VerifierKind, *, tested: bool = False) -> None:
    """tested: the test set too."""
    places = {"source": (tasks.source, tasks.split or known(tasks.source).split)}
    if tasks.held_out:
        places["held_out"] = place_of("held_out", tasks.held_out, tasks.source)
    if tasks.test and tested:
        places["test"] = place_of("test", tasks.test, tasks.source)
    for key, (source, split) in places.items():
        if source not in GENERATED and (found := local_columns(f"tasks.{key}", source, split)):
            refuse_without_columns(
                found, as_configured(source, tasks), key, source, tasks, needs_answer=needs_answers(tasks, kind)
            )
