"""Actor and learner of a run in one process, with the engine, the gates and the update of a real run.

There are no sockets and no journal. The reward is the parity of the token ids' sum, so that any model has something
to learn. An engine with a fault can be put in: what is planted is in the engine alone, after the adapter went in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from msgspec import structs

from actor.engines.engine import Completion, Progress
from actor.engines.hf_engine import HFEngine
from actor.rollout import Rollout
from actor.scoring.scores import Scorer, Scores, ScoresTogether
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.wiring import allowed_difference, build_engine
from launch.commands.in_process import LocalFiller
from learner.durable.state import RunTotals
from learner.loop import train
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.step_report import StepReport
from learner.update.figures import StepResult
from learner.wiring import build_learner, load_model
from protocol.messages import GroupOrder, Sampling
from protocol.outcome import Outcome
from shared.config.tree import Config
from shared.process.lease import NoLease
from shared.run.metrics import StepMetrics

HOT = 1.2
Fault = Callable[[HFEngine], None]
"""Spoils an engine in which an adapter was just installed."""


def off(engine: HFEngine) -> None:
    scale_layers(engine, 0.0, every=1)


def half(engine: HFEngine) -> None:
    """Every second layer has no adapter."""
    scale_layers(engine, 0.0, every=2)


def doubled(engine: HFEngine) -> None:
    scale_layers(engine, 2.0, every=1)


def scale_layers(engine: HFEngine, factor: float, every: int) -> None:
    layers = engine.policy.adapter.layers
    with torch.no_grad():
        for name in sorted(layers)[::every]:
            layers[name].lora_B.mul_(factor)
    engine.prepare()


FAULTS: dict[str, Fault] = {"off": off, "half": half, "doubled": doubled}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault and the version from which on it is there. That of step 0 has B = 0, where an adapter's do not show."""

    name: str
    """`stale`, `hot`, or a key of FAULTS."""
    version: int


class FaultyEngine:
    """The real engine behind a fault."""

    def __init__(self, engine: HFEngine, planted: Planted | None) -> None:
        self.engine = engine
        self.planted = planted
        self.version = 0
        self.identity, self.logprobs = engine.identity, engine.logprobs
        self.sleep, self.wake = engine.sleep, engine.wake

    def faulty(self, name: str) -> bool:
        return self.planted is not None and self.planted.name == name and self.version >= self.planted.version

    def install(self, version: int, adapter: bytes) -> None:
        """As told, or with a fault."""
        self.version = version
        if self.faulty("stale"):
            return
        self.engine.install(version, adapter)
        for name, fault in FAULTS.items():
            if self.faulty(name):
                fault(self.engine)

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """At the temperature that was ordered, or a higher one."""
        return self.engine.generate(groups, self.heated(sampling), progress)

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """The same for a turn of a conversation."""
        return self.engine.take_turn(groups, self.heated(sampling), progress)

    def heated(self, sampling: Sampling) -> Sampling:
        return structs.replace(sampling, temperature=HOT) if self.faulty("hot") else sampling


class ParityScorer:
    """Right is an even sum of token ids: about half of all completions, whatever the model."""

    def begin(self) -> Scores:
        """Scored when all are there."""
        return ScoresTogether(self.score)

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        return [verdict(sum(job.completion_ids) % 2 == 0) for job in jobs]


def verdict(right: bool) -> Verdict:
    outcome = Outcome.CORRECT if right else Outcome.WRONG
    return Verdict(outcome=outcome, score=float(right), final_answer=None, note="")


class Rows:
    """Keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch, result: StepResult) -> None:
        self.rows.append(metrics)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not kept."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run that came to its end."""

    rows: list[StepMetrics]
    sha256: str
    """Of the last adapter."""


def run_here(config: Config, planted: Planted | None = None, scorer: Scorer | None = None) -> Done:
    """Raises Mismatch or CanaryMismatch where a gate refuses. scorer: the parity's if it is not given."""
    engine, prompter = build_engine(config)
    assert isinstance(engine, HFEngine)
    allowed = allowed_difference(config, engine.policy.device)
    judge = scorer or ParityScorer()
    return trained(config, Rollout(FaultyEngine(engine, planted), judge, NoLease(), prompter.text, allowed))


def trained(config: Config, rollout: Rollout) -> Done:
    """All steps, with orders that are filled by this rollout."""
    filler = LocalFiller(rollout)
    learner = build_learner(load_model(config), filler, keep_nowhere)
    state, files = learner.state, Rows()
    filler.publish(state.publisher.versions[0].message, oldest_needed=0)
    report = StepReport(config, files, RunTotals(), lambda: False, state.plan.curriculum.metrics)
    train(learner.parts(report, NoLease()), 0, config.run.steps)
    return Done(rows=files.rows, sha256=state.publisher.versions[config.run.steps].sha256)
