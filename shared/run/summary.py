"""summary.json: the state or the result of a run. The learner writes it and the commands read it, both as this record.

When the learner has ended, the launcher adds the verdict of `why`, whose rules are no part of a learner. It also adds
the sentence of an error that the user can fix: such an error may end a run while it loads, or in an actor.
Unknown keys are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import DamageError
from shared.run.evaluation import Evaluation, read_evaluation
from shared.run.files import write_whole
from shared.run.forecast import Figures, Spent
from shared.run.run_dir import RunDir

Status = Literal["running", "done", "stopped", "failed"]


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is doing, as a rule of `why` found it."""

    name: str
    """What is going on, in a few words: `all groups alike, all wrong`, `learning`."""
    fault: bool
    """Whether something should be changed. `learning`, `finished` and `too early to say` are no faults."""
    evidence: str
    """The figures, with the limit that they crossed."""
    remedy: str
    """What to do: a configuration key with a value, or an action."""
    sure: float
    """How sure the rule is, from 0 to 1."""
    harm: float
    """How much of the training it costs, from 0 to 1."""

    @property
    def rank(self) -> float:
        """What should be looked at first."""
        return self.sure * self.harm

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.remedy}."


class ActorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one actor, since the row of metrics before."""

    tokens_per_s: float
    """While it had orders; a mean of the last ones. 0 before its first."""
    waiting: float
    """Share of the time in which it had no order, or waited for its turn to compute."""
    faults: int
    """Orders that it was given and others had to fill, since the learner started."""
    version: int
    """Policy of the last order that it filled."""


class ActorsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Empty in a run with one actor."""

    actors: dict[str, ActorFigures] = {}
    """By actor id."""
    limited: dict[str, float] = {}
    """The key of the configuration that costs the actors the most time, and the share of it; empty if it is little."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The state or the result of a run."""

    status: Status
    """`running` also if the run was killed."""
    steps: int
    """Steps done."""
    wall_s: float
    """Time the run took, restarts included."""
    adapter_sha256: str
    """sha256 of the newest adapter."""
    predicted: Figures | None = None
    """Memory and time, before the run began; None if nothing was predicted."""
    measured: Figures | None = None
    """The same as it was measured until now; None before the first step."""
    spent: Spent | None = None
    """Where time and energy went until now; None if nobody noted it."""
    eval: Mapping[str, Evaluation] = {}
    """`base` and `final` if they exist, without the results of single tasks."""
    why: RunVerdict | None = None
    """The first verdict of `why`; None while the learner runs."""
    actors: ActorsReport = ActorsReport()
    """Of several actors, as in the last row of metrics."""
    error: str = ""
    """The sentence with which the run failed; empty if it ended otherwise, or in a crash."""


def first_and_last(run: RunDir) -> dict[str, Evaluation]:
    """The evaluations that a summary has."""
    found = {label: read_evaluation(run.eval / f"{label}.json") for label in ("base", "final")}
    return {label: evaluation for label, evaluation in found.items() if evaluation}


def write_summary(run: RunDir, summary: Summary) -> None:
    short = {label: msgspec.structs.replace(report, task_results=()) for label, report in summary.eval.items()}
    whole = msgspec.structs.replace(summary, eval=short)
    write_whole(run.summary, msgspec.json.format(msgspec.json.encode(whole), indent=2))


def with_error(summary: Summary | None, error: str) -> Summary:
    """Of a run that failed. summary: None if the learner has written none."""
    known = summary or Summary(status="failed", steps=0, wall_s=0.0, adapter_sha256="")
    return msgspec.structs.replace(known, status="failed", error=error)


def read_summary(run: RunDir) -> Summary | None:
    """None if the run ended before it wrote one."""
    return read_file(run.summary)


def read_file(path: Path) -> Summary | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read ({error}); move it away, `resume` writes it again.") from error
