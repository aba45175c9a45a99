"""docker/: the Dockerfile and compose.yaml as their parsers read them, and an image where a builder is to be had."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from launch.cli import parse
from shared.config.load import apply_override, resolve
from shared.run.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
PORT = 5757


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One FROM and what follows it."""

    base: str
    """What it starts from: an image, a build argument or another stage."""
    steps: list[tuple[str, str]]
    """(instruction, value) pairs."""

    def values(self, instruction: str) -> list[str]:
        """All values of one instruction."""
        return [value for name, value in self.steps if name == instruction]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    """The Dockerfile's stages by name."""
    found: dict[str, Stage] = {}
    steps: list[tuple[str, str]] = []
    for step in DockerfileParser(path=str(DOCKER)).structure:
        if step["instruction"] == "FROM":
            base, _, name = step["value"].partition(" AS ")
            steps = []
            found[name] = Stage(base=base, steps=steps)
        elif step["instruction"] != "COMMENT":
            steps.append((step["instruction"], step["value"]))
    return found


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """compose.yaml with anchors and merges resolved."""
    return yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    """Its services."""
    return compose["services"]


def test_stages_and_targets(stages: dict[str, Stage]) -> None:
    assert list(stages)[-2:] == ["cpu", "cuda"]
    assert stages["base-cpu"].base == "${CPU_BASE}"
    assert stages["base-cuda"].base == "${CUDA_BASE}"
    for target in ("cpu", "cuda"):
        assert stages[target].base == f"base-{target}"
        assert stages[f"packages-{target}"].base == f"base-{target}"


def test_bases_are_pinned_and_replaceable() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG CPU_BASE=docker\.io/library/python:3\.1[1-9]-slim-\w+$", text, re.MULTILINE)
    assert re.search(r"^ARG CUDA_BASE=docker\.io/nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d+\.\d+$", text, re.MULTILINE)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_run_as_a_user_and_start_our_modules(stages: dict[str, Stage], target: str) -> None:
    stage = stages[target]
    assert stage.values("USER") == ["tandem"]
    assert stage.values("ENTRYPOINT") == ['["python", "-m"]']
    # Nothing runs or is copied after the rights are given up, and nothing needs root when it starts.
    after = [name for name, _ in stage.steps[[name for name, _ in stage.steps].index("USER") :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    assert "--create-home tandem" in stage.values("RUN")[0]
    assert "chmod -R a+rX /app" in stage.values("RUN")[-1], "a clone's modes may keep the user out"


def test_both_targets_differ_in_their_packages_only(stages: dict[str, Stage]) -> None:
    cuda = [(name, value.replace("cuda", "cpu")) for name, value in stages["cuda"].steps]
    assert cuda == stages["cpu"].steps


def test_triton_can_start_in_the_cuda_image(stages: dict[str, Stage], services: dict[str, Any]) -> None:
    """A compiler, the headers of C and Python, and a folder of the user's from which libraries may be loaded."""
    (install,) = stages["base-cuda"].values("RUN")
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(install.split())
    (setting,) = stages["base-cuda"].values("ENV")
    name, _, folder = setting.partition("=")
    assert name == "TRITON_CACHE_DIR"
    assert Path(folder).is_relative_to("/home/tandem/.cache")
    assert "install -d -o ${UID} -g tandem /run/tandem /home/tandem/.cache" in stages["cuda"].values("RUN")[0]
    for service in ("learner-gpu", "actor-gpu"):
        # Docker mounts a tmpfs noexec; a volume is not.
        assert [volume["type"] for volume in services[service]["volumes"] if folder.startswith(volume["target"])] == [
            "volume"
        ]


def test_every_copied_source_exists_and_is_let_through(stages: dict[str, Stage]) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    copied = [value.split() for stage in stages.values() for value in stage.values("COPY")]
    from_context = [source for words in copied if not words[0].startswith("--from=") for source in words[:-1]]
    for source in from_context:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, source
    assert {line[1:] for line in ignore if line.startswith("!")} == set(from_context)
    for words in copied:
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages


def test_the_image_holds_the_five_packages_and_no_tests(stages: dict[str, Stage]) -> None:
    copied = {value.split()[0] for value in stages["sources"].values("COPY")}
    assert copied == {"protocol", "shared", "actor", "learner", "launch", ".github/LICENSE", "pyproject.toml"}


def test_services_and_their_targets(services: dict[str, Any]) -> None:
    assert set(services) == {"prepare", "learner", "actor", "learner-gpu", "actor-gpu"}
    for name, service in services.items():
        target = "cuda" if name.endswith("-gpu") else "cpu"
        assert service["build"]["target"] == target
        assert service["image"] == f"tandem:{target}"
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
    binds = [volume for volume in service["volumes"] if volume["target"].startswith("/run/tandem")]
    return {volume["target"]: not volume.get("read_only", False) for volume in binds}


def test_only_the_learner_may_write_journal_and_checkpoints(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name.startswith("actor"):
            assert mounts(service) == {"/run/tandem": False, "/run/tandem/lease": True, "/run/tandem/logs": True}
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


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_the_actor_gets_its_key_as_a_secret_and_no_other(
    compose: dict[str, Any], services: dict[str, Any], suffix: str
) -> None:
    command = services[f"actor{suffix}"]["command"]
    assert services[f"actor{suffix}"]["secrets"] == ["actor_key"]
    assert command[command.index("--key") + 1] == "/run/secrets/actor_key"
    assert compose["secrets"]["actor_key"]["file"].endswith("/keys/actor0.json")
    assert "/run/tandem/keys" in services[f"actor{suffix}"]["tmpfs"], "the run directory's keys are covered"
    assert "secrets" not in services[f"learner{suffix}"]
    assert "/run/tandem/keys" not in services[f"learner{suffix}"]["tmpfs"]


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_both_sides_mean_the_same_address(services: dict[str, Any], suffix: str) -> None:
    arguments = parse(services["prepare"]["command"][1:])
    tree: dict[str, Any] = {}
    for override in arguments.set:
        apply_override(tree, override)
    link = resolve(tree).link
    assert link.bind == f"tcp://0.0.0.0:{PORT}"
    command = services[f"actor{suffix}"]["command"]
    assert command[command.index("--connect") + 1] == link.endpoint == f"tcp://learner:{PORT}"
    network = services[f"learner{suffix}"]["networks"]
    assert suffix == "" or "learner" in network["link"]["aliases"]
    assert list(network) == list(services[f"actor{suffix}"]["networks"]) == ["link"]


def test_prepare_is_a_command_of_ours(services: dict[str, Any]) -> None:
    command = services["prepare"]["command"]
    assert command[0] == "launch"
    arguments = parse(command[1:])
    assert arguments.command == "run"
    assert arguments.prepare
    assert str(arguments.out) == "/run/tandem"
    assert services["prepare"]["profiles"] == ["prepare"]


def test_the_gpu_is_reserved_in_its_profile_only(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name.endswith("-gpu"):
            assert service["profiles"] == ["gpu"]
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        else:
            assert "deploy" not in service
            assert service.get("profiles", []) != ["gpu"]


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_the_actor_waits_for_a_healthy_learner(services: dict[str, Any], suffix: str) -> None:
    assert services[f"actor{suffix}"]["depends_on"] == {f"learner{suffix}": {"condition": "service_healthy"}}


# A line of /proc/net/tcp: slot, local address, remote address, state, and more.
IDLE = "   0: 00000000:0050 00000000:0000 0A 00000000:00000000"
LISTENS = "   1: 00000000:167D 00000000:0000 0A 00000000:00000000"
ACCEPTED = "   2: 0300A8C0:167D 0200A8C0:9C40 01 00000000:00000000"
DIALLED = "   3: 0200A8C0:9C40 0300A8C0:167D 01 00000000:00000000"
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
    ],
)
@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_health_is_what_it_says(
    services: dict[str, Any], tmp_path: Path, service: str, lines: list[str], healthy: bool, suffix: str
) -> None:
    kind, *command, table = services[f"{service}{suffix}"]["healthcheck"]["test"]
    assert (kind, table) == ("CMD", "/proc/net/tcp")
    (tmp_path / "tcp").write_text("\n".join(lines) + "\n")
    done = subprocess.run([*command, str(tmp_path / "tcp")], check=False)
    assert (done.returncode == 0) is healthy


def test_the_port_in_the_health_checks_is_ours() -> None:
    assert f"{PORT:04X}" == "167D"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cpu_image_builds_and_starts() -> None:
    """Takes a base image of this machine, named in TANDEM_TEST_BASE, because tests fetch nothing from registries."""
    builder = shutil.which("buildah") or shutil.which("podman")
    base = os.environ.get("TANDEM_TEST_BASE")
    if not builder or not base:
        pytest.skip("needs buildah or podman, and a local base image with Python named in TANDEM_TEST_BASE")
    build = [builder, "build", "--file", "docker/Dockerfile", "--target", "cpu", "--tag", "tandem:test"]
    local = ["--build-arg", f"CPU_BASE={base}", "--build-arg", "PIP_EXTRA_INDEX_URL=", "--network", "host", "."]
    subprocess.run([*build, *local], cwd=ROOT, check=True)
    if builder.endswith("podman"):
        shown = subprocess.run([builder, "run", "--rm", "tandem:test"], capture_output=True, text=True, check=True)
        assert "usage: python -m launch" in shown.stdout
