"""One evaluation as eval/<label>.json holds it, written by the learner and by `eval`, read by whoever shows it.

Keys beyond these belong to other readers and are passed over; what an older file has not gets its default here.
Left out on purpose: whole answers of all tasks (the last words of each greedy one are kept, and three in full).
"""

from pathlib import Path

import msgspec

from shared.errors import DamageError
from shared.run.files import write_whole
from shared.statistics import wilson


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records here."""


class Share(Record, frozen=True, kw_only=True):
    """A mean over tasks of numbers from 0 to 1, with Wilson's 95 % interval.

    Where a task counts in part (several draws), its number varies less than a coin of the same mean; the interval is
    then too wide rather than too narrow.
    """

    correct: float
    """Sum over the tasks."""
    accuracy: float
    """Their mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""
    n: int = 0
    """Tasks; 0 in files that say it elsewhere."""


class Decoded(Share, frozen=True, kw_only=True):
    """What one way to decode came to; as a share: the probability that one answer is right."""

    temperature: float = 0.0
    """0: the most likely token each time."""
    cap: int = 0
    """Tokens an answer may have."""
    draws: int = 1
    """Answers a task."""
    format_rate: float = 0.0
    """Share of answers in which the verifier found a final answer, right or wrong."""
    truncation_rate: float = 0.0
    """Share of answers that ran into the cap."""
    length_mean: float = 0.0
    """Tokens of an answer, its end token included."""
    length_median: float = 0.0
    """Of the same."""
    length_max: int = 0
    """Of the same."""
    pass_at: dict[int, Share] = msgspec.field(default_factory=dict)
    """k -> one of k is right; only where there are several draws."""
    maj_at: dict[int, Share] = msgspec.field(default_factory=dict)
    """k -> the most frequent of k is right; only where the votes can be told apart."""
    by_level: dict[str, Share] = msgspec.field(default_factory=dict)
    """Level -> one answer is right; where the data has a column `level`."""
    by_subject: dict[str, Share] = msgspec.field(default_factory=dict)
    """The same by column `subject` or `type`."""


class Sample(Record, frozen=True, kw_only=True):
    """One held-out question and what was answered, in full."""

    question: str
    """The question as it stands in the data."""
    answer: str = ""
    """The gold answer."""
    completion: str
    """The answer's text."""
    outcome: str
    """What the verifier found."""


class Answered(Record, frozen=True, kw_only=True):
    """One task and what became of it."""

    question: str
    """As it stands in the data."""
    answer: str
    """The gold answer."""
    greedy: str
    """Outcome of the most likely answer."""
    sampled: float
    """Share of right answers among the draws."""
    said: str
    """The last words of the most likely answer."""


class Evaluation(Record, frozen=True, kw_only=True):
    """eval/base.json, eval/final.json, eval/step-000010.json."""

    label: str
    """`base`, `final` or a step."""
    version: int = 0
    """Updates behind the policy."""
    n: int
    """Tasks."""
    seed: int = 0
    """Of the draws."""
    adapter_sha256: str = ""
    """Which adapter; empty in files that do not say."""
    tasks_sha256: str = ""
    """Over all questions and gold answers; evaluations with different ones cannot be compared."""
    source: str = ""
    """Where the tasks came from."""
    verifier: str = ""
    """Its kind."""
    greedy: Decoded
    """Most likely token each time, at the cap of training."""
    sampled: Decoded
    """At the temperature of training, at its cap."""
    long_greedy: Decoded | None = None
    """As `greedy`, at the long cap."""
    long_sampled: Decoded | None = None
    """As `sampled`, at the long cap."""
    samples: tuple[Sample, ...] = ()
    """A few of the tasks, the same ones in every evaluation of a run."""
    answers: tuple[Answered, ...] = ()
    """All of them, briefly."""

    def ways(self) -> dict[str, Decoded]:
        """Name -> figures, those that were made."""
        found = {
            "greedy": self.greedy,
            "sampled": self.sampled,
            "greedy, long cap": self.long_greedy,
            "sampled, long cap": self.long_sampled,
        }
        return {name: way for name, way in found.items() if way}


def share_of(values: list[float]) -> Share:
    """The mean of one number a task."""
    correct = sum(values)
    low, high = wilson(correct, len(values))
    return Share(correct=correct, accuracy=correct / len(values), low=low, high=high, n=len(values))


def right(evaluation: Evaluation) -> list[float]:
    """[n] 1 where the greedy answer is right."""
    return [float(task.greedy == "correct") for task in evaluation.answers]


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """eval/<label>.json, whole."""
    file = folder / f"{evaluation.label}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(evaluation), indent=2))
    return file


def read_evaluation(file: Path) -> Evaluation | None:
    """None if it was not made."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Evaluation)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{file} cannot be read ({error}); move it away to have it made again.") from error
