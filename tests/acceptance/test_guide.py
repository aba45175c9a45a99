"""The README's three sections for one's own model, data and reward, typed exactly as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def section(title: str) -> str:
    """The one block of commands below a heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^## {title}\n(?:(?!^## ).)*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone after the set-up."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "shared").symlink_to(ROOT / "shared")
    return tmp_path


def typed(title: str, checkout: Path) -> str:
    """What the commands print; each must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(checkout / "cache")}
    done = subprocess.run(
        ["bash", "-e", "-c", section(title)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_model(checkout: Path) -> None:
    said = typed("Train your own model", checkout)
    assert len(rows(checkout / "runs/model")) == 6
    assert "####" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_data(checkout: Path) -> None:
    said = typed("Your own data", checkout)
    assert "train     53 tasks" in said and "held out  5 tasks" in said and "test      60 tasks" in said
    assert "as the model sees it" in said and "Answer with a number." in said
    assert '"outcome": "correct", "reward": 1.0, "extracted": "18"' in said
    assert len(rows(checkout / "runs/data")) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_reward(checkout: Path) -> None:
    typed("Your own reward", checkout)
    found = rows(checkout / "runs/reward")
    assert len(found) == 4
    for row in found:
        assert 0.0 < row["reward/brevity"] < 1.0 and row["reward/think_tags"] == 0.0
        parts = row["reward/outcome"] + 0.1 * row["reward/brevity"] - 0.05 * row["reward/length"]
        assert row["reward/mean"] == pytest.approx(parts)
