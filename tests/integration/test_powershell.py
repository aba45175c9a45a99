"""launch/run.ps1 in a real PowerShell, with a stand-in for wsl.exe. Without PowerShell it is skipped; GitHub's runners
have it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import ROOT

SCRIPT = ROOT / "launch" / "run.ps1"
WSL = """\
#!/bin/sh
[ "$1" = --distribution ] && shift 2
shift
case $1 in
uname) echo "$KERNEL"; [ -n "$KERNEL" ] ;;
wslpath) echo "$3" | sed 's|^C:/|/mnt/c/|' ;;
bash) shift; printf '<%s>' "$@"; exit 7 ;;
esac
"""
"""Answers as WSL does, and shows what it was given to start."""
WSL2 = "5.15.167.4-microsoft-standard-WSL2"
needs_powershell = pytest.mark.skipif(not shutil.which("pwsh"), reason="PowerShell (pwsh) is not installed")


def started(folder: Path, *words: str, kernel: str | None = WSL2) -> subprocess.CompletedProcess[str]:
    """kernel: what the Linux in WSL calls itself; empty where no distribution is installed, None without WSL."""
    powershell = shutil.which("pwsh")
    assert powershell
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sh", "sed"):
        (programs / name).symlink_to(shutil.which(name) or name)
    if kernel is not None:
        (programs / "wsl.exe").write_text(WSL)
        (programs / "wsl.exe").chmod(0o755)
    argv = [powershell, "-NoProfile", "-NonInteractive", "-File", str(SCRIPT), *words]
    environment = os.environ | {"PATH": str(programs), "KERNEL": kernel or "", "HOME": str(folder)}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@needs_powershell
@pytest.mark.slow
def test_arguments_reach_run_sh_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    done = started(tmp_path, "C:\\mine\\my.toml", "--out", "runs/two words", "--set", "optimizer.lr=3e-4")
    words = "</mnt/c/mine/my.toml><--out><runs/two words><--set><optimizer.lr=3e-4>"
    assert (done.returncode, done.stdout) == (7, f"<{ROOT}/launch/run.sh>{words}")


@needs_powershell
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (".\\my.toml ..\\mine\\x.toml --out runs\\first", "<./my.toml><../mine/x.toml><--out><runs/first>"),
        ("embedded --out=runs\\first", "<embedded><--out=runs/first>"),
        ("embedded --out=C:\\mine\\first", "<embedded><--out=/mnt/c/mine/first>"),
        ("embedded --set a=\\boxed .\\d+", "<embedded><--set><a=\\boxed><./d+>"),
    ],
)
def test_paths_of_windows_become_paths_of_linux(tmp_path: Path, words: str, expected: str) -> None:
    done = started(tmp_path, *words.split())
    assert (done.returncode, done.stdout) == (7, f"<{ROOT}/launch/run.sh>{expected}")


@needs_powershell
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (None, "this Windows has no WSL; run 'wsl --install'"),
        ("", "WSL starts no Linux here; run 'wsl --install -d Ubuntu'"),
        ("4.4.0-19041-Microsoft", "is not one of WSL2; run 'wsl --set-version Ubuntu 2'"),
    ],
)
def test_what_is_missing_is_one_sentence(tmp_path: Path, kernel: str | None, words: str) -> None:
    done = started(tmp_path, "embedded", kernel=kernel)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_it_can_be_read_by_every_powershell() -> None:
    """Windows PowerShell 5.1 reads a file without a mark as the code page of its machine, so only ASCII is the same."""
    text = SCRIPT.read_bytes()
    assert text.isascii() and b"\r" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert (SCRIPT.parent / "run.sh").is_file() and b"'run.sh'" in text


def test_git_for_windows_keeps_the_line_ends_that_bash_needs() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    asked = [
        "git",
        "-c",
        "safe.directory=*",
        "check-attr",
        "eol",
        "launch/run.sh",
        "shared/embedded/model/tokenizer.json",
    ]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("eol: lf") == 2
