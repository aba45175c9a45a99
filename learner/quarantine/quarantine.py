"""A quarantined batch in one file, with all that its update needs: no journal, no checkpoint, no actor.

    quarantine/step-000013.safetensors    a safetensors file of byte strings
      config.json                         the run's
      adapter_model.safetensors           before the step, PEFT's format
      optimizer.safetensors               before the step
      anchor.safetensors                  what the policy is kept close to, if the curriculum has stages
      fault.json                          step, kind, words, suspect; digest of the base; norms of the steps before
      groups/000 ...                      the step's filled orders, each the frames of its FilledOrder message
      sha256                              over all others, names and lengths included

The base is named by its digest, not copied. The same fault gives the same bytes, so a resumed run replaces the file by
itself. Left out on purpose: the tasks; prompts are token ids in the groups.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from learner.update.gradient_check import Kind
from learner.update.update import Position
from protocol.codec import decode, encode, pack, unpack
from protocol.errors import ProtocolError
from protocol.messages import FilledOrder
from shared.errors import DamageError
from shared.run.files import make_folder, write_whole

DIGEST = "sha256"
ANCHOR = "anchor.safetensors"
GROUPS = "groups/"


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A batch and the update that was refused."""

    step: int
    """Updates behind the policy; the row of the metrics has one more."""
    kind: Kind
    """Of the fault."""
    what: str
    """The fault in words."""
    sample: str
    """The suspect."""
    base_digest: str
    """The frozen base it was trained on."""
    config: bytes
    """config.json"""
    position: Position
    """Before the step."""
    filled: tuple[FilledOrder, ...]
    """The orders of the step, as collected."""


def file_name(step: int) -> str:
    """By the number of the step in metrics.jsonl."""
    return f"step-{step + 1:06d}.safetensors"


def pack_batch(batch: KeptBatch) -> bytes:
    fault = {name: getattr(batch, name) for name in ("step", "kind", "what", "sample", "base_digest")}
    parts = {
        "config.json": batch.config,
        "adapter_model.safetensors": batch.position.adapter,
        "optimizer.safetensors": batch.position.optimizer,
        "fault.json": json.dumps(fault | {"norms": batch.position.norms}, indent=2).encode(),
    }
    if batch.position.anchor:
        parts[ANCHOR] = batch.position.anchor
    parts |= {f"{GROUPS}{index:03d}": pack(encode(filled_order)) for index, filled_order in enumerate(batch.filled)}
    return save({name: np.frombuffer(part, np.uint8) for name, part in (parts | {DIGEST: digest(parts)}).items()})


def write_batch(folder: Path, batch: KeptBatch) -> Path:
    """Into the run's quarantine/; returns the file."""
    make_folder(folder)
    path = folder / file_name(batch.step)
    write_whole(path, pack_batch(batch))
    return path


def keep_nowhere(batch: KeptBatch) -> None:
    """For a replay, which writes nothing."""


def by_length(name: str) -> tuple[int, str]:
    """For sorting: from a thousand groups on, their names differ in length."""
    return len(name), name


def read_batch(path: Path) -> KeptBatch:
    """The inverse; DamageError for anything else."""
    try:
        parts = {name: array.tobytes() for name, array in load(path.read_bytes()).items()}
        if parts.pop(DIGEST, b"") != digest(parts):
            raise DamageError(f"{path} does not match its own sha256; restore it from a copy, or `resume` the run.")
        messages = [decode(unpack(parts[name])) for name in sorted(parts, key=by_length) if name.startswith(GROUPS)]
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror}); give a file of a run's quarantine/.") from error
    # KeyError: a number type that numpy does not have.
    except (SafetensorError, ProtocolError, KeyError) as error:
        raise DamageError(f"{path} is not a batch that this release quarantined ({error}).") from error
    fault = json.loads(parts["fault.json"])
    position = Position(
        adapter=parts["adapter_model.safetensors"],
        optimizer=parts["optimizer.safetensors"],
        norms=fault.pop("norms"),
        anchor=parts.get(ANCHOR, b""),
    )
    groups = tuple(message for message in messages if isinstance(message, FilledOrder))
    return KeptBatch(**fault, config=parts["config.json"], position=position, filled=groups)


def digest(parts: Mapping[str, bytes]) -> bytes:
    """[32] over names, lengths and contents, in order of names."""
    found = hashlib.sha256()
    for name in sorted(parts):
        found.update(f"{name}\n{len(parts[name])}\n".encode())
        found.update(parts[name])
    return found.digest()
