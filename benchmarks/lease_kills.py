"""Has a card ever two holders? Kills and stops of real processes that want its lease all the time.

    python -m benchmarks.lease_kills --blows 1000

Learner and actor of two runs share one lease (tests/chaos/lease_storm.py). Half of the blows are SIGKILLs, half are
SIGSTOPs with a SIGCONT up to 50 ms later, at random instants. Two holders at once would meet at a lock of another kind.
Then nothing is done until there were a hundred more turns: a round is any four in a row, and it is fair if each process
had one. Results: results/lease_kills.json; exit 1 if there were two holders, or if a process was left out.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.machine import write_result
from tests.chaos.lease_storm import NAMES, storm


def main(blows: int, seed: int) -> int:
    """Zero if there was one holder at a time."""
    with tempfile.TemporaryDirectory(prefix="lease-") as folder:
        found = storm(Path(folder), blows, seed)
    calm, size = found.afterwards, len(NAMES)
    rounds = [calm[place : place + size] for place in range(len(calm) - size + 1)]
    figures = msgspec.to_builtins(found) | {
        "blows": blows,
        "seed": seed,
        "rounds": len(rounds),
        "fair_rounds": sum(len(set(each)) == size for each in rounds),
    }
    print(write_result("lease_kills", figures), figures, sep="\n")
    return 1 if found.two_holders or not all(found.turns.values()) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lease_kills", description="Kills holders of a lease.")
    parser.add_argument("--blows", type=int, default=1000, help="kills and stops together")
    parser.add_argument("--seed", type=int, default=0, help="of their order and instants")
    chosen = parser.parse_args()
    sys.exit(main(chosen.blows, chosen.seed))
