"""Every figure of a step, on one made by hand."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import StepBatch
from learner.reports.step_metrics import Clock, Shown, step_metrics
from learner.update.figures import StepResult, UpdateStats
from learner.update.gradient_noise import GradientNoise
from protocol.messages import FilledOrder, Finish, Group, Outcome
from shared.config.data import CurriculumConfig, RewardConfig
from shared.config.tree import Config, ConstraintConfig, LossConfig
from shared.process.card import CardMemory
from tests.support.fakes import tiny_group
from tests.support.run_files import COLUMNS
from tests.support.steps import collected_of, step_batch, teaching_samples
from tests.support.wire_examples import timings

CONFIG = Config(
    loss=LossConfig(entropy_fraction=0.5),
    constraint=ConstraintConfig(beta=0.1, low_entropy=0.5, share=0.2),
    reward=RewardConfig(truncated=-0.5),
    curriculum=CurriculumConfig(kind="levels", ewc=1.0),
)
SHOWN = Shown(loss=CONFIG.loss, constraint=CONFIG.constraint, curriculum=CONFIG.curriculum)
CLOCK = Clock(time_s=100.0, step_s=10.0, update_s=3.0, swap_s=0.25, learner_mb=300.0)
STATS = UpdateStats(
    loss=-0.125,
    grad_norm=0.7,
    lr=1e-4,
    ratios=np.array([1.0, 1.5]),
    clipped=np.array([False, True, False, False]),
    stale=np.array([False, False, True, False]),
    importance=np.array([0.5, 1.0, 4.0, 0.5]),
    kl=np.array([0.0, 0.2]),
    logprobs={},
    entropies=np.array([0.25, 1.25]),
    mismatch=np.linspace(0.0, 1.0, 101),
    weight_sum=0.5,
    constraint_loss=0.25,
    penalised_kl=np.array([0.0, 0.5]),
    ewc_penalty=0.375,
    noise=GradientNoise(spread=3.0, signal=0.5),
)

TEACHING = tiny_group(
    [1.0, 0.0],
    [2, 4],
    group_id="train/000004/0000",
    outcomes=[Outcome.CORRECT, Outcome.TRUNCATED],
    finishes=[Finish.STOP, Finish.LENGTH],
)
SAME = tiny_group([0.0, 0.0], [3, 1], group_id="train/000004/0001", outcomes=[Outcome.WRONG, Outcome.UNPARSABLE])

FIGURES = CurriculumFigures(stage=2, pass_rate=0.625, effective_tasks=12.5)


def filled_order(group: Group, version: int, seconds: float) -> FilledOrder:
    return FilledOrder(
        order_id="train/000004/u0",
        policy_version=version,
        adapter_sha256="a" * 64,
        groups=(group,),
        timings=timings(rollout_s=seconds, verify_s=seconds / 2, swap_s=seconds / 8, memory_mb=100.0 * seconds),
    )


FILLED = [filled_order(TEACHING, 4, 2.0), filled_order(SAME, 3, 1.0)]


def entropies_of(group: Group) -> np.ndarray:
    assert group.entropies is not None
    return group.entropies


def batch_of(groups: list[Group]) -> StepBatch:
    samples = teaching_samples(groups, CONFIG)
    return step_batch(samples, idle_groups=sum(g is SAME for g in groups), config=CONFIG)


def row_of(
    filled: list[FilledOrder], batch: StepBatch, done: UpdateStats | StepResult | None, clock: Clock = CLOCK
) -> dict[str, Any]:
    result = done if isinstance(done, StepResult) else StepResult(stats=done)
    return step_metrics(4, collected_of(filled, CONFIG), batch, result, clock, FIGURES, SHOWN).to_row()


EXPECTED = {
    "step": 5,
    "time_s": 100.0,
    "reward/mean": (1.0 - 0.5) / 4,
    "reward/std": np.std([1.0, -0.5, 0.0, 0.0]),
    "reward/min": -0.5,
    "reward/max": 1.0,
    "outcome/correct": 0.25,
    "outcome/wrong": 0.25,
    "outcome/unparsable": 0.25,
    "outcome/truncated": 0.25,
    "outcome/timeout": 0.0,
    "outcome/error": 0.0,
    "outcome/abstain": 0.0,
    "groups/idle": 1,
    "groups/quarantined": 0,
    "groups/total": 2,
    # Two completions, rewards 1 and -0.5: one standard deviation above their mean and one below.
    "advantage/mean": 0.0,
    "advantage/std": 0.75 / (0.75 + 1e-4),
    "advantage/min": -0.75 / (0.75 + 1e-4),
    "advantage/max": 0.75 / (0.75 + 1e-4),
    "entropy/mean": float(np.concatenate([entropies_of(TEACHING), entropies_of(SAME)]).mean()),
    "selected/fraction": 0.5,
    "ratio/mean": 1.25,
    "clip/fraction": 0.25,
    "importance/mean": 1.5,
    "importance/capped": 0.25,
    "importance/ess": 6.0**2 / (4 * (0.25 + 1.0 + 16.0 + 0.25)),
    "stale/fraction": None,
    "mismatch/mean": 0.5,
    "mismatch/p95": 0.95,
    "mismatch/p99": 0.99,
    "mismatch/max": 1.0,
    "loss": -0.125,
    "kl": 0.1,
    "grad_norm": 0.7,
    "lr": 1e-4,
    "length/mean": 10 / 4,
    "turns/mean": 1.0,
    "truncated": 0.25,
    "tokens_per_s": 1.0,
    "time/rollout_s": 3.0,
    "time/verify_s": 1.5,
    "time/swap_s": 0.25 + 0.25 + 0.125,
    "time/update_s": 3.0,
    "time/idle_s": 10.0 - 3.0 - 3.0 - 1.5 - 0.625,
    "time/step_s": 10.0,
    "mem/actor_mb": 200.0,
    "mem/learner_mb": 300.0,
    "weight/sum": 0.5,
    "constraint/fraction": 1 / 3,
    "constraint/kl": 0.25,
    "constraint/loss": 0.25,
    "noise/signal": 0.5,
    "noise/spread": 3.0,
    "ewc/penalty": 0.375,
    "teacher/kl": None,
    "policy/version": 3,
    "curriculum/stage": 2,
    "curriculum/pass_rate": 0.625,
    "curriculum/effective_tasks": 12.5,
}


def test_every_key_of_the_contract_is_there_and_right() -> None:
    row = row_of(FILLED, batch_of([TEACHING, SAME]), STATS)
    assert list(row) == list(dict.fromkeys(row)) and set(row) == set(COLUMNS.split())
    assert row == pytest.approx(EXPECTED, abs=1e-12)


def test_a_step_in_which_nothing_teaches_has_nulls_where_nothing_was_measured() -> None:
    row = row_of([filled_order(SAME, 4, 1.0)], batch_of([SAME]), None)
    nulls = {key for key, value in row.items() if value is None}
    assert nulls == {
        "advantage/mean",
        "advantage/std",
        "advantage/min",
        "advantage/max",
        "selected/fraction",
        "ratio/mean",
        "clip/fraction",
        "importance/mean",
        "importance/capped",
        "importance/ess",
        "stale/fraction",
        "mismatch/mean",
        "mismatch/p95",
        "mismatch/p99",
        "mismatch/max",
        "loss",
        "kl",
        "grad_norm",
        "lr",
        "constraint/fraction",
        "constraint/kl",
        "constraint/loss",
        "noise/signal",
        "noise/spread",
        "ewc/penalty",
        "teacher/kl",
    }
    assert (row["groups/idle"], row["groups/total"], row["weight/sum"]) == (1, 1, 0.0)
    assert set(row) == set(COLUMNS.split())


def test_a_step_whose_batch_was_set_aside_counts_its_groups_and_has_no_update() -> None:
    row = row_of(FILLED, batch_of([TEACHING, SAME]), StepResult(quarantined=2))
    assert row["groups/quarantined"] == 2 and row["reward/mean"] == (1.0 - 0.5) / 4
    assert row["grad_norm"] is None and row["lr"] is None and row["weight/sum"] == 0.0


def test_a_kl_that_was_not_computed_is_null_and_not_zero() -> None:
    assert row_of(FILLED, batch_of([TEACHING, SAME]), replace(STATS, kl=np.zeros(0)))["kl"] is None


def test_a_step_with_the_kl_alone_has_its_figures_and_no_others() -> None:
    nothing = np.zeros(0)
    alone = replace(STATS, ratios=nothing, clipped=nothing, stale=nothing, importance=nothing, weight_sum=0.0)
    row = row_of([filled_order(SAME, 4, 1.0)], batch_of([SAME]), alone)
    assert (row["kl"], row["loss"], row["grad_norm"], row["mismatch/max"]) == (0.1, -0.125, 0.7, 1.0)
    empty = (
        "ratio/mean",
        "clip/fraction",
        "importance/mean",
        "importance/capped",
        "importance/ess",
        "selected/fraction",
    )
    assert all(row[key] is None for key in empty) and row["constraint/fraction"] is None


def test_without_a_cap_none_of_the_weights_is_at_it() -> None:
    shown = replace(SHOWN, loss=LossConfig(importance_cap=0.0))
    result = StepResult(stats=STATS)
    found = step_metrics(4, collected_of(FILLED, CONFIG), batch_of([TEACHING]), result, CLOCK, FIGURES, shown)
    row = found.to_row()
    assert row["importance/capped"] is None and row["importance/mean"] == 1.5


def test_a_mask_counts_weights_on_both_sides_and_samples_that_are_left_out() -> None:
    loss = LossConfig(importance="token_mask", importance_floor=0.75, stale_limit=0.1)
    collected, batch = collected_of(FILLED, CONFIG), batch_of([TEACHING])
    result, shown = StepResult(stats=STATS), replace(SHOWN, loss=loss)
    row = step_metrics(4, collected, batch, result, CLOCK, FIGURES, shown).to_row()
    assert (row["importance/capped"], row["stale/fraction"]) == (0.5, 0.25)
    assert row_of(FILLED, batch, STATS)["stale/fraction"] is None


def test_entropy_is_null_where_nobody_could_tell() -> None:
    silent = msgspec.structs.replace(SAME, entropies=None)
    assert row_of([filled_order(silent, 4, 1.0)], batch_of([silent]), None)["entropy/mean"] is None


def test_entropy_is_the_learners_own_where_the_engine_could_not_tell() -> None:
    """Of the whole completions if it filled them in for the mask, else of the tokens that its update used."""
    silent = [filled_order(msgspec.structs.replace(group, entropies=None), 4, 1.0) for group in (TEACHING, SAME)]
    filled = batch_of([TEACHING, SAME])
    assert row_of(silent, filled, STATS)["entropy/mean"] == pytest.approx(float(entropies_of(TEACHING).mean()))
    blind = [replace(s, sample=replace(s.sample, entropies=None)) for s in filled.samples]
    assert row_of(silent, replace(filled, samples=tuple(blind)), STATS)["entropy/mean"] == 0.75


def test_memory_of_cards_is_that_of_the_largest_actor_and_of_the_learners_turn() -> None:
    one, two = FILLED
    small = timings(card_allocated_mb=1000.0, card_reserved_mb=1500.0, card_driver_mb=5000.0)
    large = timings(card_allocated_mb=2000.0, card_reserved_mb=2500.0, card_driver_mb=4000.0)
    filled = [msgspec.structs.replace(one, timings=small), msgspec.structs.replace(two, timings=large)]
    clock = replace(CLOCK, card=CardMemory(allocated=3 * 2**20, reserved=4 * 2**20, driver=2**19))
    row = row_of(filled, batch_of([TEACHING, SAME]), STATS, clock)
    found = {key: value for key, value in row.items() if key not in COLUMNS.split()}
    assert found == {
        "mem/actor_allocated": 2000.0,
        "mem/actor_reserved": 2500.0,
        "mem/actor_driver": 5000.0,
        "mem/learner_allocated": 3.0,
        "mem/learner_reserved": 4.0,
        "mem/learner_driver": 0.5,
    }


def test_a_card_of_one_side_alone_has_no_figures_of_the_other() -> None:
    row = row_of(FILLED, batch_of([TEACHING]), STATS, replace(CLOCK, card=CardMemory(allocated=2**20)))
    assert set(row) - set(COLUMNS.split()) == {"mem/learner_allocated"}


def test_several_actors_at_once_leave_no_negative_idle_time() -> None:
    busy = [filled_order(TEACHING, 4, 8.0), filled_order(SAME, 4, 8.0)]
    row = row_of(busy, batch_of([TEACHING, SAME]), STATS)
    assert row["time/idle_s"] == 0.0 and row["time/rollout_s"] == 16.0


def test_a_figure_that_is_not_finite_is_null() -> None:
    row = row_of(FILLED, batch_of([TEACHING, SAME]), replace(STATS, grad_norm=math.inf))
    assert row["grad_norm"] is None
