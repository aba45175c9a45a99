"""Which processes a configuration means, and the plan that --dry-run prints."""

import sys
from pathlib import Path

import pytest

from launch.commands.run import describe, differences
from launch.supervisor.topology import topology
from shared.config.load import resolve
from shared.config.tree import Config, warm_start

RUN = Path("runs/first")


def test_one_learner_and_one_actor_with_their_commands_and_logs() -> None:
    plan = topology(RUN, Config())
    assert [process.name for process in plan.processes] == ["learner", "actor0"]
    assert plan.learner.argv == (sys.executable, "-m", "learner", "--run", "runs/first")
    assert plan.actors[0].argv == (sys.executable, "-m", "actor", "--run", "runs/first", "--id", "actor0")
    assert [process.log for process in plan.processes] == [RUN / "logs/learner.log", RUN / "logs/actor0.log"]


def test_each_process_has_its_own_threads_and_the_configured_kernels() -> None:
    plan = topology(RUN, resolve({"compute": {"learner_threads": 3, "actor_threads": 5, "blas": "portable"}}))
    assert plan.learner.environment["OMP_NUM_THREADS"] == "3"
    assert plan.actors[0].environment["OMP_NUM_THREADS"] == "5"
    assert [process.threads for process in plan.processes] == [3, 5]
    assert all(process.environment["ATEN_CPU_CAPABILITY"] == "avx2" for process in plan.processes)


def test_a_trace_is_asked_of_every_process() -> None:
    traced, plain = topology(RUN, Config(), trace=True), topology(RUN, Config())
    for one, other in zip(traced.processes, plain.processes, strict=True):
        assert one.argv == (*other.argv, "--trace")


def test_logs_are_unbuffered() -> None:
    assert all(process.environment["PYTHONUNBUFFERED"] == "1" for process in topology(RUN, Config()).processes)


def test_the_topology_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    assert topology(tmp_path, Config()) == topology(tmp_path, Config())
    assert list(tmp_path.iterdir()) == []


def test_what_evaluates_beside_training_follows_the_run() -> None:
    plan = topology(RUN, resolve({"eval": {"every": 10, "beside": True}, "compute": {"actor_threads": 5}}))
    (evaluator,) = plan.followers
    assert evaluator.argv == (sys.executable, "-m", "launch.evaluator", "--run", "runs/first")
    assert (evaluator.threads, evaluator.awaited) == (5, True), "the threads are part of the last bit"
    assert [process.name for process in plan.processes] == ["learner", "actor0", "evaluator"]


def test_the_endpoint_is_the_configured_one() -> None:
    assert topology(RUN, Config()).endpoint == "ipc"
    assert topology(RUN, resolve({"link": {"endpoint": "tcp://10.0.0.1:5757"}})).endpoint == "tcp://10.0.0.1:5757"


def test_only_what_differs_from_the_defaults_is_listed() -> None:
    assert list(differences(Config(), Config())) == []
    changed = resolve({"optimizer": {"lr": 2e-3}, "tasks": {"levels": [1]}})
    assert list(differences(changed, Config())) == [
        ("tasks.levels", "[1]", "[1,2,3]"),
        ("optimizer.lr", "0.002", "0.0001"),
    ]


def test_the_plan_tells_everything_before_anything_starts() -> None:
    sections = {"run": {"steps": 3}, "rollout": {"prompts": 4, "group": 6}, "optimizer": {"lr": 2e-3}}
    config = resolve(sections | {"compute": {"dtype": "bf16", "learner_threads": 2, "actor_threads": 2}})
    text = describe(topology(RUN, config), config)
    for expected in (
        "run directory  runs/first",
        "3 steps x 4 prompts x 6 samples = 72 completions of at most 64 tokens",
        "tasks          embedded",
        "256 held-out problems of embedded before and after",
        "endpoint       ipc",
        "arithmetic     bf16, 2 threads for the learner and 2 for an actor",
        "optimizer.lr = 0.002  (default 0.0001)",
        "-m learner --run runs/first",
        "-m actor --run runs/first --id actor0",
        "learner: 2 threads, log runs/first/logs/learner.log",
        "MKL_CBWR=AUTO,STRICT",
        "metrics.jsonl",
        "checkpoints/",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        ({}, "dapo, ratio from 0.8 to 1.28, advantage over the group's standard deviation"),
        ({"kind": "dr_grpo"}, "dr_grpo, ratio from 0.8 to 1.2, advantage not divided"),
        ({"kind": "gspo", "clip_high": 0.5}, "gspo, ratio from 0.9997 to 1.5, advantage over the group's"),
        ({"kind": "cispo"}, "cispo, ratio from 0 to 5, advantage over the group's"),
    ],
)
def test_the_plan_says_what_a_kind_of_loss_brings(loss: dict[str, object], line: str) -> None:
    config = resolve({"loss": loss})
    assert f"objective      {line}" in describe(topology(RUN, config), config)


def test_the_plan_of_a_warm_start_names_its_examples() -> None:
    sections = {"sft": {"source": "sft.jsonl"}, "tasks": {"source": "qa.jsonl", "held_out": "val.jsonl"}}
    config = warm_start(resolve(sections))
    text = describe(topology(RUN, config), config)
    assert "examples       sft.jsonl" in text
    assert "evaluation     256 held-out problems of val.jsonl before and after" in text
    assert "\ntasks " not in text
    alone = warm_start(resolve({"tasks": {"source": "qa.jsonl"}, "eval": {"problems": 0}}))
    text = describe(topology(RUN, alone), alone)
    assert "examples       solutions of qa.jsonl" in text
    assert "evaluation     none" in text
    assert "tasks          qa.jsonl" in describe(topology(RUN, resolve(sections)), resolve(sections))


def test_the_plan_says_where_nothing_is_special() -> None:
    config = resolve({"eval": {"problems": 0}})
    assert "evaluation     none" in describe(topology(RUN, config), config)
    assert "nowhere" in describe(topology(RUN, Config()), Config())
