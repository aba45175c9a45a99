"""Elsewhere than on Linux: one sentence with a way out, before anything is imported that such a system has not."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.__main__ import main
from shared.errors import UserError
from shared.process.supported_system import refuse_other_systems

ROOT = Path(__file__).resolve().parents[3]
NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "termios")


def test_linux_is_not_refused() -> None:
    refuse_other_systems("linux")


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("darwin", ("This is macOS", "needs Linux", "docker/")),
        ("win32", ("This is Windows", "needs Linux", "launch/run.ps1")),
        ("freebsd14", ("'freebsd14'", "needs Linux", "virtual machine")),
    ],
)
def test_others_are_refused_with_the_reason_and_a_way_out(system: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        refuse_other_systems(system)
    assert [word for word in words if word not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", [["run"], ["resume", "runs/first"], ["doctor"], ["generate", "--prompt", "x"]])
def test_a_command_ends_with_that_sentence(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, system="darwin") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: This is macOS") and err.count("\n") == 1


def test_a_typing_error_is_answered_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"], system="darwin") == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_nothing_is_imported_that_windows_has_not() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_ON_WINDOWS}))
from launch.__main__ import main
sys.exit(main(["run"], system="win32"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: This is Windows")
