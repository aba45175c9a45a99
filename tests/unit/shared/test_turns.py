"""The two take turns wherever they would be in each other's way."""

import os
from pathlib import Path

import pytest

from shared.config.processes import ComputeConfig
from shared.process.lease import Lease, NoTurns, turns

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("device", "learner", "actor", "kind"),
    [
        ("cpu", CORES, CORES, Lease),
        ("cpu", CORES, 1, Lease),
        ("cuda", 1, 1, Lease),
        pytest.param("cpu", 1, CORES - 1, NoTurns, marks=pytest.mark.skipif(CORES < 2, reason="one core has no room")),
    ],
)
def test_who_waits(tmp_path: Path, device: str, learner: int, actor: int, kind: type) -> None:
    compute = ComputeConfig(learner_threads=learner, actor_threads=actor)
    assert isinstance(turns(compute, device, tmp_path / "lease"), kind)


def test_without_turns_both_hold_at_once_and_nobody_waited(tmp_path: Path) -> None:
    free = NoTurns()
    with free.hold("actor") as first, free.hold("learner") as second:
        assert first == second == 0.0
