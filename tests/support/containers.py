"""The images of docker/Dockerfile, and learner and actor in containers of them, with Podman on this machine.

Nothing comes from a registry of images. The base is one of this machine, any with Python 3.11 or newer, its venv module
and useradd, such as docker/README.md makes from Debian's packages:

    TANDEM_TEST_BASE             its name
    TANDEM_TEST_BUILD_OPTIONS    more options of `podman build`, such as --volume HOST:INSIDE:ro for pip's settings

podman-compose reads the file and Podman starts the containers, so nothing of docker/ is repeated here. Containers,
network and cache are those of a project of its own. The images have the names that the file gives them, and stay.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.runs import ROOT

PROJECT = "tandem-test"
TARGETS = {"prepare": "tandem:cpu", "learner": "tandem:learner-cpu", "actor": "tandem:actor-cpu"}
"""Service -> its image, in the order in which they are built; the first one installs what all three need."""
USER = 1000
"""Who the processes are, unless the file is told otherwise."""
BUILD_S, WAIT_S = 1500.0, 600.0
LOOK = """
import json, os
status = dict(line.split(None, 1) for line in open("/proc/self/status") if line.startswith(("CapBnd", "NoNewPrivs")))
places = ("/app", "/run/tandem", "/run/tandem/lease", "/run/tandem/logs", "/run/tandem/journal", "/run/tandem/keys")
print(json.dumps({
    "user": os.getuid(),
    "capabilities": int(status["CapBnd:"], 16),
    "may_gain_rights": int(status["NoNewPrivs:"]) == 0,
    "writable": [place for place in places if os.access(place, os.W_OK)],
    "keys": sorted(os.listdir("/run/tandem/keys")),
    "code": sorted(set(os.listdir("/app")) & {"actor", "learner", "launch"}),
}))
"""


def missing() -> str:
    """What is not on this machine and is needed; empty if all is."""
    if os.getuid() != 0:
        return "containers that write a run directory need root here"
    if not shutil.which("podman") or not find_spec("podman_compose"):
        return "needs podman, and podman-compose from the extra dev"
    if not os.environ.get("TANDEM_TEST_BASE"):
        return "needs a local base image with Python, named in TANDEM_TEST_BASE; docker/README.md makes one"
    return ""


@dataclass(frozen=True, kw_only=True)
class Containers:
    """docker/compose.yaml with one run directory."""

    run: Path

    def compose(self, *words: str, wait_s: float = WAIT_S) -> str:
        """`podman-compose ...` to its end; what it printed."""
        options = ["-f", "docker/compose.yaml", "-p", PROJECT, "--profile", "prepare"]
        local = ["--build-arg", f"CPU_BASE={os.environ['TANDEM_TEST_BASE']}", "--build-arg", "PIP_EXTRA_INDEX_URL="]
        # A network for builds alone may not reach what this machine reaches.
        more = ["--network", "host", *shlex.split(os.environ.get("TANDEM_TEST_BUILD_OPTIONS", ""))]
        told = [f"--podman-build-args={shlex.join([*local, *more])}"]
        return output(
            sys.executable, "-m", "podman_compose", *options, *told, *words, wait_s=wait_s, TANDEM_RUN=str(self.run)
        )

    def build(self, service: str, *options: str) -> str:
        """Its image."""
        return self.compose("build", *options, service, wait_s=BUILD_S)

    def prepare(self) -> None:
        """The run and its keys, in a folder of the user who is inside."""
        self.run.mkdir()
        os.chown(self.run, USER, USER)
        self.compose("run", "--rm", "prepare")

    def train(self, *options: str) -> str:
        """`up`, until both have ended unless the options say otherwise."""
        return self.compose("up", *options, "learner", "actor")

    def look_inside(self, service: str) -> dict[str, Any]:
        """What a process of a running service is, sees and may write."""
        return json.loads(self.compose("exec", "-T", service, "python", "-c", LOOK).strip().splitlines()[-1])

    def state(self, service: str) -> dict[str, Any]:
        """What Podman knows of a service's container."""
        return json.loads(output("podman", "inspect", f"{PROJECT}_{service}_1"))[0]

    def kill(self, service: str) -> None:
        """From outside: after `podman kill` nothing would start it again."""
        os.kill(self.state(service)["State"]["Pid"], signal.SIGKILL)


@contextmanager
def containers(run: Path) -> Iterator[Containers]:
    """Everything but the images is gone afterwards."""
    ours = Containers(run=run)
    try:
        yield ours
    finally:
        ours.compose("down", "--volumes")


def output(*argv: str, wait_s: float = WAIT_S, **variables: str) -> str:
    """Of a command that must succeed."""
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=wait_s,
    )
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
