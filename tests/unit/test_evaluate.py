"""Held-out accuracy through the actor's own rollout, with a scripted engine."""

from collections.abc import Iterable
from pathlib import Path

from actor.rollout import Rollout
from launch.local_desk import LocalDesk
from learner.evaluate import Evaluation
from protocol.messages import Order
from shared.config import Config, EvalConfig, RolloutConfig, RunConfig
from shared.gpu_lease import Lease
from shared.interval import wilson
from tests.fakes import ScriptedEngine, ScriptedScorer, spelled, toy_policy, toy_tasks

CONFIG = Config(
    run=RunConfig(seed=3),
    rollout=RolloutConfig(prompts=2, group=4, max_new_tokens=6, temperature=0.7),
    eval=EvalConfig(problems=20, max_new_tokens=9),
)


class NotedDesk(LocalDesk):
    """Keeps the orders it was given."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        self.ordered: list[Order] = []

    def submit(self, orders: Iterable[Order]) -> None:
        orders = list(orders)
        self.ordered += orders
        super().submit(orders)


def desk_in(folder: Path) -> NotedDesk:
    desk = NotedDesk(Rollout(ScriptedEngine(), ScriptedScorer(), Lease(folder / "lease"), spelled))
    for version in (0, 8):
        desk.publish(toy_policy(version), oldest_needed=0)
    return desk


def seeds(orders: list[Order]) -> list[int]:
    return [seed for order in orders for group in order.groups for seed in group.seeds]


def test_a_report_counts_what_the_engine_drew(tmp_path: Path) -> None:
    desk = desk_in(tmp_path)
    report = Evaluation(CONFIG, toy_tasks(30), desk, spelled).run("base", version=0)
    assert {key: report[key] for key in ("label", "version", "n", "seed")} == {
        "label": "base",
        "version": 0,
        "n": 20,
        "seed": 3,
    }
    engine = ScriptedEngine()
    engine.install(0, toy_policy(0).adapter.tobytes())
    for name, orders in (("greedy", desk.ordered[:3]), ("sampled", desk.ordered[3:])):
        drawn = [s for o in orders for s in engine.generate(o.groups, o.sampling, lambda: None)]
        correct = sum(7 in samples[0].ids for samples in drawn)
        low, high = wilson(correct, 20)
        assert 0 < correct < 20
        assert report[name] == {"correct": correct, "accuracy": correct / 20, "low": low, "high": high}


def test_samples_are_shown_with_question_answer_and_outcome(tmp_path: Path) -> None:
    tasks = toy_tasks(30)
    report = Evaluation(CONFIG, tasks, desk_in(tmp_path), spelled).run("base", version=0)
    assert len(report["samples"]) == 3
    for task, shown in zip(tasks, report["samples"], strict=False):
        assert (shown["question"], shown["answer"]) == (task.columns["question"], task.columns["answer"])
        assert shown["outcome"] == ("correct" if "7" in shown["completion"].split() else "wrong")


def test_each_task_is_answered_once_greedily_and_once_drawn(tmp_path: Path) -> None:
    desk = desk_in(tmp_path)
    Evaluation(CONFIG, toy_tasks(30), desk, spelled).run("base", version=0)
    assert [(o.sampling.temperature, len(o.groups)) for o in desk.ordered] == [
        (t, size) for t in (0.0, 0.7) for size in (8, 8, 4)
    ]
    assert {o.sampling.max_new_tokens for o in desk.ordered} == {9}
    assert {len(g.seeds) for o in desk.ordered for g in o.groups} == {1}
    assert len({o.order_id for o in desk.ordered}) == len(desk.ordered)
    assert not any(o.order_id.startswith("train/") for o in desk.ordered)


def test_base_and_trained_policy_meet_the_same_draws(tmp_path: Path) -> None:
    base, final = desk_in(tmp_path), desk_in(tmp_path)
    Evaluation(CONFIG, toy_tasks(20), base, spelled).run("base", version=0)
    Evaluation(CONFIG, toy_tasks(20), final, spelled).run("final", version=8)
    assert seeds(base.ordered) == seeds(final.ordered)
    assert {o.policy_version for o in base.ordered} == {0} and {o.policy_version for o in final.ordered} == {8}
    assert not {o.order_id for o in base.ordered} & {o.order_id for o in final.ordered}


def test_the_training_cap_holds_where_evaluation_has_none(tmp_path: Path) -> None:
    desk = desk_in(tmp_path)
    config = Config(rollout=CONFIG.rollout, eval=EvalConfig(problems=2))
    Evaluation(config, toy_tasks(5), desk, spelled).run("base", version=0)
    assert {o.sampling.max_new_tokens for o in desk.ordered} == {6}
