"""Several ranks of one learner: their processes, what they need, and what is said of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.__main__ import main
from launch.cli import parse
from launch.doctor.hardware_checks import cores
from launch.plan.cost import make_plan, plan_as_json, table, work_of
from launch.plan.duration import step_time
from launch.plan.memory import UNRETURNED_BYTES, host_memory, micro_batch_tokens, size_of, step_tokens
from launch.plan.remedies import fewer_ranks
from launch.plan.shape import Lengths
from launch.plan.work import Work
from launch.presets.load import load_config
from launch.supervisor.endings import later
from launch.supervisor.topology import arithmetic, topology
from shared.config.load import config_from_json, resolve
from shared.config.model import ModelConfig
from shared.config.processes import ActorConfig, ComputeConfig
from shared.process.entry_point import LOST_RANK
from shared.process.lease import NoLease, lease_for
from shared.process.processor import Capacity, cores_here, settled
from tests.support.machines import HALF, SPEED, but, configured, sound


def work(ranks: int, token_budget: int = 4096) -> Work:
    """A step of 4608 tokens."""
    config = resolve(
        {
            "model": {"path": "somewhere"},
            "eval": {"problems": 0},
            "rollout": {"prompts": 8, "group": 8, "max_new_tokens": 64},
            "batch": {"token_budget": token_budget},
            "compute": {"learner_threads": 1, "actor_threads": 1, "ranks": ranks},
        }
    )
    return replace(work_of(config, cores=8), lengths=Lengths(prompt=64, completion=64, longest=64))


def test_each_rank_is_a_process_with_its_log_and_the_threads_of_a_learner() -> None:
    plan = topology(Path("runs/first"), resolve({"compute": {"ranks": 3, "learner_threads": 5}}), meeting="here")
    assert [process.name for process in plan.processes] == ["learner", "learner1", "learner2", "actor0"]
    assert plan.learner.argv[1:] == ("-m", "learner", "--run", "runs/first", "--meeting", "here")
    assert plan.ranks[1].argv[1:] == ("-m", "learner", "--run", "runs/first", "--rank", "2", "--meeting", "here")
    assert {process.threads for process in (plan.learner, *plan.ranks)} == {5}
    assert plan.ranks[0].environment == plan.learner.environment and plan.ranks[0].log.name == "learner1.log"


def test_one_rank_is_started_as_it_was() -> None:
    plan = topology(Path("runs/first"), resolve({}), meeting="here")
    assert plan.ranks == () and "--meeting" not in plan.learner.argv


def test_the_flag_is_the_key_and_resume_has_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config("embedded", parse(["run", "embedded", "--ranks", "3"]).set).compute.ranks == 3
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--ranks", "2", "--out", str(out)]) == 0
    assert main(["resume", str(out), "--ranks", "65"]) == 2
    assert "--ranks got 65; expected at most 64." in capsys.readouterr().err
    # It ends before anything is started, since there is no such card.
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace('"device": "auto"', '"device": "cuda"'))
    assert main(["resume", str(out), "--ranks", "4"]) == 2
    assert config_from_json((out / "config.json").read_bytes()).compute.ranks == 4


def test_ranks_that_contradict_the_configuration_are_refused_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(out), "--set", "link.adapter_dtype=bf16"]) == 0
    before = (out / "config.json").read_bytes()
    assert main(["resume", str(out), "--ranks", "2"]) == 2
    assert "link.adapter_dtype = 'bf16' rounds the adapters" in capsys.readouterr().err
    assert (out / "config.json").read_bytes() == before


def test_the_threads_of_all_ranks_count(tmp_path: Path) -> None:
    assert ComputeConfig(ranks=3, learner_threads=2, actor_threads=1).threads == 7
    all_cores = cores_here()
    compute = ComputeConfig(learner_threads=1, actor_threads=1, ranks=all_cores)
    assert not isinstance(lease_for(compute, torch.device("cpu"), tmp_path / "lease"), NoLease)
    assert "1 threads for each of 3 ranks of the learner" in arithmetic(
        ComputeConfig(ranks=3, learner_threads=1, actor_threads=1), ModelConfig(), ActorConfig()
    )


def test_cores_are_divided_among_ranks() -> None:
    machine = Capacity(flags=frozenset(), cores=8, card=False)
    hub = ModelConfig(path="somebody/a-model-that-is-not-here")
    assert settled(ComputeConfig(ranks=4), hub, 0, machine).learner_threads == 2
    assert settled(ComputeConfig(ranks=16), hub, 0, machine).learner_threads == 1
    assert settled(ComputeConfig(ranks=4), hub, 0, machine).actor_threads == 8


def test_memory_counts_every_rank_with_its_share_of_the_step() -> None:
    one, four = (replace(host_memory(HALF, work(ranks)), unreturned=UNRETURNED_BYTES) for ranks in (1, 4))
    assert four.shared == one.shared, "the base is mapped by all"
    assert "gradients of all ranks" in four.learner and "gradients of all ranks" not in one.learner
    assert four.lasting - one.lasting == 4 * size_of(four.learner) - size_of(one.learner)
    order = size_of(four.rollout)
    peak = max(
        4 * size_of(four.update) + min(order, UNRETURNED_BYTES), order + 4 * min(size_of(four.update), UNRETURNED_BYTES)
    )
    assert four.total - four.lasting == peak
    assert micro_batch_tokens(work(4)) <= step_tokens(work(4)) / 4 < micro_batch_tokens(work(1))
    assert micro_batch_tokens(work(4, token_budget=600)) == micro_batch_tokens(work(1, token_budget=600))


def test_memory_counts_the_parts_of_a_divided_base_besides_its_file() -> None:
    whole, divided = (host_memory(HALF, replace(work(4), divides=divides)) for divides in (False, True))
    assert divided.shared == whole.shared and "part of the base" not in whole.learner
    assert 4 * divided.learner["part of the base"] == 4 * HALF.linear, "each of four values in fp32"
    assert ComputeConfig(parallel="fsdp2", ranks=2).divides_base and not ComputeConfig(parallel="fsdp2").divides_base
    assert not fewer_ranks(1).apply(replace(work(4), divides=True)).divides


def test_memory_counts_the_moments_that_a_rank_owns() -> None:
    whole, owned = (host_memory(HALF, replace(work(4), divides_moments=owns)).learner for owns in (False, True))
    assert 4 * owned["Adam's moments"] == whole["Adam's moments"] > 0 and owned["gradient"] == whole["gradient"]
    saved = whole["adapter"] * 3 // 4
    assert whole["gradients of all ranks"] - owned["gradients of all ranks"] == saved
    assert size_of(whole) - size_of(owned) == 3 * saved
    config = resolve({"compute": {"parallel": "zero2", "ranks": 2}, "model": {"path": "somewhere"}})
    assert work_of(config, cores=8).divides_moments and not ComputeConfig(parallel="zero2").divides_moments


def test_updates_take_a_part_of_the_time() -> None:
    def update(ranks: int) -> float:
        return step_time(HALF, work(ranks, token_budget=600), SPEED, SPEED).update

    assert update(1) / 4.2 < update(4) < update(1) / 3.5


def test_the_plan_says_each_of_so_many_and_a_refusal_names_fewer() -> None:
    plan = make_plan(HALF, work(4), None, steps=10, speeds=lambda: (SPEED, SPEED))
    assert any("each of 4 ranks" in line for line in table(plan)) and plan_as_json(plan)["ranks"] == 4
    free = int(0.901 * host_memory(HALF, work(2)).total)
    refused = make_plan(HALF, work(4), free, steps=10, speeds=lambda: (SPEED, SPEED))
    assert not refused.fits
    assert any("compute.ranks" in remedy.settings for remedy in refused.remedies)


def test_the_doctor_says_where_ranks_have_too_few_cores() -> None:
    several = {"ranks": 4, "learner_threads": 2, "actor_threads": 1}
    found = cores(but("processor", cores=4)(configured(compute=several)(sound())))
    assert found.level == "warning" and "4 cores; threads: each of 4 ranks 2, actor 1" in found.found
    assert "compute.learner_threads=1" in found.remedy
    assert cores(but("processor", cores=9)(configured(compute=several)(sound()))).level == "ok"


def test_a_rank_that_was_lost_comes_before_those_that_lost_it() -> None:
    assert sorted([LOST_RANK, 1, 2, -9], key=later) == [-9, 2, 1, LOST_RANK]


def test_one_of_several_ranks_is_not_started_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from learner.__main__ import start

    out = tmp_path / "run"
    assert main(["run", "--prepare", "--ranks", "2", "--out", str(out)]) == 0
    assert start(["--run", str(out)]) == 2
    assert "compute.ranks is 2, and this starts one of them; use `python -m launch resume" in capsys.readouterr().err
