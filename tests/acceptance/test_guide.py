"""Every shell command of the README, typed as it is written there. Only `tests/run.sh` cannot be: it runs this test."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAWINGS = {"How it works", "The tree"}
OWN_CALL = "./tests/run.sh"

SHORT = """\
[run]
steps = 3

[rollout]
prompts = 4
group = 4
max_new_tokens = 24

[eval]
problems = 0

[compute]
learner_threads = 1
actor_threads = 1

[optimizer]
lr = 2e-3
"""
"""The preset `embedded` for a test of its commands. That it learns is what test_learning.py asks."""

FINISH_SET_UP = 'source launch/setup.sh; printf "%s\\n\\n" "$(fingerprint)" >"$TANDEM_STAMP"'


def blocks() -> dict[str, list[str]]:
    """The blocks between fences, by the title of their section."""
    sections = re.split("^## ", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        section.partition("\n")[0]: re.findall(r"^(?:```|~~~).*?\n(.*?)^(?:```|~~~)", section, re.MULTILINE | re.DOTALL)
        for section in sections
    }


def test_every_block_of_the_readme_is_typed_or_a_drawing() -> None:
    """The test that types a section has its name."""
    with_blocks = {title for title, found in blocks().items() if found}
    assert {title for title in with_blocks if f"test_{title.lower().replace(' ', '_')}" not in globals()} == DRAWINGS
    drawn = "".join("".join(blocks()[title]) for title in DRAWINGS)
    assert not re.search(r"^\s*(\$ |\./|\.venv/|(python|pip|git|cd|docker|bash) )", drawn, re.MULTILINE)


def test_what_the_documents_say_of_the_test_script_exists() -> None:
    script = ROOT / OWN_CALL
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    for file in (ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")):
        for tier in re.findall(r"tests/run\.sh (\w+)", file.read_text(encoding="utf-8")):
            assert tier == "static" or (ROOT / "tests" / tier).is_dir(), (file, tier)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone after the set-up."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "shared").symlink_to(ROOT / "shared")
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is committed, in a folder with a space in its name. test_setup.py installs; here the packages are ours."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout, so there is nothing to clone")
    root = tmp_path / "a clone"
    (tmp_path / "gitconfig").write_text("[safe]\n\tdirectory = *\n")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig")}
    subprocess.run(["git", "clone", "--quiet", ROOT, root], env=environment, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    (site,) = root.glob(".venv/lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    subprocess.run(["bash", "-e", "-c", FINISH_SET_UP], cwd=root, check=True)
    (root / "launch/presets/embedded.toml").write_text(SHORT)
    return root


def typed(commands: str, folder: Path, **variables: str) -> str:
    """What the commands print; each must succeed."""
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env={**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def section(title: str, checkout: Path) -> str:
    return typed("".join(blocks()[title]), checkout, PYTHONPATH=str(ROOT))


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_commands(clone: Path) -> None:
    commands = "".join(blocks()["Two commands"]).splitlines(keepends=True)
    ours = [line for line in commands if not line.startswith(f"{OWN_CALL} ")]
    assert len(ours) == len(commands) - 1, "this test runs inside tests/run.sh and types everything else"
    said = typed("".join(ours), clone, PYTHONPATH="")
    unnamed, first = sorted((clone / "runs").iterdir(), key=lambda run: run.name == "first")
    assert (first.name, len(rows(unnamed)), len(rows(first))) == ("first", 3, 60)
    assert json.loads((clone / "my-adapter/adapter_config.json").read_text())["peft_type"] == "LORA"
    assert "run directory  runs/" in said, "the plan of the dry run"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train_your_own_model(checkout: Path) -> None:
    said = section("Train your own model", checkout)
    assert len(rows(checkout / "runs/model")) == 6
    assert "####" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_data(checkout: Path) -> None:
    said = section("Your own data", checkout)
    assert "train     53 tasks" in said and "held out  5 tasks" in said and "test      60 tasks" in said
    assert "as the model sees it" in said and "Answer with a number." in said
    assert '"outcome": "correct", "score": 1.0, "final_answer": "18"' in said
    assert len(rows(checkout / "runs/data")) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_reward(checkout: Path) -> None:
    section("Your own reward", checkout)
    found = rows(checkout / "runs/reward")
    assert len(found) == 4
    for row in found:
        assert 0.0 < row["reward/brevity"] < 1.0 and row["reward/think_tags"] == 0.0
        parts = row["reward/score"] + 0.1 * row["reward/brevity"] - 0.05 * row["reward/length"]
        assert row["reward/mean"] == pytest.approx(parts)
