"""What Ray runs on the node that it has chosen: it starts one process of the run there and watches it.

The process is the same program as on one machine, `python -m learner` or `python -m actor`, and gets its address as an
option. It finds everything else in the run's folder, its keys too, so no secret passes through Ray. The folder from
which the run was started must be there under the same path, and Tandem in the Python that runs Ray.

A host has one thread and does not wait long, so that it can be asked at any time. The process is tied to it
(shared/process/parent_death.py): if Ray or the node ends the host, the process ends, and with it all that it started.
"""

import os
import random
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launch.supervisor.starter import FreshProcess
from launch.supervisor.topology import Process
from shared.errors import RunDirError
from shared.run.files import open_log

PORTS = range(20_000, 30_000)
"""Below those that the kernel gives to connections, and above those of Ray's own workers: the learner listens seconds
after its port was chosen."""
LOOK_EVERY_S = 0.05


class Host:
    """Ray makes one for each process of the run."""

    started: FreshProcess

    def address(self, ip: str = "") -> str:
        """Where a learner on this node can listen. ip: of the node; else Ray says it."""
        host = ip or node_ip()
        return f"tcp://{host}:{free_port(host)}"

    def start(self, process: Process, option: str, address: str, folder: Path) -> None:
        """option: which has the address. folder: in which the process runs."""
        logs = folder / process.log.parent  # a relative path is meant from there
        if not (folder.is_dir() and logs.is_dir()):
            missing = logs if folder.is_dir() else folder
            raise RunDirError(
                f"{process.name} cannot start on node {socket.gethostname()}, where {missing} is missing; the run and"
                " the folder from which you start it must be on a disk that all nodes see under the same path."
            )
        os.chdir(folder)
        # The Python of this node may be elsewhere.
        argv = (sys.executable, *process.argv[1:], option, address)
        with open_log(process.log, "ab") as log:
            self.started = FreshProcess(replace(process, argv=argv), log)

    def exit_code(self, wait_s: float) -> int | None:
        """Of the process; waits at most so long for its end."""
        deadline = time.monotonic() + wait_s
        while (code := self.started.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return code

    def send_signal(self, number: int) -> None:
        self.started.send_signal(number)

    def kill_group(self) -> None:
        self.started.kill_group()


def node_ip() -> str:
    """Of this node, as the others reach it."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.util.get_node_ip_address()


def free_port(host: str) -> int:
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise RunDirError(f"No port from {PORTS[0]} to {PORTS[-1]} is free at {host}, and the learner needs one.")
