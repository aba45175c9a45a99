"""Joules that the hardware counted: from files as powercap has them, and from a driver's library, both made here."""

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest

from shared.process.energy import NO_METER, UNSUPPORTED, Rapl, open_meter

RANGE = 262_143_328_850
"""Microjoules after which the counter of many processors begins again."""


def zone(powercap: Path, folder: str, name: str, energy: int) -> Path:
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    return path


def count(path: Path, energy: int) -> None:
    (path / "energy_uj").write_text(f"{energy}\n")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_packages_and_memory_are_counted_and_no_part_twice(tmp_path: Path) -> None:
    package, other = (
        zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 0),
    )
    memory = zone(tmp_path, "intel-rapl:0:2", "dram", 1_000)
    parts = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:0:1", "uncore", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    meter = open_meter([], tmp_path)
    count(package, 7_500_000)
    count(other, 1_000_000)
    count(memory, 251_000)
    for part in parts:
        count(part, 9_000_000)
    assert meter.take() == {"cpu": pytest.approx(2.5 + 1.0 + 0.25)}
    assert meter.take() == {"cpu": 0.0} and meter.unread == {}


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 4_000_000)
    meter = open_meter([], tmp_path)
    count(package, 3_000_000)
    meter.look()
    count(package, 5_500_000)
    assert meter.take() == {"cpu": pytest.approx(9.5)}
    count(package, 2_000_000)
    assert meter.take() == {"cpu": pytest.approx((RANGE - 3_500_000) / 1e6)}


def test_a_look_that_comes_too_late_has_no_figure(tmp_path: Path) -> None:
    """In 263 s at 1000 W the counter may have gone all the way round."""
    clock = Clock()
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    counter = Rapl([package], clock)
    clock.now += 262.0
    count(package, 1_000_000)
    assert counter.joules() == 1.0
    clock.now += 263.0
    count(package, 2_000_000)
    assert math.isnan(counter.joules())
    count(package, 4_000_000)
    assert counter.joules() == 2.0


def test_why_there_is_no_figure_is_one_word(tmp_path: Path) -> None:
    assert open_meter([], tmp_path / "nowhere").unread == {"cpu": "absent"}
    zone(tmp_path, "intel-rapl:0", "psys", 0)
    assert open_meter([], tmp_path).unread == {"cpu": "absent"}
    package = zone(tmp_path, "intel-rapl:1", "package-0", 0)
    (package / "energy_uj").write_text("many")
    assert open_meter([], tmp_path).unread == {"cpu": "unreadable"}
    (package / "energy_uj").unlink()
    assert open_meter([], tmp_path).unread == {"cpu": "unreadable"}
    assert open_meter([], tmp_path).take() == {} == NO_METER.take()


def test_a_file_that_only_root_may_read_is_forbidden(tmp_path: Path) -> None:
    """As a file of that kind answers; this test may be root itself."""

    class Forbidden(type(tmp_path)):
        def read_text(self, *args: Any, **kwargs: Any) -> str:
            if self.name == "energy_uj":
                raise PermissionError(13, "Permission denied")
            return super().read_text(*args, **kwargs)

    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    assert open_meter([], Forbidden(tmp_path)).unread == {"cpu": "forbidden"}


def test_a_counter_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = open_meter([], tmp_path)
    (package / "energy_uj").unlink()
    assert math.isnan(meter.take()["cpu"])
    count(package, 8_000_000)
    assert meter.take() == {"cpu": 8.0}


class Library:
    """NVML of a machine with these cards, in millijoules. codes: what a call answers instead of 0."""

    def __init__(self, cards: dict[str, int], **codes: int) -> None:
        self.cards, self.codes = cards, codes

    def nvmlInit_v2(self) -> int:
        return self.codes.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self.cards:
            return 6
        handle._obj.value = 1 + list(self.cards).index(uuid.decode())
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, amount: Any) -> int:
        assert handle.value is not None
        amount._obj.value = list(self.cards.values())[handle.value - 1]
        return self.codes.get("energy", 0)


def test_cards_of_the_run_are_counted_by_their_driver(tmp_path: Path) -> None:
    library = Library({"GPU-a": 2**40, "GPU-b": 7_000, "GPU-other": 0})
    meter = open_meter(["GPU-a", "GPU-b"], tmp_path, lambda: library)
    library.cards |= {"GPU-a": 2**40 + 1_500, "GPU-b": 8_000, "GPU-other": 9_999}
    assert meter.take() == {"card": 2.5} and meter.unread == {"cpu": "absent"}
    library.codes["energy"] = 15
    assert math.isnan(meter.take()["card"])


@pytest.mark.parametrize(
    ("library", "word"),
    [
        (None, "absent"),
        (Library({"GPU-a": 0}, energy=UNSUPPORTED), "unsupported"),
        (Library({"GPU-a": 0}, init=9), "unreadable"),
        (Library({}), "unreadable"),
    ],
    ids=["no library", "old card", "no driver", "another card"],
)
def test_a_card_that_does_not_count_says_why(library: Any, word: str, tmp_path: Path) -> None:
    assert open_meter(["GPU-a"], tmp_path, lambda: library).unread == {"card": word, "cpu": "absent"}
