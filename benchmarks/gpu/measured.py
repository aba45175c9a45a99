"""How a section of the suite takes its figures: time and memory of a card, noted as soon as they are known.

    note = Note(file);  note(load_s=1.5)         the file is whole after every call, so a killed section keeps its part
    seconds, result = timed(work, device)        waits for the card before and after
    peaks = Peaks(device);  peaks("decode")      what was allocated at most since the call before, by phase

Memory is asked of PyTorch's allocator (allocated, reserved) and of the driver, which also knows contexts and what
other processes have. On a CPU there is only time. The card as a whole is watched from outside (`CardWatch`), because a
run has several processes: nvidia-smi writes a line ten times a second.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from shared.config.model import ModelConfig
from shared.run.files import write_whole

Found = TypeVar("Found")
MIB = 2**20
WATCH_MS = 100


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a section runs, and how large its work is."""

    work: Path
    """Folder for bases and runs; the sections of a suite share it."""
    device: torch.device
    small: bool
    """A dry run: a model of two layers, a few tokens, once. Proves that the code runs, and measures nothing."""

    def shape(self, name: str) -> str:
        """Name of the model's shape."""
        return "tiny" if self.small else name

    def size(self, full: int, small: int) -> int:
        return small if self.small else full

    def keys(self, model: ModelConfig) -> dict[str, Any]:
        """Of a configuration for this place. A dry run computes as on a card: in bf16, codes dequantised in each
        call."""
        keys: dict[str, Any] = {"model.path": model.path, "model.cache_dir": model.cache_dir}
        if self.device.type == "cuda":
            return keys | {"compute.device": "cuda"}
        return keys | {"compute.device": "cpu", "compute.dtype": "bf16", "model.dequantize": "each_call"}


class Note:
    """The figures of a section so far, in a file that is whole at any time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.figures: dict[str, Any] = {}

    def __call__(self, **figures: Any) -> None:
        self.figures |= figures
        write_whole(self.file, json.dumps(self.figures, indent=2).encode(), durable=False)


def finish(device: torch.device) -> None:
    """Wait until the card has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Found], device: torch.device) -> tuple[float, Found]:
    finish(device)
    began = time.perf_counter()
    found = work()
    finish(device)
    return time.perf_counter() - began, found


class Peaks:
    """The memory of this process by phase, in MiB."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, dict[str, float]] = {}
        self.begin()

    def begin(self) -> None:
        if self.device.type == "cuda":
            finish(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def __call__(self, phase: str) -> None:
        """The phase that ends here. Of several with one name the largest counts."""
        if self.device.type == "cuda":
            finish(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            self.add(phase, "allocated", torch.cuda.max_memory_allocated(self.device))
            self.add(phase, "reserved", torch.cuda.max_memory_reserved(self.device))
            self.add(phase, "used_on_card", total - free)
        else:
            self.phases.setdefault(phase, {})
        self.begin()

    def add(self, phase: str, kind: str, num_bytes: int) -> None:
        found = self.phases.setdefault(phase, {})
        found[kind] = max(found.get(kind, 0.0), round(num_bytes / MIB, 1))


class CardWatch:
    """Inside the block, nvidia-smi notes what is used on the card; without it, nothing is noted."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.written = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the block ends
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        if tool := shutil.which("nvidia-smi"):
            asked = "--query-gpu=memory.used,utilization.gpu"
            command = [tool, asked, "--format=csv,noheader,nounits", f"--loop-ms={WATCH_MS}"]
            self.process = subprocess.Popen(command, stdout=self.written)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()
        self.written.seek(0)
        self.lines = self.written.read().decode().splitlines()
        self.written.close()

    def figures(self) -> dict[str, float]:
        """Use before, most use, and how busy the card was on average; empty if nothing was noted."""
        rows = [tuple(map(float, line.split(","))) for line in self.lines if line.count(",") == 1]
        if not rows:
            return {}
        used, busy = zip(*rows, strict=True)
        return {
            "used_before_mib": used[0],
            "used_at_most_mib": max(used),
            "used_by_run_mib": max(used) - used[0],
            "busy_percent": round(sum(busy) / len(busy), 1),
        }
