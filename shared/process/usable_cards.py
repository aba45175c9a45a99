"""The cards that a run can use on this machine, found without loading torch; or a sentence that says why there is none.

    torch   the CUDA version that it was built for, from the file with its versions
    driver  its version, from the kernel; the newest CUDA version that it supports, from its library
    cards   names and compute capabilities, from that library, as CUDA_VISIBLE_DEVICES shows them

A driver supports all CUDA versions before its own, and later ones of the same major version. Cards before compute
capability 8.0 compute bf16 slowly or not at all, and are refused unless the number type is fp32.

It takes a fraction of a second, so a run without its card ends before anything is made; one that may compute on the CPU
says that it does. `doctor` asks PyTorch itself, in a process of its own. Left out on purpose: fp16, which needs its
gradients scaled.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from shared.config.processes import ActorConfig, ComputeConfig
from shared.errors import ConfigError
from shared.process.card import driver_version

CARD_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
"""What the driver of NVIDIA makes where a card can be used: Linux, WSL."""
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide every card."""
LIBRARY = "libcuda.so.1"
MAJOR, MINOR = 75, 76
"""The driver's numbers for the two parts of a compute capability."""
MAX_NAME_BYTES = 256
UUID_BYTES = 16
BF16_CAPABILITY = (8, 0)
CUDA_BUILD = "install a build of PyTorch with CUDA (https://pytorch.org/get-started)"
CPU_INSTEAD = "use --set compute.device=cpu"
NO_REASON = ("", "")
Role = Literal["learner", "actor"]
"""Who uses a card. The key of its number is compute.<role>_card."""
BOTH: tuple[Role, ...] = ("learner", "actor")


@dataclass(frozen=True, kw_only=True)
class FoundCard:
    """One card, as the driver names it."""

    name: str
    """Such as `NVIDIA GeForce RTX 3070`."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 6)."""
    uuid: str = ""
    """`GPU-...`, as nvidia-smi has it, which has none like that of a part of a card (MIG); empty if the driver does not
    say."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search found."""

    torch: str
    """Version of PyTorch."""
    build: str
    """CUDA version that it was built for; empty for a build without CUDA."""
    driver: str
    """Version of the driver; empty if the kernel does not say."""
    newest: tuple[int, int] | None
    """The newest CUDA version that the driver supports; None without a driver."""
    trouble: str
    """Why the driver shows no cards, in its own words; empty if it shows some, or was not asked."""
    cards: tuple[FoundCard, ...]
    """In the order of their numbers."""
    is_hidden: bool
    """Whether CUDA_VISIBLE_DEVICES hides every card."""

    @property
    def driver_words(self) -> str:
        """`driver 580.65.06`, with what it supports."""
        supported = f" (CUDA {self.newest[0]}.{self.newest[1]})" if self.newest else ""
        return f"driver{f' {self.driver}' if self.driver else ''}{supported}"

    @property
    def is_new_enough(self) -> bool:
        return self.newest is not None and self.newest[0] >= int(self.build.partition(".")[0])


def find_cards() -> Found:
    build, library = cuda_build(), driver_library()
    found = Found(
        torch=version("torch"),
        build=build,
        driver=driver_version(),
        newest=newest_cuda(library),
        trouble="",
        cards=(),
        is_hidden=os.environ.get("CUDA_VISIBLE_DEVICES", "all") in HIDDEN,
    )
    return with_cards(found, library) if library else found


def is_expected(environment: Mapping[str, str], files: Sequence[str] = CARD_FILES) -> bool:
    """Whether there is a driver, and nobody has hidden its cards; it is not asked."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "all") in HIDDEN
    return not hidden and any(Path(file).exists() for file in files)


def has_card(find: Callable[[], Found] = find_cards, files: Sequence[str] = CARD_FILES) -> bool:
    """Whether `auto` takes one."""
    return is_expected(os.environ, files) and why_none(find()) == NO_REASON


def cuda_build(package: str = "torch") -> str:
    """`13.0`; empty for a build without CUDA."""
    spec = find_spec(package)
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    found = re.search(r"^cuda\b.*= ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def driver_library() -> Any:
    """None without a driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def newest_cuda(library: Any) -> tuple[int, int] | None:
    """That the driver supports. Needs no card and no context."""
    number = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def with_cards(found: Found, library: Any) -> Found:
    """Ask the driver, which opens no context on any card."""
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    cards = tuple(card_at(library, number) for number in range(0 if code else count.value))
    return replace(found, trouble=error_words(library, code) if code else "", cards=cards)


def card_at(library: Any, number: int) -> FoundCard:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(MAX_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), number)
    library.cuDeviceGetName(name, MAX_NAME_BYTES, device)
    for part, attribute in ((major, MAJOR), (minor, MINOR)):
        library.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return FoundCard(
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
        uuid=uuid_of(library, device),
    )


def uuid_of(library: Any, device: ctypes.c_int) -> str:
    """Drivers before CUDA 11.4 have another function, which says of a part of a card that it is the whole one."""
    ask, found = getattr(library, "cuDeviceGetUuid_v2", None), ctypes.create_string_buffer(UUID_BYTES)
    return "" if ask is None or ask(found, device) else f"GPU-{UUID(bytes=found.raw)}"


def error_words(library: Any, code: int) -> str:
    words = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(words))
    return (words.value or f"error {code}".encode()).decode(errors="replace")


def why_none(found: Found) -> tuple[str, str]:
    """Why no card can be used, and the remedy; both empty if there is one."""
    if not found.build:
        there = f"beside {found.driver_words}" if found.newest else "and there is no NVIDIA driver"
        return f"this PyTorch ({found.torch}) was built without CUDA, {there}", CUDA_BUILD
    torch = f"PyTorch {found.torch}, which was built for CUDA {found.build}"
    if found.newest is None:
        return f"there is no NVIDIA driver for {torch}", "install the driver; in a container use --gpus all"
    if not found.is_new_enough:
        older = f"install a PyTorch that was built for CUDA {found.newest[0]}"
        return f"{found.driver_words} is too old for {torch}", f"update the driver, or {older}"
    if found.is_hidden:
        return "CUDA_VISIBLE_DEVICES hides every card", "unset CUDA_VISIBLE_DEVICES"
    if not found.cards:
        said = f" ({found.trouble})" if found.trouble else ""
        return f"{found.driver_words} shows no card{said}", "check it with nvidia-smi; in a container use --gpus all"
    return NO_REASON


def cpu_instead(
    compute: ComputeConfig, find: Callable[[], Found] = find_cards, files: Sequence[str] = CARD_FILES
) -> str:
    """What to say where `auto` takes the CPU beside a card that cannot be used; else empty."""
    if compute.device != "auto" or not is_expected(os.environ, files):
        return ""
    found = find()
    why, remedy = why_none(found)
    if not why:
        return ""
    which = ", ".join(card.name for card in found.cards) or "the card of this machine"
    return (
        f"{which} cannot be used: {why}; {remedy}. compute.device is 'auto', so the CPU computes, which takes many"
        " times as long."
    )


def roles_here(actor: ActorConfig) -> Sequence[Role]:
    """Who computes on this machine's cards: not an actor whose servers sample."""
    return ("learner",) if actor.is_elsewhere else BOTH


def card_numbers(compute: ComputeConfig, roles: Sequence[Role]) -> dict[Role, int]:
    """compute.<role>_card of each."""
    return {role: compute.learner_card if role == "learner" else compute.actor_card for role in roles}


def check_cards(
    compute: ComputeConfig, roles: Sequence[Role] = BOTH, find: Callable[[], Found] = find_cards
) -> dict[str, str]:
    """For run.json: the names of the cards of these roles, and what they depend on; empty where the CPU computes.
    ConfigError if a card is wanted that cannot be used. `auto` wants one where there is one."""
    if compute.device == "cpu" or (compute.device == "auto" and not is_expected(os.environ)):
        return {}
    found = find()
    why, remedy = why_none(found)
    if why and compute.device == "cuda":
        raise ConfigError(f"compute.device is 'cuda', but {why}; {remedy}; or {CPU_INSTEAD}.")
    if why:
        return {}
    numbers = card_numbers(compute, roles)
    for role, number in numbers.items():
        refuse_unfit(found.cards, f"compute.{role}_card", number, needs_bf16=compute.dtype != "fp32")
    if "learner" in roles:
        refuse_unfit_ranks(found.cards, compute)
    names = {role: found.cards[number].name for role, number in numbers.items()}
    return {**names, "driver": found.driver, "cuda": found.build}


def refuse_unfit(cards: Sequence[FoundCard], key: str, number: int, *, needs_bf16: bool) -> None:
    if number >= len(cards):
        listed = ", ".join(f"{n}: {card.name}" for n, card in enumerate(cards))
        raise ConfigError(f"{key} = {number}, but the cards here are {listed}; set it to one of these numbers.")
    if needs_bf16 and (why := no_bf16(cards[number])):
        raise ConfigError(f"Card {number}, {why}; use --set compute.dtype=fp32, or another card.")


def refuse_unfit_ranks(cards: Sequence[FoundCard], compute: ComputeConfig) -> None:
    """Further ranks have the cards that follow the learner's."""
    first, last = compute.learner_card, compute.learner_card + compute.ranks - 1
    if last >= len(cards):
        raise ConfigError(
            f"compute.ranks = {compute.ranks} needs the cards {first} to {last}, one for each rank, but there are"
            f" {len(cards)} here, numbered from 0; use fewer ranks, or another compute.learner_card."
        )
    for number in range(first + 1, last + 1):
        refuse_unfit(cards, "compute.learner_card", number, needs_bf16=compute.dtype != "fp32")


def no_bf16(card: FoundCard) -> str:
    """Why it does not compute in bf16; empty if it does."""
    if card.capability >= BF16_CAPABILITY:
        return ""
    has, needs = (f"{major}.{minor}" for major, minor in (card.capability, BF16_CAPABILITY))
    return f"{card.name}, has compute capability {has} and no bf16, which needs {needs}"
