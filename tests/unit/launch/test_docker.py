"""docker/Dockerfile as its parser reads it, and its images at work where Podman and a base image are to be had."""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.support.containers import TARGETS, USER, containers, missing
from tests.support.runs import launch, num_rows, rows, summary, wait_until

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
WHOLE = ("cpu", "cuda", "vllm")
PROCESSES = ("learner", "actor")


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


def code_in(stages: dict[str, Stage], target: str) -> set[str]:
    """What of the clone is in its /app."""
    (copied,) = [words for value in stages[target].values("COPY") if (words := value.split())[-1] == "/app"]
    name, found = copied[0].removeprefix("--from="), set[str]()
    while name in stages:
        found |= {value.split()[0] for value in stages[name].values("COPY")}
        name = stages[name].base
    return found


def test_stages_and_targets(stages: dict[str, Stage]) -> None:
    assert list(stages)[-5:] == [*PROCESSES, *WHOLE]
    assert stages["base-cpu"].base == "${CPU_BASE}"
    assert stages["base-cuda"].base == "${CUDA_BASE}"
    for kind, base in {"cpu": "cpu", "cuda": "cuda", "vllm": "cuda"}.items():
        assert stages[kind].base == f"runtime-{kind}"
        assert stages[f"packages-{kind}"].base == f"base-{base}"
        assert stages[f"runtime-{kind}"].base == f"user-{base}"
        assert stages[f"runtime-{kind}"].steps == [("COPY", f"--from=packages-{kind} /opt/tandem /opt/tandem")]
    for process in PROCESSES:
        assert stages[process].base == "runtime-${KIND}"


def test_bases_are_pinned_and_replaceable() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG CPU_BASE=docker\.io/library/python:3\.1[1-9]-slim-\w+$", text, re.MULTILINE)
    assert re.search(r"^ARG CUDA_BASE=docker\.io/nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d+\.\d+$", text, re.MULTILINE)
    # A FROM sees only arguments that stand before the first one.
    assert "ARG KIND=cpu" in text.partition("\nFROM ")[0]


@pytest.mark.parametrize("target", [*PROCESSES, *WHOLE])
def test_images_run_as_a_user_and_start_our_modules(stages: dict[str, Stage], target: str) -> None:
    stage = stages[target]
    assert stage.values("USER") == ["tandem"]
    assert stage.values("ENTRYPOINT") == [
        f'["python", "-m", "{target}"]' if target in PROCESSES else '["python", "-m"]'
    ]
    # Nothing runs or is copied after the rights are given up, and nothing needs root when it starts.
    after = [name for name, _ in stage.steps[[name for name, _ in stage.steps].index("USER") :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    assert stage.values("RUN") == ["chmod -R a+rX /app"], "a clone's modes may keep the user out"


def test_kinds_differ_in_their_packages_only(stages: dict[str, Stage]) -> None:
    assert stages["cpu"].steps == stages["cuda"].steps == stages["vllm"].steps
    assert stages["user-cpu"].steps == stages["user-cuda"].steps
    (made,) = stages["user-cpu"].values("RUN")
    assert "--create-home tandem" in made
    assert "install -d -o ${UID} -g tandem /run/tandem /app/runs /home/tandem/.cache" in made


def test_triton_can_start_in_the_cuda_image(stages: dict[str, Stage]) -> None:
    """A compiler, the headers of C and Python, and a folder of the user's from which libraries may be loaded."""
    (install,) = stages["base-cuda"].values("RUN")
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(install.split())
    assert stages["base-cuda"].values("ENV") == ["TRITON_CACHE_DIR=/home/tandem/.cache/triton"]


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


def test_each_image_holds_the_code_that_it_needs_and_no_tests(stages: dict[str, Stage]) -> None:
    both = {"protocol", "shared", ".github/LICENSE"}
    assert code_in(stages, "learner") == both | {"learner"}
    assert code_in(stages, "actor") == both | {"actor"}
    for target in WHOLE:
        assert code_in(stages, target) == both | {"actor", "learner", "launch", "pyproject.toml"}


@pytest.mark.parametrize("extras", [[], ["vllm"]])
def test_what_is_installed_is_what_the_project_names(extras: list[str], tmp_path: Path) -> None:
    """install.sh with another folder for /build and /opt, and a pip that shows what it is asked for."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = (DOCKER / "install.sh").read_text(encoding="utf-8").replace("/build/", f"{tmp_path}/")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(
        f'#!/bin/sh\n[ "$1" = - ] || {{ echo "$*"; exit; }}\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "bin" / "python").chmod(0o755)
    script = script.replace("python3 -m venv /opt/tandem\n", "").replace("/opt/tandem/", f"{tmp_path}/")
    done = subprocess.run(["sh", "-s", *extras], input=script, capture_output=True, text=True, check=True)
    assert f"-r {tmp_path}/requirements.txt" in done.stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == wanted


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_images_build_and_train_in_two_containers(tmp_path: Path) -> None:
    """`cpu` prepares the run, `learner` and `actor` train it. Settings of the machine are in TANDEM_TEST_*."""
    with containers(tmp_path / "inside") as ours:
        for service in TARGETS:
            ours.build(service)
        ours.prepare()
        ours.train("-d")
        wait_until(lambda: num_rows(ours.run) >= 3, "three steps in containers", 300)
        learner, actor = (ours.look_inside(service) for service in PROCESSES)
        ours.compose("down")
        stopped = summary(ours.run)
        ours.train()
    for process in (learner, actor):
        assert (process["user"], process["capabilities"], process["may_gain_rights"]) == (USER, 0, False)
        assert "/app" not in process["writable"]
    assert (learner["code"], actor["code"]) == (["learner"], ["actor"])
    assert {"learner.json", "actor0.json"} <= set(learner["keys"]) and actor["keys"] == []
    assert actor["writable"] == ["/run/tandem/lease", "/run/tandem/logs"]
    assert (stopped["status"], num_rows(ours.run)) == ("stopped", 40)
    outside = launch("run", "embedded", "--out", tmp_path / "outside", wait_s=900)
    assert outside.returncode == 0, outside.stdout + outside.stderr
    inside, reward = summary(ours.run), [row["reward/mean"] for row in rows(ours.run)]
    assert inside["adapter_sha256"] == summary(tmp_path / "outside")["adapter_sha256"]
    assert sum(reward[-5:]) > sum(reward[:5]) + 1
    done = subprocess.run(["podman", "run", "--rm", "tandem:cpu"], capture_output=True, text=True, check=True)
    assert "usage: python -m launch" in done.stdout
