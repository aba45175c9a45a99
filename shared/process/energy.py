"""Energy that the hardware of this machine counted, in joules. Nothing here is an estimate.

    card    NVML: what a card used since its driver was loaded, asked of the driver's library
    cpu     RAPL: packages of processors, and memory where it is counted apart, from /sys/class/powercap

    meter.take() ... a step, with meter.look() now and then ... meter.take() -> {"card": 812.5, "cpu": 204.1}

Everything that a card or a processor does is counted, for other programs too. RAPL's counter begins at 0 again after
max_energy_range_uj, on some processors after a quarter of an hour. Between two looks it may pass 0 once. If MOST_W
would have been enough for a whole round, the figure is NaN. A source that cannot be read has no figure, and one word
why:

    absent         this machine has no such counter: a virtual machine, another processor, a card without NVML
    forbidden      only root may read RAPL, until somebody allows more: chmod a+r /sys/class/powercap/*/energy_uj
    unsupported    a card before Volta, or a part of a card
    unreadable     anything else

Left out on purpose: other machines, power supplies, and figures of power, which would have to be added up.
"""

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")
ZONES = "intel-rapl:*"
"""Processors of AMD have the same names."""
COUNTED = ("package", "dram")
"""Beginnings of the names of zones that have no part in common."""
MOST_W = 1000.0
"""Of one zone; above what processors take."""
LIBRARY = "libnvidia-ml.so.1"
UNSUPPORTED = 3
"""NVML's number for it."""


class Counter(Protocol):
    """A hardware counter of energy."""

    def joules(self) -> float:
        """Since the last call. NaN if that cannot be known."""
        ...


class Rapl:
    """Zones of powercap."""

    def __init__(self, zones: Sequence[Path], now: Callable[[], float] = time.monotonic) -> None:
        self.ranges = {zone: whole_number(zone / "max_energy_range_uj") for zone in zones}
        self.now = now
        self.before, self.looked_at = self.read(), now()

    def read(self) -> dict[Path, int]:
        """Microjoules."""
        return {zone: whole_number(zone / "energy_uj") for zone in self.ranges}

    def joules(self) -> float:
        before, looked_at = self.before, self.looked_at
        self.before, self.looked_at = self.read(), self.now()
        if self.looked_at - looked_at > min(self.ranges.values()) / 1e6 / MOST_W:
            return math.nan
        return sum((self.before[zone] - before[zone]) % around for zone, around in self.ranges.items()) / 1e6


class Nvml:
    """Cards, by their UUIDs."""

    def __init__(self, library: Any, uuids: Sequence[str]) -> None:
        self.library = library
        checked(library.nvmlInit_v2())
        self.handles = [self.handle(uuid) for uuid in uuids]
        self.before = self.read()

    def handle(self, uuid: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        checked(self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(found)))
        return found

    def read(self) -> int:
        """Millijoules of all."""
        counted = 0
        for handle in self.handles:
            amount = ctypes.c_ulonglong()
            checked(self.library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(amount)))
            counted += amount.value
        return counted

    def joules(self) -> float:
        before, self.before = self.before, self.read()
        return (self.before - before) / 1e3


class EnergyMeter:
    """Adds up what the counters say."""

    def __init__(self, sources: Mapping[str, Counter | str]) -> None:
        """By name; a source that cannot be read is one word why."""
        self.counters = {name: found for name, found in sources.items() if not isinstance(found, str)}
        self.unread = {name: found for name, found in sources.items() if isinstance(found, str)}
        self.used = dict.fromkeys(self.counters, 0.0)

    def look(self) -> None:
        for name, counter in self.counters.items():
            self.used[name] += joules_or_nan(counter)

    def take(self) -> dict[str, float]:
        """Joules of each source since the last take."""
        self.look()
        used, self.used = self.used, dict.fromkeys(self.counters, 0.0)
        return used


NO_METER = EnergyMeter({})


def open_meter(
    uuids: Sequence[str], powercap: Path = POWERCAP, find_library: Callable[[], Any] | None = None
) -> EnergyMeter:
    """uuids: of the cards that the run uses."""
    cards = {"card": nvml((find_library or nvml_library)(), uuids)} if uuids else {}
    return EnergyMeter(cards | {"cpu": rapl(powercap)})


def rapl(powercap: Path) -> Rapl | str:
    try:
        zones = [zone for zone in sorted(powercap.glob(ZONES)) if (zone / "name").read_text().startswith(COUNTED)]
        return Rapl(zones) if zones else "absent"
    except PermissionError:
        return "forbidden"
    except (OSError, ValueError):
        return "unreadable"


def nvml(library: Any, uuids: Sequence[str]) -> Nvml | str:
    if library is None:
        return "absent"
    try:
        return Nvml(library, uuids)
    except OSError as error:
        return "unsupported" if error.errno == UNSUPPORTED else "unreadable"


def nvml_library() -> Any:
    """None without a driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def checked(code: int) -> None:
    """OSError with NVML's number."""
    if code:
        raise OSError(code, f"NVML answers {code}")


def joules_or_nan(counter: Counter) -> float:
    """A counter that was there and is gone must not end a run."""
    try:
        return counter.joules()
    except (OSError, ValueError):
        return math.nan


def whole_number(file: Path) -> int:
    return int(file.read_text())
