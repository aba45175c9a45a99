"""Adapters as folders that a vLLM server reads: one for each install, under a name that no other ever had.

    {here}/tandem-HOST-PID-HEX/policy-7-2/adapter_model.safetensors, adapter_config.json      written by the actor
    {there}/tandem-HOST-PID-HEX/policy-7-2                                                    the server's name for it

vLLM's prefix cache tells adapters apart by name and path, so both must be new each time, also after a restart of the
actor beside a server that goes on. A folder appears whole, by a rename, and is removed when the server has the next
adapter: until then vLLM may read it again. An actor that was killed leaves its folder; the next one on this machine
removes it.
"""

import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from shared.errors import ConfigError

PREFIX = "tandem"
TOKEN = re.compile(r"([0-9]+)-[0-9a-f]+")
"""PID-HEX"""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An adapter that a server can load."""

    name: str
    """Never used again."""
    path: str
    """As the server sees it."""


class AdapterFiles:
    """The folders of this process."""

    def __init__(self, here: Path, there: str, settings: bytes) -> None:
        """settings: adapter_config.json."""
        self.owner = f"{PREFIX}-{socket.gethostname()}"
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.here = here / f"{self.owner}-{self.token}"
        self.there = f"{(there or str(here.absolute())).rstrip('/')}/{self.here.name}"
        self.settings = settings
        self.numbers = count(1)

    def open(self) -> None:
        """Make this process's folder, and remove those of actors that were killed."""
        try:
            for folder in self.here.parent.glob(f"{self.owner}-*-*"):
                # Whole: a machine may be called as this one and go on, like node and node-2.
                of_this_machine = TOKEN.fullmatch(folder.name.removeprefix(f"{self.owner}-"))
                if of_this_machine and has_ended(of_this_machine[1]):
                    shutil.rmtree(folder, ignore_errors=True)
            self.here.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"server.folder = '{self.here.parent}' cannot be written ({error.strerror}); give a folder that this"
                " machine writes and the server reads."
            ) from error

    def close(self) -> None:
        shutil.rmtree(self.here, ignore_errors=True)

    def write(self, version: int, adapter: bytes) -> Written:
        # The token again, because two actors may use one server, and names have no folder.
        name = f"policy-{version}-{self.token}-{next(self.numbers)}"
        unfinished = self.here / f".{name}"
        unfinished.mkdir()
        (unfinished / "adapter_model.safetensors").write_bytes(adapter)
        (unfinished / "adapter_config.json").write_bytes(self.settings)
        unfinished.rename(self.here / name)
        return Written(name=name, path=f"{self.there}/{name}")

    def remove(self, written: Written) -> None:
        shutil.rmtree(self.here / written.name, ignore_errors=True)


def has_ended(process: str) -> bool:
    """process: its id."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):
        pass
    return False
