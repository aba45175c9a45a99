"""Several actors beside one learner: their processes, what they need, and what is said of those without work."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.__main__ import main
from launch.cli import parse
from launch.commands.run import warn_of_idle_actors
from launch.display.watch import phase_seconds, time_shares
from launch.doctor.hardware_checks import cores
from launch.plan.cost import make_plan, plan_as_json, table, work_of
from launch.plan.duration import step_time
from launch.plan.memory import UNRETURNED_BYTES, HostMemory, host_memory, size_of
from launch.plan.shape import Lengths
from launch.plan.work import Work
from launch.presets.load import load_config
from launch.supervisor.topology import topology
from protocol.access.keys import load_actor_key, load_learner_keys, read_allowed
from shared.config.load import config_from_json, resolve
from shared.config.processes import ComputeConfig
from shared.config.tree import RolloutConfig
from shared.process.lease import NoLease, lease_for
from shared.process.processor import cores_here
from tests.support.machines import HALF, SPEED, but, configured, sound


def work(machine_cores: int, *, actors: int, max_lag: int = 0, **rollout: int) -> Work:
    """Eight orders of one group, with a thread for each process."""
    sections: Mapping[str, Mapping[str, object]] = {
        "model": {"path": "somewhere"},
        "eval": {"problems": 0},
        "rollout": {"prompts": 8, "group": 8, "max_new_tokens": 64, "groups_per_order": 1, **rollout},
        "compute": {"learner_threads": 1, "actor_threads": 1, "actors": actors},
        "pipeline": {"max_lag": max_lag},
    }
    lengths = Lengths(prompt=64, completion=64, longest=64)
    return replace(work_of(resolve(sections), cores=machine_cores), lengths=lengths)


def memory(machine_cores: int, *, actors: int, max_lag: int = 0) -> HostMemory:
    """With what stays after short turns."""
    found = host_memory(HALF, work(machine_cores, actors=actors, max_lag=max_lag))
    return replace(found, unreturned=UNRETURNED_BYTES)


# --- processes


def test_each_actor_has_its_name_its_log_and_the_threads_of_one() -> None:
    plan = topology(Path("runs/first"), resolve({"compute": {"actors": 3, "actor_threads": 5}}), trace=True)
    assert [process.name for process in plan.processes] == ["learner", "actor0", "actor1", "actor2"]
    assert plan.actors[2].argv[1:] == ("-m", "actor", "--run", "runs/first", "--id", "actor2", "--trace")
    assert {process.threads for process in plan.actors} == {5}
    assert len({process.log for process in plan.processes}) == 4


def test_the_flag_is_the_key_and_the_later_one_wins() -> None:
    def actors(*words: str) -> int:
        return load_config("embedded", parse(["run", "embedded", *words]).set).compute.actors

    assert actors() == 1 and actors("--actors", "3") == 3
    assert actors("--actors", "3", "--set", "compute.actors=2") == 2
    assert actors("--set", "compute.actors=2", "--actors", "3") == 3


def test_a_run_has_a_key_for_each_actor_and_resume_makes_those_that_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--actors", "2", "--out", str(out)]) == 0
    keys = out / "keys"
    assert sorted(read_allowed(keys / "allowed").actor_ids.values()) == ["actor0", "actor1"]
    first = load_actor_key(keys / "actor0.json")
    assert main(["resume", str(out), "--actors", "65"]) == 2
    assert "--actors got 65; expected at most 64." in capsys.readouterr().err
    # It ends before anything is started, since there is no such card, and has made the keys before.
    config = (out / "config.json").read_text()
    assert '"device": "auto"' in config
    (out / "config.json").write_text(config.replace('"device": "auto"', '"device": "cuda"'))
    assert main(["resume", str(out), "--actors", "3"]) == 2
    assert config_from_json((out / "config.json").read_bytes()).compute.actors == 3
    assert sorted(read_allowed(load_learner_keys(keys).allowed).actor_ids.values()) == ["actor0", "actor1", "actor2"]
    assert load_actor_key(keys / "actor0.json") == first


@pytest.mark.parametrize(("actors", "free"), [(1, True), (2, False)])
def test_the_threads_of_all_actors_count_for_the_lease(tmp_path: Path, actors: int, free: bool) -> None:
    all_cores = cores_here()
    if all_cores < 2:
        pytest.skip("one core has no room")
    compute = ComputeConfig(learner_threads=1, actor_threads=all_cores - 1, actors=actors)
    assert isinstance(lease_for(compute, torch.device("cpu"), tmp_path / "lease"), NoLease) == free


# --- the plan


def test_memory_counts_every_actor_and_those_that_decode_at_once() -> None:
    one, free, in_turns = memory(4, actors=1), memory(4, actors=3), memory(2, actors=3)
    actor, order, update = size_of(one.actor), size_of(one.rollout), size_of(one.update)
    scoring = one.launcher["scoring"]
    assert free.lasting - one.lasting == 2 * (actor + scoring) == in_turns.lasting - one.lasting
    left, kept = min(order, UNRETURNED_BYTES), min(update, UNRETURNED_BYTES)
    assert in_turns.total - in_turns.lasting == max(update + 3 * left, order + 2 * left + kept)
    assert free.total - free.lasting == max(update + 3 * left, 3 * order + kept)
    overlapping = memory(4, actors=3, max_lag=1)
    assert overlapping.total - overlapping.lasting == update + 3 * order


def test_one_actor_needs_what_it_needed() -> None:
    assert memory(2, actors=1).actors == 1 == memory(1, actors=1).at_once


def test_time_falls_with_the_actors_that_compute_at_once() -> None:
    def rollout(machine_cores: int, actors: int, **sizes: int) -> float:
        return step_time(HALF, work(machine_cores, actors=actors, **sizes), SPEED, SPEED).rollout

    one = rollout(8, 1)
    assert rollout(8, 4) == pytest.approx(one / 4, rel=0.1)
    assert rollout(2, 4) == one, "they take turns"
    assert rollout(8, 4, groups_per_order=8) == rollout(8, 1, groups_per_order=8), "there is one order"


def test_the_plan_says_each_of_so_many_and_a_refusal_names_fewer() -> None:
    three = work(8, actors=4)
    plan = make_plan(HALF, three, None, steps=10, speeds=lambda: (SPEED, SPEED))
    assert any("each of 4 actors" in line for line in table(plan))
    assert plan_as_json(plan)["actors"] == 4
    free = int(0.901 * host_memory(HALF, work(8, actors=2)).total)
    refused = make_plan(HALF, three, free, steps=10, speeds=lambda: (SPEED, SPEED))
    assert not refused.fits
    assert {"compute.actors": "2"} in [remedy.settings for remedy in refused.remedies]


# --- actors without work


@pytest.mark.parametrize(
    ("actors", "groups_per_order", "max_lag", "threads", "words"),
    [
        (1, 0, 0, 1, ""),
        (2, 0, 0, 1, "1 of 2 actors can have an order at a time, because an order has 16 groups"),
        (4, 8, 0, 1, "rollout.groups_per_order=2 gives work to all"),
        (2, 0, 1, 1, ""),
        (3, 4, 0, 1, ""),
        (2, 1, 0, 4096, "so they take turns"),
    ],
)
def test_what_is_said_of_actors_that_cannot_all_work(
    actors: int, groups_per_order: int, max_lag: int, threads: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The lower bound on threads keeps the sentence about turns out of the other cases on any machine.
    compute = ComputeConfig(actors=actors, actor_threads=threads if threads > 1 else 0, device="cpu")
    warn_of_idle_actors(compute, RolloutConfig(groups_per_order=groups_per_order), max_lag, "here")
    said = capsys.readouterr().err
    assert words in said and (bool(words) == bool(said))


@pytest.mark.parametrize(("max_lag", "most"), [(0, 4), (1, 8)])
def test_more_actors_than_groups_are_told_so(max_lag: int, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    compute = ComputeConfig(actors=most + 1, device="cpu")
    warn_of_idle_actors(compute, RolloutConfig(prompts=4, groups_per_order=1), max_lag, "here")
    assert capsys.readouterr().err == (
        f"warning: at most {most} of {most + 1} actors can have an order at a time, because rollout.prompts is 4;"
        " use more prompts, or fewer actors.\n"
    )


def test_the_doctor_says_where_several_are_no_faster_than_one() -> None:
    several = {"actors": 2, "learner_threads": 2, "actor_threads": 2}
    found = cores(but("processor", cores=4)(configured(compute=several)(sound())))
    assert found.level == "note" and "4 cores; threads: learner 2, each of 2 actors 2" in found.found
    assert "compute.actors=1" in found.remedy
    assert cores(but("processor", cores=6)(configured(compute=several)(sound()))).level == "ok"


@pytest.mark.parametrize(
    ("decoded", "swapped", "one"),
    [
        *((12.8, 0.0, (3.2, 0.0, 0.0)), (100.0, 4.0, (25.0, 1.0, 0.0))),
        *((2.8, 0.4, (2.8, 0.4, 0.0)), (1.0, 0.2, (1.0, 0.2, 2.0))),
    ],
    ids=["at once", "in other steps too", "in turns", "idle"],
)
def test_what_several_actors_did_at_once_counts_once(decoded: float, swapped: float, one: tuple[float, ...]) -> None:
    # The row has no idle time left, as the learner writes it where the sums are longer than the step.
    row = {"rollout": decoded, "verify": 4.0, "swap": swapped, "update": 0.4, "step": 4.6, "idle": 0.0}
    row = {f"time/{phase}_s": amount for phase, amount in row.items()}
    row |= {f"actors/{n}/waiting": 0.2 for n in range(4)} | {"actors/gone/waiting": 1.0}
    rollout, swap, idle = one
    expected = {"rollout": rollout, "verify": 1.0, "swap": swap, "update": 0.4, "idle": idle}
    assert phase_seconds(row) == pytest.approx(expected)
    assert time_shares([row]) == pytest.approx({name: s / sum(expected.values()) for name, s in expected.items()})
