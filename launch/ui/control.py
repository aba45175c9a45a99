"""What `ui --control` allows: to evaluate, to chat, to plan, start, stop and resume a run. Without it none of this is
there.

Each is a command that a person could type, is shown as such, and runs in a process of its own (jobs.py). A request is a
record with checked fields; its values become words of a command, never text of a shell. A configuration is a preset or
a file of the folder in which `ui` was started; a new run is in the folder that the page shows.

A stop is the signal that the launcher itself sends at Ctrl-C, to the learner that holds the run's lock. So it also
works for a run that was started elsewhere, or by a page that has ended since.
"""

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from launch.display.console import next_command
from launch.presets.load import PRESETS_DIR
from launch.ui.jobs import Command, Jobs, Kind
from launch.ui.keys import keys
from launch.ui.questions import is_text
from launch.ui.runs_folder import OpenRun, RunsFolder
from shared.config.load import read_config
from shared.errors import UserError
from shared.run.run_dir import RunDir

NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MOST_BYTES = 64 * 1024
"""Of a request."""
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Checkpoint = Annotated[str, Meta(pattern=r"^(latest|best|[0-9]{1,9})\Z")]
LEARNER = re.compile(rb"-m[ \0]learner[ \0]--run[ \0]")
"""In the command line of one, which joins its words with spaces."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without fields: what is wanted is in the address."""


Asked = TypeVar("Asked", bound=Wanted)


class Evaluate(Wanted, frozen=True, kw_only=True):
    """As the options of `eval`."""

    checkpoint: Checkpoint = "latest"
    base: bool = False
    test: bool = False
    problems: Count | None = None
    samples: Count | None = None
    long_cap: Count | None = None

    def options(self) -> list[str]:
        which = ["--base"] if self.base else ["--checkpoint", self.checkpoint]
        counts = {"--problems": self.problems, "--samples": self.samples, "--long-cap": self.long_cap}
        return [*which, *(["--test"] if self.test else []), *given(counts)]


class Chat(Wanted, frozen=True, kw_only=True):
    """As the options of `generate --chat`."""

    checkpoint: Checkpoint = "latest"
    max_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0

    def options(self) -> list[str]:
        warm = ["--temperature", f"{self.temperature:g}"] if self.temperature else []
        return ["--chat", "--checkpoint", self.checkpoint, *given({"--max-new-tokens": self.max_new_tokens}), *warm]


class Say(Wanted, frozen=True, kw_only=True):
    """A question in a chat; empty to start over."""

    text: Annotated[str, Meta(max_length=20_000)] = ""

    @property
    def line(self) -> str:
        """As chat_process.py reads it."""
        return msgspec.json.encode(self).decode()


class Train(Wanted, frozen=True, kw_only=True):
    """As the options of `run`."""

    source: str
    """A preset, or a configuration file."""
    name: str
    """Of the new run."""
    sets: dict[str, str] = {}
    """Key -> value, as in --set."""

    def assignments(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.sets.items()]


class Resume(Wanted, frozen=True, kw_only=True):
    """As the options of `resume`."""

    steps: Count | None = None


def asked(body: bytes, kind: type[Asked]) -> Asked:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The request cannot be read: {error}.") from error


def given(options: Mapping[str, int | None]) -> list[str]:
    return [word for option, value in options.items() if value is not None for word in (option, str(value))]


class Control:
    """Does what the page asks for."""

    def __init__(self, runs: RunsFolder, here: Path) -> None:
        """here: where configuration files may be, and where commands run."""
        self.runs = runs
        self.here = here
        self.jobs = Jobs(here)

    def evaluate(self, opened: OpenRun, body: bytes) -> dict[str, Any]:
        words = ["eval", self.place(opened.name), *asked(body, Evaluate).options()]
        return self.start("eval", opened.name, words)

    def chat(self, opened: OpenRun, body: bytes) -> dict[str, Any]:
        """In a program of its own: `generate --chat` is for a terminal."""
        wanted, place = asked(body, Chat), self.place(opened.name)
        program = ["launch.ui.chat_process", place, wanted.checkpoint]
        program += [str(wanted.max_new_tokens or 0), str(wanted.temperature)]
        shown = next_command("generate", place, *wanted.options())
        return self.begin(Command(kind="chat", run=opened.name, shown=shown, module=program))

    def resume(self, opened: OpenRun, body: bytes) -> dict[str, Any]:
        options = given({"--steps": asked(body, Resume).steps})
        if opened.run.state() != "running":
            self.jobs.wait_for_launcher(opened.name)
        return self.start("run", opened.name, ["resume", self.place(opened.name), *options])

    def stop(self, opened: OpenRun, body: bytes) -> dict[str, Any]:
        """The learner finishes its step or gives up its evaluation, writes a checkpoint and ends."""
        asked(body, Wanted)
        if opened.run.state() != "running":
            raise UserError(f"{opened.name} is not running, so there is nothing to stop.")
        with suppress(ProcessLookupError):
            os.kill(learner_of(opened.run.path), signal.SIGTERM)
        return {}

    def draft(self, body: bytes) -> dict[str, Any]:
        """The command that `train` would start, and what is wrong with its configuration."""
        wanted = asked(body, Train)
        return {"command": next_command(*self.training(wanted)), "problem": self.problem(wanted)}

    def plan(self, body: bytes) -> dict[str, Any]:
        return self.start("plan", "", [*self.training(asked(body, Train)), "--dry-run"])

    def train(self, body: bytes) -> dict[str, Any]:
        wanted = asked(body, Train)
        return self.start("run", wanted.name, self.training(wanted))

    def training(self, wanted: Train) -> list[str]:
        """The command of a new run."""
        if self.runs.single:
            raise UserError("This page shows one run; start `ui` with the folder that has the runs to train another.")
        taken = self.runs.has(wanted.name) and not RunDir(self.runs.parent / wanted.name).failed_at_start()
        if not NEW_NAME.fullmatch(wanted.name) or taken:
            raise UserError(f"name got {wanted.name!r}, expected a new one of letters, digits, '.', '-' and '_'.")
        self.file(wanted.source)
        # In one word each, so that a value cannot be taken for an option.
        sets = [f"--set={one}" for one in wanted.assignments()]
        return ["run", wanted.source, "--out", self.place(wanted.name), *sets]

    def problem(self, wanted: Train) -> str:
        """Empty if there is none."""
        try:
            read_config(self.file(wanted.source), wanted.assignments())
        except UserError as error:
            return str(error)
        return ""

    def start(self, kind: Kind, run: str, words: list[str]) -> dict[str, Any]:
        return self.begin(Command(kind=kind, run=run, shown=next_command(*words), module=["launch", *words]))

    def begin(self, command: Command) -> dict[str, Any]:
        return self.jobs.start(command).told(0)

    def place(self, run: str) -> str:
        """As a person would type it here; never like an option."""
        path = self.runs.parent / run
        inside = path.is_relative_to(self.here)
        text = str(path.relative_to(self.here)) if inside else str(path)
        return f"./{text}" if text.startswith("-") else text

    def sources(self) -> dict[str, Path]:
        """Presets by name, and configuration files of this folder by theirs."""
        presets = {path.stem: path for path in sorted(PRESETS_DIR.glob("*.toml"))}
        files = [path for ending in ("*.toml", "*.yaml", "*.yml") for path in sorted(self.here.glob(ending))]
        own = [path for path in files if path.name != "pyproject.toml" and not path.name.startswith("-")]
        return {**presets, **{path.name: path for path in own if is_text(path.name)}}

    def file(self, source: str) -> Path:
        found = self.sources().get(source)
        if found is None:
            raise UserError(f"source got {source!r}, expected a preset or a configuration file of {self.here}.")
        return found

    def form(self, source: str) -> dict[str, Any]:
        """All keys with their values in this configuration."""
        values = msgspec.to_builtins(read_config(self.file(source)))
        return {"keys": keys(values), "sources": list(self.sources())}


def learner_of(path: Path) -> int:
    """The process that signed the run's lock. UserError if it is no learner."""
    text = (path / "lock").read_text(encoding="ascii", errors="replace").strip()
    try:
        command = Path(f"/proc/{text}/cmdline").read_bytes() if text.isdecimal() else b""
    except OSError as error:
        # It is in another container, or /proc hides it (hidepid).
        raise UserError(
            f"{path.name} is held by process {text}, which cannot be seen from here; stop it where it was started."
        ) from error
    if not LEARNER.search(command):
        raise UserError(f"{path.name} is held by a process that is not a learner; stop it where it was started.")
    return int(text)
