"""The plan of a warm start: updates without sampling, and an actor only where something is evaluated."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from launch.plan.cost import Plan, make_plan, plan_as_json, table, work_of
from launch.plan.duration import step_time
from launch.plan.memory import LAUNCHER_BYTES, host_memory, size_of
from launch.plan.remedies import fits
from launch.plan.work import Work
from shared.config.load import resolve
from shared.config.tree import warm_start
from tests.support.machines import GIB, HALF, SPEED


def work(*, warm: bool = True, problems: int = 0, group: int = 8, **sections: Mapping[str, object]) -> Work:
    """Four examples, or prompts with a group each, of 64 tokens."""
    rollout = {"prompts": 4, "group": group, "max_new_tokens": 64}
    given = {"model": {"path": "somewhere"}, "eval": {"problems": problems}, "rollout": rollout, **sections}
    config = resolve(given)
    return work_of(warm_start(config) if warm else config, cores=2)


def plan(one: Work, free: int | None = None) -> Plan:
    return make_plan(HALF, one, free, steps=10, speeds=lambda: (SPEED, SPEED))


def test_an_update_is_that_of_a_run_with_groups_of_one() -> None:
    warm, run = host_memory(HALF, work()), host_memory(HALF, replace(work(warm=False, group=2), overlaps=False))
    assert warm.learner == run.learner
    assert size_of(warm.update) < size_of(run.update)
    times = step_time(HALF, work(), SPEED, SPEED)
    same = replace(work(), samples=True)
    assert times.rollout == 0.0 and times.update == step_time(HALF, same, SPEED, SPEED).update
    assert step_time(HALF, same, SPEED, SPEED).rollout > 0.0


def test_without_evaluations_there_is_no_actor() -> None:
    alone, evaluated = host_memory(HALF, work()), host_memory(HALF, work(problems=16))
    assert alone.actor == alone.rollout == alone.evaluation == {}
    assert alone.launcher == {"launcher": LAUNCHER_BYTES}
    assert alone.total == alone.lasting + size_of(alone.update)
    assert evaluated.actor and evaluated.evaluation and evaluated.rollout == {}
    assert evaluated.lasting == alone.lasting + size_of(evaluated.actor) + evaluated.launcher["scoring"]
    beside = work(eval={"problems": 16, "every": 2, "beside": True})
    assert host_memory(HALF, beside).actor == {} and host_memory(HALF, beside).evaluator


def test_it_is_told_as_updates_of_answers() -> None:
    found = plan(work(problems=16))
    lines = table(found)
    assert lines[-1].startswith("predicted time: ") and "per step of updates" in lines[-1]
    assert lines[-1].endswith("if an answer has 64 tokens")
    assert not any(line.strip().startswith("an order") for line in lines)
    processes = plan_as_json(found)["processes"]
    assert [phase["phase"] for phase in processes["actor"]] == ["evaluation"]
    assert plan_as_json(plan(work()))["processes"]["actor"] == []
    # Rows of a warm start have no actor's figures to compare with.
    figures = found.figures
    assert (figures.actor_mb, figures.rollout_s) == (None, None) and figures.update_s and figures.learner_mb
    assert found.total_s and found.time and found.total_s > 10 * found.time.step


def test_one_that_cannot_fit_is_told_what_would() -> None:
    large = work(rollout={"prompts": 64, "group": 8, "max_new_tokens": 2048}, batch={"token_budget": 65_536})
    free = 6 * GIB
    found = plan(large, free)
    assert not found.fits and found.remedies
    for remedy in found.remedies:
        assert fits(remedy.total, free) and "rollout.groups_per_order" not in remedy.settings


def test_lengths_of_other_data_are_not_those_of_the_embedded_problems() -> None:
    config = resolve({"rollout": {"max_new_tokens": 64}})
    own, chats = (
        work_of(warm_start(one), cores=2).lengths for one in (config, resolve({"sft": {"source": "chats.jsonl"}}))
    )
    assert own.completion == 22 and chats.completion == chats.longest == 64


@pytest.mark.parametrize("problems", [0, 16])
def test_a_run_keeps_its_actor(problems: int) -> None:
    assert host_memory(HALF, work(warm=False, problems=problems)).actor
