"""When a run is evaluated: before the first step, every `eval.every` steps, after the last.

    eval/base.json -> eval/step-000010.json -> ... -> eval/final.json

An evaluation is made after the step's checkpoint. A life that ended between the two left it out, so the next one begins
with it; one that is there for the same adapter is not made again. Training does not notice: nothing here is journaled,
no order of training changes, and the policy that answers is one that was published anyway. With `eval.every`, each
evaluation after step 0 also judges the checkpoint before it, and the best one is kept (past.py).
"""

import logging
from collections.abc import Callable
from typing import Protocol

from shared.config.processes import EvalConfig
from shared.run.evaluation import Evaluation

log = logging.getLogger("learner")


class Schedule(Protocol):
    """What the loop calls."""

    def after(self, done: int) -> None:
        """`done` updates are behind the policy."""
        ...


class Books(Protocol):
    """Where evaluations lie."""

    def evaluation(self, label: str) -> Evaluation | None:
        """One of an earlier life of this run."""
        ...

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Keep it."""
        ...

    def judge(self, evaluation: Evaluation) -> None:
        """It is that of a checkpoint, which may be the best."""
        ...


class EvalSchedule:
    """Evaluates a run as it goes."""

    def __init__(
        self,
        config: EvalConfig,
        steps: int,
        evaluate: Callable[[str, int, str], Evaluation],
        digest: Callable[[int], str],
        books: Books,
        tasks_sha256: str,
    ) -> None:
        """steps: of the whole run. evaluate: label, version and digest to a report. digest: of a version. tasks_sha256:
        of what this run is evaluated on; a report on other tasks (`eval --problems`) says nothing here."""
        self.config = config
        self.steps = steps
        self.evaluate = evaluate
        self.digest = digest
        self.books = books
        self.tasks_sha256 = tasks_sha256

    def begin(self, done: int) -> None:
        """The base at step 0; later, what an earlier life may have left out."""
        if done == 0:
            self.report("base", 0)
            return
        self.after(done)
        final = self.known("final", done)
        if final and self.config.every:
            # A finished run that is trained further: its end was a checkpoint like any other.
            self.books.judge(final)

    def after(self, done: int) -> None:
        """If one is due; the last step's is `final`."""
        if self.config.is_due(done) and done < self.steps:
            self.report(f"step-{done:06d}", done)

    def end(self, done: int) -> None:
        """The result."""
        self.report("final", done)

    def report(self, label: str, version: int) -> None:
        """Made unless it is there; judged in any case, since the life that made it may have ended before that."""
        found = self.known(label, version)
        if found is None:
            log.info("evaluates the %s policy", label)
            found = self.evaluate(label, version, self.digest(version))
            self.books.write_evaluation(found)
            log.info("%s: %s", label, in_words(found))
        if version and self.config.every:
            self.books.judge(found)

    def known(self, label: str, version: int) -> Evaluation | None:
        """A report of this policy on these tasks."""
        found, wanted = self.books.evaluation(label), (version, self.digest(version), self.tasks_sha256)
        same = found and (found.version, found.adapter_sha256, found.tasks_sha256) == wanted
        return found if same else None


class NoEvaluations:
    """A replay has no actor, a run may want none."""

    def begin(self, done: int) -> None:
        """Nothing."""

    def after(self, done: int) -> None:
        """Nothing."""

    def end(self, done: int) -> None:
        """Nothing."""


NO_EVALUATIONS = NoEvaluations()


def in_words(found: Evaluation) -> str:
    """`greedy 71.5% [65.7%, 76.7%], sampled ..., n = 256, seed 0`"""
    ways = [f"{name} {way.accuracy:.1%} [{way.low:.1%}, {way.high:.1%}]" for name, way in found.ways().items()]
    return f"{', '.join(ways)}, n = {found.n}, seed {found.seed}"
