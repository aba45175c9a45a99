"""How undecided the base is about a task, by meaning: the order of SENT's curriculum (arXiv 2512.04359), and its cache.

    M answers of the base, sampled as in training; C_k the answers that mean the same
    SE(q) = - sum_k p_k log p_k,    p_k = |C_k| / M
    stages: tasks by SE from low to high, cut into equal parts; tasks that were always or never right are left out

Answers without a final answer that can be read (truncated ones among them) are one cluster: they do not differ in
meaning. A task that is always or never right has nothing to teach a group, and its low entropy would put it first.
What the entropies were measured with is kept beside them, in words; they are refused for anything else.
Left out on purpose: how answers are sampled and compared, which needs an engine and a verifier
(launch/commands/curriculum.py).
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from learner.tasks.tasks import Task
from shared.config.model import cache_root
from shared.config.tree import Config
from shared.errors import DataError


class MeasuredWith(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What entropies depend on."""

    model: str
    """sha256 of the base's weight file."""
    template: str
    """sha256 over vocabulary, chat template and end ids."""
    sampling: str
    """How answers are drawn, in words."""
    verifier: str
    """How they are read, in words."""
    data: str
    """sha256 over prompts and columns of all training tasks, in order."""


class Answers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The M answers of one task."""

    clusters: tuple[int, ...]
    """How many answers have each meaning; their sum is M."""
    right: int
    """How many are correct."""

    @property
    def entropy(self) -> float:
        """SE in nats."""
        total = sum(self.clusters)
        return -math.fsum(n / total * math.log(n / total) for n in self.clusters)

    @property
    def can_teach(self) -> bool:
        """Neither always nor never right."""
        return 0 < self.right < sum(self.clusters)


class SemanticEntropies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache file."""

    measured_with: MeasuredWith
    """Must be what the run is."""
    tasks: tuple[Answers, ...]
    """One of each training task, in order."""


def measured_with(config: Config, tasks: Sequence[Task], base_digest: str, tokenizer_digest: str) -> MeasuredWith:
    """What entropies for this run have to be measured with."""
    rollout, verifier = config.rollout, config.verifier
    return MeasuredWith(
        model=base_digest,
        template=tokenizer_digest,
        sampling=f"{config.curriculum.samples} answers, temperature {rollout.temperature:g},"
        f" at most {rollout.max_new_tokens} tokens",
        verifier=f"{verifier.kind}{', strict' if verifier.strict else ''}",
        data=data_digest(tasks),
    )


def data_digest(tasks: Sequence[Task]) -> str:
    """sha256 over what is asked and what is expected."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(task.prompt_ids.tobytes())
        found.update(msgspec.json.encode(sorted(task.columns.items())) + b"\n")
    return found.hexdigest()


def cache_file(config: Config) -> Path:
    """As configured, else by the names of model and data; what is in it is checked, so a name may be taken again."""
    if config.curriculum.cache:
        return Path(config.curriculum.cache)
    names = [Path(name).name or name for name in (config.model.path, config.tasks.source)]
    return cache_root(config.model) / "curricula" / f"{'-'.join(names)}.json"


def read_entropies(file: Path, wanted: MeasuredWith) -> SemanticEntropies:
    """The cache, if it was made for this; else DataError with what differs."""
    remedy = "measure it with `python -m launch curriculum` and the same configuration"
    if not file.is_file():
        raise DataError(f"curriculum.kind = 'sent' needs semantic entropies in {file}, which is not there; {remedy}.")
    try:
        found = msgspec.json.decode(file.read_bytes(), type=SemanticEntropies)
    except msgspec.DecodeError as error:
        raise DataError(f"{file} holds no semantic entropies ({error}); {remedy}.") from error
    if differing := differences(found.measured_with, wanted):
        raise DataError(f"The semantic entropies in {file} are of another {', '.join(differing)}; {remedy}.")
    return found


def differences(found: MeasuredWith, wanted: MeasuredWith) -> list[str]:
    """Which parts are not the same, each with what is there and what is needed."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in MeasuredWith.__struct_fields__]
    return [f"{name} ({there[:60]}, not {here[:60]})" for name, there, here in pairs if there != here]


def entropy_stages(answers: Sequence[Answers], count: int) -> list[list[int]]:
    """`count` stages of equal size, low entropies first."""
    tasks = [task for task, found in enumerate(answers) if found.can_teach]
    if len(tasks) < count:
        raise DataError(
            f"Only {len(tasks)} of {len(answers)} tasks are neither always nor never right, too few for"
            f" curriculum.stages = {count}; take other tasks, more curriculum.samples, or fewer stages."
        )
    ranked = sorted(tasks, key=lambda task: (answers[task].entropy, task))
    return [part.tolist() for part in np.array_split(ranked, count)]
