"""What goes wrong in which trial: made from the points that a run passes, so that none is forgotten.

A kind of point is a point without the parts that differ between steps and runs. It is also the pattern of a fault:
`before fsync {run}/checkpoints/.step-*.*.tmp/state.json`. Heartbeats come when they are due, so no plan waits for one.
Everything random is drawn from a seed.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from shared.run.failpoints import Fault
from tests.chaos.start import Kill, Victim

VARIES = ((r"\.[0-9a-f]{8}\.", ".*."), (r"\b(step|policy)-\d+", r"\1-*"), (r"\.log\.\d+\.", ".log.*."))
WRITES = ("open", "write", "fsync", "truncate", "rename", "mkdir", "remove")
TROUBLE = (
    Fault(point="before write {run}/journal/000001.log", hit=3, act="tear"),
    Fault(point="before write {run}/metrics.jsonl", hit=2, act="tear"),
    Fault(point="before write {run}/journal/000001.log", hit=4, act="short"),
    Fault(point="after mkdir {run}/checkpoints/.step-*.tmp", act="kill"),
)
"""After these a run has something to clear up, and passes points that others never see."""
VICTIMS: tuple[Victim, ...] = ("learner", "actor0", "launcher", "all")
LONGEST_S = 1.2
"""Latest instant of a random kill: about as long as a start takes until it trains."""

Item = TypeVar("Item")


def kinds(passed: Iterable[str]) -> list[str]:
    """Every kind once, in the order of its first appearance."""
    return list(dict.fromkeys(kind(point) for point in passed if "Heartbeat" not in point))


def kind(point: str) -> str:
    """Without digits that vary."""
    for pattern, name in VARIES:
        point = re.sub(pattern, name, point)
    return point


def is_write(point: str) -> bool:
    """Whether a disk may refuse here."""
    return point.startswith(tuple(f"before {name} " for name in WRITES))


def write_faults(points: Sequence[str]) -> list[Fault]:
    """Every write site with every way to be refused. A disk that was made read-only shows it where a name is taken."""
    sites = [point for point in points if is_write(point)]
    faults = [Fault(point=site, act=act) for act in ("ENOSPC", "EIO") for site in sites]
    names = [site for site in sites if site.startswith(("before open ", "before rename ", "before mkdir "))]
    writes = [site for site in sites if site.startswith("before write ")]
    return faults + [Fault(point=site, act="EROFS") for site in names] + [Fault(point=w, act="short") for w in writes]


def kill_faults(points: Sequence[str], seed: int) -> list[Fault]:
    """Every point at its first passing, one in six with the launcher; messages also later on; every write torn."""
    rng = random.Random(seed)
    first = [Fault(point=point, act=rng.choice(("kill",) * 5 + ("kill_all",))) for point in points]
    later = [Fault(point=point, hit=rng.choice((2, 3)), act="kill") for point in points if "{run}" not in point]
    return first + later + [Fault(point=point, act="tear") for point in points if point.startswith("before write ")]


def random_kills(count: int, seed: int) -> tuple[Kill, ...]:
    """At any instant, of anyone."""
    rng = random.Random(seed)
    return tuple(Kill(victim=rng.choice(VICTIMS), after_s=round(rng.uniform(0, LONGEST_S), 4)) for _ in range(count))


def split(items: Sequence[Item], batches: int) -> Iterator[tuple[Item, ...]]:
    """One by one in turn, so that each batch has points of all kinds."""
    return (tuple(items[batch::batches]) for batch in range(batches))
