"""Does a run end the same after any kill? SIGKILLs of real processes, at every named point and at random instants.

    python -m benchmarks.chaos --kills 1000

Each trial has about twenty kills and its own processes (tests/chaos); every core runs one trial at a time. A named kill
happens at a point of the code, at a random visit of it; a random kill at any instant, to learner, actor, launcher or
all.
After each trial: status, steps, sha256 of the adapter, every group once in the journal, one row of metrics a step with
equal figures, equal rollouts and newest checkpoint, no process, lock or half-written checkpoint left. One line a trial
is printed. Results: results/chaos.json; exit 1 if any trial ended otherwise, and its folder is kept.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from shared.run.failpoints import Fault
from tests.chaos.plans import TROUBLE, kinds, random_kills
from tests.chaos.pool import Pool, pool
from tests.chaos.prepared import CHAOS, prepare
from tests.chaos.trial import Result, Trial

A_TRIAL = 20
DEADLY = ("kill", "kill_all", "tear")


def main(kills: int, folder: Path) -> int:
    """Trials until there were that many kills."""
    run = str(prepare(folder / "prepared"))
    began = time.monotonic()
    with pool(folder / "trials") as hosts:
        undisturbed = hosts.run_one(Trial(name="undisturbed", run=run, trace=True))
        troubled = hosts.run_one(Trial(name="troubled", run=run, trace=True, faults=TROUBLE))
        assert not undisturbed.error and not troubled.error, undisturbed.error + troubled.error
        points = kinds([*undisturbed.passed, *troubled.passed])
        figures = run_until(hosts, trials(run, points), undisturbed, kills)
    figures |= {"points": len(points), "wall_s": round(time.monotonic() - began, 1), "config": CHAOS}
    write_result("chaos", figures | {"adapter_sha256": undisturbed.outcome["adapter_sha256"]})
    return 1 if figures["unequal"] else 0


def trials(run: str, points: Sequence[str]) -> Iterator[Trial]:
    """Named and random, one after another, each from its own seed."""
    for seed in count():
        if seed % 3 == 2:
            yield Trial(name=f"random-{seed}", run=run, kills=random_kills(A_TRIAL, seed))
        else:
            yield Trial(name=f"named-{seed}", run=run, faults=faults(points, seed))


def faults(points: Sequence[str], seed: int) -> tuple[Fault, ...]:
    """Trouble first, in every second trial, so that its clearing up is killed too."""
    rng = random.Random(seed)
    drawn = [
        Fault(point=point, hit=rng.choice((1, 1, 1, 2, 3)), act=rng.choice(("kill",) * 5 + ("kill_all",)))
        for point in rng.sample(points, A_TRIAL)
    ]
    return (*(TROUBLE if seed % 2 else ()), *drawn)


def run_until(hosts: Pool, trials: Iterator[Trial], undisturbed: Result, kills: int) -> dict[str, Any]:
    """Trials until there were that many kills, as many at a time as there are hosts."""
    totals: Counter[str] = Counter()
    happened: set[str] = set()
    unequal: list[str] = []
    while totals["kills"] < kills:
        batch = [next(trials) for _ in range(hosts.size)]
        for trial, result in zip(batch, hosts.run(batch), strict=True):
            named = [fault for fault in trial.happened(result) if fault.act in DEADLY]
            happened |= {fault.point for fault in named}
            equal = not result.error and result.outcome == undisturbed.outcome
            if not equal:
                unequal.append(f"{trial.name}: {result.error or result.starts}")
            totals.update(trials=1, named=len(named), random=result.kills, kills=len(named) + result.kills)
            totals.update(starts=len(result.starts), launcher_too=sum(fault.act == "kill_all" for fault in named))
            print(f"{totals['kills']:5d} kills  {trial.name:12s} {'equal' if equal else 'UNEQUAL'}", flush=True)
    return {**totals, "points_hit": len(happened), "equal": totals["trials"] - len(unequal), "unequal": unequal}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Kills real processes of a run.")
    parser.add_argument("--kills", type=int, default=1000, help="at least this many")
    chosen = parser.parse_args()
    sys.exit(main(chosen.kills, Path(tempfile.mkdtemp(prefix="chaos-"))))
