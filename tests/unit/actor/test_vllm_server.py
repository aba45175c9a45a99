"""What a vLLM server must be: each way in which it is not gets one sentence, before anything is sampled."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor.engines.server.adapter_files import AdapterFiles, has_ended
from actor.engines.server.completions import NoReply, message_of
from shared.errors import ConfigError
from tests.support.fakes import ScriptedEngine
from tests.support.served_engine import Options, ServedEngine
from tests.unit.actor.test_server_engine import line_to, needs, word


@pytest.fixture
def server() -> Iterator[ServedEngine]:
    made = ServedEngine(ScriptedEngine(), word, Options(key="secret"))
    os.environ["TEST_SERVER_KEY"] = "secret"
    yield made
    del os.environ["TEST_SERVER_KEY"]
    made.close()


def check(server: ServedEngine, folder: Path, **changes: Any) -> None:
    line_to(server.url, folder, needs(**changes)).server.check()


def test_a_server_that_has_everything_passes_and_keeps_nothing(server: ServedEngine, tmp_path: Path) -> None:
    check(server, tmp_path, temperature=0.7)
    assert len(server.loads) == len(server.unloaded) == 1 and len(server.adapters) == 1


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"max_model_len": 63}, {}, r"up to 63 tokens and this run may need 64; start it with --max-model-len 64"),
        ({"enable_lora": False}, {}, r"started without; start it with --enable-lora\."),
        ({"runtime_updates": False}, {}, r"started without; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1\."),
        ({"max_lora_rank": 8}, {}, r"rank is larger than it has room for; start it with --max-lora-rank 16\."),
        ({"processed": False}, {"temperature": 0.7}, r"samples at 0\.7; start it with --logprobs-mode processed"),
        ({"vocabulary": 100}, {}, r"out of vocabulary\), so it serves another model; serve /models/base there"),
        ({"key": "other"}, {}, r"refuses the key .*set the variable TEST_SERVER_KEY"),
    ],
)
def test_what_a_server_lacks_is_said_with_its_remedy(
    server: ServedEngine, tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    for name, value in options.items():
        setattr(server.options, name, value)
    with pytest.raises(ConfigError, match=sentence):
        check(server, tmp_path, **changes)
    assert server.drawn == [] or "temperature" in changes


def test_log_probs_before_temperature_are_those_after_it_at_1(server: ServedEngine, tmp_path: Path) -> None:
    server.options.processed = False
    check(server, tmp_path)


def test_other_tokens_are_another_model(server: ServedEngine, tmp_path: Path) -> None:
    server.spelling = lambda token: "Hund"
    with pytest.raises(ConfigError, match=r"other tokens than the run: .* and 'Hund' there; serve /models/base there"):
        check(server, tmp_path)


def test_a_folder_that_the_server_does_not_see(server: ServedEngine, tmp_path: Path) -> None:
    line = line_to(server.url, tmp_path, needs())
    line.server.files.there = "/not/there"
    with pytest.raises(ConfigError, match=r"cannot load /not/there/policy-0-.*server\.folder and server\.seen_as must"):
        line.server.check()


def test_a_server_of_something_else(server: ServedEngine, tmp_path: Path) -> None:
    line = line_to(f"{server.url}/deeper", tmp_path, needs())
    with pytest.raises(ConfigError, match=r"refused a request \(404 Not Found: Not Found\); give the address of vLLM"):
        line.server.check()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token_ids": None}, "without the ids and log-probs"),
        ({"logprobs": None}, "without the ids and log-probs"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "without the ids and log-probs"),
        (
            {"token_ids": [3, 9], "logprobs": {"token_logprobs": [-1.0, -1.0]}},
            r"ended a completion after 2 of 8 tokens with token 9.*--generation-config vllm",
        ),
    ],
)
def test_a_completion_that_is_not_whole_is_not_used(
    server: ServedEngine, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    server.options.changed = lambda choice: choice.update(change)
    one = line_to(server.url, tmp_path, needs()).server
    one.check()
    with pytest.raises(ConfigError, match=sentence):
        one.draw([1, 2], 3, 1.0, 8)


def test_a_completion_that_was_given_up_is_asked_for_again(server: ServedEngine, tmp_path: Path) -> None:
    aborted = {"token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}
    server.options.changed = lambda choice: choice.update(aborted)
    one = line_to(server.url, tmp_path, needs()).server
    one.check()
    with pytest.raises(NoReply, match="given up after 1 tokens"):
        one.draw([1, 2], 3, 1.0, 8)


def test_a_server_that_was_only_silent_keeps_no_old_adapter(server: ServedEngine, tmp_path: Path) -> None:
    one = line_to(server.url, tmp_path, needs()).server
    one.check()
    one.install(1, one.probe())
    (old,) = [name for name in server.adapters if name.startswith("policy-1")]
    one.check()
    assert old not in server.adapters and one.adapter is None
    assert list(tmp_path.rglob("policy-*")) == []


def test_the_command_has_all_that_is_checked() -> None:
    command = needs(serves="/base", rank=32, tokens=700).command
    assert command == (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve /base --dtype float32 --max-model-len 700 --enable-lora"
        " --max-lora-rank 32 --logprobs-mode processed_logprobs --generation-config vllm"
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "no such model"}}', "no such model"),
        ('{"error": "as planned"}', "as planned"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("<html>a proxy</html>", "<html>a proxy</html>"),
        ("[1]", "[1]"),
    ],
)
def test_what_a_server_says_about_an_error_is_its_sentence(body: str, said: str) -> None:
    assert message_of(body) == said


@pytest.mark.parametrize("is_there", [True, False])
def test_at_the_end_nothing_is_left_on_the_server_or_in_the_folder(
    server: ServedEngine, tmp_path: Path, is_there: bool
) -> None:
    line = line_to(server.url, tmp_path, needs())
    line.server.install(3, b"adapter")
    if not is_there:
        server.close()
    line.server.close()
    assert list(tmp_path.iterdir()) == [] and len(server.unloaded) == is_there


# --- folders


def test_the_folders_of_a_killed_actor_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = AdapterFiles(tmp_path, "", b"{}")
    left, running = (tmp_path / f"{mine.owner}-{number}-ab" for number in (ended.pid, os.getpid()))
    foreign = tmp_path / f"tandem-elsewhere-{ended.pid}-ab"
    # A machine whose name is this one's and a number: its actor 7 runs.
    numbered = tmp_path / f"{mine.owner}-{ended.pid}-7-ab"
    for folder in (left, running, foreign, numbered):
        folder.mkdir()
    mine.open()
    assert not left.exists() and running.exists() and foreign.exists() and numbered.exists() and mine.here.is_dir()
    assert has_ended(str(ended.pid)) and not has_ended("1") and not has_ended("no number")


def test_an_adapter_appears_whole_under_the_name_that_the_server_has_for_its_folder(tmp_path: Path) -> None:
    files = AdapterFiles(tmp_path, "/mnt/adapters/", b'{"r": 8}')
    files.open()
    written = files.write(3, b"bytes")
    assert written.path == f"/mnt/adapters/{files.here.name}/{written.name}"
    found = {path.name: path.read_bytes() for path in (files.here / written.name).iterdir()}
    assert found == {"adapter_model.safetensors": b"bytes", "adapter_config.json": b'{"r": 8}'}
    files.remove(written)
    assert list(files.here.iterdir()) == []
    files.close()
    assert not files.here.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server\.folder = '.*/file' cannot be written"):
        AdapterFiles(tmp_path / "file", "", b"").open()
