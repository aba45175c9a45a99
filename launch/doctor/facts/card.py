"""Cards and who is on them, as nvidia-smi tells it, which comes with the driver; and what the torch probe told: the
driver, PyTorch's build and cards, a bitsandbytes round trip."""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from launch.doctor.finding import Missing
from launch.doctor.probe import Told, ask

PROGRAM = "nvidia-smi"
LIMIT_S = 8.0
CARD_FIELDS = "uuid,name,driver_version,memory.total,memory.free,compute_mode"
HOLDER_FIELDS = "gpu_uuid,pid,process_name,used_gpu_memory"
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
)
MIB = 2**20
PROBE = "launch.doctor.probes"
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process on a card."""

    pid: int
    """Its id."""
    name: str
    """Its program."""
    held: int | None
    """Bytes; None where the driver does not tell (WSL, another container)."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card."""

    uuid: str
    """`GPU-...`"""
    name: str
    """Its maker's name for it."""
    driver: str
    """Version of the driver."""
    total: int
    """Bytes of memory."""
    free: int
    """Bytes nobody holds."""
    mode: str
    """`Default`, `Exclusive_Process`, `Prohibited`."""
    holders: tuple[Holder, ...]
    """Who is on it."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """All that nvidia-smi sees."""

    trouble: str
    """Why it could not tell; empty if it could, or is not here."""
    cards: tuple[Card, ...]
    """In its order."""
    variables: Mapping[str, str]
    """Environment variables that PyTorch's allocator and CUDA read."""


def look_at_cards(program: str = PROGRAM) -> Cards:
    """On this machine."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if shutil.which(program) is None:
        return Cards(trouble="", cards=(), variables=variables)
    cards = query(program, f"--query-gpu={CARD_FIELDS}")
    if cards.returncode:
        return Cards(trouble=first_line(cards), cards=(), variables=variables)
    holders = query(program, f"--query-compute-apps={HOLDER_FIELDS}")
    return Cards(trouble="", cards=read_cards(cards.stdout, holders.stdout), variables=variables)


def query(program: str, what: str) -> subprocess.CompletedProcess[str]:
    """One question."""
    argv = [program, what, "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    """Of whatever it said."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else f"{PROGRAM} ended with exit code {done.returncode}"


def read_cards(cards: str, holders: str) -> tuple[Card, ...]:
    """From the two answers, lines of fields with commas between."""
    on: dict[str, list[Holder]] = {}
    for uuid, pid, name, held in (row for row in rows(holders) if len(row) == 4):
        on.setdefault(uuid, []).append(Holder(pid=int(pid), name=name, held=bytes_of(held)))
    return tuple(
        Card(
            uuid=uuid,
            name=name,
            driver=driver,
            total=bytes_of(total) or 0,
            free=bytes_of(free) or 0,
            mode=mode,
            holders=tuple(on.get(uuid, ())),
        )
        for uuid, name, driver, total, free, mode in rows(cards)
    )


def rows(answer: str) -> list[list[str]]:
    """Its lines as fields."""
    return [row for row in csv.reader(answer.splitlines(), skipinitialspace=True) if row]


def bytes_of(mebibytes: str) -> int | None:
    """A number, or None for `[N/A]` and the like."""
    return int(mebibytes) * MIB if mebibytes.isdecimal() else None


class Driver(msgspec.Struct, frozen=True, kw_only=True, tag="driver", tag_field="stage"):
    """The card's driver as its own library tells of it."""

    cuda: tuple[int, int] | None
    """Newest CUDA it can serve; None without a driver."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A card as PyTorch sees it."""

    name: str
    """Its maker's name for it."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 6)."""


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True, tag="torch", tag_field="stage"):
    """PyTorch as it is here."""

    version: str
    """With the build's suffix."""
    cuda_build: str | None
    """CUDA version it was built for."""
    architectures: tuple[str, ...]
    """What its kernels were compiled for, such as `sm_86` or `compute_90`."""
    devices: tuple[Device, ...]
    """Cards that it can use."""
    cuda_error: str
    """Why it can use none; empty if it can, or was not built to."""


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True, tag="bitsandbytes", tag_field="stage"):
    """Random weights to NF4 and back."""

    version: str
    """Of bitsandbytes."""
    device: str
    """Where: `cpu` or `cuda`."""
    round_trip: float
    """Largest error, in units of the largest value of its block."""
    kernel_gap: float
    """Largest difference between its kernels and the format's formula."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The three stages."""

    driver: Driver | Missing
    """First, since loading torch may fail for its sake."""
    torch: TorchBuild | Missing
    """Second."""
    bitsandbytes: RoundTrip | Missing
    """Last."""


def look_at_torch(device: str, limit_s: float) -> TorchFacts:
    """Ask a process of its own; `device` is the configured one."""
    return stages(ask(PROBE, ["torch", device], limit_s))


def stages(told: Told) -> TorchFacts:
    """Each stage that was finished, and for the others how the probe ended."""
    said = [msgspec.json.decode(line, type=Driver | TorchBuild | RoundTrip) for line in told.lines]
    return TorchFacts(
        driver=pick(said, Driver, told), torch=pick(said, TorchBuild, told), bitsandbytes=pick(said, RoundTrip, told)
    )


def pick(said: list[Driver | TorchBuild | RoundTrip], kind: type[T], told: Told) -> T | Missing:
    """The stage of this kind."""
    found = [stage for stage in said if isinstance(stage, kind)]
    return found[0] if found else Missing(told.trouble or "the probe said nothing")
