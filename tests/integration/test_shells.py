"""Completion in real shells: each has a terminal, in which TAB is pressed. One that is not installed is skipped.

`tandem` is a function that shows its arguments, so that the completed line can be read after Enter.
"""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.completion import SCRIPTS
from tests.support.runs import ROOT

STARTS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
}
SHOW = {
    "bash": 'tandem() { printf \'<%s>\' "$@"; echo; }; python() { tandem "$@"; }',
    "zsh": 'tandem() { printf \'<%s>\' "$@"; echo }; python() { tandem "$@" }; autoload -Uz compinit; compinit -u -D',
    "fish": "function tandem; printf '<%s>' $argv; echo; end; function python; tandem $argv; end",
}
SOURCE = {"bash": 'eval "$({})"', "zsh": 'eval "$({})"', "fish": "{} | source"}
LINES = {
    "tandem ru\tembe\t": "<run><embedded>",
    "tandem resume runs/fi\t": "<resume><runs/first>",
    "tandem export --as mer\t": "<export><--as><merged>",
    "tandem run --set loss.ki\tcis\t": "<run><--set><loss.kind=cispo>",
    "python -m launch wh\tmi\t": "<-m><launch><why><mine>",
    "tandem generate --in not\t": "<generate><--in><notes.txt>",
    "tandem why ~/runs/fi\t": "<why><{home}/runs/first>",
    "tandem watch two\tdee\t": "<watch><two words/deep>",
}
"""What is typed -> the arguments of the command then."""


class Terminal:
    """What a person sees and types."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        """At a prompt. The shell handles one key after the other, however long a TAB takes."""
        self.read_until_quiet()
        os.write(self.descriptor, text.encode())

    def read_until_quiet(self, quiet_s: float = 0.3) -> None:
        while select.select([self.descriptor], [], [], quiet_s)[0]:
            self.seen += os.read(self.descriptor, 65536).decode(errors="replace")

    def expect(self, text: str, wait_s: float = 90.0) -> None:
        end = time.monotonic() + wait_s
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.seen}"
            if select.select([self.descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self.descriptor, 65536).decode(errors="replace")


@contextmanager
def terminal(shell: str, folder: Path) -> Iterator[Terminal]:
    """A shell of its own session, with nothing of its user's start-up files."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "PS1": "> "}
    argv = ["setsid", "--ctty", *STARTS[shell]]
    with subprocess.Popen(argv, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            yield Terminal(ours)
        finally:
            os.close(ours)
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shell", SCRIPTS)
def test_tab_completes_the_line(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed; apt-get install {shell}")
    for run in ("mine", "runs/first", "two words/deep"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    command = f"env PYTHONPATH={ROOT} {sys.executable} -m launch completion {shell}"
    with terminal(shell, tmp_path) as screen:
        screen.type(f"{SHOW[shell]}\n")
        screen.type(f"{SOURCE[shell].format(command)}; echo rea''dy\n")
        screen.expect("ready")
        for typed, arguments in LINES.items():
            screen.type(f"{typed}\n")
            screen.expect(arguments.format(home=tmp_path))
