"""One evaluation, as in eval/<label>.json: written by the learner and by `eval`, read by the commands that show it.

Left out on purpose: whole completions of all tasks. The last words of each greedy one are kept, and three in full.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import msgspec

from shared.errors import DamageError
from shared.run.files import write_whole
from shared.run.run_dir import RUN_DIR
from shared.statistics import wilson

IN_CURVE = re.compile(r"base|final|step-\d+")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records here."""


class Share(Record, frozen=True, kw_only=True):
    """A mean over tasks of numbers from 0 to 1, with Wilson's 95 % interval.

    With several completions per task, the number of a task varies less than a coin of the same mean, so the interval is
    too wide rather than too narrow.
    """

    correct: float
    """Sum over the tasks."""
    accuracy: float
    """Their mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""
    n: int
    """Number of tasks."""


class Decoded(Share, frozen=True, kw_only=True):
    """Figures of one way to decode. The share is the probability that one completion is right."""

    temperature: float = 0.0
    """0: the most likely token each time."""
    cap: int = 0
    """Largest number of tokens in a completion."""
    draws: int = 1
    """Completions per task."""
    format_rate: float = 0.0
    """Share of completions in which the verifier found a final answer, right or wrong."""
    truncation_rate: float = 0.0
    """Share of completions that reached the cap."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    """Mean rewards of a completion, under the names of `reward/...` in metrics.jsonl: `mean` of all together, and each
    unweighted. One without a result counts 0, as there. Empty if the rewards say no more than the accuracy."""
    length_mean: float = 0.0
    """Mean number of tokens in a completion, end token included."""
    length_median: float = 0.0
    """Median of the same."""
    length_max: int = 0
    """Maximum of the same."""
    pass_at: dict[int, Share] = msgspec.field(default_factory=dict)
    """k -> one of k is right; only with several completions per task."""
    maj_at: dict[int, Share] = msgspec.field(default_factory=dict)
    """k -> the most frequent final answer of k is right; only if final answers can be compared."""
    by_level: dict[str, Share] = msgspec.field(default_factory=dict)
    """Level -> one completion is right; only if the data has a column `level`."""
    by_subject: dict[str, Share] = msgspec.field(default_factory=dict)
    """The same by column `subject` or `type`."""


class Example(Record, frozen=True, kw_only=True):
    """One held-out task with its whole greedy completion."""

    question: str
    """The question as in the data."""
    answer: str = ""
    """The gold answer."""
    completion: str
    """The text of the completion."""
    outcome: str
    """The outcome that the verifier gave."""


class TaskResult(Record, frozen=True, kw_only=True):
    """One task and the results of its completions."""

    question: str
    """The question as in the data."""
    answer: str
    """The gold answer."""
    greedy: str
    """Outcome of the greedy completion."""
    sampled: float
    """Share of the sampled completions that are right."""
    last_words: str
    """The last words of the greedy completion."""


class Evaluation(Record, frozen=True, kw_only=True):
    """eval/base.json, eval/final.json, eval/step-000010.json."""

    label: str
    """`base`, `final` or `step-000010`; `eval` may add `-test` and `-n4x8-cap512`."""
    version: int
    """Of the policy: the number of steps before it."""
    n: int
    """Tasks."""
    seed: int
    """Seed of the sampled completions."""
    adapter_sha256: str
    """sha256 of the adapter."""
    tasks_sha256: str
    """sha256 over all questions and gold answers. Evaluations can be compared only if it is equal."""
    source: str
    """Where the tasks came from."""
    verifier: str
    """Kind of the verifier."""
    greedy: Decoded
    """The most likely token each time, with the cap of training."""
    sampled: Decoded
    """At the temperature of training, with its cap."""
    long_greedy: Decoded | None = None
    """As `greedy`, with the long cap."""
    long_sampled: Decoded | None = None
    """As `sampled`, with the long cap."""
    examples: tuple[Example, ...] = ()
    """A few tasks in full, the same ones in every evaluation of a run."""
    task_results: tuple[TaskResult, ...] = ()
    """All tasks, in short."""
    wall_s: float = 0.0
    """How long it took, in seconds."""

    def ways(self) -> dict[str, Decoded]:
        """Name -> figures, for the ways that were evaluated."""
        found = {
            "greedy": self.greedy,
            "sampled": self.sampled,
            "greedy, long cap": self.long_greedy,
            "sampled, long cap": self.long_sampled,
        }
        return {name: way for name, way in found.items() if way}

    @property
    def in_curve(self) -> bool:
        """Whether it is a point of the run's accuracy over its steps; longer labels are of other tasks or options."""
        return bool(IN_CURVE.fullmatch(self.label))

    @property
    def of_test_set(self) -> bool:
        """Whether its tasks are those of `tasks.test`."""
        return "-test" in self.label

    def kind(self) -> tuple[object, ...]:
        """Tasks, verifier, and caps, draws and temperature of each way. If two evaluations have the same, all their
        figures can be compared."""
        ways = {name: (way.cap, way.draws, way.temperature) for name, way in self.ways().items()}
        return self.tasks_sha256, self.verifier, ways


def share_of(values: list[float]) -> Share:
    """values: one number for each task."""
    correct = sum(values)
    low, high = wilson(correct, len(values))
    return Share(correct=correct, accuracy=correct / len(values), low=low, high=high, n=len(values))


def largest(shares: Mapping[int, Share]) -> dict[int, Share]:
    """That of the largest k; empty if there is none."""
    return {k: shares[k] for k in sorted(shares)[-1:]}


def figures(evaluation: Evaluation) -> dict[str, float]:
    """What a row of metrics has of it, by name: `eval/greedy` and so on."""
    sampled = evaluation.sampled
    return {
        "step": evaluation.version,
        "greedy": evaluation.greedy.accuracy,
        "sampled": sampled.accuracy,
        **{f"pass_at_{k}": share.accuracy for k, share in largest(sampled.pass_at).items()},
        **{f"maj_at_{k}": share.accuracy for k, share in largest(sampled.maj_at).items()},
        **{f"reward_{name}": value for name, value in sampled.rewards.items()},
        "wall_s": evaluation.wall_s,
    }


def right(evaluation: Evaluation) -> list[float]:
    return [float(task.greedy == "correct") for task in evaluation.task_results]


def label_for(folder: Path, found: Evaluation, *, as_the_run: bool) -> str:
    """The label to write it under: its own, if that is not taken or is of the same kind, which is then replaced; else
    a longer one, `base-n4x8` for 4 tasks of 8 draws, `base-n4x8-cap512` with a long cap. as_the_run: with the tasks,
    draws and caps of the run's own evaluations. Any other gets a longer label at once: the run makes those without one,
    and takes what it finds there for its own."""
    longer = f"{found.label}-n{found.n}x{found.sampled.draws}"
    if long := found.long_greedy:
        longer += f"-cap{long.cap}"
    usual = (found.label,) if as_the_run else ()
    for label in chain(usual, (longer,), (f"{longer}-{number}" for number in count(2))):
        # One that is damaged stays too.
        with suppress(DamageError):
            kept = read_evaluation(folder / f"{label}.json")
            if kept is None or kept.kind() == found.kind():
                return label
    raise AssertionError("unreachable")


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    file = folder / f"{evaluation.label}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(evaluation), indent=2), place=RUN_DIR)
    return file


def read_evaluation(file: Path) -> Evaluation | None:
    """None if the file does not exist."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Evaluation)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{file} cannot be read ({error}); move it away to have it made again.") from error
