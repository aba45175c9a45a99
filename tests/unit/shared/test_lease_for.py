"""The processes need a lease wherever they would compete for the same device."""

import os
from pathlib import Path

import pytest

from shared.config.processes import ComputeConfig
from shared.process.lease import Lease, NoLease, lease_for

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("device", "learner", "actor", "kind"),
    [
        ("cpu", CORES, CORES, Lease),
        ("cpu", CORES, 1, Lease),
        ("cuda", 1, 1, Lease),
        pytest.param("cpu", 1, CORES - 1, NoLease, marks=pytest.mark.skipif(CORES < 2, reason="one core has no room")),
    ],
)
def test_who_needs_a_lease(tmp_path: Path, device: str, learner: int, actor: int, kind: type) -> None:
    compute = ComputeConfig(learner_threads=learner, actor_threads=actor)
    assert isinstance(lease_for(compute, device, tmp_path / "lease"), kind)


def test_without_a_lease_both_compute_at_once(tmp_path: Path) -> None:
    free = NoLease()
    with free.hold("actor") as first, free.hold("learner") as second:
        assert first == second == 0.0
