"""Every figure of a step, on one made by hand."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.batch import StepBatch, step_batch, teaching_samples
from learner.curriculum import CurriculumFigures
from learner.gradient_noise import GradientNoise
from learner.guard import Skipped
from learner.step_metrics import Clock, step_metrics
from learner.update_figures import UpdateStats
from protocol.messages import Finish, Group, Groups, Outcome, Timings
from shared.config import Config, ConstraintConfig, CurriculumConfig, LossConfig, RewardConfig
from tests.fakes import tiny_group

CONTRACT = """
step time_s reward/mean outcome/correct outcome/wrong outcome/unparsable outcome/truncated outcome/timeout
outcome/error outcome/abstain groups/dropped groups/quarantined groups/total entropy/mean mask/fraction ratio/mean
clip/fraction mismatch/mean mismatch/p95 mismatch/p99 mismatch/max kl grad_norm lr length/mean truncated
tokens_per_s time/rollout_s
time/verify_s time/update_s time/idle_s time/step_s mem/actor_mb mem/learner_mb weight/sum
constraint/fraction constraint/kl constraint/loss noise/signal noise/spread ewc/penalty policy/version
curriculum/stage curriculum/pass_rate curriculum/effective_tasks
"""

CONFIG = Config(
    loss=LossConfig(entropy_fraction=0.5),
    constraint=ConstraintConfig(beta=0.1, low_entropy=0.5, share=0.2),
    reward=RewardConfig(truncated=-0.5),
    curriculum=CurriculumConfig(kind="levels", ewc=1.0),
)
CLOCK = Clock(time_s=100.0, step_s=10.0, update_s=3.0, learner_mb=300.0)
STATS = UpdateStats(
    grad_norm=0.7,
    lr=1e-4,
    ratios=np.array([1.0, 1.5]),
    clipped=np.array([False, True, False, False]),
    kl=np.array([0.0, 0.2]),
    mismatch=np.linspace(0.0, 1.0, 101),
    weight_sum=0.5,
    constraint_loss=0.25,
    held_kl=np.array([0.0, 0.5]),
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


def answer(group: Group, version: int, seconds: float) -> Groups:
    timings = Timings(wait_s=0.0, rollout_s=seconds, verify_s=seconds / 2, memory_mb=100.0 * seconds)
    return Groups(
        order_id="train/000004/u0", policy_version=version, adapter_sha256="a" * 64, groups=(group,), timings=timings
    )


ANSWERS = [answer(TEACHING, 4, 2.0), answer(SAME, 3, 1.0)]


def batch_of(groups: list[Group]) -> StepBatch:
    samples = teaching_samples(groups, CONFIG)
    return step_batch(samples, dropped=sum(g is SAME for g in groups), config=CONFIG)


def row_of(
    answers: list[Groups], batch: StepBatch, stats: UpdateStats | Skipped | None, clock: Clock = CLOCK
) -> dict[str, Any]:
    return step_metrics(4, answers, batch, stats, clock, FIGURES, CONFIG).to_row()


def test_every_key_of_the_contract_is_there_and_right() -> None:
    assert TEACHING.entropies is not None and SAME.entropies is not None
    row = row_of(ANSWERS, batch_of([TEACHING, SAME]), STATS)
    assert list(row) == list(dict.fromkeys(row)) and set(row) == set(CONTRACT.split())
    expected = {
        "step": 5,
        "time_s": 100.0,
        "reward/mean": (1.0 - 0.5) / 4,
        "outcome/correct": 0.25,
        "outcome/wrong": 0.25,
        "outcome/unparsable": 0.25,
        "outcome/truncated": 0.25,
        "outcome/timeout": 0.0,
        "outcome/error": 0.0,
        "outcome/abstain": 0.0,
        "groups/dropped": 1,
        "groups/quarantined": 0,
        "groups/total": 2,
        "entropy/mean": float(np.concatenate([TEACHING.entropies, SAME.entropies]).mean()),
        "mask/fraction": 0.5,
        "ratio/mean": 1.25,
        "clip/fraction": 0.25,
        "mismatch/mean": 0.5,
        "mismatch/p95": 0.95,
        "mismatch/p99": 0.99,
        "mismatch/max": 1.0,
        "kl": 0.1,
        "grad_norm": 0.7,
        "lr": 1e-4,
        "length/mean": 10 / 4,
        "truncated": 0.25,
        "tokens_per_s": 1.0,
        "time/rollout_s": 3.0,
        "time/verify_s": 1.5,
        "time/update_s": 3.0,
        "time/idle_s": 10.0 - 3.0 - 3.0 - 1.5,
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
        "policy/version": 3,
        "curriculum/stage": 2,
        "curriculum/pass_rate": 0.625,
        "curriculum/effective_tasks": 12.5,
    }
    assert row == pytest.approx(expected)


def test_a_step_in_which_nothing_teaches_has_nulls_where_nothing_was_measured() -> None:
    row = row_of([answer(SAME, 4, 1.0)], batch_of([SAME]), None)
    nulls = {key for key, value in row.items() if value is None}
    assert nulls == {
        "mask/fraction",
        "ratio/mean",
        "clip/fraction",
        "mismatch/mean",
        "mismatch/p95",
        "mismatch/p99",
        "mismatch/max",
        "kl",
        "grad_norm",
        "lr",
        "constraint/fraction",
        "constraint/kl",
        "constraint/loss",
        "noise/signal",
        "noise/spread",
        "ewc/penalty",
    }
    assert (row["groups/dropped"], row["groups/total"], row["weight/sum"]) == (1, 1, 0.0)
    assert set(row) == set(CONTRACT.split())


def test_a_step_whose_batch_was_set_aside_counts_its_groups_and_has_no_update() -> None:
    row = row_of(ANSWERS, batch_of([TEACHING, SAME]), Skipped(groups=2))
    assert row["groups/quarantined"] == 2 and row["reward/mean"] == (1.0 - 0.5) / 4
    assert row["grad_norm"] is None and row["lr"] is None and row["weight/sum"] == 0.0


def test_entropy_is_null_where_no_engine_could_tell() -> None:
    silent = msgspec.structs.replace(SAME, entropies=None)
    assert row_of([answer(silent, 4, 1.0)], batch_of([silent]), None)["entropy/mean"] is None


def test_several_actors_at_once_leave_no_negative_idle_time() -> None:
    busy = [answer(TEACHING, 4, 8.0), answer(SAME, 4, 8.0)]
    row = row_of(busy, batch_of([TEACHING, SAME]), STATS)
    assert row["time/idle_s"] == 0.0 and row["time/rollout_s"] == 16.0


def test_a_figure_that_is_not_finite_is_null() -> None:
    row = row_of(ANSWERS, batch_of([TEACHING, SAME]), replace(STATS, grad_norm=math.inf))
    assert row["grad_norm"] is None
