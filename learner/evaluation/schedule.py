"""When a run is evaluated: before the first step, every `eval.every` steps, and after the last.

    eval/base.json -> eval/step-000010.json -> ... -> eval/final.json

An evaluation follows the checkpoint of its step. If the process ended between the two, the next start makes the missing
evaluation first; one that exists for the same adapter is not repeated. Training is not affected: nothing is recorded in
the journal, no training order changes, and the evaluated policy is published anyway. With `eval.every`, each evaluation
after step 0 also notes the accuracy of the checkpoint before it, and the best checkpoint is kept (`RunTotals` in
learner/durable/state.py). The row of the step that follows shows its figures (`eval/...` in metrics.jsonl). When a
finished run is trained further, its former end is a checkpoint like any other: `final` is also stored under its step.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from msgspec import structs

from shared.config.processes import EvalConfig
from shared.process.trace import NO_TRACE, Trace
from shared.run.evaluation import Evaluation, largest

MANY = 20
"""Checkpoints that wait for their evaluation; of more, the log warns once."""

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

    def note(self, evaluation: Evaluation, *, may_be_best: bool) -> None:
        """For the next row of metrics; may_be_best: also compare its checkpoint with the best until now."""
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
        former_end = self.known("final", done) if done < self.steps else None
        if former_end:
            self.store.write_evaluation(of_step(former_end))
        if former_end and self.config.every:
            self.report(label_of(done), done)
        else:
            self.after(done)

    def after(self, done: int) -> None:
        """The evaluation after the last step is left to `end`."""
        if self.config.is_due(done) and done < self.steps:
            self.report(label_of(done), done)

    def end(self, done: int) -> None:
        self.report("final", done)

    def report(self, label: str, version: int) -> None:
        """Evaluate unless it is done. Note it in any case: the process may have ended before that."""
        found = self.known(label, version)
        if found is None:
            log.info("evaluates the %s policy", label)
            with self.trace.phase(f"evaluation {label}"):
                found = self.evaluate(label, version, self.digest(version))
            self.store.write_evaluation(found)
            log.info("%s: %s", label, in_words(found))
        self.store.note(found, may_be_best=bool(version and self.config.every))

    def known(self, label: str, version: int) -> Evaluation | None:
        """A stored evaluation of this adapter on these tasks."""
        found, wanted = self.store.evaluation(label), (version, self.digest(version), self.tasks_sha256)
        same = found and (found.version, found.adapter_sha256, found.tasks_sha256) == wanted
        return found if same else None


class StoredResults(EvaluationStore, Protocol):
    """Stores evaluations that another process makes."""

    def adapters(self) -> dict[int, str]:
        """Step -> sha256 of the adapter, for the checkpoints on disk."""
        ...

    def adapter(self, step: int) -> str:
        """The same of one checkpoint; empty if it is not there."""
        ...

    def written_at(self) -> int:
        """When an evaluation was written last, by the clock of the disk."""
        ...

    def keep(self, steps: Collection[int]) -> None:
        """These checkpoints stay, beside the newest and the best."""
        ...


class BesideSchedule:
    """Takes in what a process of its own has evaluated (eval.beside; launch/evaluator). Training waits for nothing: a
    result counts when it is there, and its checkpoint stays until then. However many wait, a step in which none came
    looks at none."""

    def __init__(self, config: EvalConfig, steps: int, store: StoredResults, tasks_sha256: str) -> None:
        """steps: of the whole run. tasks_sha256: of the held-out tasks."""
        self.config = config
        self.steps = steps
        self.store = store
        self.tasks_sha256 = tasks_sha256
        self.has_base = False
        self.waiting: dict[int, str] = {}
        """Step -> sha256 of its adapter."""
        self.looked = (0, 0)
        """When an evaluation had been written last, at the last two looks."""
        self.warned = False

    def begin(self, done: int) -> None:
        adapters = {step: sha256 for step, sha256 in self.store.adapters().items() if step <= done}
        self.waiting = {step: sha256 for step, sha256 in adapters.items() if self.config.is_due(step)}
        self.take_base()
        self.take(self.waiting)
        if done < self.steps:
            self.take_former_end(adapters)

    def after(self, done: int) -> None:
        new = {done: self.store.adapter(done)} if self.config.is_due(done) else {}
        self.waiting |= {step: sha256 for step, sha256 in new.items() if sha256}
        if self.something_came():
            self.take_base()
            new = self.waiting
        self.take(new)
        self.warn_if_many()

    def something_came(self) -> bool:
        """Whether an evaluation was written since the last look. True once more after that: a second one may have come
        within the same tick of the disk's clock, and left the same time."""
        written_at = self.store.written_at()
        came = self.looked != (written_at, written_at)
        self.looked = (self.looked[1], written_at)
        return came

    def take(self, steps: Collection[int]) -> None:
        """The results of these that are there; others go on waiting."""
        for step in sorted(self.waiting.keys() & set(steps)):
            found = result_of(self.store.evaluation, step, self.waiting[step], self.tasks_sha256)
            if found:
                del self.waiting[step]
                self.store.note(found, may_be_best=True)
        self.store.keep(set(self.waiting))

    def take_base(self) -> None:
        base = None if self.has_base else self.store.evaluation("base")
        if base and base.tasks_sha256 == self.tasks_sha256:
            self.has_base = True
            self.store.note(base, may_be_best=False)

    def take_former_end(self, adapters: Mapping[int, str]) -> None:
        final = self.store.evaluation("final")
        if final and (adapters.get(final.version), self.tasks_sha256) == (final.adapter_sha256, final.tasks_sha256):
            self.store.write_evaluation(of_step(final))
            self.store.note(final, may_be_best=True)

    def warn_if_many(self) -> None:
        if len(self.waiting) > MANY and not self.warned:
            self.warned = True
            log.warning(
                "%d checkpoints wait for their evaluation, and stay on the disk until then. Either no process evaluates"
                " them (see logs/, or start `eval RUN --follow`), or an evaluation takes longer than %d steps: then"
                " raise eval.every, or lower eval.problems or eval.samples",
                len(self.waiting),
                self.config.every,
            )

    def end(self, done: int) -> None:
        """What is not there yet, the evaluating process notes when the learner has ended."""
        self.take_base()
        self.take(self.waiting)


def result_of(
    stored: Callable[[str], Evaluation | None], step: int, adapter_sha256: str, tasks_sha256: str
) -> Evaluation | None:
    """Of the checkpoint of this step. That of a former end of the run is stored as `final`. stored: by label."""
    wanted = (step, adapter_sha256, tasks_sha256)
    found = (stored(label) for label in (label_of(step), "final"))
    return next((one for one in found if one and (one.version, one.adapter_sha256, one.tasks_sha256) == wanted), None)


def of_step(final: Evaluation) -> Evaluation:
    """Under the label of its step, because the next end of the run replaces `final`."""
    return structs.replace(final, label=label_of(final.version))


def label_of(step: int) -> str:
    return f"step-{step:06d}"


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
    """`greedy 71.5% [65.7%, 76.7%], sampled ..., maj@4 ..., n = 256, seed 0, in 12.3 s`"""
    parts = found.ways() | {f"maj@{k}": share for k, share in largest(found.sampled.maj_at).items()}
    shares = [f"{name} {share.accuracy:.1%} [{share.low:.1%}, {share.high:.1%}]" for name, share in parts.items()]
    return f"{', '.join(shares)}, n = {found.n}, seed {found.seed}, in {found.wall_s:.1f} s"
