"""The whole loop in one process: real policy, real decode loop, a toy task whose best completion is known.

The toy pays for completions whose first token is among the first third of the vocabulary. Bits are compared, not
curves, wherever a run is repeated, resumed or run at a lag.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.numpy import load

from actor.engines.engine import Engine
from actor.engines.hf_engine import HFEngine
from actor.rollout import Rollout
from launch.commands.in_process import LocalFiller
from learner.durable.checkpoint import Checkpoint
from learner.durable.state import LearnerState, RunTotals
from learner.evaluation.evaluate import Evaluator
from learner.evaluation.schedule import EvalSchedule
from learner.loop import train
from learner.quarantine.quarantine import keep_nowhere
from learner.reports.step_report import StepReport
from learner.tasks.tasks import TaskSet
from learner.update.mismatch import Mismatch
from learner.wiring import Model, build_learner
from shared.config.data import CurriculumConfig
from shared.config.processes import CheckpointConfig, EvalConfig, PipelineConfig
from shared.config.tree import (
    BatchConfig,
    Config,
    GrowthConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
)
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.process.lease import Lease
from shared.run.evaluation import Evaluation
from shared.run.metrics import StepMetrics
from tests.support.cramped_card import Refusing, named
from tests.support.fakes import ScriptedScorer, spelled, tiny_policy, tiny_prompter, toy_tasks
from tests.support.steps import NotedSizes, never_stepped

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
GOAL = 32
END = 96
SHUFFLED = CurriculumConfig()
CURRICULA = (CurriculumConfig(kind="pass_rate"), CurriculumConfig(kind="levels", stage_steps=2, replay=0.25))


class KeptFiles:
    """Keeps rows, and checkpoints as they would be on disk."""

    def __init__(self, state: LearnerState) -> None:
        self.state = state
        self.rows: list[StepMetrics] = []
        self.checkpoints: dict[int, Checkpoint] = {}

    def step(self, step: int, metrics: StepMetrics, collected: object, batch: object, result: object) -> None:
        self.rows.append(metrics)

    @property
    def rewards(self) -> list[float]:
        """The curve."""
        return [row.reward_mean for row in self.rows]

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        self.checkpoints[step] = self.state.to_save(step, totals).copied()


class KeptEvaluations:
    """Evaluations, as on the disk."""

    def __init__(self, found: dict[str, Evaluation]) -> None:
        self.found = found

    def evaluation(self, label: str) -> Evaluation | None:
        return self.found.get(label)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self.found[evaluation.label] = evaluation

    def note(self, evaluation: Evaluation, *, may_be_best: bool) -> None:
        """Nothing is chosen here."""


class Run:
    """One start of a learner with an actor inside; nothing is shared between two of them but the checkpoint folder."""

    def __init__(
        self, checkpoint: Path, folder: Path, config: Config, engine: Callable[[Policy, Prompter], Engine] = HFEngine
    ) -> None:
        self.config = config
        self.notes = NotedSizes()
        self.scorer = ScriptedScorer(lambda ids: ids[0] < GOAL)
        policy = tiny_policy(checkpoint, shaken=False)
        lease = Lease(folder / "lease")
        sampling_policy = tiny_policy(checkpoint, shaken=False)
        rollout = Rollout(engine(sampling_policy, tiny_prompter(END)), self.scorer, lease, spelled)
        self.filler = LocalFiller(rollout)
        tasks = [replace(t, columns=t.columns | {"level": str(i % 3)}) for i, t in enumerate(toy_tasks(12))]
        model = Model(
            config=config,
            policy=policy,
            prompter=tiny_prompter(END),
            tasks=TaskSet(train=tuple(tasks), held_out=(), dropped={}),
        )
        learner = build_learner(model, self.filler, keep_nowhere, notes=self.notes)
        self.state = learner.state
        self.filler.publish(self.state.publisher.versions[0].message, oldest_needed=0)
        self.files = KeptFiles(self.state)
        self.parts = learner.parts(self.report(RunTotals()), lease)

    def report(self, totals: RunTotals) -> StepReport:
        return StepReport(self.config, self.files, totals, lambda: False, self.state.plan.curriculum.metrics)

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, as a session does."""
        self.parts = replace(self.parts, report=self.report(self.state.load(checkpoint)))
        for version in sorted(self.state.publisher.versions):
            self.filler.publish(self.state.publisher.versions[version].message, oldest_needed=0)
        self.state.plan.submit_pending()

    def evaluate_into(self, found: dict[str, Evaluation]) -> dict[str, Evaluation]:
        """Evaluate on the way, as the config says; reports go there."""
        evaluator = Evaluator(self.config, toy_tasks(6, first=50), self.filler, spelled)
        publisher = self.state.publisher
        schedule = EvalSchedule(
            self.config.eval,
            self.config.run.steps,
            evaluator.run,
            digest=lambda version: publisher.versions[version].sha256,
            store=KeptEvaluations(found),
            tasks_sha256=evaluator.tasks_sha256,
        )
        self.parts = replace(self.parts, evaluations=schedule)
        return found

    def until(self, step: int) -> Checkpoint:
        """The state after so many steps."""
        self.train(last=step)
        return self.state.to_save(step, RunTotals()).copied()

    def train(self, first: int = 0, last: int | None = None) -> str:
        """Run these steps; the adapter's digest."""
        done = train(self.parts, first, self.config.run.steps if last is None else last)
        return self.state.publisher.versions[done].sha256


def config_for(
    *,
    steps: int = STEPS,
    max_lag: int = 0,
    rounds: int = 0,
    rho: float = 1.0,
    lr: float = 2e-3,
    max_mismatch: float = 0.05,
    curriculum: CurriculumConfig = SHUFFLED,
    kl_beta: float = 0.0,
    growth: GrowthConfig | None = None,
    updates: int = 1,
) -> Config:
    return Config(
        run=RunConfig(steps=steps, seed=1),
        rollout=RolloutConfig(prompts=4, group=4, max_new_tokens=4, groups_per_order=2, replacement_rounds=rounds),
        loss=LossConfig(entropy_fraction=rho, max_mismatch=max_mismatch, kl_beta=kl_beta),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=2, schedule="cosine"),
        pipeline=PipelineConfig(max_lag=max_lag),
        curriculum=curriculum,
        checkpoint=CheckpointConfig(every=3),
        batch=BatchConfig(updates=updates),
        growth=growth or GrowthConfig(),
        guard=GuardConfig(canary_tokens=0),
    )


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Callable[[Config], Run]:
    return lambda config: Run(checkpoint, tmp_path, config)


def test_the_policy_learns_the_toy(start: Callable[[Config], Run]) -> None:
    run = start(config_for(steps=30, lr=2e-2))
    run.train()
    rewards = run.files.rewards
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.6 and last > 0.9, rewards


@pytest.mark.parametrize(
    ("max_lag", "rounds", "updates"), [(0, 0, 1), (0, 1, 1), (2, 0, 1), (2, 1, 1), (0, 0, 3), (2, 1, 3)]
)
def test_a_run_repeated_or_resumed_ends_in_the_same_bits(
    max_lag: int, rounds: int, updates: int, start: Callable[[Config], Run]
) -> None:
    config = config_for(max_lag=max_lag, rounds=rounds, rho=0.5, updates=updates)
    undisturbed = start(config)
    digest = undisturbed.train()
    assert start(config).train() == digest
    stopped, resumed = start(config), start(config)
    halfway = stopped.train(last=3)
    assert halfway != digest
    resumed.load(stopped.files.checkpoints[3])
    assert resumed.train(first=3) == digest
    assert resumed.files.rewards == undisturbed.files.rewards[3:]
    assert saved(resumed) == saved(undisturbed)


@pytest.mark.parametrize("curriculum", CURRICULA, ids=lambda curriculum: curriculum.kind)
@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_with_a_curriculum_resumed_ends_in_the_same_bits(
    curriculum: CurriculumConfig, max_lag: int, start: Callable[[Config], Run]
) -> None:
    config = config_for(max_lag=max_lag, rounds=1, curriculum=curriculum)
    undisturbed = start(config)
    digest = undisturbed.train()
    assert start(config_for(max_lag=max_lag, rounds=1)).train() != digest
    stopped, resumed = start(config), start(config)
    stopped.train(last=3)
    resumed.load(stopped.files.checkpoints[3])
    assert resumed.train(first=3) == digest
    assert saved(resumed) == saved(undisturbed)
    figures = [[row.curriculum_stage, row.curriculum_effective_tasks] for row in undisturbed.files.rows]
    assert len({tuple(figure) for figure in figures}) > 1
    assert [[row.curriculum_stage, row.curriculum_effective_tasks] for row in resumed.files.rows] == figures[3:]


@pytest.mark.parametrize("max_lag", [0, 2])
def test_steps_that_grow_with_the_noise_resume_in_the_same_bits(max_lag: int, start: Callable[[Config], Run]) -> None:
    config = config_for(max_lag=max_lag, growth=GrowthConfig(max_prompts=7, factor=100.0, memory=0.5))
    undisturbed = start(config)
    digest = undisturbed.train()
    sizes = [row.groups_total for row in undisturbed.files.rows]
    assert sizes == ([4, 5, 7, 7, 7, 7] if max_lag == 0 else [4, 4, 4, 5, 7, 7])
    assert all(row.noise_spread > 0 for row in undisturbed.files.rows)
    stopped, resumed = start(config), start(config)
    stopped.train(last=3)
    resumed.load(stopped.files.checkpoints[3])
    assert resumed.train(first=3) == digest
    assert [row.groups_total for row in resumed.files.rows] == sizes[3:]
    assert saved(resumed) == saved(undisturbed)
    assert start(config_for(max_lag=max_lag)).train() != digest


ANCHORED = CurriculumConfig(kind="levels", stage_steps=2, ewc=50.0, ewc_samples=8, kl_to="stage")


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_that_is_anchored_to_its_stages_resumed_ends_in_the_same_bits(
    max_lag: int, start: Callable[[Config], Run]
) -> None:
    config = config_for(max_lag=max_lag, curriculum=ANCHORED, kl_beta=0.1)
    undisturbed = start(config)
    digest = undisturbed.train()
    free = structs.replace(ANCHORED, ewc=0.0, kl_to="base")
    assert start(config_for(max_lag=max_lag, curriculum=free, kl_beta=0.1)).train() != digest
    for stop in (1, 3):
        resumed = start(config)
        checkpoint = start(config).until(stop)
        resumed.load(checkpoint)
        assert resumed.train(first=stop) == digest
        assert saved(resumed) == saved(undisturbed)
        assert [row.ewc_penalty for row in resumed.files.rows] == [r.ewc_penalty for r in undisturbed.files.rows[stop:]]


def test_the_anchor_is_the_policy_that_the_stage_s_last_completions_came_from(start: Callable[[Config], Run]) -> None:
    run = start(config_for(curriculum=ANCHORED, kl_beta=0.1))
    run.train(last=1)
    sampled_from = run.filler.policies[1].adapter.tobytes()
    run.train(first=1, last=2)
    anchor = run.state.anchor
    assert anchor is not None and anchor.stage == 1
    assert {name: value.numpy().tobytes() for name, value in anchor.theta.items()} == {
        name.removeprefix("base_model.model.").removesuffix(".weight"): value.tobytes()
        for name, value in load(sampled_from).items()
    }
    means = [float(values.float().mean()) for values in anchor.fisher.values()]
    assert set(anchor.fisher) == set(anchor.adapter.layers) and min(means) > 0.0
    run.train(first=2, last=4)
    penalties = [row.ewc_penalty for row in run.files.rows]
    assert penalties[:2] == [0.0, 0.0] and penalties[2] > 0.0
    assert run.files.rows[1].kl == 0.0 < run.files.rows[2].kl, "to the base it would have been more than 0 before"


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_no_tensor_of_a_step_waits_for_the_garbage_collector(start: Callable[[Config], Run], recompute: str) -> None:
    config = config_for(max_lag=2, rounds=1, curriculum=ANCHORED, kl_beta=0.1)
    run = start(structs.replace(config, batch=structs.replace(config.batch, recompute=recompute)))
    run.train(last=3)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run.train(first=3)
        gc.collect()
        left = [found for found in gc.garbage if issubclass(type(found), torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def saved(run: Run) -> dict[str, Any]:
    """The files of the last checkpoint, but for the wall time."""
    files = run.files.checkpoints[STEPS].files
    return {**files, "state.json": json.loads(files["state.json"]) | {"wall_s": 0.0}}


@pytest.mark.parametrize("max_lag", [0, 2])
def test_evaluations_on_the_way_change_no_bit_also_after_a_resume(
    max_lag: int, start: Callable[[Config], Run], tmp_path: Path
) -> None:
    config = config_for(max_lag=max_lag, rounds=1)
    digest = start(config).train()
    config = structs.replace(config, eval=EvalConfig(every=2, problems=5, samples=3))
    evaluated, first, second = start(config), start(config), start(config)
    found = evaluated.evaluate_into({})
    assert evaluated.train() == digest
    assert list(found) == ["step-000002", "step-000004"]
    kept = first.evaluate_into({})
    first.train(last=4)
    # As if the first start had ended after the checkpoint of step 3, and its evaluation of step 4 were lost with it.
    del kept["step-000004"]
    second.load(first.files.checkpoints[3])
    second.evaluate_into(kept)
    assert second.train(first=3) == digest
    assert untimed(kept) == untimed(found)
    assert found["step-000002"].adapter_sha256 != found["step-000004"].adapter_sha256


def untimed(found: dict[str, Evaluation]) -> dict[str, Evaluation]:
    return {label: structs.replace(evaluation, wall_s=0.0) for label, evaluation in found.items()}


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_that_ran_out_of_memory_resumes_and_replays_in_the_same_bits(
    max_lag: int, start: Callable[[Config], Run]
) -> None:
    """Step 3 did; it and the later ones were cut smaller, and the journal says so."""
    config = config_for(max_lag=max_lag)
    cramped, replayed, resumed = start(config), start(config), start(config)
    cramped.train(last=2)
    with Refusing(named("silu_backward"), at=2) as card:
        cramped.train(first=2, last=3)
    digest = cramped.train(first=3)
    assert card.left == 0 and min(cramped.notes.sizes) == 2
    assert start(config).train() != digest, "the size decides the last bits"
    replayed.notes.sizes |= cramped.notes.sizes
    assert replayed.train() == digest
    resumed.notes.sizes |= {step: size for step, size in cramped.notes.sizes.items() if step < 4}
    resumed.load(replayed.files.checkpoints[3])
    assert resumed.train(first=3) == digest
    assert saved(resumed) == saved(cramped) == saved(replayed)


def test_lag_makes_a_difference(start: Callable[[Config], Run]) -> None:
    assert len({start(config_for(max_lag=lag)).train() for lag in (0, 2)}) == 2


def test_actor_and_learner_agree_on_every_token(start: Callable[[Config], Run]) -> None:
    run = start(config_for(max_mismatch=1e-4))
    run.train()
    assert max(row.mismatch_p99 for row in run.files.rows) < 1e-4


class StaleEngine(HFEngine):
    """Takes the first adapter and no other, and does not say so."""

    def install(self, version: int, adapter: bytes) -> None:
        if version == 0:
            super().install(version, adapter)


def test_a_stale_adapter_stops_the_run(checkpoint: Path, tmp_path: Path) -> None:
    run = Run(checkpoint, tmp_path, config_for(max_mismatch=1e-4), StaleEngine)
    with pytest.raises(Mismatch, match=r"Step 2: .*stale adapter"):
        run.train()
    assert run.files.checkpoints == {}


def test_a_step_in_which_nothing_teaches_changes_nothing(start: Callable[[Config], Run]) -> None:
    run = start(config_for(steps=2))
    run.scorer.rule = lambda ids: True
    before = run.state.publisher.versions[0].sha256
    assert run.train() == before
    assert [row.groups_idle for row in run.files.rows] == [4, 4]
    assert never_stepped(run.state.optimizer)
