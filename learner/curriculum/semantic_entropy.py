"""How undecided the base is about a task, by meaning: the order of SENT's curriculum (arXiv 2512.04359), and its cache.

    M completions of the base, sampled as in training; C_k those whose final answers mean the same
    SE(q) = - sum_k p_k log p_k,    p_k = |C_k| / M
    stages: tasks by SE from low to high, cut into equal parts; tasks that were always or never right are left out

Completions without a readable final answer (for instance truncated ones) form one cluster: they do not differ in
meaning. A task that is always or never right cannot teach a group, and its low entropy would put it first.
The cache says in words what the entropies were measured with; it is refused for anything else.

    NAME.json.part   while it is measured: a line for what it is of, then one for each batch, durable before the next
    NAME.json        all of it, written whole

A measurement that was interrupted goes on behind its last whole line, with batches cut at the same places.
Left out on purpose: sampling and comparing, which need an engine and a verifier (launch/commands/curriculum.py).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from learner.tasks.tasks import Task, digest_of_tasks
from shared.config.data import CurriculumConfig, VerifierConfig
from shared.config.model import ModelConfig, cache_root
from shared.config.tree import RolloutConfig
from shared.errors import DataError
from shared.run.files import AppendFile, cut, disk_errors, make_folder, remove_files, write_whole

KEY = "curriculum.cache"


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


class PartOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a part."""

    measured_with: MeasuredWith
    """As in the cache."""
    batch: int
    """Tasks that are decoded together."""


class Part:
    """The batches of a measurement that are finished, in a file beside the cache. One process at a time."""

    def __init__(self, cache: Path, what: PartOf) -> None:
        """A part of anything else is begun anew."""
        self.cache = cache
        self.what = what
        self.path = part_of(cache)
        make_folder(cache.parent, place=KEY)
        first = msgspec.json.encode(what) + b"\n"
        if not self.path.is_file() or not self.path.read_bytes().startswith(first):
            write_whole(self.path, first, place=KEY)
        self.tasks = [task for batch in read_batches(self.path, len(first)) for task in batch]
        self.file = AppendFile(self.path)

    def add(self, batch: Sequence[TaskMeanings]) -> None:
        """Durable once this returns."""
        self.file.append(msgspec.json.encode(batch) + b"\n")
        self.file.sync()
        self.tasks += batch

    def finish(self) -> SemanticEntropies:
        """Write the cache."""
        found = SemanticEntropies(measured_with=self.what.measured_with, tasks=tuple(self.tasks))
        write_whole(self.cache, msgspec.json.encode(found), place=KEY)
        return found

    def close(self) -> None:
        self.file.close()


def part_of(cache: Path) -> Path:
    return cache.with_name(f"{cache.name}.part")


def remove_part(cache: Path) -> None:
    """Once the cache is there. A process that was killed in between has left it."""
    if part_of(cache).is_file():
        remove_files(cache.parent, [part_of(cache)])


def read_batches(path: Path, start: int) -> Iterator[list[TaskMeanings]]:
    """From this byte on. What a kill has torn, or a power cut has left of a line, is cut off with all that follows."""
    with disk_errors(path, KEY):
        data = path.read_bytes()
    while start < len(data):
        end = data.find(b"\n", start) + 1
        try:
            batch = msgspec.json.decode(data[start : max(start, end)], type=list[TaskMeanings])
        except ValueError:
            cut(path, start)
            return
        start = end
        yield batch


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
        data=digest_of_tasks(tasks),
    )


def in_words(verifier: VerifierConfig) -> str:
    """`math, decimals from 3 digits on`: the keys that decide which final answers are equal or right."""
    if verifier.strict:
        return f"{verifier.kind}, strict"
    digits = verifier.rounded_digits if verifier.kind == "math" else 0
    return f"{verifier.kind}, decimals from {digits} digits on" if digits else verifier.kind


def cache_file(curriculum: CurriculumConfig, model: ModelConfig, source: str, wanted: MeasuredWith) -> Path:
    """As configured, else named after model, data, and what it must be measured with, so that no configuration replaces
    the measurement of another."""
    if curriculum.cache:
        return Path(curriculum.cache)
    names = [Path(name).name or name for name in (model.path, source)]
    digest = hashlib.sha256(msgspec.json.encode(wanted)).hexdigest()
    return cache_root(model) / "curricula" / f"{'-'.join(names)}-{digest[:12]}.json"


def read_entropies(file: Path, wanted: MeasuredWith) -> SemanticEntropies:
    """The cache; DataError if it is missing or was measured with something else."""
    remedy = "measure it with `python -m launch curriculum` and the same configuration"
    if not file.is_file():
        raise DataError(f"curriculum.kind = 'sent' needs semantic entropies in {file}, which is not there; {remedy}.")
    try:
        found = msgspec.json.decode(file.read_bytes(), type=SemanticEntropies)
    # ValueError: bytes that are not UTF-8, too.
    except ValueError as error:
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
