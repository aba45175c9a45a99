"""The fork server as the pool sees it: sends commands, receives the exits of workers, waits SEND_LIMIT_S at most.

Its environment, which its workers inherit, is an allow-list: paths, language, thread counts, and what
verifier.environment names. So it contains no token of the actor. Workers have another HOME, so they are told where the
user's models of the hub are, in a folder that has no token. Python looks for modules on
PYTHONPATH only: a file in the folder where the run was started must not replace a module of ours.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actor.scoring.pipe import Command, WorkerExited
from shared.config.model import hub_cache_folder
from shared.config.types import Section
from shared.process.busy_cores.gathering import give_all_cores
from shared.process.children import end_trees

ROOT = Path(__file__).resolve().parents[2]
KNOWN = re.compile(
    r"PATH|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHONHASHSEED|CUDA_VISIBLE_DEVICES|HF_HUB_OFFLINE"
    r"|\w+_NUM_THREADS"
)
PACKET_BYTES = 4096
END_LIMIT_S = 5.0
SEND_LIMIT_S = 30.0
"""Longest wait for room in the socket, which takes a few hundred commands. A fork server reads none while it starts."""


class ForkServerProcess:
    """A process, the socket to it, and the scratch folder of its workers."""

    def __init__(self, module: str, config: Section, variables: Sequence[str]) -> None:
        """module: its program, which gets the configuration. variables: more that the workers may read."""
        self.scratch = tempfile.mkdtemp(prefix="tandem-scoring-")
        self.commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = msgspec.json.encode(config).decode()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-u", "-m", module, str(theirs.fileno()), given, self.scratch],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment(variables),
            )
        give_all_cores(self.popen.pid)
        self.commands.setblocking(False)
        self.is_gone = False
        self.closed = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    def fileno(self) -> int:
        return self.commands.fileno()

    def send(self, command: Command, descriptors: Sequence[int] = ()) -> None:
        """A fork server that lets the socket stay full counts as gone."""
        if self.is_gone or self.closed:
            return
        self.commands.settimeout(SEND_LIMIT_S)
        try:
            socket.send_fds(self.commands, [msgspec.msgpack.encode(command)], list(descriptors))
        except OSError:
            self.is_gone = True
        self.commands.setblocking(False)

    def exits(self) -> list[WorkerExited]:
        """Workers that have ended since the last call."""
        exited: list[WorkerExited] = []
        try:
            while packet := self.commands.recv(PACKET_BYTES):
                exited.append(msgspec.msgpack.decode(packet, type=WorkerExited))
            self.is_gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_gone = True
        return exited

    def close(self) -> None:
        """End the fork server and with it all workers; kill it if it does not end in time."""
        if self.closed:
            return
        self.closed = True
        self.commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_LIMIT_S)
        if self.popen.returncode is None:
            end_trees({self.pid})
            self.popen.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def environment(more: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: the allowed variables, and the path to our packages."""
    kept = {name: value for name, value in os.environ.items() if KNOWN.fullmatch(name) or name in more}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HF_HUB_CACHE": str(hub_cache_folder())}
