"""However the processes of two runs are killed and stopped, the card they share has one holder, and turns go round."""

from pathlib import Path

from tests.chaos.lease_storm import NAMES, storm

BLOWS = 40
LONGEST_WAIT = 4 * len(NAMES)
"""Turns of others between two of one worker; in the line there are len(NAMES) - 1. A busy machine may add some."""


def test_one_holder_at_a_time_and_nobody_is_left_out(tmp_path: Path) -> None:
    found = storm(tmp_path, BLOWS, seed=1)
    assert (found.kills, found.stops, found.two_holders) == (BLOWS // 2, BLOWS // 2, 0)
    assert min(found.turns.values()) > 0
    gaps = [len(gap) for name in NAMES for gap in found.afterwards.split(name)]
    assert max(gaps) <= LONGEST_WAIT, found.afterwards
