"""`python -m launch doctor` as a person types it: its words, its JSON, its exit code, and what it leaves behind."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.commands.run import make_run
from launch.doctor.command import (
    CHECKS,
    DEFAULT_SOURCE,
    as_tree,
    choose_source,
    examine,
    finding_of,
    num_errors,
    read_config,
    show,
)
from launch.doctor.finding import Missing, warning
from launch.doctor.machine import Machine
from launch.presets.load import load_config
from shared.errors import ConfigError
from tests.support.machines import but, sound

ROOT = Path(__file__).resolve().parents[3]
NAMES = [f"{group}.{check.__name__}" for group, checks in CHECKS.items() for check in checks]
STABLE = [
    "software.python",
    "software.libraries",
    "software.torch",
    "software.bitsandbytes",
    "processor.vector_units",
    "processor.cores",
    "processor.container_share",
    "processor.variables",
    "memory.available",
    "memory.container_limit",
    "memory.swap",
    "memory.windows",
    "card.present",
    "card.driver",
    "card.architecture",
    "card.sharing",
    "card.memory",
    "card.allocator",
    "card.kernels",
    "disk.writable",
    "disk.space",
    "disk.speed",
    "disk.file_system",
    "disk.modes",
    "disk.locks",
    "limits.open_files",
    "limits.file_size",
    "limits.address_space",
    "limits.processes",
    "link.address",
    "run.directory",
    "run.keys",
    "run.lock",
    "run.lease",
    "model.present",
    "model.access",
    "model.hub_cache",
    "model.base_cache",
    "model.targets",
    "model.tasks",
    "verifier.function",
]


def doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    argv = [sys.executable, "-m", "launch", "doctor", *words]
    environment = os.environ | variables
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def printed(machine: Machine, **terminal: Any) -> str:
    """What a person reads about this machine."""
    text = io.StringIO()
    show(Console(file=text, highlight=False, **terminal), "my.toml", Path("runs/first"), examine(machine))
    return text.getvalue()


def test_names_are_stable() -> None:
    assert NAMES == STABLE


def test_off_a_terminal_it_is_plain_text_a_line_a_check() -> None:
    lines = printed(sound(), width=40).splitlines()
    assert lines[0] == "my.toml, to run in runs/first"
    assert lines[1] == "software"
    assert lines[2] == "  ok       python: Python 3.11.7, expected >=3.11"
    assert len(lines) == 1 + len(CHECKS) + len(NAMES) + 1
    assert lines[-1] == f"{len(NAMES)} checks: no problems"
    assert "\x1b" not in "".join(lines)


def test_a_remedy_is_below_its_finding() -> None:
    lines = printed(but("limits", open_files=32)(sound())).splitlines()
    at = lines.index("  error    open files: 32 open files in one process")
    assert lines[at + 1] == "           -> ulimit -n 1024, as root"
    assert lines[-1] == f"{len(NAMES)} checks: 1 error"


def test_a_terminal_has_colours() -> None:
    assert "\x1b[" in printed(sound(), force_terminal=True, color_system="standard")


def test_words_with_brackets_are_shown_as_they_are() -> None:
    machine = but("link", address="tcp://h:1", trouble="[red]x[/red]; [y]")(sound())
    assert "[red]x[/red]" in printed(machine)


def test_a_fact_that_is_missing_is_a_warning() -> None:
    machine = replace(sound(), disk=Missing("not finished within 3 s"))
    (check, *_) = CHECKS["disk"]
    finding = finding_of(check, machine)
    assert finding == warning("could not be checked: not finished within 3 s", finding.remedy)
    assert num_errors(examine(machine)) == 0


@pytest.mark.parametrize("subject", [f.name for f in fields(Machine) if f.name not in ("config", "run_dir")])
def test_no_missing_fact_stops_the_others(subject: str) -> None:
    reports = examine(replace(sound(), **{subject: Missing("gone")}))
    assert [report.check for report in reports] == NAMES
    told = [report for report in reports if report.finding.level != "ok"]
    assert told or subject in ("hub", "plan"), "needed only where there is a card, or a model to fetch"
    assert all("gone" in report.finding.found for report in told if report.finding.level != "note")


def test_the_json_has_a_header_and_the_four_fields() -> None:
    tree = as_tree("my.toml", Path("runs/first"), examine(but("limits", open_files=32)(sound())))
    assert (tree["doctor"], tree["config"], tree["run_dir"], tree["errors"]) == (1, "my.toml", "runs/first", 1)
    findings = tree["findings"]
    assert isinstance(findings, list)
    assert [set(finding) for finding in findings] == [{"check", "level", "found", "remedy"}] * len(NAMES)
    assert {finding["check"]: finding["level"] for finding in findings}["limits.open_files"] == "error"


# --- which configuration


def test_a_folder_that_cannot_be_looked_into_has_no_run() -> None:
    assert choose_source(None, Path("long" * 100)) == DEFAULT_SOURCE


def test_an_existing_run_is_checked_with_its_own_configuration(run_path: Path) -> None:
    make_run(run_path, load_config("embedded", ["run.steps=7", "run.seed=3"]))
    own = choose_source(None, run_path)
    assert own == run_path / "config.json"
    config = read_config(own, ["run.seed=4"])
    assert (config.run.steps, config.run.seed) == (7, 4)
    with pytest.raises(ConfigError, match=r"did you mean 'run\.seed'"):
        read_config(own, ["run.sed=4"])
    assert choose_source("my.toml", run_path) == "my.toml", "what is typed counts"
    assert choose_source(None, run_path.parent / "new") == choose_source(None, None) == "embedded"
    assert read_config("embedded", []).run.steps == 40


# --- for real


@pytest.mark.slow
def test_a_real_run_with_real_troubles(run_path: Path) -> None:
    make_run(run_path, load_config("embedded"))
    (key, *_) = sorted((run_path / "keys").glob("learner*.json"))
    key.chmod(0o644)
    before = sorted(path for path in run_path.rglob("*"))
    reward = ["--set", "verifier.kind=callable", "--set", "verifier.function=no-such-file.py:f"]
    done = doctor("--json", "--out", str(run_path), *reward, OMP_PROC_BIND="true", PYTORCH_ALLOC_CONF="a:1")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    tree = json.loads(done.stdout)
    findings = {finding["check"]: finding for finding in tree["findings"]}
    assert list(findings) == NAMES
    assert findings["run.keys"]["level"] == "error"
    assert findings["run.keys"]["remedy"] == f"run `chmod 600 {key}`"
    assert findings["verifier.function"]["level"] == "error"
    assert "no such file" in findings["verifier.function"]["found"]
    assert findings["processor.variables"]["remedy"] == "unset OMP_PROC_BIND"
    assert findings["run.directory"]["level"] == "note"
    assert findings["software.torch"]["level"] == "ok"
    assert findings["software.bitsandbytes"]["level"] == "ok"
    errors = [finding["check"] for finding in tree["findings"] if finding["level"] == "error"]
    assert tree["errors"] == len(errors)
    assert sorted(path for path in run_path.rglob("*")) == before, "nothing is left behind"


def test_a_crash_of_torch_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    done = doctor("--out", str(tmp_path / "run"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "  error    torch: PyTorch does not load: killed by signal 6 (Aborted)\n" in done.stdout
    assert "  ok       writable: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{len(NAMES)} checks: 2 errors")
    assert not (tmp_path / "run").exists(), "doctor makes no run directory"


def test_bad_arguments_exit_with_2() -> None:
    done = doctor("--set", "optimizer.lrr=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'optimizer.lr'?" in done.stderr
