"""Warm starts as a user starts them: killed and resumed, replayed, with chats and no actor, and what is refused."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_bad_input import refused
from tests.support.runs import (
    SMALL,
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

QUICK = SMALL | {"run.steps": 8, "optimizer.lr": 2e-3}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Tom has {n} coins. He finds 4. How many coins now?"},
            {"role": "assistant", "content": f"{n} + 4 = {n + 4}\n#### {n + 4}"},
            {"role": "user", "content": "Are you sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    for n in range(12)
]


def chats(folder: Path) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, CHATS)))
    return file


def learned(out: Path, **given: Any) -> str:
    """A warm start to its end; the digest of its adapter."""
    done = launch("sft", "embedded", "--out", out, *sets(QUICK | given))
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(out)["adapter_sha256"]


@pytest.mark.long
def test_killed_and_resumed_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    out, keys = tmp_path / "killed", {"run.steps": 160, "eval.problems": 8, "checkpoint.every": 20}
    expected = learned(tmp_path / "whole", **keys)
    begun = start("sft", "embedded", "--out", out, *sets(QUICK | keys))
    wait_until(lambda: num_rows(out) >= 25, "25 steps")
    kill(processes_of(out, "learner"))
    begun.communicate(timeout=60)
    assert begun.returncode == 1
    begun = start("resume", out)
    wait_until(lambda: num_rows(out) >= 60, "60 steps")
    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=60)
    assert begun.returncode == 0 and summary(out)["status"] == "stopped"
    assert launch("resume", out).returncode == 0
    assert (summary(out)["adapter_sha256"], summary(out)["steps"]) == (expected, 160)
    assert [row["step"] for row in rows(out)] == list(range(1, 161))
    assert replayed(out)["match"]
    losses = [row["loss"] for row in rows(out)]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert summary(out)["eval"].keys() == {"base", "final"}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm start from chats."""
    folder = tmp_path_factory.mktemp("chats")
    learned(folder / "warm", **{"sft.source": str(chats(folder)), "tasks.source": "embedded"})
    return folder / "warm"


def test_chats_without_an_actor(warm: Path) -> None:
    assert not (warm / "logs" / "actor0.log").exists() and not list((warm / "keys" / "allowed").glob("*"))
    assert replayed(warm)["match"]
    sampled = [json.loads(line)["samples"] for line in (warm / "rollouts.jsonl").read_text().splitlines()]
    texts = {sample["text"] for samples in sampled for sample in samples}
    assert texts <= {m["content"] for row in CHATS for m in row["messages"] if m["role"] == "assistant"} and texts
    told = [(sample["gap"], set(sample["logprob"])) for samples in sampled for sample in samples]
    assert told == [(None, {None})] * len(told), "no actor wrote them"
    assert all(len(sample["written"]) == len(sample["ids"]) for samples in sampled for sample in samples)
    assert all(one is not None and one <= 0.0 for one in sampled[0][0]["written"])


@pytest.mark.long
def test_its_result_is_used_as_that_of_a_run_is(warm: Path, tmp_path: Path) -> None:
    assert launch("generate", warm, "--prompt", "Are you sure?").returncode == 0
    assert launch("eval", warm, "--problems", "4").returncode == 0
    assert launch("export", warm, "--out", tmp_path / "exported").returncode == 0
    keys = SMALL | {"run.steps": 2, "lora.start_from": str(warm)}
    assert launch("run", "embedded", "--out", tmp_path / "run", *sets(keys)).returncode == 0
    assert replayed(tmp_path / "run")["match"]


@pytest.mark.long
def test_a_warm_start_goes_on_from_an_adapter_and_further(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    learned(first, **{"run.steps": 2})
    learned(second, **{"run.steps": 2, "lora.start_from": str(first)})
    shutil.rmtree(first)
    assert launch("resume", second, "--steps", "5").returncode == 0
    assert replayed(second)["match"] and summary(second)["steps"] == 5


@pytest.mark.long
def test_a_refused_update_is_set_aside_as_in_a_run(tmp_path: Path) -> None:
    out = tmp_path / "warm"
    keys = QUICK | {"guard.grad_norm_limit": 1e-9, "guard.on_fault": "stop"}
    said = refused(launch("sft", "embedded", "--out", out, *sets(keys)), "guard.grad_norm_limit", "quarantine")
    file = next((out / "quarantine").glob("*.safetensors"))
    assert file.name in said
    done = launch("replay", "--batch", file)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["reproduced"]


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        ("run", {"loss.kind": "sft"}, ("python -m launch sft", "loss.kind")),
        ("sft", {"sft.source": "missing.jsonl"}, ("missing.jsonl", "does not exist")),
        pytest.param(
            "sft",
            {"rollout.max_new_tokens": 1},
            ("rollout.max_new_tokens = 1", "no answer to learn"),
            marks=pytest.mark.long,
        ),
        ("sft", {"sft.solutions": "x"}, ("sft.solutions", "sft.solution")),
    ],
)
def test_what_is_refused(tmp_path: Path, command: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(launch(command, "embedded", "--out", tmp_path / "out", *sets(QUICK | given)), *words)


def test_a_plan_of_a_warm_start_says_what_is_learned_and_starts_nothing(tmp_path: Path) -> None:
    done = launch("sft", "embedded", "--out", tmp_path / "out", "--dry-run", "--set", "eval.problems=0")
    assert done.returncode == 0 and not (tmp_path / "out").exists()
    assert "the likelihood of written answers" in done.stdout and "actor0" not in done.stdout
    assert "predicted memory: " in done.stdout and "per step of updates" in done.stdout
