"""The cards of this machine, their memory, and the processes that use it, as nvidia-smi lists them. nvidia-smi comes
with the driver and takes no memory of a card; asking through torch would.
"""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

NVIDIA_SMI = "nvidia-smi"
NVIDIA_SMI_S = 8.0
"""Time limit of one call."""
CARD_FIELDS = "uuid,name,driver_version,memory.total,memory.free,compute_mode"
PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_gpu_memory"
CARD_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process that uses a card."""

    pid: int
    """Process id."""
    name: str
    """Path of its program."""
    num_bytes: int | None
    """Memory on the card; None if the driver does not say (WSL, another container)."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card."""

    uuid: str
    """`GPU-...`"""
    name: str
    """Such as `NVIDIA GeForce RTX 3070`."""
    driver: str
    """Version of the driver."""
    total: int
    """Bytes of memory."""
    free: int
    """Bytes that no process uses."""
    mode: str
    """`Default`, `Exclusive_Process`, `Prohibited`."""
    processes: tuple[CardProcess, ...]
    """Those that use it."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What nvidia-smi lists."""

    trouble: str
    """Why nvidia-smi failed; empty if it worked, or is not installed."""
    cards: tuple[Card, ...]
    """In the order of nvidia-smi."""
    variables: Mapping[str, str]
    """Environment variables that CUDA and PyTorch's allocator read."""


def look_at_cards(program: str = NVIDIA_SMI) -> Cards:
    variables = {name: os.environ[name] for name in CARD_VARIABLES if name in os.environ}
    if shutil.which(program) is None:
        return Cards(trouble="", cards=(), variables=variables)
    cards = query(program, f"--query-gpu={CARD_FIELDS}")
    if cards.returncode:
        return Cards(trouble=first_line(cards), cards=(), variables=variables)
    processes = query(program, f"--query-compute-apps={PROCESS_FIELDS}")
    return Cards(trouble="", cards=read_cards(cards.stdout, processes.stdout), variables=variables)


def query(program: str, what: str) -> subprocess.CompletedProcess[str]:
    argv = [program, what, "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else f"{NVIDIA_SMI} ended with exit code {done.returncode}"


def read_cards(cards: str, processes: str) -> tuple[Card, ...]:
    """From the CSV that nvidia-smi prints about cards and about processes."""
    on: dict[str, list[CardProcess]] = {}
    for uuid, pid, name, used in (row for row in rows(processes) if len(row) == 4):
        on.setdefault(uuid, []).append(CardProcess(pid=int(pid), name=name, num_bytes=bytes_of(used)))
    return tuple(
        Card(
            uuid=uuid,
            name=name,
            driver=driver,
            total=bytes_of(total) or 0,
            free=bytes_of(free) or 0,
            mode=mode,
            processes=tuple(on.get(uuid, ())),
        )
        for uuid, name, driver, total, free, mode in rows(cards)
    )


def rows(text: str) -> list[list[str]]:
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]


def bytes_of(mebibytes: str) -> int | None:
    """None for `[N/A]` and other words."""
    return int(mebibytes) * MIB if mebibytes.isdecimal() else None


def chosen_card(cards: Cards, number: int) -> Card | None:
    """The card that has this number among all, or among those that CUDA_VISIBLE_DEVICES names; else the first."""
    visible = cards.variables.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(cards.cards))))).split(",")
    wanted = visible[min(number, len(visible) - 1)].strip()
    named = [card for index, card in enumerate(cards.cards) if wanted == str(index) or card.uuid.startswith(wanted)]
    return (named or [*cards.cards, None])[0]
