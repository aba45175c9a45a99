"""Every preset: it parses, it is planned without a network, and its embedded twin differs in nothing that matters."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.commands.run import describe
from launch.presets.load import PRESETS_DIR, find_source, load_config
from launch.supervisor.topology import topology
from shared.config.load import read_config
from shared.config.processes import CheckpointConfig, EvalConfig
from shared.config.tree import Config
from shared.errors import ConfigError

PRESETS = sorted(path.stem for path in PRESETS_DIR.glob("*.toml"))
TWIN = "_embedded"
SMALL = {"embedded", "calculator", "guessing_game"}
"""For the models that ship with Tandem."""
REAL = [name for name in PRESETS if name not in SMALL and not name.endswith(TWIN)]
MAY_DIFFER = {"run", "model", "tasks", "rollout", "actor", "optimizer", "batch", "compute", "checkpoint", "eval"}
"""What a smaller model and other problems ask for: sizes, rates, where things come from, no card, no engine that needs
one."""

OFFLINE = """
import socket, sys
def refused(*args, **options):
    raise OSError("a dry run spoke to somebody")
socket.socket.connect = socket.getaddrinfo = refused
from launch.__main__ import main
codes = [main(["run", name, "--dry-run"]) for name in sys.argv[1:]]
heavy = {"torch", "transformers", "datasets", "huggingface_hub"} & set(sys.modules)
assert not any(codes) and not heavy, (codes, heavy)
"""


def test_the_presets_are_those_of_the_readme() -> None:
    assert {"gsm8k_8gb", "math_8gb", "cpu_135m", "cpu_05b", "sent_two_stage", "continual_3stage"} <= set(REAL)
    assert {name + TWIN for name in REAL} | SMALL == set(PRESETS) - set(REAL)
    readme = (Path(__file__).resolve().parents[3] / "launch" / "README.md").read_text()
    assert [name for name in PRESETS if f"launch/presets/{name}.toml" not in readme] == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_planned_with_what_it_names(name: str) -> None:
    config = load_config(name)
    plan = describe(topology(Path("runs/x"), config), config)
    assert config.model.path in plan and config.tasks.source in plan
    assert name in SMALL or (config.model.path == "embedded") == name.endswith(TWIN)


@pytest.mark.parametrize("name", REAL)
def test_a_twin_has_the_same_curriculum_verifier_objective_and_code(name: str) -> None:
    # As written: what is left open is chosen for machine and model.
    real, twin = (read_config(find_source(each)) for each in (name, name + TWIN))
    different = {section for section in Config.__struct_fields__ if getattr(real, section) != getattr(twin, section)}
    assert different <= MAY_DIFFER, different - MAY_DIFFER
    assert twin.model == Config().model
    assert twin.batch.recompute == real.batch.recompute
    assert twin.rollout.replacement_rounds == real.rollout.replacement_rounds
    assert bool(twin.rollout.groups_per_order) == bool(real.rollout.groups_per_order)


@pytest.mark.parametrize("name", REAL)
def test_a_twin_has_the_defaults_that_the_readme_says(name: str) -> None:
    real, twin = (read_config(find_source(each)) for each in (name, name + TWIN))
    assert (twin.eval, twin.checkpoint, twin.rollout.temperature) == (EvalConfig(), CheckpointConfig(), 1.0)
    on_card = real.compute.device == "cuda"
    assert twin.compute.dtype == ("bf16" if on_card else "auto") and twin.compute.device != "cuda"
    assert on_card or real.model.path != "Qwen/Qwen2.5-1.5B-Instruct", "too large for a CPU"


def test_a_misspelt_preset_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"named 'embeded'; did you mean 'embedded'\? Presets are: calculator, "):
        find_source("embeded")
    with pytest.raises(ConfigError, match="no file named 'zzz'; presets are: calculator, "):
        find_source("zzz")


def test_a_run_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"^{tmp_path} is a run, expected a preset or a file; `resume {tmp_path}`"):
        find_source(str(tmp_path))


def test_dry_runs_need_no_network_and_load_no_library(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OFFLINE, *PRESETS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run directory") == len(PRESETS)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_for_a_file_is_no_preset() -> None:
    with pytest.raises(ConfigError, match="There is no preset and no file named 'longlong"):
        find_source("long" * 100)


@pytest.mark.parametrize("name", ["folder.toml", "folder.yaml"])
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} cannot be read .Is a directory.; expected a file"):
        read_config(tmp_path / name)
