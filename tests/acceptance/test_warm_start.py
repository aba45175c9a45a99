"""From a base that answers nothing: a run alone learns nothing, a warm start and then a run reach a reward of 0.90.

The base is made here with the product itself: the embedded model learns to say that it does not know, and the adapter
is merged into it. What it could do is still there, but no sample shows it, so no group teaches.
"""

import json
from pathlib import Path

import pytest

from learner.tasks.word_problems import problems
from tests.support.runs import launch, rows, sets, summary

WINDOW = 5


def done(*words: str | Path, **given: object) -> None:
    ended = launch(*words, *sets({key.replace("__", "."): value for key, value in given.items()}), wait_s=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("silent")
    asked = [problem.question for problem in problems("train", count=1024, seed=0, levels=(1, 2))]
    file = folder / "silence.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "solution": "I do not know."}) for q in asked))
    small: dict[str, object] = {"lora__rank": 4, "lora__alpha": 8.0, "eval__problems": 0}
    done("sft", "embedded", "--out", folder / "sft", "--steps", "40", sft__source=str(file), **small)
    done("export", folder / "sft", "--as", "merged", "--dtype", "fp32", "--out", folder / "model")
    return folder / "model"


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_a_base_that_answers_nothing_learns_after_a_warm_start(tmp_path: Path, silent: Path) -> None:
    alone, warm, trained = (tmp_path / name for name in ("alone", "warm", "trained"))
    model = str(silent)
    done("run", "embedded", "--out", alone, "--steps", "4", model__path=model, eval__problems=0)
    assert all(row["reward/mean"] == 0.0 and row["groups/idle"] == row["groups/total"] for row in rows(alone))
    done("sft", "embedded", "--out", warm, "--steps", "12", model__path=model, eval__problems=64)
    assert summary(warm)["eval"]["base"]["greedy"]["accuracy"] == 0.0
    done("run", "embedded", "--out", trained, model__path=model, lora__start_from=str(warm), eval__problems=128)
    rewards = [row["reward/mean"] for row in rows(trained)]
    means = [sum(rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(rewards) + 1)]
    assert 0.2 < rewards[0] < 0.8 and max(means) >= 0.9, means
    before, after = (summary(trained)["eval"][label]["greedy"] for label in ("base", "final"))
    assert after["low"] > before["high"]
