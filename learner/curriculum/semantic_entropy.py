"""How undecided the base is about a task, by meaning: the order of SENT's curriculum (arXiv 2512.04359), and its cache.

    M completions of the base, sampled as in training; C_k those whose final answers mean the same
    SE(q) = - sum_k p_k log p_k,    p_k = |C_k| / M
    stages: tasks by SE from low to high, cut into equal parts; tasks that were always or never right are left out

Completions without a readable final answer (for instance truncated ones) form one cluster: they do not differ in
meaning. A task that is always or never right cannot teach a group, and its low entropy would put it first.
The cache says in words what the entropies were measured with; it is refused for anything else.
Left out on purpose: sampling and comparing, which need an engine and a verifier (launch/commands/curriculum.py).
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from learner.tasks.tasks import Task
from shared.config.data import CurriculumConfig, VerifierConfig
from shared.config.model import ModelConfig, cache_root
from shared.config.tree import RolloutConfig
from shared.errors import DataError


class MeasuredWith(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What entropies depend on."""

    model: str
    """sha256 of the base's weight file."""
    template: str
    """sha256 over vocabulary, chat template and end ids."""
    sampling: str
    """How completions are sampled, in words."""
    verifier: str
    """How final answers are read, in words."""
    data: str
    """sha256 over prompts and columns of all training tasks, in order."""


class TaskMeanings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The M completions of one task, counted by the meaning of their final answers."""

    clusters: tuple[int, ...]
    """How many completions have each meaning; the sum is M."""
    right: int
    """How many are correct."""

    @property
    def entropy(self) -> float:
        total = sum(self.clusters)
        return -math.fsum(n / total * math.log(n / total) for n in self.clusters)

    @property
    def can_teach(self) -> bool:
        """Whether the task is neither always nor never right."""
        return 0 < self.right < sum(self.clusters)


class SemanticEntropies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache file."""

    measured_with: MeasuredWith
    """Must match the run."""
    tasks: tuple[TaskMeanings, ...]
    """One entry per training task, in order."""


def measured_with(
    rollout: RolloutConfig,
    verifier: VerifierConfig,
    samples: int,
    tasks: Sequence[Task],
    base_digest: str,
    tokenizer_digest: str,
) -> MeasuredWith:
    """What the entropies of a run must be measured with. samples: M."""
    return MeasuredWith(
        model=base_digest,
        template=tokenizer_digest,
        sampling=f"{samples} completions, temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} tokens",
        verifier=in_words(verifier),
        data=data_digest(tasks),
    )


def in_words(verifier: VerifierConfig) -> str:
    """`math, decimals from 3 digits on`: the keys that decide which final answers are equal or right."""
    if verifier.strict:
        return f"{verifier.kind}, strict"
    digits = verifier.rounded_digits if verifier.kind == "math" else 0
    return f"{verifier.kind}, decimals from {digits} digits on" if digits else verifier.kind


def data_digest(tasks: Sequence[Task]) -> str:
    """sha256 over prompts and columns, in order."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(task.prompt_ids.tobytes())
        found.update(msgspec.json.encode(sorted(task.columns.items())) + b"\n")
    return found.hexdigest()


def cache_file(curriculum: CurriculumConfig, model: ModelConfig, source: str) -> Path:
    """As configured, else named after model and data. Data sets may share a name, since the content is checked."""
    if curriculum.cache:
        return Path(curriculum.cache)
    names = [Path(name).name or name for name in (model.path, source)]
    return cache_root(model) / "curricula" / f"{'-'.join(names)}.json"


def read_entropies(file: Path, wanted: MeasuredWith) -> SemanticEntropies:
    """The cache; DataError if it is missing or was measured with something else."""
    remedy = "measure it with `python -m launch curriculum` and the same configuration"
    if not file.is_file():
        raise DataError(f"curriculum.kind = 'sent' needs semantic entropies in {file}, which is not there; {remedy}.")
    try:
        found = msgspec.json.decode(file.read_bytes(), type=SemanticEntropies)
    except msgspec.DecodeError as error:
        raise DataError(f"{file} has no semantic entropies ({error}); {remedy}.") from error
    if differing := differences(found.measured_with, wanted):
        raise DataError(f"The semantic entropies in {file} are of another {', '.join(differing)}; {remedy}.")
    return found


def differences(found: MeasuredWith, wanted: MeasuredWith) -> list[str]:
    """The fields that differ, each with both values."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in MeasuredWith.__struct_fields__]
    return [f"{name} ({there[:60]}, not {here[:60]})" for name, there, here in pairs if there != here]


def entropy_stages(found: Sequence[TaskMeanings], count: int) -> list[list[int]]:
    """`count` stages of equal size, low entropies first."""
    tasks = [task for task, meanings in enumerate(found) if meanings.can_teach]
    if len(tasks) < count:
        raise DataError(
            f"Only {len(tasks)} of {len(found)} tasks are neither always nor never right, too few for"
            f" curriculum.stages = {count}; take other tasks, more curriculum.samples, or fewer stages."
        )
    ranked = sorted(tasks, key=lambda task: (found[task].entropy, task))
    return [part.tolist() for part in np.array_split(ranked, count)]
