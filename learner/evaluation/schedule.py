"""When a run is evaluated: before the first step, every `eval.every` steps, and after the last.

    eval/base.json -> eval/step-000010.json -> ... -> eval/final.json

An evaluation follows the checkpoint of its step. If the process ended between the two, the next start makes the missing
evaluation first; one that exists for the same adapter is not repeated. Training is not affected: nothing is recorded in
the journal, no training order changes, and the evaluated policy is published anyway. With `eval.every`, each evaluation
after step 0 also notes the accuracy of the checkpoint before it, and the best checkpoint is kept (`RunTotals` in
learner/durable/state.py).
"""

import logging
from collections.abc import Callable
from typing import Protocol

from shared.config.processes import EvalConfig
from shared.process.trace import NO_TRACE, Trace
from shared.run.evaluation import Evaluation

log = logging.getLogger("learner")


class Schedule(Protocol):
    """What the loop calls."""

    def after(self, done: int) -> None:
        """Called when `done` updates are done."""
        ...


class EvaluationStore(Protocol):
    """Stores evaluations."""

    def evaluation(self, label: str) -> Evaluation | None:
        """The stored evaluation with this label; None if there is none."""
        ...

    def write_evaluation(self, evaluation: Evaluation) -> None: ...

    def note_accuracy(self, evaluation: Evaluation) -> None:
        """Note the accuracy of the checkpoint that was evaluated, which may be the best."""
        ...


class EvalSchedule:
    """Evaluates a run while it trains."""

    def __init__(
        self,
        config: EvalConfig,
        steps: int,
        evaluate: Callable[[str, int, str], Evaluation],
        digest: Callable[[int], str],
        store: EvaluationStore,
        tasks_sha256: str,
        trace: Trace = NO_TRACE,
    ) -> None:
        """steps: of the whole run. evaluate: from label, version and adapter digest. digest: of a version's adapter.
        tasks_sha256: of the held-out tasks; an evaluation on other tasks (`eval --problems`) is not reused."""
        self.config = config
        self.steps = steps
        self.evaluate = evaluate
        self.digest = digest
        self.store = store
        self.tasks_sha256 = tasks_sha256
        self.trace = trace

    def begin(self, done: int) -> None:
        """Evaluate the base at step 0; later, make the evaluation that an earlier start may have missed."""
        if done == 0:
            self.report("base", 0)
            return
        self.after(done)
        final = self.known("final", done)
        if final and self.config.every:
            # A finished run is trained further: its former end is a checkpoint like any other.
            self.store.note_accuracy(final)

    def after(self, done: int) -> None:
        """The evaluation after the last step is left to `end`."""
        if self.config.is_due(done) and done < self.steps:
            self.report(f"step-{done:06d}", done)

    def end(self, done: int) -> None:
        self.report("final", done)

    def report(self, label: str, version: int) -> None:
        """Evaluate unless it is done. Note the accuracy in any case: the process may have ended before that."""
        found = self.known(label, version)
        if found is None:
            log.info("evaluates the %s policy", label)
            with self.trace.phase(f"evaluation {label}"):
                found = self.evaluate(label, version, self.digest(version))
            self.store.write_evaluation(found)
            log.info("%s: %s", label, in_words(found))
        if version and self.config.every:
            self.store.note_accuracy(found)

    def known(self, label: str, version: int) -> Evaluation | None:
        """A stored evaluation of this adapter on these tasks."""
        found, wanted = self.store.evaluation(label), (version, self.digest(version), self.tasks_sha256)
        same = found and (found.version, found.adapter_sha256, found.tasks_sha256) == wanted
        return found if same else None


class NoEvaluations:
    """For a replay, which has no actor, and for runs without evaluations."""

    def begin(self, done: int) -> None:
        pass

    def after(self, done: int) -> None:
        pass

    def end(self, done: int) -> None:
        pass


NO_EVALUATIONS = NoEvaluations()


def in_words(found: Evaluation) -> str:
    """`greedy 71.5% [65.7%, 76.7%], sampled ..., n = 256, seed 0`"""
    ways = [f"{name} {way.accuracy:.1%} [{way.low:.1%}, {way.high:.1%}]" for name, way in found.ways().items()]
    return f"{', '.join(ways)}, n = {found.n}, seed {found.seed}"
