"""On-policy distillation as a user starts it: an adapter teaches another without a reward, killed and replayed."""

import json
import shutil
from pathlib import Path

import pytest

from learner.wiring import build_trainer, load_trained_policy
from shared.config.load import resolve
from shared.embedded import EMBEDDED_DIR
from shared.model.prompt import load_prompter
from tests.integration.test_bad_input import refused
from tests.support.fakes import shake
from tests.support.runs import (
    SMALL,
    free_port,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    rows,
    sets,
    start,
    summary,
    wait_until,
)
from tests.support.teacher_server import TeacherServer, logprobs_of

KEYS = SMALL | {"loss.kind": "opd", "optimizer.lr": 1e-3, "rollout.max_new_tokens": 64}


@pytest.mark.long
def test_an_adapter_teaches_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    teacher, whole, out = (tmp_path / name for name in ("teacher", "whole", "killed"))
    warm = SMALL | {"run.steps": 60, "optimizer.lr": 2e-3, "rollout.prompts": 16, "rollout.max_new_tokens": 64}
    assert launch("sft", "embedded", "--out", teacher, *sets(warm)).returncode == 0
    keys = KEYS | {"run.steps": 24, "teacher.adapter": str(teacher), "rollout.prompts": 8, "rollout.group": 8}
    done = launch("run", "embedded", "--out", whole, *sets(keys))
    assert done.returncode == 0, done.stdout + done.stderr
    kls = [row["teacher/kl"] for row in rows(whole)]
    rewards = [row["reward/mean"] for row in rows(whole)]
    # Not to zero: where the policy is sure of another opening word than the teacher, it never samples the teacher's.
    assert sum(kls[-5:]) < 0.95 * sum(kls[:5]) and sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, (kls, rewards)
    assert all(row["groups/idle"] == 0 for row in rows(whole))
    begun = start("run", "embedded", "--out", out, *sets(keys))
    wait_until(lambda: num_rows(out) >= 9, "nine steps")
    kill(processes_of(out, "learner"))
    begun.communicate(timeout=60)
    shutil.rmtree(teacher)
    assert launch("resume", out).returncode == 0
    assert summary(out)["adapter_sha256"] == summary(whole)["adapter_sha256"]
    assert replayed(out)["match"]


@pytest.mark.long
def test_a_teacher_that_is_told_the_solution(tmp_path: Path) -> None:
    out = tmp_path / "told"
    keys = KEYS | {"run.steps": 3, "teacher.prompt": "#### {answer}", "tasks.max_prompt_tokens": 200}
    assert launch("run", "embedded", "--out", out, *sets(keys)).returncode == 0
    assert all(row["teacher/kl"] is not None for row in rows(out)) and replayed(out)["match"]
    assert launch("generate", out, "--prompt", "Tom has 6 coins. He finds 4. How many coins now?").returncode == 0


def test_a_refused_update_is_repeated_with_its_teacher(tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = KEYS | {"teacher.prompt": "#### {answer}", "guard.grad_norm_limit": 1e-9}
    refused(launch("run", "embedded", "--out", out, *sets(keys)), "guard.grad_norm_limit")
    done = launch("replay", "--batch", next((out / "quarantine").glob("*.safetensors")))
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["reproduced"], done.stdout + done.stderr


@pytest.mark.long
def test_a_refused_update_with_tools_is_repeated_with_its_teacher(tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = KEYS | {"teacher.prompt": "#### {answer}", "guard.grad_norm_limit": 1e-9, "tasks.max_prompt_tokens": 400}
    refused(launch("run", "calculator", "--out", out, *sets(keys)), "guard.grad_norm_limit")
    done = launch("replay", "--batch", next((out / "quarantine").glob("*.safetensors")))
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["reproduced"], done.stdout + done.stderr


@pytest.mark.long
def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(KEYS | {"teacher.prompt": "{hint}"}))
    refused(done, "teacher.prompt", "{hint}")


REMOTE = KEYS | {"run.steps": 4, "rollout.max_new_tokens": 24}


def teaching(port: int = 0) -> TeacherServer:
    """The embedded base with an adapter of its own, behind a URL."""
    config = resolve({"compute": {"learner_threads": 1, "actor_threads": 1, "dtype": "fp32", "device": "cpu"}})
    policy = load_trained_policy(config, "cpu")
    shake(policy, 3)
    forward_pass = build_trainer(policy, config, lambda: None).batches.forward_pass
    prompter = load_prompter(EMBEDDED_DIR)
    return TeacherServer(logprobs_of(forward_pass), lambda token: prompter.as_the_model_sees([token]), port)


@pytest.mark.long
def test_a_teacher_elsewhere_is_waited_for_and_recorded(tmp_path: Path) -> None:
    whole, out, port = tmp_path / "whole", tmp_path / "waited", free_port()
    keys = REMOTE | {"teacher.url": f"http://127.0.0.1:{port}/v1"}
    log = out / "logs" / "actor0.log"
    begun = start("run", "embedded", "--out", out, *sets(keys))
    wait_until(lambda: log.exists() and "does not reply" in log.read_text(), "a teacher that is down")
    server = teaching(port)
    try:
        wait_until(lambda: num_rows(out) >= 1, "the first step")
        kill(processes_of(out, "learner"))
        begun.communicate(timeout=60)
        assert launch("resume", out).returncode == 0
        done = launch("run", "embedded", "--out", whole, *sets(keys))
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        server.close()
    assert summary(out)["adapter_sha256"] == summary(whole)["adapter_sha256"]
    assert all(row["teacher/kl"] > 0 for row in rows(out))
    assert replayed(out)["match"], "without the teacher"


@pytest.mark.long
def test_a_teacher_that_stays_away_ends_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    keys = REMOTE | {"teacher.url": f"http://127.0.0.1:{free_port()}/v1", "teacher.patience_s": 0.5}
    refused(launch("run", "embedded", "--out", tmp_path / "run", *sets(keys)), "has not replied", "nothing is lost")
