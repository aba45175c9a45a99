"""What micro-batches free does not add up: in a process of its own, since a heap has one history."""

import subprocess
import sys

import pytest

CUTS = """
from learner.update.forward_pass import trimming_between
from shared.process.free_memory import own_bytes

# They lie behind what is freed, so that the heap cannot shrink.
behind = []

def work(cut):
    blocks = [bytearray(50_000) for _ in cut]
    behind.append(bytearray(50_000))
    return len(blocks)

on_cut = trimming_between(work)
done = [on_cut([None] * 2000)]
left = own_bytes()
done.append(on_cut([None] * 3000))
print(done, own_bytes() < left - 50_000_000)
"""


@pytest.mark.long
def test_a_micro_batch_leaves_little_to_the_next() -> None:
    assert subprocess.run([sys.executable, "-c", CUTS], capture_output=True, text=True).stdout == "[2000, 3000] True\n"
