"""Checkpoints: folders that are written whole, checked by content, and pruned.

    checkpoints/step-000010/   the caller's files (an adapter in PEFT's format, optimizer, position) and MANIFEST.json
    checkpoints/best.json      step with the highest held-out accuracy, once one was evaluated; for people and tools

MANIFEST.json has step, size and sha256 of each file, and its own sha256, so any changed byte is found. Saving a step
again replaces its folder as a whole: after a crash the same steps are repeated and end in the same bytes. A damaged
checkpoint is not fatal if an older one is good, since the journal brings the learner forward from there.
The newest `keep` checkpoints up to the step just saved stay, and those that the caller names: the best one (`RunTotals`
in learner/durable/state.py), and those that wait for their evaluation. Later checkpoints can only be ones that did not
load; they stay until they are replaced. Left out on purpose: what the files mean (bytes in, bytes out), and copies in
other places.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.codec import pack, unpack
from shared.errors import ConfigError, DamageError, RunDirError
from shared.run.files import FileParts, finish_writes, make_folder, remove_tree_whole, write_tree_whole, write_whole
from shared.run.run_dir import RunDir

MANIFEST = "MANIFEST.json"
BEST = "best.json"
FOLDER = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.[0-9a-f]+\.old")
"""The second form is the name of a folder while it is being replaced, in case the process died at that moment."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The learner's whole state after a step."""

    step: int
    """Steps done."""
    files: Mapping[str, bytes]
    """Name -> content; flat names."""


@dataclass(frozen=True, kw_only=True)
class UnsavedCheckpoint:
    """A checkpoint whose tensors are still those that the learner computes with: it must be saved before the next
    update, and needs no memory of its own."""

    step: int
    files: Mapping[str, FileParts]

    def copied(self) -> Checkpoint:
        return Checkpoint(step=self.step, files={name: b"".join(parts) for name, parts in self.files.items()})


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file in the manifest."""

    sha256: str
    """Digest of the content."""
    num_bytes: int
    """Size of the content."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MANIFEST.json."""

    step: int
    """Of the checkpoint."""
    files: dict[str, Entry]
    """All files of the folder except this one."""
    sha256: str = ""
    """Digest of this record with an empty digest."""


class Broken(Exception):
    """A checkpoint is damaged; the message says how."""


class CheckpointStore:
    """The checkpoints of a run. Any process may load; only the learner saves."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint | UnsavedCheckpoint, *, keep_also: Collection[int] = ()) -> None:
        """Durable when this returns. keep_also: steps that stay besides the newest ones."""
        make_folder(self._folder)
        finish_writes(self._folder)
        files = {name: in_parts(content) for name, content in checkpoint.files.items()}
        manifest = pack_manifest(checkpoint.step, files)
        write_tree_whole(self.path(checkpoint.step), {**files, MANIFEST: (manifest,)})
        self._prune(checkpoint.step, keep_also)

    def note_best(self, step: int, accuracy: float) -> None:
        write_whole(self._folder / BEST, json.dumps({"step": step, "accuracy": accuracy}).encode() + b"\n")

    def load_latest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if there are no checkpoints."""
        return self._first_whole(sorted(self._folders().items(), reverse=True))

    def load_oldest(self, since: int) -> Checkpoint | None:
        """The oldest undamaged checkpoint of this step or later; None if there are no checkpoints."""
        return self._first_whole(sorted((step, path) for step, path in self._folders().items() if step >= since))

    def oldest_kept(self, saved: int) -> int:
        """Step of the oldest of the newest `keep` checkpoints up to the step just saved; 0 while there are fewer."""
        steps = sorted(step for step in self._folders() if step <= saved)
        return steps[-self._keep] if len(steps) >= self._keep else 0

    def _first_whole(self, candidates: Iterable[tuple[int, Path]]) -> Checkpoint | None:
        faults: list[str] = []
        for step, path in candidates:
            try:
                checkpoint = read_checkpoint(path, step)
            except Broken as broken:
                faults.append(str(broken))
                continue
            for fault in faults:
                log.warning("%s; the checkpoint of step %d is used instead.", fault, step)
            return checkpoint
        if faults:
            raise DamageError(
                f"No checkpoint in {self._folder} is whole ({'; '.join(faults)}); restore one from a copy, "
                "or remove them all to have the run begin again."
            )
        return None

    def load(self, step: int) -> Checkpoint:
        folders = self._folders()
        if step not in folders:
            there = ", ".join(str(known) for known in sorted(folders)) or "none"
            raise RunDirError(f"{self._folder} has no checkpoint of step {step}; there are: {there}.")
        try:
            return read_checkpoint(folders[step], step)
        except Broken as broken:
            raise DamageError(f"{broken}; restore it from a copy, or choose another step.") from broken

    def load_best(self) -> Checkpoint:
        if not (self._folder / BEST).is_file():
            raise RunDirError(
                f"{self._folder} has no best checkpoint: none was evaluated during the run. Set eval.every in the next"
                " run, or give --checkpoint latest or a step."
            )
        try:
            return self.load(json.loads((self._folder / BEST).read_bytes())["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(
                f"{self._folder / BEST} does not name a checkpoint ({error}); `resume` the run, or remove that file and"
                " give --checkpoint N."
            ) from error

    def digests(self, name: str) -> dict[int, str]:
        """Step -> sha256 of this file, as the manifest has it. A damaged manifest does not count."""
        found = {step: digest_in(path, name) for step, path in self._folders().items()}
        return {step: sha256 for step, sha256 in found.items() if sha256}

    def digest(self, step: int, name: str) -> str:
        """The same of one step; empty if there is none."""
        return digest_in(self.path(step), name)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint, which need not exist."""
        return self._folder / f"step-{step:06d}"

    def _folders(self) -> dict[int, Path]:
        """Step -> folder. A dot sorts first, so a folder in its place wins over one that was moved aside."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        matches = [(FOLDER.fullmatch(path.name), path) for path in paths]
        return {int(match[1] or match[2]): path for match, path in matches if match}

    def _prune(self, saved: int, keep_also: Collection[int]) -> None:
        steps = sorted(step for step in self._folders() if step <= saved)
        for step in steps[: -self._keep]:
            if step not in keep_also:
                remove_tree_whole(self.path(step))


def in_parts(content: bytes | FileParts) -> FileParts:
    return (content,) if isinstance(content, bytes) else content


def pack_manifest(step: int, files: Mapping[str, FileParts]) -> bytes:
    entries = {name: entry_of(parts) for name, parts in sorted(files.items())}
    return manifest_bytes(Manifest(step=step, files=entries))


def entry_of(parts: FileParts) -> Entry:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return Entry(sha256=found.hexdigest(), num_bytes=sum(map(len, parts)))


def manifest_bytes(manifest: Manifest) -> bytes:
    """As JSON with its own digest. A manifest has exactly one spelling, so any other means a changed byte."""
    bare = msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))
    sealed = msgspec.structs.replace(manifest, sha256=hashlib.sha256(bare).hexdigest())
    return msgspec.json.format(msgspec.json.encode(sealed), indent=2)


def read_manifest(path: Path) -> Manifest:
    """Broken unless the file is byte for byte what `manifest_bytes` writes."""
    file = path / MANIFEST
    try:
        data = file.read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise Broken(f"{file} cannot be read ({error})") from error
    if manifest_bytes(manifest) != data:
        raise Broken(f"{file} does not match its own sha256")
    return manifest


def digest_in(path: Path, name: str) -> str:
    with suppress(Broken):
        files = read_manifest(path).files
        return files[name].sha256 if name in files else ""
    return ""


def read_checkpoint(path: Path, step: int) -> Checkpoint:
    """Broken unless every file is as it was saved."""
    manifest = read_manifest(path)
    if manifest.step != step:
        raise Broken(f"{path} has the checkpoint of step {manifest.step}")
    if foreign := [name for name in manifest.files if Path(name).name != name or name in ("", "..")]:
        raise Broken(f"{path / MANIFEST} names a file that is not in its folder ({foreign[0]!r})")
    files = {name: read_checked(path / name, entry) for name, entry in manifest.files.items()}
    return Checkpoint(step=step, files=files)


def read_checked(file: Path, entry: Entry) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Broken(f"{file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Broken(f"{file} does not match its sha256 ({len(data)} bytes, {entry.num_bytes} were saved)")
    return data


def packed_checkpoint(checkpoint: Checkpoint | None) -> bytes:
    """For another rank of the learner."""
    if checkpoint is None:
        return b""
    files = (part for name, data in checkpoint.files.items() for part in (name.encode(), data))
    return pack([str(checkpoint.step).encode(), *files])


def unpacked_checkpoint(data: bytes) -> Checkpoint | None:
    if not data:
        return None
    step, *files = unpack(data)
    return Checkpoint(
        step=int(step), files={name.decode(): one for name, one in zip(files[::2], files[1::2], strict=True)}
    )


def choose_checkpoint(run: RunDir, keep: int, which: str) -> Checkpoint:
    """What `--checkpoint STEP|best|latest` asks for."""
    store = CheckpointStore(run.checkpoints, keep)
    if which == "latest":
        newest = store.load_latest()
        if newest is None:
            raise RunDirError(
                f"{run.path} has no checkpoint yet; `resume` it until it has one, or ask for the base with --base."
            )
        return newest
    if which == "best":
        return store.load_best()
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint got '{which}', expected a step number, 'best' or 'latest'.")
    return store.load(int(which))
