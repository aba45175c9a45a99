"""An actor that holds other weights than it says is caught: by the canary before it samples, or by its samples."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs

from actor.engines.engine import Completion, Progress
from actor.engines.hf_engine import HFEngine
from actor.installer import CanaryMismatch
from actor.rollout import Rollout
from actor.wiring import allowed_difference, build_engine
from launch.commands.in_process import LocalFiller
from launch.presets.load import load_config
from learner.durable.state import RunTotals
from learner.loop import train
from learner.objective.batch import StepBatch
from learner.objective.judged import Collected
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.step_report import StepReport
from learner.update.mismatch import Mismatch
from learner.wiring import build_learner, load_model
from protocol.messages import GroupOrder, Sampling
from shared.config.tree import Config
from shared.process.lease import Lease, NoLease
from shared.run.metrics import StepMetrics
from tests.support.fakes import ScriptedScorer

Spoil = Callable[[HFEngine, int, bytes], None]
"""Installs a version, with a fault."""
ONE_THREAD = ("compute.actor_threads=1", "compute.learner_threads=1")


class SpoiledEngine:
    """The real engine behind a fault in what gets installed or in how it samples."""

    def __init__(self, config: Config, spoil: Spoil) -> None:
        engine, self.prompter = build_engine(config)
        assert isinstance(engine, HFEngine)
        self.engine = engine
        self.identity = self.engine.identity
        self.sleep, self.logprobs, self.wake = self.engine.sleep, self.engine.logprobs, self.engine.wake
        self.spoil = spoil

    def install(self, version: int, adapter: bytes) -> None:
        """As told, or with a fault."""
        self.spoil(self.engine, version, adapter)

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """At the temperature that was ordered, unless the fault is another one."""
        if self.spoil is hot:
            sampling = structs.replace(sampling, temperature=HOT)
        return self.engine.generate(groups, sampling, progress)


HOT = 1.2
FAULTY = 3
"""The version from which on something is wrong. That of step 0 has B = 0, where no fault of an adapter shows."""


def right(engine: HFEngine, version: int, adapter: bytes) -> None:
    engine.install(version, adapter)


def stale(engine: HFEngine, version: int, adapter: bytes) -> None:
    if version < FAULTY:
        engine.install(version, adapter)


def hot(engine: HFEngine, version: int, adapter: bytes) -> None:
    """Only samples are wrong."""
    engine.install(version, adapter)


def off(engine: HFEngine, version: int, adapter: bytes) -> None:
    """The adapter goes in and is not used."""
    engine.install(version, adapter)
    scaled(engine, version, 0.0, lambda index: True)


def half(engine: HFEngine, version: int, adapter: bytes) -> None:
    """Every second layer has none."""
    engine.install(version, adapter)
    scaled(engine, version, 0.0, lambda index: index % 2 == 0)


def doubled(engine: HFEngine, version: int, adapter: bytes) -> None:
    engine.install(version, adapter)
    scaled(engine, version, 2.0, lambda index: True)


def scaled(engine: HFEngine, version: int, factor: float, chosen: Callable[[int], bool]) -> None:
    """B times a factor in the chosen layers."""
    if version >= FAULTY:
        layers = engine.policy.adapter.layers
        with torch.no_grad():
            for index, name in enumerate(sorted(layers)):
                if chosen(index):
                    layers[name].lora_B.mul_(factor)
        engine.prepare()


class Rows:
    """Keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []

    def step(self, step: int, metrics: StepMetrics, collected: Collected, batch: StepBatch) -> None:
        """One row."""
        self.rows.append(metrics)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        """Not kept."""


def run(tmp_path: Path, spoil: Spoil, *more: str) -> list[StepMetrics]:
    """Four steps with an engine that has a fault."""
    sets = ("run.steps=4", "rollout.prompts=4", "optimizer.lr=0.003", "eval.problems=0", *ONE_THREAD)
    # Without lag: only samples of the current version must agree with it.
    config = load_config("embedded", (*sets, "pipeline.max_lag=0", *more))
    engine = SpoiledEngine(config, spoil)
    scorer = ScriptedScorer(lambda ids: sum(ids) % 2 == 0)
    model = load_model(config)
    allowed = allowed_difference(config, torch.device("cpu"))
    filler = LocalFiller(Rollout(engine, scorer, Lease(tmp_path / "actor"), model.prompter.text, allowed))
    learner = build_learner(model, filler, keep_nowhere)
    state = learner.state
    filler.publish(state.publisher.versions[0], oldest_needed=0)
    files = Rows()
    report = StepReport(config, files, RunTotals(), lambda: False, state.plan.curriculum.metrics)
    train(learner.parts(report, NoLease()), 0, config.run.steps)
    return files.rows


in_both_types = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_the_right_adapter_agrees_to_rounding(tmp_path: Path, dtype: str, most: float) -> None:
    found = [row.mismatch_p99 for row in run(tmp_path, right, f"compute.dtype={dtype}")]
    # A step in which no group teaches has none.
    judged = [p99 for p99 in found if not math.isnan(p99)]
    assert len(judged) >= 3 and max(judged) <= most


@in_both_types
@pytest.mark.parametrize(
    ("spoil", "step", "cause"),
    [
        (stale, 4, "a stale adapter, half of one, or a wrong scale"),
        (off, 4, "a stale adapter: the actor's log-probs are those of the base without one"),
        (half, 4, "a stale adapter, half of one, or a wrong scale"),
        (doubled, 4, "a wrong scale: the actor applies its adapter 2 times"),
        (hot, 1, "the actor samples at temperature 1.2 where 1 was ordered"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_gate_stops_the_run_and_names_the_fault(
    tmp_path: Path, dtype: str, spoil: Spoil, step: int, cause: str
) -> None:
    with pytest.raises(Mismatch, match=rf"Step {step}: .*Likely cause: {cause}"):
        run(tmp_path, spoil, "guard.canary_tokens=0", f"compute.dtype={dtype}")


@in_both_types
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (stale, r"They are those of policy 2: the adapter was not installed\."),
        (off, r"They are those of policy 0, the base without an adapter: the adapter was not installed\."),
        (half, r"They show about \d+% of the adapter's effect: half an adapter, an old one, or a wrong scale\."),
        (doubled, r"They show about 1\d\d% of the adapter's effect: half an adapter, an old one, or a wrong scale\."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_canary_stops_it_before_anything_is_sampled(tmp_path: Path, dtype: str, spoil: Spoil, cause: str) -> None:
    with pytest.raises(CanaryMismatch, match=rf"Policy 3 was installed, but this actor .*{cause}"):
        run(tmp_path, spoil, f"compute.dtype={dtype}")
