"""Whether activations are kept or recomputed, as `run` chooses it."""

from msgspec import structs

from launch.plan.cost import Plan, choose_recompute, make_plan, work_of
from launch.plan.machine import NotMeasured, Speed
from shared.config.load import resolve
from shared.config.training import BatchConfig
from tests.support.machines import QWEN_15B

CONFIG = resolve({"model": {"path": "somewhere"}, "rollout": {"prompts": 2, "group": 8, "max_new_tokens": 256}})


def not_measured() -> tuple[Speed, Speed]:
    raise NotMeasured("no time is needed here")


def plan(batch: BatchConfig, free: int | None) -> Plan:
    work = work_of(structs.replace(CONFIG, batch=batch), cores=2)
    return make_plan(QWEN_15B, work, free, steps=10, speeds=not_measured)


def chosen(recompute: str, free: int | None) -> tuple[str, Plan]:
    given = structs.replace(CONFIG.batch, recompute=recompute)
    batch, cost = choose_recompute(given, lambda one: plan(one, free))
    assert isinstance(cost, Plan)
    return batch.recompute, cost


def test_activations_are_recomputed_only_if_they_do_not_fit() -> None:
    large, small = (plan(BatchConfig(recompute=choice), None).memory.total for choice in ("never", "always"))
    assert small < large
    recompute, cost = chosen("auto", 2 * large)
    assert recompute == "never" and cost.memory.total == large
    # Between both: what needs less fits.
    recompute, cost = chosen("auto", (small + large) // 2)
    assert recompute == "always" and cost.fits and cost.memory.total == small
    # If neither fits, the plan that is refused is the smaller one.
    recompute, cost = chosen("auto", small // 2)
    assert recompute == "always" and not cost.fits and cost.memory.total == small


def test_a_choice_of_the_user_is_kept() -> None:
    assert [chosen(choice, 1)[0] for choice in ("never", "always")] == ["never", "always"]


def test_where_nothing_is_planned_nothing_is_recomputed() -> None:
    batch, cost = choose_recompute(CONFIG.batch, lambda one: "unknown")
    assert (batch.recompute, cost) == ("never", "unknown")
