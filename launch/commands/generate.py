"""`generate`: answers from a run's policy or its base, through the model's own chat template."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.preset import load_config
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from protocol.messages import GroupOrder, Sampling
from protocol.plain_text import for_terminal
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import DataError
from shared.process.determinism import cpu_environment
from shared.run.files import write_whole
from shared.run.run_dir import RunDir
from shared.seeding import sample_seeds


def run_command(
    *,
    directory: Path | None,
    prompt: str | None,
    source: Path | None,
    out: Path | None,
    base: bool,
    checkpoint: str,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
) -> int:
    """Answer, print or write."""
    config, chosen = open_policy(directory, base, checkpoint)
    questions = [prompt] if prompt is not None else read_questions(source)
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens or config.rollout.max_new_tokens)
    answers = answer(config, chosen, questions, sampling, seed)
    if out is None:
        print("\n\n".join(map(for_terminal, answers)))
        return 0
    rows = [json.dumps({"prompt": q, "completion": a}) for q, a in zip(questions, answers, strict=True)]
    write_whole(out, ("\n".join(rows) + "\n").encode())
    print(f"{len(rows)} answers in {out}", file=sys.stderr)
    return 0


def open_policy(directory: Path | None, base: bool, which: str) -> tuple[Config, Checkpoint | None]:
    """The run's config and a checkpoint; None where the base is asked for."""
    if directory is None:
        return load_config("embedded"), None
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    return config, None if base else choose_checkpoint(run, config.checkpoint.keep, which)


def read_questions(source: Path | None) -> list[str]:
    """One a line, empty lines left out."""
    if source is None or not source.is_file():
        raise DataError(f"--in names {source}, which is no file; give a text file with one question a line.")
    return [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]


def answer(
    config: Config, checkpoint: Checkpoint | None, questions: Sequence[str], sampling: Sampling, seed: int
) -> list[str]:
    """One answer a question."""
    from actor.wiring import build_engine
    from learner.state import ADAPTER

    engine, prompter = build_engine(config)
    if checkpoint is not None:
        engine.install(checkpoint.step, checkpoint.files[ADAPTER])
    groups = tuple(
        GroupOrder(
            group_id=f"generate/{index}",
            prompt_ids=np.array(prompter.prompt_ids(question, config.tasks.system_prompt), dtype=np.int32),
            columns={},
            seeds=sample_seeds(seed, "generate", 0, index, 1),
        )
        for index, question in enumerate(questions)
    )
    completions = engine.generate(groups, sampling, lambda ended: None)
    return [prompter.text(samples[0].ids.tolist()) for samples in completions]
