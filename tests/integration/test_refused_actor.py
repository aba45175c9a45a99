"""`python -m actor --connect` as a person types it, at a live learner: with no key, with a wrong or an open one."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from launch.__main__ import main
from launch.presets.load import load_config
from protocol.access.keys import create_keys
from shared.config.load import config_to_json
from tests.support.live_run import live_run

ROOT = Path(__file__).resolve().parents[2]


def actor(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """To its end."""
    argv = [sys.executable, "-m", "actor", *map(str, words)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def foreign_key(folder: Path, learner_public: str | None) -> Path:
    """The key of another run, perhaps bent to trust this run's learner."""
    create_keys(folder)
    file = folder / "actor0.json"
    if learner_public:
        content = msgspec.json.decode(file.read_bytes()) | {"learner_public": learner_public}
        file.write_bytes(msgspec.json.encode(content))
    return file


@pytest.mark.parametrize(
    "bent",
    [
        pytest.param(False, id="key of another run", marks=pytest.mark.long),
        pytest.param(True, id="key that is not allowed"),
    ],
)
def test_a_wrong_key_ends_the_actor_with_a_sentence_and_not_the_run(tmp_path: Path, bent: bool) -> None:
    config = tmp_path / "config.json"
    # A connection that ends without a reason is blamed on the key after silence_s: a forwarder may do the same.
    config.write_bytes(config_to_json(load_config("embedded", ["link.silence_s=6"])))
    with live_run(tmp_path) as run:
        public = msgspec.json.decode((run.keys / "learner.json").read_bytes())["public"] if bent else None
        key = foreign_key(tmp_path / "foreign", public)
        done = actor("--connect", run.endpoint, "--key", key, "--config", config)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: The learner at tcp://") and str(key) in last
    assert "launch key RUN NAME" in last and "Traceback" not in done.stderr


def test_without_a_key_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = actor("--connect", "tcp://127.0.0.1:9", "--config", tmp_path / "config.json")
    assert done.returncode == 2 and "python -m launch key RUN NAME" in done.stderr


def test_a_configuration_that_no_learner_has_completed_is_copied_again(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(config_to_json(load_config("embedded", here=False)))
    key = foreign_key(tmp_path / "foreign", None)
    done = actor("--connect", "tcp://127.0.0.1:9", "--key", key, "--config", config)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: {config} belongs to a run that was prepared") and "copy" in last


def test_an_actor_of_a_prepared_run_waits_for_the_learner_as_long_as_for_any(tmp_path: Path) -> None:
    run = tmp_path / "run"
    silence = ("--set", "link.silence_s=3")
    assert main(["run", "--prepare", "--out", str(run), *silence]) == 0
    done = actor("--run", run)
    assert done.returncode == 2
    assert "; start the learner." in done.stderr.strip().splitlines()[-1]


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(config_to_json(load_config("embedded")))
    key = foreign_key(tmp_path / "foreign", None)
    key.chmod(0o644)
    done = actor("--connect", "tcp://127.0.0.1:9", "--key", key, "--config", config)
    assert done.returncode == 2 and f"chmod 600 {key}" in done.stderr


def test_an_actor_whose_servers_sample_needs_no_card(tmp_path: Path) -> None:
    """It comes as far as its server, which is not there."""
    config = tmp_path / "config.json"
    keys = ("actor.engine=vllm_server", 'server.urls=["http://127.0.0.1:9/v1"]', "server.patience_s=0.1")
    config.write_bytes(config_to_json(load_config("embedded", [*keys, "compute.device=cuda", "compute.dtype=fp32"])))
    key = foreign_key(tmp_path / "foreign", None)
    done = actor("--connect", "tcp://127.0.0.1:9", "--key", key, "--config", config)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "The vLLM server at http://127.0.0.1:9/v1 does not reply" in last
