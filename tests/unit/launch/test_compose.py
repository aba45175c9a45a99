"""docker/compose.yaml and the file for two machines, as YAML and as podman-compose reads them."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from actor.__main__ import may_be_remote
from actor.__main__ import parse as parse_actor
from launch.cli import parse
from shared.config.load import apply_override, resolve
from shared.config.processes import dial_address
from shared.run.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
PORT = 5757
LEARNERS = ("learner", "learner-gpu")
ACTORS = {"actor": "learner", "actor-gpu": "learner-gpu", "actor-vllm": "learner-gpu"}
"""Actor -> its learner."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """compose.yaml with anchors and merges resolved."""
    return yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    """Its services."""
    return compose["services"]


def test_services_and_their_targets(services: dict[str, Any]) -> None:
    built = {name: (service["build"]["target"], service["build"]["args"]) for name, service in services.items()}
    user = {"UID": "${UID:-1000}"}
    assert built == {
        "prepare": ("cpu", user),
        "learner": ("learner", user | {"KIND": "cpu"}),
        "actor": ("actor", user | {"KIND": "cpu"}),
        "learner-gpu": ("learner", user | {"KIND": "cuda"}),
        "actor-gpu": ("actor", user | {"KIND": "cuda"}),
        "actor-vllm": ("actor", user | {"KIND": "vllm"}),
    }
    images = [service["image"] for service in services.values()]
    assert len(set(images)) == len(images), "two builds with one name"
    for service in services.values():
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_services_share_the_run_directory(services: dict[str, Any]) -> None:
    for service in services.values():
        (run,) = [volume for volume in service["volumes"] if volume["target"] == "/run/tandem"]
        assert run["type"] == "bind"
        # Docker would make it as root, and then nobody could write to it.
        assert run["bind"] == {"create_host_path": False}


def mounts(service: dict[str, Any]) -> dict[str, bool]:
    """Where in the run directory something is mounted -> whether it may be written."""
    ours = [volume for volume in service["volumes"] if volume["target"].startswith("/run/tandem")]
    return {volume["target"]: not volume.get("read_only", False) for volume in ours}


def test_only_the_learner_may_write_journal_and_checkpoints(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name.startswith("actor"):
            writable = {"/run/tandem/lease": True, "/run/tandem/logs": True}
            assert mounts(service) == {"/run/tandem": False, "/run/tandem/keys": False} | writable
        else:
            assert mounts(service) == {"/run/tandem": True}


def test_what_the_actor_may_write_is_made_with_the_run(tmp_path: Path, services: dict[str, Any]) -> None:
    run = RunDir.create(tmp_path / "run", b"{}")
    needed = {str(path.relative_to(run.path)) for path in (run.lease.parent, run.logs)}
    assert {
        target.removeprefix("/run/tandem/") for target, writable in mounts(services["actor"]).items() if writable
    } == (needed)
    for volume in services["actor"]["volumes"]:
        if volume["target"].removeprefix("/run/tandem/") in needed:
            assert volume["bind"] == {"create_host_path": False}


def test_no_service_takes_the_whole_machine_or_starts_for_ever(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["pids_limit"] == 1024
        assert re.fullmatch(r"\$\{TANDEM_MEMORY:-\d+g\}", service["mem_limit"])
        assert service.get("restart") == (None if name == "prepare" else "on-failure:5")


def test_services_can_do_little(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert "ports" not in service, "the link stays inside the network"


@pytest.mark.parametrize("actor", ACTORS)
def test_the_actor_gets_its_key_as_a_secret_and_no_other(
    compose: dict[str, Any], services: dict[str, Any], actor: str
) -> None:
    arguments = parse_actor(services[actor]["command"])
    assert services[actor]["secrets"] == ["actor0"]
    assert str(arguments.key) == "/run/secrets/actor0"
    assert compose["secrets"]["actor0"]["file"].endswith("/keys/actor0.json")
    # The run directory's keys are covered, and not by a tmpfs: Podman copies into it what it covers.
    (cover,) = [volume for volume in services[actor]["volumes"] if volume["target"] == "/run/tandem/keys"]
    assert cover["type"] == "volume" and cover["read_only"] and cover["volume"] == {"nocopy": True}
    assert services[actor]["tmpfs"] == ["/tmp"]
    others = [volume for service in services.values() for volume in service["volumes"] if volume != cover]
    assert cover["source"] not in {volume["source"] for volume in others}, "nothing ever writes into it"
    for learner in LEARNERS:
        assert "secrets" not in services[learner]


@pytest.mark.parametrize("actor", ACTORS)
def test_both_sides_mean_the_same_address(services: dict[str, Any], actor: str) -> None:
    arguments = parse(services["prepare"]["command"][1:])
    tree: dict[str, Any] = {}
    for override in arguments.set:
        apply_override(tree, override)
    link = resolve(tree).link
    assert link.bind == f"tcp://0.0.0.0:{PORT}"
    found = parse_actor(services[actor]["command"])
    dialled = found.connect or dial_address(link, found.run)
    assert dialled == link.endpoint == f"tcp://learner:{PORT}"
    network = services[ACTORS[actor]]["networks"]
    assert ACTORS[actor] == "learner" or "learner" in network["link"]["aliases"]
    assert list(network) == list(services[actor]["networks"]) == ["link"]


def test_prepare_is_a_command_of_ours(services: dict[str, Any]) -> None:
    command = services["prepare"]["command"]
    assert command[0] == "launch"
    arguments = parse(command[1:])
    assert arguments.command == "run"
    assert arguments.prepare
    assert str(arguments.out) == "/run/tandem"
    assert services["prepare"]["profiles"] == ["prepare"]


def test_cards_are_reserved_in_their_profiles_only(services: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles", []) for name, service in services.items()}
    assert profiles == {
        "prepare": ["prepare"],
        "learner": [],
        "actor": [],
        "learner-gpu": ["gpu", "vllm"],
        "actor-gpu": ["gpu"],
        "actor-vllm": ["vllm"],
    }
    for name, service in services.items():
        if name.endswith(("-gpu", "-vllm")):
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        else:
            assert "deploy" not in service


def test_memory_of_a_card_can_be_shared_and_is_not_by_default(services: dict[str, Any]) -> None:
    modes = {name: service.get("ipc") for name, service in services.items()}
    assert {name for name, mode in modes.items() if mode} == {"learner-gpu", "actor-gpu", "actor-vllm"}
    assert {mode for mode in modes.values() if mode} == {"${TANDEM_IPC:-private}"}


def test_triton_may_load_what_it_has_built(services: dict[str, Any]) -> None:
    """Docker mounts a tmpfs noexec; a volume is not."""
    for service in ("learner-gpu", "actor-gpu", "actor-vllm"):
        kinds = [one["type"] for one in services[service]["volumes"] if one["target"] == "/home/tandem/.cache"]
        assert kinds == ["volume"]


@pytest.mark.parametrize("actor", ACTORS)
def test_the_actor_waits_for_a_healthy_learner_unless_that_waits_for_it(services: dict[str, Any], actor: str) -> None:
    state = "service_started" if actor == "actor-gpu" else "service_healthy"
    assert services[actor]["depends_on"] == {ACTORS[actor]: {"condition": state}}


def test_an_actor_on_the_card_of_the_learner_may_share_its_base(services: dict[str, Any]) -> None:
    arguments = parse_actor(services["actor-gpu"]["command"])
    assert arguments.run == Path("/run/tandem") and not may_be_remote(arguments)


# A line of /proc/net/tcp: slot, local address, remote address, state, and more.
IDLE = "   0: 00000000:0050 00000000:0000 0A 00000000:00000000"
LISTENS = "   1: 00000000:167D 00000000:0000 0A 00000000:00000000"
ACCEPTED = "   2: 0300A8C0:167D 0200A8C0:9C40 01 00000000:00000000"
DIALLED = "   3: 0200A8C0:9C40 0300A8C0:167D 01 00000000:00000000"
LISTENS_6 = f"   0: {'0' * 32}:167D {'0' * 32}:0000 0A 00000000:00000000"
DIALLED_6 = f"   1: {'0' * 31}1:9C40 {'0' * 31}2:167D 01 00000000:00000000"
DIALLING = "   4: 0200A8C0:9C40 0300A8C0:167D 02 00000001:00000000"


@pytest.mark.parametrize(
    ("service", "lines", "healthy"),
    [
        ("learner", [IDLE], False),
        ("learner", [IDLE, LISTENS], True),
        ("learner", [ACCEPTED], False),
        ("actor", [IDLE], False),
        ("actor", [DIALLING], False),
        ("actor", [IDLE, DIALLED], True),
        ("learner", [LISTENS_6], True),
        ("learner", [DIALLED_6], False),
        ("actor", [DIALLED_6], True),
        ("actor", [LISTENS_6], False),
    ],
)
def test_health_is_what_it_says(
    services: dict[str, Any], tmp_path: Path, service: str, lines: list[str], healthy: bool
) -> None:
    tests = [one["healthcheck"]["test"] for name, one in services.items() if name.startswith(service)]
    assert all(test == tests[0] for test in tests)
    kind, *command, four, six = tests[0]
    assert (kind, four, six) == ("CMD", "/proc/net/tcp", "/proc/net/tcp6")
    (tmp_path / "tables").write_text("\n".join(lines) + "\n")
    # A machine without IPv6 has no second table.
    for tables in ((tmp_path / "tables", tmp_path / "none"), (tmp_path / "none", tmp_path / "tables")):
        assert (subprocess.run([*command, *tables], check=False).returncode == 0) is healthy


def test_the_port_in_the_health_checks_is_ours() -> None:
    assert f"{PORT:04X}" == "167D"


def read_by_podman(*words: str, folder: Path, **variables: str) -> dict[str, Any]:
    """What podman-compose makes of the files, with its profiles and variables."""
    if not find_spec("podman_compose"):
        pytest.skip("podman-compose is not installed; pip install podman-compose")
    command = [sys.executable, "-m", "podman_compose", "--dry-run", *words, "config"]
    environment = os.environ | {"TANDEM_RUN": str(folder), **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return yaml.safe_load(done.stdout)


@pytest.mark.parametrize(
    ("profiles", "names"),
    [
        ([], {"learner", "actor"}),
        (["prepare"], {"learner", "actor", "prepare"}),
        (["gpu"], {"learner", "actor", "learner-gpu", "actor-gpu"}),
        (["vllm"], {"learner", "actor", "learner-gpu", "actor-vllm"}),
    ],
)
def test_a_real_parser_finds_the_services_of_each_profile(profiles: list[str], names: set[str], tmp_path: Path) -> None:
    words = [word for profile in profiles for word in ("--profile", profile)]
    read = read_by_podman("-f", "docker/compose.yaml", *words, folder=tmp_path, UID="1234")
    assert set(read["services"]) == names
    for service in read["services"].values():
        assert "UID=1234" in service["build"]["args"]
        assert str(tmp_path) in json.dumps(service["volumes"])


@pytest.mark.parametrize("actor", ACTORS)
def test_on_two_machines_the_actor_has_a_folder_with_its_key_and_nothing_of_the_run(actor: str, tmp_path: Path) -> None:
    words = ["-f", "docker/compose.yaml", "-f", "docker/two_machines.yaml", "--profile", "gpu", "--profile", "vllm"]
    join = tmp_path / "join"
    read = read_by_podman(*words, folder=tmp_path / "run", TANDEM_JOIN=str(join), TANDEM_LEARNER="box.example")
    service = read["services"][actor]
    arguments = parse_actor(service["command"])
    assert arguments.connect == f"tcp://box.example:{PORT}" and arguments.run is None
    assert (str(arguments.key), str(arguments.config)) == ("/run/secrets/actor0", "/run/join/config.json")
    assert not service.get("depends_on"), "the learner is on another machine"
    assert service["volumes"] == ["cache:/home/tandem/.cache"], "nothing of a run is mounted"
    assert {"source": "config", "target": str(arguments.config)} in service["secrets"]
    # The lease is a file beside the configuration, and all else is read-only.
    assert set(service["tmpfs"]) == {"/tmp", "/run/join"} and service["read_only"] is True
    files = {name: secret["file"] for name, secret in read["secrets"].items()}
    assert files == {"actor0": f"{join}/actor0.json", "config": f"{join}/config.json"}


@pytest.mark.parametrize("learner", LEARNERS)
def test_on_two_machines_the_learner_is_reached_from_outside(learner: str, tmp_path: Path) -> None:
    files = ["-f", "docker/compose.yaml", "-f", "docker/two_machines.yaml", "--profile", "gpu"]
    service = read_by_podman(*files, folder=tmp_path)["services"][learner]
    assert service["ports"] == [f"0.0.0.0:{PORT}:{PORT}"]
    assert str(tmp_path) in json.dumps(service["volumes"]), "the run is here"
