"""What is fuzzed: every reader of bytes from outside, with good inputs and the errors it may raise.

    message      three frames from the wire, decoded, and checked as the learner checks a delivery
    payload      the same as the journal keeps it, frames in one string
    journal      a segment, scanned
    manifest     a checkpoint's list of files
    key allowed  key files
    adapter      a safetensors file, compared with a model's layout
    toml json    configurations, as a person writes and as a run keeps them
    override     --set KEY=VALUE
    metrics      rows as the display reads them, and what is drawn of them
    summary      summary.json
    dispatcher   typed messages of hostile actors at a Dispatcher (fuzz_dispatcher.py); the bytes seed the messages

A target splits an input into a tree of plain values where it can, so that mutations reach behind the parser, and puts
it together again with checksums that are right, most of the time.
"""

import hashlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import torch

from benchmarks.fuzz_dispatcher import converse
from benchmarks.mutate import mutate_bytes, mutate_tree
from launch.display.watch import Watch, curve, outcome_shares, steps_done, time_shares
from launch.presets.load import load_config
from learner.durable.checkpoint import MANIFEST, Broken, pack_manifest, read_manifest
from learner.durable.journal_format import pack_record, scan
from protocol.access.key_list import create_invitation, list_keys, open_invitations
from protocol.access.keys import create_keys, load_actor_key, read_allowed
from protocol.codec import decode, encode, pack, unpack
from protocol.errors import MalformedMessage, SecurityError, WrongVersion
from protocol.messages import FilledOrder
from protocol.validate import check_groups
from shared.config.load import config_from_json, config_to_json
from shared.config.tree import Config
from shared.errors import ConfigError, DamageError
from shared.model.adapter_file import adapter_bytes, install_adapter
from shared.model.layers.lora import Adapter, DenseMatmul, FrozenLinear, LoraLinear
from shared.run.summary import read_file
from tests.support.wire_examples import examples

Split = Callable[[bytes], Any]
Join = Callable[[Any, Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One reader."""

    name: str
    """For the result."""
    seeds: tuple[bytes, ...]
    """Inputs that it takes."""
    run: Callable[[bytes], object]
    """Read one."""
    allowed: tuple[type[Exception], ...]
    """What it may raise."""
    split: Split | None = None
    """Input -> tree."""
    join: Join | None = None
    """Tree -> input, sealed."""
    weight: int = 1
    """Share of the inputs."""

    def mutant(self, random: Random) -> bytes:
        """A damaged seed."""
        seed = random.choice(self.seeds)
        if self.split and self.join and random.random() < 0.7:
            try:
                return self.join(mutate_tree(self.split(seed), random), random)
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError, RecursionError):
                pass  # The tree has become something that this format cannot write.
        return mutate_bytes(seed, random)


def split_message(packed: bytes) -> Any:
    """Header, body and buffers as a tree."""
    header, body, buffers = unpack(packed)
    return {"header": msgpack.unpackb(header), "body": msgpack.unpackb(body), "buffers": list(buffers)}


def joined(values: Any) -> bytes:
    """A list of numbers as bytes; a number alone would be that many zeros."""
    if not isinstance(values, list):
        raise TypeError("no bytes")
    return bytes(values)


def packed(tree: Any) -> bytes:
    """As msgpack."""
    data = msgpack.packb(tree)
    assert data is not None
    return data


def join_message(tree: Any, random: Random) -> bytes:
    """Frames; the checksum right four times of five, bytes of the body changed behind it now and then."""
    body, buffers = packed(tree["body"]), joined(tree["buffers"])
    if random.random() < 0.1:
        body = mutate_bytes(body, random)
    if random.random() < 0.8:
        tree["header"]["crc32"] = zlib.crc32(body + buffers)
    frames = [packed(tree["header"]), body, buffers]
    if random.random() < 0.02:
        random.shuffle(frames)
    return pack(frames)


def read_message(packed: bytes) -> None:
    """As the learner does."""
    message = decode(unpack(packed))
    if isinstance(message, FilledOrder):
        check_groups(message)


def join_json(tree: Any, random: Random) -> bytes:
    """JSON as other programs write it, NaN included."""
    return json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 2))).encode()


def join_manifest(tree: Any, random: Random) -> bytes:
    """With a digest of its own that is right."""
    tree["sha256"] = ""
    bare = json.dumps(tree, separators=(",", ":")).encode()
    tree["sha256"] = hashlib.sha256(bare).hexdigest()
    return json.dumps(tree, indent=2).encode()


def split_safetensors(data: bytes) -> Any:
    """Header as a tree, data as it is."""
    (length,) = struct.unpack_from("<Q", data)
    return {"header": json.loads(data[8 : 8 + length]), "data": list(data[8 + length :])}


def join_safetensors(tree: Any, random: Random) -> bytes:
    """With the header's length, and sometimes a name that is there twice."""
    header = json.dumps(tree["header"])
    if random.random() < 0.1 and header.endswith("}"):
        header = header[:-1] + ", " + header[1:]
    raw = header.encode()
    return struct.pack("<Q", len(raw)) + raw + joined(tree["data"])


def split_journal(data: bytes) -> Any:
    """Payloads."""
    return [list(data[record.start : record.end]) for record in scan(data, 0)[0]]


def join_journal(tree: Any, random: Random) -> bytes:
    """Whole records, numbered in order, and torn or changed behind their checksums half of the time."""
    data = b"".join(pack_record(number, joined(payload)) for number, payload in enumerate(tree))
    return mutate_bytes(data, random) if random.random() < 0.5 else data


class Readers:
    """The targets that read files, over a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "input"
        self.allowed = folder / "allowed"
        self.allowed.mkdir()
        self.invited = folder / "invited"
        self.invited.mkdir()
        self.manifest = folder / "checkpoint"
        self.manifest.mkdir()

    def write(self, data: bytes, path: Path) -> Path:
        """As a private file."""
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    def read_key(self, data: bytes) -> None:
        """An actor's."""
        load_actor_key(self.write(data, self.file))

    def read_allow_list(self, data: bytes) -> None:
        """One file of it; its faults are values."""
        self.write(data, self.allowed / "actor0.json")
        read_allowed(self.allowed)

    def read_invitations(self, data: bytes) -> None:
        """Of a run; a damaged file is left out."""
        self.write(data, self.invited / "guest0.json")
        open_invitations(self.folder, now=0.0)
        list_keys(self.folder, now=0.0)

    def read_manifest(self, data: bytes) -> None:
        """Of a checkpoint."""
        self.write(data, self.manifest / MANIFEST)
        read_manifest(self.manifest)

    def read_toml(self, data: bytes) -> None:
        """A user's file."""
        load_config(str(self.write(data, self.file)))

    def read_metrics(self, data: bytes) -> None:
        """And everything that the display makes of them."""
        watch = Watch(self.write(data + b"\n", self.file))
        watch.poll()
        curve(watch.rows)
        steps_done(watch.rows)
        time_shares(watch.rows)
        for row in watch.rows:
            outcome_shares(row)

    def read_summary(self, data: bytes) -> None:
        """As `resume` does."""
        read_file(self.write(data, self.file))


def tiny_adapter() -> Adapter:
    """Two layers."""
    base = FrozenLinear(DenseMatmul(torch.zeros(5, 6)), None)
    return Adapter({name: LoraLinear(base, (5, 6), rank=2, scale=1.0) for name in ("q_proj", "v_proj")})


def targets(folder: Path | None = None) -> tuple[Target, ...]:
    """All of them; folder: where those that read files may write."""
    readers = Readers(folder or Path(tempfile.mkdtemp()))
    return (
        *wire_targets(),
        dispatcher_target(),
        manifest_target(readers),
        *json_targets(readers),
        *run_targets(readers),
    )


def wire_targets() -> tuple[Target, ...]:
    """Messages, and their bytes in the journal."""
    packed = tuple(pack(encode(message)) for message in examples())
    wire = (MalformedMessage, WrongVersion)
    return (
        Target(
            name="message",
            seeds=packed,
            run=read_message,
            allowed=wire,
            split=split_message,
            join=join_message,
            weight=12,
        ),
        Target(name="payload", seeds=packed, run=lambda data: decode(unpack(data)), allowed=wire, weight=2),
        Target(
            name="journal",
            seeds=(b"".join(pack_record(number, packed[5]) for number in range(3)),),
            run=lambda data: scan(data, 0),
            allowed=(),
            split=split_journal,
            join=join_journal,
        ),
    )


def dispatcher_target() -> Target:
    """Messages that the codec takes, and what the learner makes of them."""
    return Target(name="dispatcher", seeds=(b"nonsense", b"never an order", b"hello, hello"), run=converse, allowed=())


def manifest_target(readers: Readers) -> Target:
    """What a checkpoint says it holds."""
    files = {"state.json": (b"{}",), "adapter_model.safetensors": (b"abc",)}
    return Target(
        name="manifest",
        seeds=(pack_manifest(3, files),),
        run=readers.read_manifest,
        allowed=(Broken,),
        split=json.loads,
        join=join_manifest,
    )


def run_targets(readers: Readers) -> tuple[Target, ...]:
    """What a person writes, and adapters."""
    adapter = tiny_adapter()
    return (
        Target(
            name="toml",
            seeds=(b'[run]\nsteps = 4\nseed = 1\n[optimizer]\nlr = 3e-4\n[model]\npath = "embedded"\n',),
            run=readers.read_toml,
            allowed=(ConfigError,),
        ),
        Target(
            name="override",
            seeds=(b"optimizer.lr=3e-4", b"tasks.levels=[1, 2]", b'model.path="x"'),
            run=lambda data: load_config("embedded", [data.decode(errors="replace")]),
            allowed=(ConfigError,),
        ),
        Target(
            name="adapter",
            seeds=(adapter_bytes(adapter),),
            run=lambda data: install_adapter(adapter, data),
            allowed=(DamageError,),
            split=split_safetensors,
            join=join_safetensors,
        ),
    )


def json_targets(readers: Readers) -> tuple[Target, ...]:
    """Files of JSON."""
    keys = readers.folder / "keys"
    create_keys(keys)
    create_invitation(keys, "guest0", expires_at=1e9)
    invitation = (keys / "invited" / "guest0.json").read_bytes()
    row = {"step": 1, "time_s": 1.5, "reward/mean": 0.5, "outcome/correct": 0.5, "time/rollout_s": 1.0, "kl": None}
    summary = {"status": "done", "steps": 40, "wall_s": 61.5, "adapter_sha256": "ab" * 32, "eval": {}}
    return (
        json_target("key", (keys / "actor0.json").read_bytes(), readers.read_key, SecurityError),
        json_target("allowed", (keys / "allowed" / "actor0.json").read_bytes(), readers.read_allow_list, None),
        json_target("invited", invitation, readers.read_invitations, None),
        json_target("json", config_to_json(Config()), config_from_json, ConfigError),
        json_target("summary", json.dumps(summary).encode(), readers.read_summary, DamageError),
        json_target("metrics", json.dumps(row).encode(), readers.read_metrics, None),
    )


def json_target(name: str, seed: bytes, run: Callable[[bytes], object], allowed: type[Exception] | None) -> Target:
    """A reader of JSON."""
    errors = () if allowed is None else (allowed,)
    return Target(name=name, seeds=(seed,), run=run, allowed=errors, split=json.loads, join=join_json)
