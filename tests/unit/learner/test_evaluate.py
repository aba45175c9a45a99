"""Held-out accuracy through the actor's own rollout, with a scripted engine, each figure counted again by hand."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from actor.engines.engine import Completion
from actor.rollout import Rollout
from actor.scoring.votes import casting, nobody_votes
from actor.verifiers.verdict import ScoreJob, Verdict
from launch.commands.in_process import LocalFiller
from learner.evaluation.evaluate import Evaluator
from learner.orders.plan import judge_of
from learner.tasks.tasks import Task
from protocol.messages import Finish, Order
from shared.config.data import RewardConfig, TasksConfig, VerifierConfig
from shared.config.processes import EvalConfig
from shared.config.tree import Config, RolloutConfig, RunConfig
from shared.errors import DamageError
from shared.process.lease import Lease
from shared.run.evaluation import Evaluation, figures, read_evaluation, write_evaluation
from shared.statistics import maj_at_k, pass_at_k, wilson
from tests.support.fakes import ScriptedEngine, ScriptedScorer, spelled, tiny_group, toy_policy, toy_tasks, unheard

CONFIG = Config(
    run=RunConfig(seed=3),
    rollout=RolloutConfig(prompts=2, group=4, max_new_tokens=6, temperature=0.7),
    eval=EvalConfig(problems=20, max_new_tokens=9),
)


class NotedFiller(LocalFiller):
    """Keeps the orders it was given."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        self.ordered: list[Order] = []
        self.pumped = 0

    def submit(self, orders: Iterable[Order]) -> None:
        orders = list(orders)
        self.ordered += orders
        super().submit(orders)

    def pump(self, timeout_s: float = 0.0) -> None:
        self.pumped += 1
        super().pump(timeout_s)


class VotedScorer(ScriptedScorer):
    """The final answer of a long completion is its first token; short ones have none."""

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        answers = [str(job.completion_ids[0]) if len(job.completion_ids) > 1 else None for job in jobs]
        verdicts = zip(super().score(jobs, on_progress), answers, strict=True)
        return [structs.replace(verdict, final_answer=answer) for verdict, answer in verdicts]


def filler_in(folder: Path) -> NotedFiller:
    folder.mkdir(exist_ok=True)
    scorer = VotedScorer()
    votes = casting("gsm8k", scorer)
    filler = NotedFiller(Rollout(ScriptedEngine(), scorer, Lease(folder / "lease"), spelled, votes=votes))
    for version in (0, 8):
        filler.publish(toy_policy(version), oldest_needed=0)
    return filler


def seeds(orders: list[Order]) -> list[int]:
    return [seed for order in orders for group in order.groups for seed in group.seeds]


def evaluated(
    filler: LocalFiller, tasks: list[Task], *, version: int = 0, reward: RewardConfig = CONFIG.reward, **changes: int
) -> Evaluation:
    """The report of one version."""
    config = structs.replace(CONFIG, reward=reward, eval=structs.replace(CONFIG.eval, **changes))
    policy = filler.policies[version]
    label = "base" if version == 0 else "final"
    return Evaluator(config, tasks, filler, spelled).run(label, version, policy.sha256)


def drawn(orders: list[Order]) -> list[list[Completion]]:
    """What the scripted engine samples for these, asked directly."""
    engine = ScriptedEngine()
    engine.install(0, toy_policy(0).adapter.tobytes())
    return [samples for order in orders for samples in engine.generate(order.groups, order.sampling, unheard)]


def test_a_report_counts_what_the_engine_drew(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    report = evaluated(filler, toy_tasks(30))
    assert (report.label, report.version, report.n, report.seed) == ("base", 0, 20, 3)
    assert report.adapter_sha256 == toy_policy(0).sha256 and report.verifier == CONFIG.verifier.kind
    assert len(report.tasks_sha256) == 64 and set(report.ways()) == {"greedy", "sampled"}
    for way, orders in ((report.greedy, filler.ordered[:3]), (report.sampled, filler.ordered[3:])):
        completions = [samples[0] for samples in drawn(orders)]
        correct = sum(7 in completion.ids for completion in completions)
        assert 0 < correct < 20
        assert (way.correct, way.accuracy, (way.low, way.high), way.n) == (
            correct,
            correct / 20,
            wilson(correct, 20),
            20,
        )
        lengths = [len(completion.ids) for completion in completions]
        assert (way.length_mean, way.length_max) == (sum(lengths) / 20, max(lengths))
        assert way.truncation_rate == sum(c.finish is Finish.LENGTH for c in completions) / 20 > 0
        assert (way.cap, way.draws, way.format_rate, way.pass_at) == (9, 1, 1.0, {})


def test_how_far_it_is_is_told_for_each_way_to_decode(tmp_path: Path) -> None:
    filler, told = filler_in(tmp_path), list[tuple[int, int]]()
    filler.on_filled = lambda filled, wanted: told.append((filled, wanted))
    evaluated(filler, toy_tasks(30))
    assert told == 2 * [(8, 20), (16, 20), (20, 20)]


def test_the_link_is_served_while_votes_are_counted(tmp_path: Path) -> None:
    filler, phases = filler_in(tmp_path), list[str]()
    filler.beat = phases.append
    evaluated(filler, toy_tasks(20), samples=5)
    assert filler.pumped == phases.count("evaluating") == 20 * 4, "for each task, and each of its four k"


def test_several_draws_give_pass_and_majority_at_k(tmp_path: Path) -> None:
    filler, tasks = filler_in(tmp_path), toy_tasks(20)
    report = evaluated(filler, tasks, samples=5)
    groups = drawn([order for order in filler.ordered if order.sampling.temperature])
    right = [sum(7 in c.ids for c in samples) for samples in groups]
    assert report.greedy.draws == 1 and report.sampled.draws == 5
    assert report.sampled.accuracy == pytest.approx(sum(right) / 100)
    assert [task.sampled for task in report.task_results] == [count / 5 for count in right]
    assert list(report.sampled.pass_at) == list(report.sampled.maj_at) == [1, 2, 4, 5]
    for k, share in report.sampled.pass_at.items():
        assert share.correct == pytest.approx(sum(pass_at_k(5, count, k) for count in right))
        assert (share.low, share.high) == wilson(share.correct, 20)
    for k, share in report.sampled.maj_at.items():
        assert share.correct == pytest.approx(sum(maj_at_k(*votes_by_hand(samples), k) for samples in groups))
    assert report.sampled.maj_at[1].accuracy == pytest.approx(report.sampled.accuracy)
    assert [order.votes for order in filler.ordered] == [order.sampling.temperature > 0 for order in filler.ordered]
    shown = figures(report)
    assert (shown["step"], shown["greedy"]) == (0, report.greedy.accuracy)
    assert shown["maj_at_5"] == report.sampled.maj_at[5].accuracy
    assert shown["wall_s"] == report.wall_s > 0


def test_there_is_no_majority_where_nobody_can_vote(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    filler.rollout.votes = nobody_votes
    report = evaluated(filler, toy_tasks(20), samples=5)
    assert report.sampled.maj_at == {} and set(report.sampled.pass_at) == {1, 2, 4, 5}
    assert set(figures(report)) == {"step", "greedy", "sampled", "pass_at_5", "wall_s"}


def test_mean_rewards_are_told_where_they_say_more_than_right_and_wrong(tmp_path: Path) -> None:
    plain = evaluated(filler_in(tmp_path / "plain"), toy_tasks(20))
    shaped = evaluated(filler_in(tmp_path / "shaped"), toy_tasks(20), reward=RewardConfig(length=-0.5, truncated=-0.25))
    assert plain.greedy.rewards == plain.sampled.rewards == {}
    for way in (shaped.greedy, shaped.sampled):
        assert way.rewards["score"] == pytest.approx(way.accuracy) and 0.0 < way.rewards["length"] <= 1.0
        by_hand = way.rewards["score"] - 0.5 * way.rewards["length"] - 0.25 * way.truncation_rate
        assert way.rewards["mean"] == pytest.approx(by_hand)
    told = {f"reward_{name}": value for name, value in shaped.sampled.rewards.items()}
    assert figures(shaped) == figures(plain) | told | {"wall_s": shaped.wall_s}


BOTH = ({"right": (1.0, 0.0), "think_tags": (1.0, 1.0)}, {"right": (0.0, 0.0), "think_tags": (0.0, 0.0)})


@pytest.mark.parametrize(
    ("verifier", "rewards", "expected"),
    [
        ({"function": "a.py:f"}, ({}, {}), {"mean": 0.75}),
        (
            {"rewards": {"a.py:right": 2.0, "think_tags": 0.5}, "correct": "right"},
            BOTH,
            {"mean": 0.75, "score": 0.75, "right": 0.25, "think_tags": 0.5},
        ),
    ],
)
def test_functions_have_their_means(verifier: Any, rewards: Any, expected: dict[str, float]) -> None:
    scores = [[2.5, 0.5], [0.0, 0.0]]
    groups = [tiny_group(own, [2, 3], rewards=of) for own, of in zip(scores, rewards, strict=True)]
    config = structs.replace(CONFIG, verifier=VerifierConfig(kind="callable", **verifier))
    assert judge_of(config).mean_rewards(groups) == expected


def votes_by_hand(samples: list[Completion]) -> tuple[int, list[int], int]:
    wrong = [c.ids for c in samples if 7 not in c.ids]
    silent = sum(len(ids) == 1 for ids in wrong)
    given = Counter(int(ids[0]) for ids in wrong if len(ids) > 1)
    return len(samples) - len(wrong), list(given.values()), silent


def test_the_first_draw_is_the_same_whether_one_is_asked_for_or_five(tmp_path: Path) -> None:
    one, five = filler_in(tmp_path / "1"), filler_in(tmp_path / "5")
    evaluated(one, toy_tasks(20))
    evaluated(five, toy_tasks(20), samples=5)
    assert set(seeds(one.ordered)) < set(seeds(five.ordered))
    assert [len(o.groups) for o in five.ordered if o.sampling.temperature] == [1] * 20


def test_a_long_cap_is_a_second_time_with_the_same_draws(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    report = evaluated(filler, toy_tasks(20), long_cap=30)
    assert list(report.ways()) == ["greedy", "sampled", "greedy, long cap", "sampled, long cap"]
    assert [way.cap for way in report.ways().values()] == [9, 9, 30, 30]
    short, long = ([o for o in filler.ordered if o.sampling.max_new_tokens == cap] for cap in (9, 30))
    assert seeds(short) == seeds(long)
    assert len({o.order_id for o in filler.ordered}) == len(filler.ordered)


def test_levels_and_subjects_are_told_apart(tmp_path: Path) -> None:
    tasks = [
        replace(task, columns=task.columns | {"level": str(i % 3), "type": "even" if i % 2 == 0 else "odd"})
        for i, task in enumerate(toy_tasks(20))
    ]
    report = evaluated(filler_in(tmp_path), tasks)
    for by, kinds in ((report.greedy.by_level, "012"), (report.greedy.by_subject, ("even", "odd"))):
        assert list(by) == list(kinds)
        assert sum(share.correct for share in by.values()) == report.greedy.correct
        assert sum(share.n for share in by.values()) == 20
    right = [task.greedy == "correct" for task in report.task_results]
    assert report.greedy.by_level["1"].correct == sum(right[1::3])


def test_tasks_are_shown_with_question_gold_answer_and_outcome(tmp_path: Path) -> None:
    tasks = toy_tasks(30)
    report = evaluated(filler_in(tmp_path), tasks)
    assert len(report.examples) == 3 and len(report.task_results) == 20
    for task, shown, brief in zip(tasks, report.examples, report.task_results, strict=False):
        assert (shown.question, shown.answer) == (task.columns["question"], task.columns["answer"])
        assert (brief.question, brief.answer, brief.greedy) == (shown.question, shown.answer, shown.outcome)
        assert shown.outcome == ("correct" if "7" in shown.completion.split() else "wrong")
        assert shown.completion.endswith(brief.last_words)


def test_tasks_without_a_gold_answer_are_evaluated_too(tmp_path: Path) -> None:
    """A reward function needs none."""
    tasks = [replace(task, columns={"question": task.columns["question"]}) for task in toy_tasks(4)]
    report = evaluated(filler_in(tmp_path), tasks)
    assert report.n == len(report.task_results) == 4
    assert {shown.answer for shown in report.examples} == {brief.answer for brief in report.task_results} == {""}
    assert report.tasks_sha256 != evaluated(filler_in(tmp_path), tasks[:3]).tasks_sha256


@pytest.mark.parametrize(
    ("tasks", "source"),
    [
        (TasksConfig(source="sums"), "sums"),
        (TasksConfig(source="sums", held_out="test.jsonl"), "test.jsonl"),
        (TasksConfig(source="gsm8k", held_out="test"), "gsm8k test"),
    ],
)
def test_a_report_names_the_source_of_its_own_tasks(tasks: TasksConfig, source: str, tmp_path: Path) -> None:
    filler, config = filler_in(tmp_path), structs.replace(CONFIG, tasks=tasks)
    report = Evaluator(config, toy_tasks(2), filler, spelled).run("base", 0, filler.policies[0].sha256)
    assert report.source == source


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = evaluated(filler_in(tmp_path), toy_tasks(20), samples=4)
    assert read_evaluation(write_evaluation(tmp_path, report)) == report
    assert read_evaluation(tmp_path / "none.json") is None
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    with pytest.raises(DamageError, match=r"damaged\.json cannot be read"):
        read_evaluation(damaged)


def test_each_task_has_one_greedy_and_one_sampled_completion(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    evaluated(filler, toy_tasks(30))
    assert [(o.sampling.temperature, len(o.groups)) for o in filler.ordered] == [
        (t, size) for t in (0.0, 0.7) for size in (8, 8, 4)
    ]
    assert {o.sampling.max_new_tokens for o in filler.ordered} == {9}
    assert {len(g.seeds) for o in filler.ordered for g in o.groups} == {1}
    assert len({o.order_id for o in filler.ordered}) == len(filler.ordered)
    assert not any(o.order_id.startswith("train/") for o in filler.ordered)


def test_an_order_has_no_more_completions_than_a_message_takes(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    config = structs.replace(CONFIG, tasks=TasksConfig(max_prompt_tokens=3_000_000))
    Evaluator(config, toy_tasks(8), filler, spelled).run("base", 0, filler.policies[0].sha256)
    assert [len(order.groups) for order in filler.ordered] == [5, 3, 5, 3]


def test_base_and_trained_policy_meet_the_same_draws(tmp_path: Path) -> None:
    base, final = filler_in(tmp_path), filler_in(tmp_path)
    evaluated(base, toy_tasks(20))
    evaluated(final, toy_tasks(20), version=8)
    assert seeds(base.ordered) == seeds(final.ordered)
    assert {o.policy_version for o in base.ordered} == {0} and {o.policy_version for o in final.ordered} == {8}
    assert not {o.order_id for o in base.ordered} & {o.order_id for o in final.ordered}


def test_the_training_cap_holds_where_evaluation_has_none(tmp_path: Path) -> None:
    filler = filler_in(tmp_path)
    evaluated(filler, toy_tasks(5), problems=2, max_new_tokens=0)
    assert {o.sampling.max_new_tokens for o in filler.ordered} == {6}
