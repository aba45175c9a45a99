"""The cards of this machine, their memory, and the processes that use it, as nvidia-smi lists them. nvidia-smi comes
with the driver and takes no memory of a card; asking through torch would.
"""

import csv
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launch.plan.memory import size
from shared.process.usable_cards import Found, find_cards

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
    total: int | None
    """Bytes of memory; None if the driver does not say (a card that shares the memory of the host)."""
    free: int | None
    """Bytes that no process uses; None likewise."""
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
    numbered: tuple[str, ...] = ()
    """UUIDs in the order of CUDA, which is another one: by default the fastest card is the first. Empty where the
    driver does not say them."""
    variables: Mapping[str, str]
    """Environment variables that CUDA and PyTorch's allocator read."""


def look_at_cards(
    program: str = NVIDIA_SMI, find: Callable[[], Found] = find_cards, limit_s: float = NVIDIA_SMI_S
) -> Cards:
    """find: asks CUDA for its order. limit_s: of one call."""
    variables = {name: os.environ[name] for name in CARD_VARIABLES if name in os.environ}
    if shutil.which(program) is None:
        return Cards(trouble="", cards=(), variables=variables)
    try:
        cards = query(program, f"--query-gpu={CARD_FIELDS}", limit_s)
        if cards.returncode:
            return Cards(trouble=first_line(cards), cards=(), variables=variables)
        processes = query(program, f"--query-compute-apps={PROCESS_FIELDS}", limit_s)
    except subprocess.TimeoutExpired:
        return Cards(trouble=f"{NVIDIA_SMI} did not answer within {limit_s:g} s", cards=(), variables=variables)
    except OSError as error:
        return Cards(trouble=f"{NVIDIA_SMI} cannot be started: {error.strerror}", cards=(), variables=variables)
    uuids = tuple(card.uuid for card in find().cards)
    return Cards(
        trouble="",
        cards=read_cards(cards.stdout, processes.stdout),
        numbered=uuids if all(uuids) else (),
        variables=variables,
    )


def query(program: str, what: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    argv = [program, what, "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)


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
            total=bytes_of(total),
            free=bytes_of(free),
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
    """The card that has this number for CUDA; None if nvidia-smi does not list it (a part of a card). Where the driver
    does not say which one that is: the one with this number among all, or among those that CUDA_VISIBLE_DEVICES names;
    else the first."""
    if cards.numbered:
        uuid = cards.numbered[min(number, len(cards.numbered) - 1)]
        return next((card for card in cards.cards if card.uuid == uuid), None)
    visible = cards.variables.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(cards.cards))))).split(",")
    wanted = visible[min(number, len(visible) - 1)].strip()
    named = [card for index, card in enumerate(cards.cards) if wanted == str(index) or card.uuid.startswith(wanted)]
    return (named or [*cards.cards, None])[0]


def free_memory(card: Card) -> str:
    """In words, with the processes that use the rest."""
    if card.free is None or card.total is None:
        return f"the memory of {card.name} is not known (nvidia-smi does not say it){used_by(card)}"
    return f"{size(card.free)} of {size(card.total)} are free on {card.name}{used_by(card)}"


def used_by(card: Card) -> str:
    """`, used by python (process 12, 3.1 GiB)`; empty if no process uses it."""
    return f", used by {', '.join(described(process) for process in card.processes)}" if card.processes else ""


def described(process: CardProcess) -> str:
    amount = "an unknown amount" if process.num_bytes is None else size(process.num_bytes)
    return f"{process.name} (process {process.pid}, {amount})"
