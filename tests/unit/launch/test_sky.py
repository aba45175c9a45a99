"""launch/sky/actors.yaml: the fields of a SkyPilot task, its shell, and SkyPilot's own parser where it is installed."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from actor.__main__ import parse as parse_actor

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "launch" / "sky" / "actors.yaml"
FIELDS = {"name", "workdir", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
"""Of docs.skypilot.co/en/latest/reference/yaml-spec.html, those that are used."""
RESOURCES = {"use_spot", "cpus", "memory", "disk_size"}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_the_fields_are_skypilots(task: dict[str, Any]) -> None:
    assert set(task) == FIELDS
    assert set(task["resources"]) == RESOURCES
    assert task["resources"]["use_spot"] is True
    # A variable without a value has to be given on the command line.
    assert task["envs"] == {"LEARNER": None, "NAMES": "sky"}


def test_each_machine_starts_an_actor_with_its_own_key(task: dict[str, Any], tmp_path: Path) -> None:
    python = tmp_path / "tandem-venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {
        "HOME": str(tmp_path),
        "LEARNER": "tcp://box.example:5757",
        "NAMES": "sky",
        "SKYPILOT_NODE_RANK": "1",
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "actor"]
    arguments = parse_actor(words[2:])
    assert (arguments.connect, arguments.id) == ("tcp://box.example:5757", "sky1")
    assert str(arguments.key) == f"{tmp_path}/tandem-actor/sky1.json"
    assert str(arguments.config) == f"{tmp_path}/tandem-actor/config.json"


def test_a_machine_with_an_older_python_is_refused_in_one_sentence(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tandem-actor").mkdir()
    (tmp_path / "tandem-actor" / "sky0.json").write_text("{}")
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\n[ "$1" != --version ] || { echo Python 3.10.13; exit 0; }\nexit 1\n')
    python.chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", task["setup"]], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    (sentence,) = done.stderr.splitlines()
    assert "got Python 3.10.13, expected 3.11 or newer" in sentence and "image_id" in sentence


def test_keys_are_copied_from_a_folder_that_git_ignores_and_closed_to_others(task: dict[str, Any]) -> None:
    ((there, here),) = task["file_mounts"].items()
    assert here.startswith("runs/") and "/runs/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    first = task["setup"].splitlines()[0]
    assert first == f"chmod 700 {there} && chmod 600 {there}/*.json"
    assert "secrets" not in task and not {"KEY", "SECRET", "TOKEN"} & set(task["envs"])


@pytest.mark.parametrize("part", ["setup", "run"])
def test_its_shell_is_bash(task: dict[str, Any], part: str) -> None:
    assert subprocess.run(["bash", "-n", "-c", task[part]], check=False).returncode == 0


READ = """
import sys
import yaml
import sky
with open(sys.argv[1]) as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), env_overrides=[("LEARNER", "tcp://box.example:5757")])
(resources,) = task.resources
print(task.name, task.num_nodes, resources.use_spot, resources.cpus, resources.memory, resources.disk_size)
print(task.envs["LEARNER"], task.workdir, *task.file_mounts)
"""


def test_skypilot_reads_it(tmp_path: Path) -> None:
    python = os.environ.get("TANDEM_SKY_PYTHON")
    if not python:
        pytest.skip("needs a Python that has skypilot, named in TANDEM_SKY_PYTHON: it wants other versions than we do")
    # SkyPilot looks for the folder to copy, and keeps its state in the home folder.
    (tmp_path / "runs" / "sky-actors").mkdir(parents=True)
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [python, "-c", READ, FILE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "tandem-actors 2 True 4+ 16+ 64",
        "tcp://box.example:5757 . ~/tandem-actor",
    ]
