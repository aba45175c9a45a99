"""What completion offers, without a shell. tests/integration/test_shells.py presses TAB in real ones."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.completion import SCRIPTS, candidates, candidates_for_bash, main, split
from tests.support.config_keys import PINNED

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with two runs, one of them in runs/, and other things."""
    for run in ("mine", "runs/first"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").write_text("{}")
    for folder in ("data", ".hidden"):
        (tmp_path / folder).mkdir()
    for file in ("my.toml", "other.yaml", "notes.txt"):
        (tmp_path / file).write_text("")
    return tmp_path


def offered(line: str, here: Path) -> list[str]:
    """For `tandem LINE`, whose last word is being typed."""
    return list(candidates(split(f"tandem {line}")[1:], here))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ru", ["run"]),
        ("re", ["resume", "replay"]),
        ("run emb", ["embedded"]),
        ("run --dry", ["--dry-run"]),
        ("export --as ", ["peft", "merged", "gguf-ready"]),
        ("export runs/first --dtype ", ["bf16", "fp32"]),
        ("eval runs/first --checkpoint ", ["best", "latest"]),
        ("resume runs/first --on-fault s", ["stop", "skip"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("run --set lora.ra", ["lora.rank=", "lora.ranks="]),
        ("run --set model.quantization=", ["model.quantization=nf4", "model.quantization=none"]),
        ("data --set lora.rslora=t", ["lora.rslora=true"]),
        ("run --set optimizer.lr=", []),
        ("run --seed ", []),
        ("trian ", []),
        ("key runs/first ", []),
        ("replay runs/first ", []),
    ],
)
def test_words_that_fit(line: str, words: list[str], here: Path) -> None:
    found = offered(line, here)
    assert [word for word in words if word not in found] == []
    assert not words or len(found) <= 4, found
    assert words or found == []


def test_a_flag_is_offered_in_one_spelling(here: Path) -> None:
    assert offered("run --num-g", here) == ["--num-generations"]


def test_every_key_of_the_configuration_is_offered_with_its_default(here: Path) -> None:
    found = candidates(["run", "--set", ""], here)
    assert found.keys() == {f"{key}=" for key in PINNED}
    assert found["lora.rank="] == "default: 16"


def test_a_configuration_is_a_preset_or_a_file_for_one(here: Path) -> None:
    found = offered("run ", here)
    assert {"embedded", "gsm8k_8gb", "my.toml", "other.yaml", "data/"} <= set(found)
    assert "notes.txt" not in found and ".hidden/" not in found
    assert offered("plan m", here) == ["math_8gb", "math_8gb_embedded", "mine/", "my.toml"]


def test_run_folders_are_those_with_a_run(here: Path) -> None:
    assert offered("resume ", here) == ["mine", "runs/first"]
    assert offered("compare mine ", here) == ["mine", "runs/first"]
    assert offered("why ru", here) == ["runs/"]
    assert offered("why runs/", here) == ["runs/first"]
    assert offered("why da", here) == ["data/"]


def test_a_value_is_not_a_positional(here: Path) -> None:
    assert offered("resume --steps 80 ", here) == ["mine", "runs/first"]
    assert offered("resume mine --trace ", here) == []


def test_python_m_launch_is_the_same_command(here: Path) -> None:
    line = "run --set loss.ki"
    for called in ("tandem", "python -m launch", ".venv/bin/python3 -m launch"):
        assert list(candidates_for_bash(f"{called} {line}", here)) == ["loss.kind="]


def test_bash_gets_what_follows_the_equals_sign(here: Path) -> None:
    assert list(candidates_for_bash("tandem run --set loss.kind=gr", here)) == ["grpo"]
    (here / "two words").mkdir()
    for typed in ("tw", r"two\ wo"):
        assert list(candidates_for_bash(f"tandem why {typed}", here)) == [r"two\ words/"]


def test_bash_still_sees_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "two ~words").mkdir()
    assert list(candidates_for_bash("tandem why ~/runs/fi", here)) == ["~/runs/first"]
    assert list(candidates_for_bash("tandem why ~/tw", here)) == [r"~/two\ \~words/"]


def test_a_user_without_a_home_has_no_files_there(here: Path) -> None:
    assert offered("why ~nobody-of-this-name/", here) == []


def test_an_open_quote_is_no_error(here: Path) -> None:
    assert split("tandem generate --prompt 'Tom has") == ["tandem", "generate", "--prompt", "Tom has"]
    assert list(candidates_for_bash("tandem generate --prompt 'Tom has", here)) == []
    assert split("tandem run ") == ["tandem", "run", ""]


def test_the_answer_comes_without_torch_and_with_what_each_word_is(here: Path) -> None:
    code = "import sys; from launch.completion import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, "tandem", "why", ""]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "mine\trun\nruns/first\trun\nFalse\n"


def test_the_command_line_does_not_load_it() -> None:
    code = "import sys, launch.__main__, launch.cli; print('launch.completion' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_asks_this_interpreter(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.__main__ import main as tandem

    assert tandem(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m launch.completion" in script
    assert "ASK" not in script


def test_the_words_of_a_shell_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tandem"]) == 0
    assert capsys.readouterr().out.startswith("run\ttrain a new run\n")
