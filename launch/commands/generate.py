"""`generate`: completions of the trained policy or the base, for one prompt or a file of prompts.

Prompts go through the model's chat template, with what the run shows before a question: its tools, its system message,
and the examples of `tasks.few_shot`. These come from its training data; without it they are left out, and that is said.
A system message in the data counts if all training tasks have the same; `--system` gives another.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from launch.commands.open_run import open_run, pin_cpu
from launch.commands.verify import input_lines
from launch.presets.load import load_config
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from protocol.messages import GroupOrder, Sampling
from protocol.plain_text import for_terminal
from shared.config.data import TasksConfig, VerifierKind
from shared.config.tree import Config
from shared.errors import ConfigError, DataError
from shared.run.files import write_whole
from shared.run.run_dir import RunDir, refuse_to_replace
from shared.seeding import sample_seeds

if TYPE_CHECKING:
    from actor.engines.engine import Engine
    from shared.model.prompt import Message, Prompter, Shots


def generate_completions(
    *,
    directory: Path | None,
    prompt: str | None,
    source: Path | None,
    out: Path | None,
    base: bool,
    checkpoint: str | None,
    system: str | None,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
) -> int:
    if out is not None:
        refuse_to_replace(out, source)
    config, chosen = open_policy(directory, base, checkpoint, system)
    prompts = [prompt] if prompt is not None else read_prompts(source)
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens or config.rollout.max_new_tokens)

    from actor.wiring import build_engine, close_engine
    from learner.durable.state import ADAPTER

    engine, prompter = build_engine(config)
    try:
        if chosen is not None:
            engine.install(chosen.step, chosen.files[ADAPTER])
        opening = opening_of(config.tasks, config.verifier.kind)
        chats = [[*opening, {"role": "user", "content": prompt}] for prompt in prompts]
        completions = complete(engine, prompter, chats, sampling, seed)
    finally:
        close_engine(engine)
    if out is None:
        print("\n\n".join(map(for_terminal, completions)))
        return 0
    rows = [json.dumps({"prompt": p, "completion": c}) for p, c in zip(prompts, completions, strict=True)]
    write_whole(out, ("\n".join(rows) + "\n").encode())
    print(f"{len(rows)} completions in {out}", file=sys.stderr)
    return 0


def open_policy(
    directory: Path | None, base: bool, which: str | None, system: str | None = None
) -> tuple[Config, Checkpoint | None]:
    """The configuration of a run and one of its checkpoints; no checkpoint means the base. which: None for newest.
    system: message that becomes tasks.system_prompt; None for the one of the training tasks."""
    if directory is None:
        if which:
            raise ConfigError(f"--checkpoint got {which}, but no run was given; name its directory too.")
        config = load_config("embedded")
        pin_cpu(config.compute, "actor")
        return replace(config, tasks=with_system(config.tasks, system)), None
    run, config = open_run(directory, compute_as="actor")
    chosen = None if base else choose_checkpoint(run, config.checkpoint.keep, which or "latest")
    told = system_of_tasks(run, config.tasks) if system is None else system
    return replace(config, tasks=with_system(config.tasks, told)), chosen


def with_system(tasks: TasksConfig, system: str | None) -> TasksConfig:
    """None: as they are."""
    return tasks if system is None else replace(tasks, system_prompt=system)


def system_of_tasks(run: RunDir, tasks: TasksConfig) -> str | None:
    """None if they have different ones, which is said."""
    from learner.durable.state import trained_system

    found = trained_system(run, tasks)
    if found is None:
        used = "that of tasks.system_prompt is used" if tasks.system_prompt else "none is used"
        print(f"note: system messages differ by row of the data, so {used}; give one with --system", file=sys.stderr)
    return found


def read_prompts(source: Path | None) -> list[str]:
    """One a line; empty lines are skipped."""
    wanted = "a text file with one prompt a line"
    lines = input_lines(source, wanted)
    prompts = [text for number, line in enumerate(lines, start=1) if (text := decoded(line, source, number).strip())]
    if not prompts:
        raise DataError(f"--in got {source}, which has no prompts; give {wanted}.")
    return prompts


def decoded(line: bytes, source: Path | None, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"--in got {source}, which is not UTF-8 in line {number}; save it as UTF-8.") from error


def opening_of(tasks: TasksConfig, kind: VerifierKind) -> list["Message"]:
    """What the run shows before a question."""
    from shared.model.prompt import conversation

    return conversation("", tasks.system_prompt, shots_of(tasks, kind))[:-1]


def shots_of(tasks: TasksConfig, kind: VerifierKind) -> "Shots":
    """The first training rows. None of them if the data is not there any more."""
    if not tasks.few_shot:
        return ()
    from learner.tasks.tasks import examples, load_rows

    try:
        return examples(load_rows(tasks, kind)[0], tasks)
    except DataError as error:
        print(f"warning: the examples of tasks.few_shot are left out: {error}", file=sys.stderr)
        return ()


def complete(
    engine: "Engine", prompter: "Prompter", chats: Sequence[Sequence["Message"]], sampling: Sampling, seed: int
) -> list[str]:
    """One completion of each conversation."""
    groups = tuple(
        GroupOrder(
            group_id=f"generate/{index}",
            prompt_ids=np.array(prompter.chat_ids(chat), dtype=np.int32),
            columns={},
            seeds=sample_seeds(seed, "generate", 0, index, 1),
        )
        for index, chat in enumerate(chats)
    )
    completions = engine.generate(groups, sampling, lambda ended: None)
    return [prompter.text(samples[0].ids.tolist()) for samples in completions]
