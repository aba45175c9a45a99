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
RESOURCES = {"use_spot", "cpus", "memory", "disk_size", "autostop"}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_the_fields_are_skypilots(task: dict[str, Any]) -> None:
    assert set(task) == FIELDS
    assert set(task["resources"]) == RESOURCES
    assert task["resources"]["use_spot"] is True
    # A variable without a value has to be given on the command line.
    assert task["envs"] == {"LEARNER": None, "NAME": None}
    # SkyPilot ends all machines of a task when one of them fails.
    assert task["num_nodes"] == 1
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": True}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_actor(task: dict[str, Any], home: Path, python: str) -> subprocess.CompletedProcess[str]:
    """The task's command, with this shell script for Python and a pause that takes no time."""
    program(home / "tandem-venv" / "bin" / "python", python)
    program(home / "programs" / "sleep", 'echo "$*" >>"$HOME/pauses"')
    environment = {
        "HOME": str(home),
        "PATH": f"{home / 'programs'}:{os.environ['PATH']}",
        "LEARNER": "tcp://box.example:5757",
        "NAME": "sky1",
    }
    command = ["bash", "-c", task["run"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)


def test_a_machine_starts_an_actor_with_its_own_key(task: dict[str, Any], tmp_path: Path) -> None:
    done = run_actor(task, tmp_path, 'printf "%s\\n" "$@"')
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "actor"]
    arguments = parse_actor(words[2:])
    assert (arguments.connect, arguments.id) == ("tcp://box.example:5757", "sky1")
    assert str(arguments.key) == f"{tmp_path}/tandem-actor/sky1.json"
    assert str(arguments.config) == f"{tmp_path}/tandem-actor/config.json"


def test_an_actor_that_loses_the_learner_is_started_again(task: dict[str, Any], tmp_path: Path) -> None:
    done = run_actor(task, tmp_path, 'echo start >>"$HOME/starts"; [ "$(grep -c . "$HOME/starts")" -gt 1 ]')
    assert done.returncode == 0
    assert done.stderr == "the actor ended with code 1; it is started again in 10 s\n"
    assert (tmp_path / "starts").read_text() == "start\n" * 2 and (tmp_path / "pauses").read_text() == "10\n"


def test_a_machine_that_never_finds_the_learner_is_given_back(task: dict[str, Any], tmp_path: Path) -> None:
    done = run_actor(task, tmp_path, 'echo start >>"$HOME/starts"; exit 1')
    assert done.returncode == 1
    assert len((tmp_path / "starts").read_text().split()) == 30


def test_an_actor_that_a_person_has_to_help_is_not_started_again(task: dict[str, Any], tmp_path: Path) -> None:
    done = run_actor(task, tmp_path, 'echo start >>"$HOME/starts"; exit 2')
    assert (done.returncode, done.stderr) == (2, "")
    assert (tmp_path / "starts").read_text() == "start\n"


def test_a_machine_with_an_older_python_is_refused_in_one_sentence(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tandem-actor").mkdir()
    (tmp_path / "tandem-actor" / "sky0.json").write_text("{}")
    program(tmp_path / "python3", '[ "$1" != --version ] || { echo Python 3.10.13; exit 0; }\nexit 1')
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
    given = [("LEARNER", "tcp://box.example:5757"), ("NAME", "sky0")]
    task = sky.Task.from_yaml_config(yaml.safe_load(file), env_overrides=given)
(resources,) = task.resources
autostop = resources.autostop_config
print(autostop.enabled, autostop.idle_minutes, autostop.down)
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
    assert done.stdout.splitlines()[-3:] == [
        "True 10 True",
        "tandem-actor 1 True 4+ 16+ 64",
        "tcp://box.example:5757 . ~/tandem-actor",
    ]
