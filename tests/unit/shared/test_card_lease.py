"""The lease of a card: whose it is, what its turns give back, and what they wait for."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from protocol.errors import SecurityError
from shared.errors import RunDirError
from shared.process.card import NO_MEMORY, CardMemory
from shared.process.lease import Holder, Lease, Room, card_lock
from tests.support.fake_card import GIB, FakeCard, FakeDriver


class Waited(Exception):
    """Raised in a wait, to end it."""


def give_up() -> None:
    raise Waited


def holder(lease: Lease) -> Holder:
    return msgspec.json.decode(lease.note.read_bytes(), type=Holder)


def test_a_turn_tells_its_peak_and_gives_back_what_is_cached(tmp_path: Path) -> None:
    driver = FakeDriver()
    driver.allocate(GIB)
    lease = Lease(tmp_path / "lease", driver)
    with lease.hold("actor") as turn:
        driver.allocate(3 * GIB)
        driver.free(2 * GIB)
        assert driver.free_bytes() == 4 * GIB and turn.peak == NO_MEMORY
    assert turn.peak == CardMemory(allocated=4 * GIB, reserved=4 * GIB, driver=4 * GIB)
    assert (driver.releases, driver.free_bytes()) == (1, 6 * GIB)
    with lease.hold("actor") as turn:
        pass
    assert turn.peak == CardMemory(allocated=2 * GIB, reserved=2 * GIB, driver=2 * GIB), "since the turn before"


def test_memory_is_given_back_before_the_next_turn_begins(tmp_path: Path) -> None:
    class Checked(FakeDriver):
        def release(self) -> None:
            with pytest.raises(Waited), Lease(path).hold("learner", meanwhile=give_up):
                pass
            super().release()

    path, driver = tmp_path / "lease", Checked()
    with pytest.raises(KeyError), Lease(path, driver).hold("actor"):
        raise KeyError
    assert driver.releases == 1, "also where the turn failed"
    with Lease(path).hold("learner", meanwhile=give_up):
        pass


def test_the_note_says_what_the_turn_before_reserved(tmp_path: Path) -> None:
    driver = FakeDriver()
    lease = Lease(tmp_path / "lease", driver)
    with lease.hold("actor"):
        assert set(msgspec.json.decode(lease.note.read_bytes())) == {"role", "pid", "since"}
        driver.allocate(GIB)
        driver.free(GIB)
    with lease.hold("actor"):
        assert (holder(lease).card_bytes, holder(lease).pid) == (GIB, os.getpid())


def test_two_processes_that_give_back_fit_where_their_peaks_together_do_not(tmp_path: Path) -> None:
    card = FakeCard(5 * GIB)
    drivers = {name: FakeDriver(card) for name in ("actor", "learner")}
    leases = {name: Lease(tmp_path / "lease", driver) for name, driver in drivers.items()}
    for name in ("actor", "learner") * 3:
        with leases[name].hold(name) as turn:
            drivers[name].allocate(4 * GIB)
            assert card.used <= card.total
            drivers[name].free(4 * GIB)
        assert turn.peak.driver == 4 * GIB
    assert card.used == 0


# --- waiting for memory


def after(calls: int, act: Callable[[], None]) -> Callable[[], None]:
    """Something that happens while a turn waits."""
    done: list[int] = []

    def meanwhile() -> None:
        done.append(1)
        if len(done) == calls:
            act()

    return meanwhile


def test_a_turn_begins_once_a_dead_process_has_given_its_memory_back(tmp_path: Path) -> None:
    card = FakeCard()
    driver, dead = FakeDriver(card), FakeDriver(card)
    lease = Lease(tmp_path / "lease", driver)
    with lease.hold("learner"):
        driver.allocate(6 * GIB)
        driver.free(5 * GIB)
    dead.grow(4 * GIB)
    with lease.hold("learner", meanwhile=after(3, lambda: dead.grow(-4 * GIB))):
        assert driver.free_bytes() == 7 * GIB, "it had given back five, and three were free"


def test_what_was_planned_counts_from_the_first_turn_on_without_what_is_kept(tmp_path: Path) -> None:
    card = FakeCard()
    driver, other = FakeDriver(card), FakeDriver(card)
    driver.allocate(2 * GIB)
    other.allocate(GIB)
    with pytest.raises(Waited), Lease(tmp_path / "lease", driver, planned=8 * GIB).hold("actor", meanwhile=give_up):
        pass
    lease = Lease(tmp_path / "lease", driver, planned=7 * GIB)
    with lease.hold("actor", meanwhile=give_up):
        driver.allocate(GIB)
    with lease.hold("actor", meanwhile=give_up):
        driver.free(3 * GIB)
    other.allocate(GIB)
    with pytest.raises(Waited), lease.hold("actor", meanwhile=give_up):
        pass


def test_a_wait_for_memory_ends_with_a_warning_and_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    card, beats = FakeCard(), list[int]()
    driver, other = FakeDriver(card), FakeDriver(card)
    room = Room(driver, 6 * GIB, limit_s=0.05)
    other.allocate(3 * GIB)
    with caplog.at_level(logging.WARNING):
        room.wait(lambda: beats.append(1))
        assert beats and "5120 MiB free after 0 s, and this turn may need 6144 MiB" in caplog.text
        room.wait(give_up)
        other.free(3 * GIB)
        other.release()
        room.wait(give_up)
        other.allocate(4 * GIB)
        room.wait(lambda: beats.append(2))
    assert 2 in beats and len(caplog.records) == 2, "a new trouble is waited for, and told, again"


def test_a_smaller_turn_does_not_make_the_next_one_hasty() -> None:
    driver = FakeDriver()
    room = Room(driver, 0)
    for used in (4 * GIB, GIB):
        driver.allocate(used)
        driver.free(used)
        room.give_back()
    assert room.needed == 4 * GIB


# --- whose it is


def test_the_lock_of_a_card_is_in_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "tandem"
    lock = card_lock("GPU-a", cache)
    assert lock == card_lock("GPU-a", cache) != card_lock("GPU-b", cache)
    with Lease(lock).hold("learner"):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    assert stat.S_IMODE(lock.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = card_lock("GPU-a", tmp_path).parent
    folder.chmod(0o777)
    with pytest.raises(SecurityError, match=f"run `chmod 700 {folder}`"):
        card_lock("GPU-a", tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SecurityError, match="is not a folder of this user; set XDG_CACHE_HOME"):
        card_lock("GPU-a", tmp_path)


def test_a_cache_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="choose a XDG_CACHE_HOME"):
        card_lock("GPU-a", tmp_path / "file" / "tandem")


def test_processes_on_two_cards_do_not_wait(tmp_path: Path) -> None:
    first, second = (Lease(card_lock(uuid, tmp_path), FakeDriver()) for uuid in ("GPU-a", "GPU-b"))
    with first.hold("learner"), second.hold("actor", meanwhile=give_up) as turn:
        assert turn.waited_s < 1.0
    another_run = Lease(card_lock("GPU-a", tmp_path), FakeDriver())
    with first.hold("learner"), pytest.raises(Waited), another_run.hold("learner", meanwhile=give_up):
        pass
