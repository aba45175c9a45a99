"""The work that the sections of the suite have in common: a model, prompts of an exact length, a configuration.

A step is P prompts x G completions. Prompts are questions of digits, which are tokens of their own in the embedded
tokenizer, so a prompt has exactly the tokens that are asked for. Completions have their full length, but for one in a
few hundred: with random weights an end token is as unlikely as any other. The reward is the share of even token ids, so
every step has a gradient. TRL gets the same model, prompts, sizes, LoRA and reward.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import parity_reward
from benchmarks.gpu.measured import Place
from benchmarks.gpu.random_base import random_model
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.config.load import resolve
from shared.config.model import ModelConfig
from shared.config.tree import Config
from shared.model.prompt import Prompter, load_prompter
from shared.process.processor import settled_config
from shared.seeding import sample_seeds

TASKS = 10
"""Of which one is held out."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a step has to do."""

    model: str
    """Name of a shape in random_base.py."""
    prompts: int
    group: int
    prompt: int
    """Tokens."""
    tokens: int
    """Of a completion, at most."""

    def at(self, place: Place) -> "Size":
        """This size, or the smallest one in a dry run."""
        return Size(model="tiny", prompts=1, group=2, prompt=16, tokens=6) if place.small else self


R1 = Size(model="r1-distill-1.5b", prompts=1, group=8, prompt=128, tokens=512)
QWEN_3B = Size(model="qwen2.5-3b", prompts=1, group=8, prompt=128, tokens=200)


def model_of(place: Place, size: Size) -> ModelConfig:
    """Made now if it is not there."""
    return random_model(size.model, place.work / "models")


def keys_of(place: Place, size: Size, steps: int = 1, **others: Any) -> dict[str, Any]:
    """Every key of the configuration that is not at its default."""
    model = model_of(place, size)
    keys = {
        "run.steps": steps,
        "tasks.source": str(write_tasks(place, size, model)),
        "tasks.max_prompt_tokens": size.prompt,
        "verifier.kind": "callable",
        "verifier.function": f"{parity_reward.__file__}:parity",
        "rollout.prompts": size.prompts,
        "rollout.group": size.group,
        "rollout.max_new_tokens": size.tokens,
        "loss.entropy_fraction": 1.0,
        "optimizer.lr": 2e-5,
        "batch.token_budget": 4096,
        "batch.head_rows": 512,
        "batch.recompute": "always",
        "eval.problems": 0,
        "compute.learner_threads": place.size(2, 1),
        "compute.actor_threads": place.size(2, 1),
    }
    return keys | place.keys(model) | {name.replace("__", "."): value for name, value in others.items()}


def write_tasks(place: Place, size: Size, model: ModelConfig) -> Path:
    """As many questions of this length as there are tasks, all different."""
    file = place.work / f"tasks-{size.model}-{size.prompt}.jsonl"
    prompter = load_prompter(cached_base(model).folder)
    rows = [{"question": question(prompter, size.prompt, index), "answer": "1"} for index in range(TASKS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def question(prompter: Prompter, tokens: int, index: int) -> str:
    """Digits that make a prompt of so many tokens."""
    around = len(prompter.prompt_ids("0")) - 1
    digits = np.random.default_rng(index).integers(0, 10, tokens - around)
    return "".join(map(str, digits))


def sections_of(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`run.steps` -> run, steps."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def config_of(keys: Mapping[str, Any]) -> Config:
    """With all defaults, and what [compute] leaves open chosen for this machine."""
    return settled_config(resolve(sections_of(keys)))


def write_config(keys: Mapping[str, Any], file: Path) -> Path:
    """A TOML file; the values are numbers, words and truth values, which JSON writes alike."""
    parts = [
        "\n".join([f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in entries.items()), ""])
        for section, entries in sections_of(keys).items()
    ]
    file.write_text("\n".join(parts))
    return file


def order_of(prompter: Prompter, size: Size, prompts: int | None = None) -> tuple[GroupOrder, ...]:
    """The groups of a step."""
    return tuple(
        GroupOrder(
            group_id=f"group/{index}",
            prompt_ids=np.array(prompter.prompt_ids(question(prompter, size.prompt, index)), np.int32),
            columns={},
            seeds=sample_seeds(0, "suite", 0, index, size.group),
        )
        for index in range(size.prompts if prompts is None else prompts)
    )


def sampling(tokens: int) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=tokens)
