"""Adapters that the actors of one machine pass on to each other, so that each version crosses the network once.

    learner -> first actor    Policy with the adapter    the actor writes it to the machine's folder
    learner -> other actors   Policy without it          they wait for the file, and check its sha256

    {$TMPDIR or /tmp}/tandem-{uid}/adapters-{16 hex digits of the sha256 of its key}/
        machine               a random name, which an actor puts in its Hello: who reads it here has the same files
        <sha256>.safetensors  the newest few versions

Only actors that reach their learner over TCP do this; a local socket costs no more than a file. The learner's part is
in learner/orders/machines.py. A file that does not come costs time and nothing else: the actor asks the learner for it
(link.py). So nothing here is synced, and a disk that is full is a warning.
Left out: a process of its own that passes on, which would have to be started, watched and trusted with a key.
"""

import logging
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from protocol.endpoint import make_private, user_folder
from protocol.errors import SecurityError
from protocol.limits import MAX_BUFFER_BYTES
from protocol.messages import Policy
from shared.model.adapter_file import digest

KEPT = 4
"""Files of a folder: the version of this step, and those that orders of the steps before still name."""
MACHINE = "machine"
NAME = re.compile(r"[0-9a-f]{32}")
FORGOTTEN_S = 86_400.0
"""A folder that no actor has written to for so long is removed by the next actor that starts."""

log = logging.getLogger("actor")


class PassedOn:
    """The folder of one machine for one learner."""

    def __init__(self, folder: Path) -> None:
        make_private(folder)
        self.folder = folder
        self.machine = name_of(folder)

    def keep(self, policy: Policy) -> bool:
        """Write an adapter that came over the network, for the other actors; whether it worked."""
        target = self.path(policy)
        part = self.folder / f"{secrets.token_hex(8)}.part"
        try:
            part.write_bytes(policy.adapter.data)
            os.replace(part, target)
            self.forget_old()
        except OSError as error:
            part.unlink(missing_ok=True)
            log.warning("policy %d is not passed on to other actors here: %s", policy.version, error)
            return False
        return True

    def find(self, policy: Policy) -> Policy | None:
        """This policy with its adapter; None if no actor has written it yet."""
        with suppress(OSError):
            with self.path(policy).open("rb") as file:
                data = file.read(MAX_BUFFER_BYTES)
            # A file of other bytes is as good as none: the wait for it ends, and the learner sends the right ones.
            if digest(data) == policy.sha256:
                return replace(policy, adapter=np.frombuffer(data, dtype=np.uint8))
        return None

    def path(self, policy: Policy) -> Path:
        return self.folder / f"{policy.sha256}.safetensors"

    def forget_old(self) -> None:
        """Other actors do the same at the same time."""
        with suppress(FileNotFoundError):
            files = [(path.stat().st_mtime_ns, path) for path in self.folder.iterdir() if path.name != MACHINE]
            for _, path in sorted(files)[:-KEPT]:
                path.unlink()


def name_of(folder: Path) -> str:
    """The name in this folder; the first actor makes it up."""
    target, part = folder / MACHINE, folder / f"{secrets.token_hex(8)}.part"
    if target.exists() and not NAME.fullmatch(target.read_text()):
        # As after a power cut, since nothing here is synced.
        target.unlink()
    if not target.exists():
        part.write_text(secrets.token_hex(16))
        # Of two actors that start at once, one links first.
        with suppress(FileExistsError):
            os.link(part, target)
        part.unlink()
    return target.read_text()


def passed_on(endpoint: str, learner_key: bytes) -> PassedOn | None:
    """For an actor of the learner with this public key; None if it reaches the learner by a local socket, or if there
    is no place for files."""
    if not endpoint.startswith("tcp"):
        return None
    shared = user_folder()
    try:
        make_private(shared)
        for folder in shared.glob("adapters-*"):
            if time.time() - folder.stat().st_mtime > FORGOTTEN_S:
                shutil.rmtree(folder, ignore_errors=True)
        return PassedOn(shared / f"adapters-{digest(learner_key)[:16]}")
    except (OSError, SecurityError) as error:
        log.warning("this actor gets each adapter from the learner, and passes none on: %s", error)
        return None
