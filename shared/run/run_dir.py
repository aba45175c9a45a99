"""The run directory: where each file of a run is, how a run is made, opened and locked.

    config.json   the resolved configuration; it gets its name last, so a folder that has it is a run
    run.json      run id, versions, processor, card, number type and threads
    plan.json     what the run was predicted to take
    tasks.json    number and digest of the tasks that it began with, and their system message
    start/        the adapter that it starts from, if there is one; teacher/ the one that it learns from
    lock          flock: one learner per run
    lease/        locked bytes: who may compute, where processes share a CPU; actors write here and into logs/ only
    keys/         CURVE keys, 0700
    journal/      the groups that actors sent, durable before they are acknowledged
    checkpoints/  step-000010/ ...
    quarantine/   batches whose update was refused
    eval/ logs/ metrics.jsonl rollouts.jsonl summary.json report.html trace.json    for people and tools

Only the owner may read the directory (0700), because it has the policy, prompts and completions.
Left out on purpose: the content of those files; each has a module of its own.

run.json is written when the run is made, and once more when a prepared run starts. Bits on a CPU depend on the versions
of packages, the processor, the number type and the numbers of threads: all are here, and the last two in config.json
too, which decides. Bits on a card depend on the card, its driver and the CUDA version of torch, too. Versions come from
the metadata of installed packages, so torch is not imported.
"""

import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Self

import msgspec

from shared.errors import DamageError, RunDirError
from shared.run import disk
from shared.run.file_lock import open_lock, sign, signature, try_lock, try_lock_awhile
from shared.run.files import (
    UNFINISHED,
    beside,
    disk_errors,
    final_name,
    make_folder,
    remove_unfinished,
    sync_folder,
    write_new,
    write_tree_whole,
    write_whole,
)

PACKAGES = ("torch", "transformers", "bitsandbytes", "pyzmq")
CPUINFO = Path("/proc/cpuinfo")
RUN_DIR = "run directory"
"""The place that a user may choose, in an error of a command that writes into a run and has no --out."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json."""

    run_id: str
    """32 random hex digits. Actors recognise the run by it after a restart of the learner."""
    created: str
    """UTC, ISO 8601."""
    python: str
    """Version of the interpreter."""
    packages: dict[str, str]
    """Version of each package that affects numbers or the wire."""
    platform: str
    """Operating system and architecture."""
    cpu: str
    """Name of the processor."""
    cpu_count: int
    """Logical cores of the machine."""
    compute: dict[str, str | int] = {}
    """Device, number type, threads and vector units, as chosen when the run was made or first started; also in
    config.json."""
    card: dict[str, str] = {}
    """Names of the learner's and the actor's card, version of the driver, CUDA version that torch was built for. Empty
    on a CPU."""


def gather_run_info(compute: Mapping[str, str | int], card: Mapping[str, str]) -> RunInfo:
    return RunInfo(
        run_id=secrets.token_hex(16),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_count=os.cpu_count() or 1,
        compute=dict(compute),
        card=dict(card),
    )


def cpu_name() -> str:
    """The product name if Linux knows it (on x86, not on ARM), else the architecture."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


FIRST_MADE = ("config.json", "run.json", "lock", "keys", "start", "teacher", "lease", "journal", "checkpoints", "eval")
MADE_LATER = ("plan.json", "tasks.json", "logs", "quarantine", "metrics.jsonl", "rollouts.jsonl", "summary.json")
OURS = frozenset({*FIRST_MADE, *MADE_LATER, "report.html", "trace.json"})
"""What `create` and the run itself make."""
MIN_FREE_BYTES = 256 * 2**20
"""Room for a journal segment (64 MiB) and a few checkpoints of a small adapter. A large run may need more."""


class Ending(msgspec.Struct, frozen=True):
    """What must be known of summary.json here; shared/run/summary.py has the whole."""

    status: str
    """`failed` if the run ended with an error."""


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path
    """The directory itself."""

    @classmethod
    def create(
        cls,
        path: Path,
        config_json: bytes,
        *,
        compute: Mapping[str, str | int] = MappingProxyType({}),
        card: Mapping[str, str] = MappingProxyType({}),
        create_keys: Callable[[Path], None] = lambda folder: None,
        start: Mapping[str, bytes] = MappingProxyType({}),
        teacher: Mapping[str, bytes] = MappingProxyType({}),
        min_free_bytes: int = MIN_FREE_BYTES,
    ) -> Self:
        """Make a new run. RunDirError if the folder has files, cannot be written, or has too little space. A run that
        failed at its start is replaced.

        compute: that section of the configuration. card: as in run.json. create_keys: writes keys into the folder it
        gets. start, teacher: files of adapters that the run is given. config.json gets its name last, so a folder with
        it is whole. Until then, its unfinished file shows that the others are of a `create` that was cut short.
        """
        run = cls(path)
        refuse_if_taken(run)
        with disk_errors(path):
            make_folder(path, 0o700)
            refuse_if_full(path, min_free_bytes)
            write_new(unfinished := beside(run.config, UNFINISHED), (config_json,), 0o644)
            sync_folder(path)
        with run.lock_held():
            refuse_if_taken(run, held=True)  # by another process meanwhile
            remove_earlier_attempt(run, unfinished)
            for folder in (run.journal, run.checkpoints, run.eval, run.logs, run.lease.parent):
                make_folder(folder)
            make_folder(run.keys, 0o700)
            with disk_errors(run.keys):
                create_keys(run.keys)
                sync_folder(run.keys)
            for folder, files in ((run.start, start), (run.teacher, teacher)):
                if files:
                    write_tree_whole(folder, {name: (data,) for name, data in files.items()})
            run.write_info(compute, card)
            with disk_errors(run.config):
                disk.rename(unfinished, run.config)
                sync_folder(path)
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        run = cls(path)
        with disk_errors(path):
            is_run = run.config.is_file()
        if not is_run:
            raise RunDirError(f"{path} is not a run directory (it has no config.json); give the one that `run` named.")
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes this run."""
        with self.lock_held():
            for path in (self.config, self.run_info, self.tasks, self.metrics, self.rollouts, self.summary):
                remove_unfinished(path)
            yield

    @contextmanager
    def lock_held(self) -> Iterator[None]:
        """The kernel releases the lock if the process dies."""
        fd = open_lock(self.lock)
        try:
            with disk_errors(self.lock):
                taken = try_lock_awhile(fd)
            if not taken:
                raise RunDirError(f"{self.path} is in use by {signature(fd)}; wait until it ends, or stop it first.")
            sign(fd, self.lock)
            yield
        finally:
            os.close(fd)

    def has_begun(self) -> bool:
        """Whether there is anything that a new run would lose: a group, a checkpoint, an evaluation. A mistake that a
        process found while it loaded leaves none, like --prepare."""
        entries = (entry for folder in (self.journal, self.checkpoints, self.eval) for entry in folder.glob("*"))
        try:
            return any(entry.is_dir() or entry.stat().st_size for entry in entries)
        except FileNotFoundError:  # one was removed at this moment, so somebody works there
            return True

    def failed_at_start(self) -> bool:
        """Whether it ended with an error before it had anything to lose. A prepared run did not: its keys may be in use
        on another machine."""
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            ending = msgspec.json.decode(self.summary.read_bytes(), type=Ending)
            return ending.status == "failed" and not self.has_begun()
        return False

    def is_in_use(self) -> bool:
        """Whether a process has the lock."""
        fd = open_lock(self.lock)
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)

    def write_info(self, compute: Mapping[str, str | int], card: Mapping[str, str]) -> None:
        """Of this machine and its versions. A run keeps its id and its date. compute: that section."""
        info = gather_run_info(compute, card)
        if self.run_info.exists():
            known = self.read_info()
            info = msgspec.structs.replace(info, run_id=known.run_id, created=known.created)
        write_whole(self.run_info, msgspec.json.format(msgspec.json.encode(info), indent=2))

    def read_info(self) -> RunInfo:
        try:
            return msgspec.json.decode(self.run_info.read_bytes(), type=RunInfo)
        except (FileNotFoundError, ValueError, RecursionError) as error:
            raise DamageError(
                f"{self.run_info} cannot be read ({error}); restore it from a copy, or begin a new run."
            ) from error

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def run_info(self) -> Path:
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def tasks(self) -> Path:
        """Number and digest of training and held-out tasks, for a later start of the run to compare; the system message
        of all training tasks, for `generate` and `export`."""
        return self.path / "tasks.json"

    @property
    def start(self) -> Path:
        """What the run starts from, copied, so that the original may move."""
        return self.path / "start"

    @property
    def teacher(self) -> Path:
        """The same of the adapter that a distillation follows."""
        return self.path / "teacher"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def lease(self) -> Path:
        return self.path / "lease" / "lock"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def stacks(self, name: str) -> Path:
        """Stacks of a process, written on request or when it makes no progress for too long."""
        return self.logs / f"stacks-{name}.txt"

    def trace_of(self, name: str) -> Path:
        """Phases of one process, if a trace was asked for."""
        return self.logs / f"trace-{name}.json"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def make_free_folder(path: Path) -> Path:
    """A new folder of this name, or of this name with a number: another run may have begun in the same second."""
    make_folder(path.parent)
    number, folder = 1, path
    while True:
        with disk_errors(folder), suppress(FileExistsError):
            disk.make(folder, 0o700)
            return folder
        number += 1
        folder = path.with_name(f"{path.name}-{number}")


def refuse_if_taken(run: RunDir, *, held: bool = False) -> None:
    """held: whether this process has the lock."""
    with disk_errors(run.path):
        if not run.config.exists():
            if has_other_files(run):
                raise RunDirError(f"{run.path} is not empty and has no run; choose another --out, or empty it.")
        elif run.has_begun() or (not held and run.is_in_use()):
            raise RunDirError(f"{run.path} has a run already; continue it with `resume`, or choose another --out.")
        elif not run.failed_at_start():
            raise RunDirError(
                f"{run.path} has a run that has not begun; begin it with `resume`, or for another one remove that"
                " folder or choose another --out."
            )


def has_other_files(run: RunDir) -> bool:
    """Whether a folder that has no run has a file that no `create` left there when it was cut short."""
    cut_short = any(run.path.glob(f".{run.config.name}.*{UNFINISHED}"))
    files = (entry.relative_to(run.path).parts[0] for entry in run.path.rglob("*") if entry.is_file())
    return any(not (cut_short and final_name(run.path / name) in OURS) for name in files)


def remove_earlier_attempt(run: RunDir, unfinished: Path) -> None:
    """Remove what an earlier `create` left, or a run that failed at its start, if any. unfinished: of this one. Call it
    with the run held."""
    with disk_errors(run.path):
        # First, so that the rest is no run if this is cut short.
        disk.remove(run.config)
        sync_folder(run.path)
        for entry in run.path.iterdir():
            if entry not in (run.lock, unfinished) and final_name(entry) in OURS:
                disk.remove(entry)


def refuse_if_full(path: Path, min_free_bytes: int) -> None:
    free = shutil.disk_usage(path).free
    if free < min_free_bytes:
        raise RunDirError(
            f"{path} has {free >> 20} MiB free, at least {min_free_bytes >> 20} MiB are needed; "
            "free some space on that disk, or choose another --out."
        )


def refuse_to_replace(out: Path, source: Path | None = None) -> None:
    """RunDirError for the file that --in names, and for any but a page in a run directory."""
    if source is not None and out.exists() and source.exists() and out.samefile(source):
        raise RunDirError(f"--out got {out}, which is the file that --in names; choose another file.")
    if out.suffix == ".html":
        return
    for folder in out.resolve().parents:
        run = RunDir(folder)
        if run.config.is_file() and run.run_info.is_file():
            raise RunDirError(f"--out got {out}, which is in the run directory {folder}; choose a file outside of it.")
