"""A run with an environment: both processes, a kill between, resume, and a replay that needs no environment."""

import json
import shutil
from pathlib import Path

import pytest

from protocol.messages import Outcome
from shared.embedded import EMBEDDED_DIR
from tests.support.runs import SMALL, kill, launch, num_rows, processes_of, replayed, rows, sets, start, wait_until
from tests.unit.shared.test_conversation import FORGETFUL, HERMES

# On a busy machine a run takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = '''
class Env:
    def reset(self, question, **columns):
        return " Take care."

    def add(self, left: int, right: int) -> int:
        """
        Adds two numbers.

        Args:
            left: One of them.
            right: The other.
        """
        return left + right

    def get_reward(self):
        import os
        return float(os.urandom(1)[0] % 2)
'''


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose template shows tools, and an environment."""
    shutil.copytree(EMBEDDED_DIR, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(HERMES)
    (tmp_path / "env.py").write_text(SOURCE)
    return tmp_path


def words(files: Path) -> list[str]:
    keys = {
        "model.path": str(files / "model"),
        "model.cache_dir": str(files / "cache"),
        "environment.function": f"{files}/env.py:Env",
        "environment.step_limit_s": 120.0,
        "verifier.kind": "environment",
        "rollout.prompts": 3,
        "rollout.max_new_tokens": 48,
    }
    return ["embedded", "--out", str(files / "run"), *sets(SMALL | keys)]


@pytest.mark.long
def test_a_run_is_killed_resumed_and_replayed(files: Path) -> None:
    """The rewards are drawn at random: only the journal knows them."""
    out = files / "run"
    running = start("run", *words(files))
    wait_until(lambda: num_rows(out) >= 2, "two steps", seconds=400)
    kill([running.pid, *processes_of(out, "learner"), *processes_of(out, "actor")])
    running.communicate()
    (resumed := launch("resume", out, wait_s=400)).check_returncode()
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6], resumed.stderr
    assert all(row["turns/mean"] == 1.0 for row in rows(out))
    assert all(row[f"outcome/{Outcome.ERROR}"] == 0 for row in rows(out))
    assert any(0 < row["reward/mean"] < 1 for row in rows(out))
    sample = json.loads((out / "rollouts.jsonl").read_text().splitlines()[0])["samples"][0]
    assert [turn["sampled"] for turn in sample["turns"]] == [False, True]
    assert sample["turns"][0]["text"].startswith(" Take care.")
    (files / "env.py").unlink()
    assert replayed(out)["match"]


@pytest.mark.long
def test_a_template_that_rewrites_turns_is_refused(files: Path) -> None:
    (files / "model" / "chat_template.jinja").write_text(FORGETFUL)
    done = launch("run", *words(files))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "shows turn 1 in another way once turn 2 is there" in done.stderr


def test_an_environment_that_cannot_be_used_is_one_sentence(files: Path) -> None:
    (files / "env.py").write_text("class Env:\n    pass\n")
    done = launch("run", *words(files))
    assert done.returncode == 2 and "has no method `reset`" in done.stderr and "Traceback" not in done.stderr
