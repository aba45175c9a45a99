"""When a run is evaluated: before the first step, every `eval.every` steps, after the last.

    eval/base.json -> eval/step-000010.json -> ... -> eval/final.json

An evaluation is made after the step's checkpoint. A life that ended between the two left it out, so the next one begins
with it; one that is there for the same adapter is not made again. Training does not notice: nothing here is journaled,
no order of training changes, and the policy that answers is one that was published anyway.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from shared.config import EvalConfig
from shared.evaluation import Evaluation

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


class EvalSchedule:
    """Evaluates a run as it goes."""

    def __init__(
        self,
        config: EvalConfig,
        steps: int,
        evaluate: Callable[[str, int, str], Evaluation],
        digest: Callable[[int], str],
        books: Books,
    ) -> None:
        """steps: of the whole run. evaluate: label, version and digest to a report. digest: of a version."""
        self.config = config
        self.steps = steps
        self.evaluate = evaluate
        self.digest = digest
        self.books = books

    def begin(self, done: int) -> None:
        """The base at step 0; later, what an earlier life may have left out."""
        if done == 0:
            self.report("base", 0)
        else:
            self.after(done)

    def after(self, done: int) -> None:
        """If one is due; the last step's is `final`."""
        if self.config.every and done % self.config.every == 0 and done < self.steps:
            self.report(f"step-{done:06d}", done)

    def end(self, done: int) -> None:
        """The result."""
        self.report("final", done)

    def report(self, label: str, version: int) -> None:
        """Made unless it is there."""
        known, digest = self.books.evaluation(label), self.digest(version)
        if known and (known.version, known.adapter_sha256) == (version, digest):
            return
        log.info("evaluates the %s policy", label)
        found = self.evaluate(label, version, digest)
        self.books.write_evaluation(found)
        log.info("%s: %s", label, in_words(found))


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
