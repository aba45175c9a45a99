"""What a run asks of a Ray cluster, and what is refused before anything is made. Needs no Ray."""

import contextlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actor.__main__ import parse as parse_actor
from launch.__main__ import main
from launch.on_ray.host import PORTS, Host
from launch.on_ray.placement import Place, asked_for, capacity_on_ray, places_of, refuse_without_room
from launch.supervisor.topology import topology
from learner.__main__ import listening_at
from shared.config.load import resolve
from shared.config.processes import ComputeConfig, LinkConfig, RayConfig, bind_address, dial_address
from shared.errors import ConfigError, RunDirError
from shared.process.lease import NoLease, lease_for
from shared.process.processor import start_config
from shared.run.run_dir import RunDir

RUN = Path("runs/first")
HAS_RAY = importlib.util.find_spec("ray") is not None


def places(**sections: Any) -> list[Place]:
    config = resolve(sections)
    return places_of(topology(RUN, config), config.compute, config.ray, config.actor)


def gpus(**sections: Any) -> list[float]:
    return [place.gpus for place in places(**sections)]


# --- what is asked for


def test_a_process_asks_for_a_cpu_for_each_of_its_threads() -> None:
    found = places(compute={"learner_threads": 3, "actor_threads": 5, "actors": 2})
    assert [(place.name, place.cpus) for place in found] == [("learner", 3), ("actor0", 5), ("actor1", 5)]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_share_nobody_asks_for_a_card(device: str) -> None:
    assert gpus(compute={"device": device}) == [0.0, 0.0]


@pytest.mark.parametrize(("actors", "shares"), [(1, [0.5, 0.5]), (2, [0.5, 0.25, 0.25]), (3, [0.5, *[0.1666] * 3])])
def test_on_a_card_all_processes_share_one(actors: int, shares: Sequence[float]) -> None:
    found = gpus(compute={"device": "cuda", "actors": actors})
    assert found == shares and sum(found) <= 1.0


def test_shares_that_are_given_win() -> None:
    assert gpus(compute={"device": "cuda"}, ray={"learner_gpus": 1.0, "actor_gpus": 0.25}) == [1.0, 0.25]
    assert gpus(ray={"learner_gpus": 0.3}) == [0.3, 0.0]


def test_an_actor_whose_servers_sample_asks_for_no_card() -> None:
    served = {"actor": {"engine": "vllm_server"}, "server": {"urls": ["http://host:8000/v1"]}}
    assert gpus(compute={"device": "cuda"}, **served) == [0.5, 0.0]


def test_what_is_open_is_chosen_as_for_a_card_only_if_the_learner_asks_for_one() -> None:
    assert not capacity_on_ray(ComputeConfig(), RayConfig()).card
    assert capacity_on_ray(ComputeConfig(), RayConfig(learner_gpus=0.5)).card
    assert capacity_on_ray(ComputeConfig(device="cuda"), RayConfig()).card


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (ComputeConfig(ranks=2), "compute.ranks is 2"),
        (ComputeConfig(residency="shared"), "compute.residency = 'shared'"),
        (ComputeConfig(actor_card=1), "compute.actor_card is 1"),
    ],
)
def test_what_needs_one_machine_is_refused(compute: ComputeConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        capacity_on_ray(compute, RayConfig())


def test_a_prepared_run_for_other_machines_needs_no_card_here(tmp_path: Path) -> None:
    assert main(["run", "--prepare", "--out", str(tmp_path / "run"), "--set", "compute.device=cuda"]) == 0
    run = RunDir.open(tmp_path / "run")
    found = replace(capacity_on_ray(ComputeConfig(device="cuda"), RayConfig()), cores=1)
    assert start_config(run, found).compute.dtype == "bf16"


# --- what a cluster has


TWO = [Place(name="learner", cpus=2, gpus=0.5), Place(name="actor0", cpus=1, gpus=0.5)]


@pytest.mark.parametrize(
    "nodes",
    [
        [{"CPU": 3.0, "GPU": 1.0, "memory": 1e9}],
        [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}],
        [{"memory": 1e9}, {"CPU": 64.0, "GPU": 8.0}],
    ],
)
def test_a_cluster_with_room_is_accepted(nodes: list[dict[str, float]]) -> None:
    refuse_without_room(TWO, nodes)


def on_cpus(learner: int, *actors: int) -> list[Place]:
    return [Place(name="learner", cpus=learner, gpus=0.0), *(Place(name="actor", cpus=n, gpus=0.0) for n in actors)]


@pytest.mark.parametrize(
    ("asked", "cpus", "fit"),
    [
        ((2, 2), (3, 1), False),
        ((2, 2), (2, 2), True),
        # The largest first would take the first node for the learner.
        ((3, 2, 2), (4, 3), True),
        ((3, 2, 2), (3, 3, 1), False),
        ((3, 3, 3, 3), (5, 7), False),
        ((1, 3, 3, 3), (3, 7), True),
        ((4,), (4,), True),
    ],
)
def test_all_processes_must_find_room_at_once(asked: tuple[int, ...], cpus: tuple[int, ...], fit: bool) -> None:
    nodes = [{"CPU": float(n)} for n in cpus]
    if fit:
        refuse_without_room(on_cpus(*asked), nodes)
        return
    with pytest.raises(ConfigError, match=r"each of them on one node, and .*, on which they do not fit together"):
        refuse_without_room(on_cpus(*asked), nodes)


@pytest.mark.parametrize(
    ("asked", "cards", "fit"),
    [
        ((0.6, 0.6, 0.6), (2,), False),
        ((0.6, 0.6, 0.6), (3,), True),
        ((0.6, 0.6, 0.6), (1, 1, 1), True),
        ((0.6, 0.4, 0.4), (2,), True),
        ((0.4, 0.6, 0.6), (2,), True),
        ((0.5, 0.7, 0.7), (2,), False),
        ((1.0, 0.5, 0.5), (2,), True),
        ((0.1, 1.0, 1.0), (2, 1), True),
        ((0.1, 1.0, 1.0), (2,), False),
    ],
)
def test_a_share_is_of_one_card(asked: tuple[float, ...], cards: tuple[int, ...], fit: bool) -> None:
    shares = [Place(name="learner" if number == 0 else "actor", cpus=1, gpus=gpus) for number, gpus in enumerate(asked)]
    nodes = [{"CPU": 64.0, "GPU": float(n)} for n in cards]
    if fit:
        refuse_without_room(shares, nodes)
        return
    with pytest.raises(ConfigError, match=r"processes need|each share on one card"):
        refuse_without_room(shares, nodes)


def test_an_actors_share_of_a_card_is_counted_as_ray_counts_it() -> None:
    shared = places(compute={"device": "cuda", "actors": 3, "learner_threads": 1, "actor_threads": 1})
    refuse_without_room(shared, [{"CPU": 4.0, "GPU": 1.0}])


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([], "learner needs 2 CPUs and 0.5 cards on one node, and the Ray cluster has 0 CPUs on 0 nodes"),
        (
            [{"CPU": 1.0, "GPU": 1.0}] * 3,
            "learner needs 2 CPUs and 0.5 cards on one node, and the Ray cluster has 3 CPU",
        ),
        (
            [{"CPU": 2.0, "GPU": 1.0}],
            "2 processes need 3 CPUs and 1 card, but the Ray cluster has 2 CPUs and 1 card on 1",
        ),
        ([{"CPU": 8.0}], "learner needs 2 CPUs and 0.5 cards on one node"),
    ],
)
def test_a_cluster_that_never_has_room_is_refused(nodes: list[dict[str, float]], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_without_room(TWO, nodes)
    assert said in str(refused.value) and "add nodes" in str(refused.value)


# --- the command


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_one_sentence_says_so_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "embedded", "--on", "ray", "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["error: --on ray needs Ray, which is not installed; install it with `pip install -e '.[ray]'`."]
    assert not out.exists()


def test_a_dry_run_says_what_ray_would_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = ("--set", "compute.learner_threads=3", "--set", "compute.actor_threads=1")
    out = tmp_path / "run"
    assert main(["run", "embedded", "--on", "ray", "--dry-run", "--out", str(out), *threads]) == 0
    assert (
        "unknown, Ray chooses the machines; it is asked for learner: 3 CPUs; actor0: 1 CPU" in capsys.readouterr().out
    )
    assert not out.exists()


def test_the_words_for_people() -> None:
    assert asked_for(TWO) == "it is asked for learner: 2 CPUs and 0.5 cards; actor0: 1 CPU and 0.5 cards"


# --- the two programs elsewhere


def test_a_learner_listens_where_it_is_told_to(tmp_path: Path) -> None:
    given = LinkConfig(endpoint="tcp://host:1", bind="tcp://0.0.0.0:1")
    placed = listening_at("tcp://10.0.0.7:20001", given)
    assert bind_address(placed, tmp_path) == dial_address(placed, tmp_path) == "tcp://10.0.0.7:20001"
    assert listening_at("", given) == given


def test_an_actor_takes_the_address_beside_the_run() -> None:
    given = parse_actor(["--run", "runs/first", "--id", "actor1", "--connect", "tcp://10.0.0.7:20001"])
    assert (given.run, given.id, given.connect) == (RUN, "actor1", "tcp://10.0.0.7:20001")


def test_a_process_with_cores_of_its_own_waits_for_nobody() -> None:
    crowded = ComputeConfig(learner_threads=256, actor_threads=256)
    assert isinstance(lease_for(crowded, torch.device("cpu"), None), NoLease)


def test_a_learner_gets_an_address_at_which_nobody_listens() -> None:
    address = Host().address("127.0.0.1")
    assert address.startswith("tcp://127.0.0.1:") and int(address.rpartition(":")[2]) in PORTS


@pytest.mark.parametrize("missing", ["folder", "run"])
def test_a_node_without_the_shared_folders_says_which(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "folder"
    plan = topology(tmp_path / "run", resolve({}))
    for one in {folder, plan.learner.log.parent}:
        if not one.is_relative_to(tmp_path / missing):
            one.mkdir(parents=True)
    with pytest.raises(RunDirError, match=f"learner cannot start on node .* where {tmp_path / missing}.* is missing"):
        Host().start(plan.learner, "--listen", "tcp://127.0.0.1:20001", folder)


def test_a_run_with_a_relative_path_is_meant_from_the_folder_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "folder/runs/first/logs").mkdir(parents=True)
    (tmp_path / "worker").mkdir()
    learner = replace(topology(RUN, resolve({})).learner, argv=("python", "-c", "import sys; print(sys.argv[1:])"))
    host = Host()
    with contextlib.chdir(tmp_path / "worker"):
        host.start(learner, "--listen", "tcp://127.0.0.1:20001", tmp_path / "folder")
        end = time.monotonic() + 60
        while host.exit_code(wait_s=1.0) is None and time.monotonic() < end:
            pass
    assert (tmp_path / "folder" / learner.log).read_text() == "['--listen', 'tcp://127.0.0.1:20001']\n"
