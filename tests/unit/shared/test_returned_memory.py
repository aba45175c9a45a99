"""Freed memory goes back to the system between parts, in a process of its own, since a heap has one history."""

import subprocess
import sys

import pytest

from shared.process.free_memory import MOST_GROWTH

PARTS = """
import sys
from shared.process.free_memory import Trimmer, own_bytes

# They lie behind what parts free, so that the heap cannot shrink.
behind = []

def part(num_bytes):
    blocks = [bytearray(50_000) for _ in range(num_bytes // 50_000)]
    behind.append(bytearray(50_000))

trimmer, (first, second) = Trimmer(), map(int, sys.argv[1:])
part(first)
trimmer.after_part()
left = own_bytes()
part(second)
grown = own_bytes() - left
trimmer.after_part()
print(grown, own_bytes() - left)
"""
FIRST = 100 * 2**20


@pytest.mark.parametrize("growth", [4 * MOST_GROWTH, MOST_GROWTH // 4], ids=["much", "little"])
def test_what_later_parts_leave_is_returned_if_it_is_much(growth: int) -> None:
    argv = [sys.executable, "-c", PARTS, str(FIRST), str(FIRST + growth)]
    grown, after = map(int, subprocess.run(argv, capture_output=True, text=True).stdout.split())
    assert grown > 0.75 * growth
    # All that is free goes back, also what the first part had left.
    assert (after < -0.5 * FIRST) == (growth > MOST_GROWTH)
