"""The plans of a run whose completions come from servers: its actor has no model."""

from typing import Any

from launch.card.phases import MetaTracer
from launch.card.plan import make_card_plan
from launch.card.published import QWEN_05B
from launch.plan.cost import table
from launch.plan.memory import host_memory
from tests.support.machines import GIB, HALF
from tests.unit.launch.test_card_plan import SMALL
from tests.unit.launch.test_card_plan import work_of as card_work_of
from tests.unit.launch.test_plan import plan, work


def test_on_a_cpu_it_has_no_model_and_takes_no_turns() -> None:
    served: Any = {
        "actor": {"engine": "vllm_server"},
        "server": {"urls": ["http://a:8000/v1"]},
        "eval": {"problems": 64},
    }
    here, there = host_memory(HALF, work(eval={"problems": 64})), host_memory(HALF, work(**served))
    assert there.rollout == there.evaluation == {} and set(there.actor) <= set(here.actor)
    adapter = 4 * 16 * HALF.adapter
    assert there.actor_peak == there.shared["libraries"] + there.shared["tokenizer"] + sum(there.actor.values())
    assert there.actor["adapter"] + there.actor["adapter as messages"] == 3 * adapter
    assert (
        there.actor_peak < here.actor_peak
        and there.total <= here.total
        and there.learner == here.learner
        and there.shared == here.shared
    )
    ahead: Any = {"pipeline": {"max_lag": 1}, "compute": {"learner_threads": 2, "actor_threads": 2}}
    assert work(**served, **ahead).overlaps and not work(**ahead).overlaps
    found = plan(HALF, work(**served), 64 * GIB)
    assert found.fits and found.time is None and found.no_time == "how fast its servers are is not known here"
    assert "predicted" in "\n".join(table(found))


def test_of_a_card_it_takes_nothing() -> None:
    served = {"actor": {"engine": "vllm_server", "max_sequences": 32}, "server": {"urls": ["http://a:8000/v1"]}}
    asked = {**SMALL, "lora": {"rank": 2}}
    there, here = (
        make_card_plan(QWEN_05B, card_work_of(**{**asked, **more}), 6 * GIB, MetaTracer(QWEN_05B))
        for more in (served, {})
    )
    assert there.fits and there.processes["learner"] == here.processes["learner"]
    assert [(phase.phase, set(phase.items)) for phase in there.processes["actor"]] == [
        ("rollout", {"margin"}),
        ("waiting", set()),
    ]
    assert there.peak_bytes < here.peak_bytes
