"""Through real processes: a reward that no gradient survives, from the command that stops to the one that goes on."""

import json
from pathlib import Path

import pytest

from launch.presets.load import load_config
from learner.curriculum.curriculum import Shuffled
from learner.tasks.tasks import load_tasks
from shared.base.cache import cached_base
from shared.model.prompt import load_prompter
from tests.support.runs import SMALL, launch, rows, sets, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = """
def reward(prompts, completions, question, **columns):
    return [2e8 * (len(text) % 3) if asked == {question!r} else float(len(text) % 2)
            for text, asked in zip(completions, question)]
"""


def question_of(step: int) -> str:
    """One that is asked in this step of the small run."""
    config = load_config("embedded")
    tasks = load_tasks(config.tasks, load_prompter(cached_base(config.model).folder), config.verifier.kind).train
    curriculum = Shuffled(len(tasks), config.run.seed)
    asked = [curriculum.next(SMALL["rollout.prompts"]) for _ in range(step)]
    return tasks[asked[-1][1]].columns["question"]


@pytest.mark.long
def test_a_reward_beyond_measure_is_set_aside_replayed_alone_and_left_out(run_path: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD.format(question=question_of(3)))
    config = SMALL | {
        "verifier.kind": "callable",
        "verifier.form": "text",
        "verifier.function": f"{tmp_path / 'reward.py'}:reward",
        "reward.advantage": "mean",
        "guard.grad_norm_limit": 1e5,
        "checkpoint.every": 2,
    }
    stopped = launch("run", "embedded", "--out", run_path, *sets(config))
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    sentence = stopped.stderr.splitlines()[-1]
    assert sentence.startswith("error: Step 3: the gradient norm is ") and "guard.grad_norm_limit is 100000" in sentence
    assert "sample train/000002/0001[" in sentence and "Traceback" not in stopped.stderr
    kept = run_path / "quarantine/step-000003.safetensors"
    assert f"launch replay --batch {kept}`" in sentence and f"launch resume {run_path} --on-fault skip`" in sentence
    assert [row["step"] for row in rows(run_path)] == [1, 2] and summary(run_path)["status"] == "failed"

    alone = launch("replay", "--batch", kept)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    report = json.loads(alone.stdout.splitlines()[-1])
    assert report["reproduced"] and report["kind"] == "spike" and report["group"] == "train/000002/0001"

    resumed = launch("resume", run_path, "--on-fault", "skip")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [row["groups/quarantined"] for row in rows(run_path)] == [0, 0, 4, 0, 0, 0]
    assert summary(run_path)["status"] == "done"
    replayed = launch("replay", run_path)
    assert replayed.returncode == 0 and json.loads(replayed.stdout.splitlines()[-1])["match"], replayed.stderr
