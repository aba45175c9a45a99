"""The processes need a lease wherever they would compete for the same device."""

from pathlib import Path

import pytest
import torch

from shared.config.processes import ComputeConfig
from shared.process.card import CardFacts
from shared.process.lease import Lease, NoLease, lease_for
from tests.support.fake_card import GIB, FakeDriver

CORES = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("learner", "actor", "kind"),
    [
        (CORES, CORES, Lease),
        (CORES, 1, Lease),
        (1, CORES - 1, NoLease),
    ],
)
def test_who_needs_a_lease_on_a_cpu(tmp_path: Path, learner: int, actor: int, kind: type) -> None:
    compute = ComputeConfig(learner_threads=learner, actor_threads=actor)
    assert isinstance(lease_for(compute, CPU, tmp_path / "lease", find_cores=lambda: CORES), kind)


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_nobody_waits_memory_goes_back_only_between_turns(overlaps: bool) -> None:
    lease = lease_for(ComputeConfig(learner_threads=1, actor_threads=1), CPU, None, overlaps=overlaps)
    assert isinstance(lease, NoLease) and lease.overlaps == overlaps


def facts(device: torch.device) -> CardFacts:
    """Of the card with this number."""
    return CardFacts(name="a card", uuid=f"GPU-{device.index}", capability=(8, 6), driver="", total_bytes=0)


def test_on_a_card_all_runs_share_the_lease_of_that_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compute = ComputeConfig(learner_threads=1, actor_threads=1)
    found: list[Path] = []
    for run, number in (("a", 0), ("b", 0), ("a", 1)):
        device, path = torch.device("cuda", number), tmp_path / run / "lease"
        lease = lease_for(compute, device, path, planned=GIB, find_driver=lambda _: FakeDriver(), facts=facts)
        assert isinstance(lease, Lease) and lease.room and lease.room.needed == GIB
        found.append(lease.path)
    assert found[0] == found[1] != found[2]
    assert found[0].is_relative_to(tmp_path / "cache" / "tandem")


def test_without_a_lease_both_compute_at_once() -> None:
    free = NoLease()
    with free.hold("actor") as first, free.hold("learner") as second:
        assert first.waited_s == second.waited_s == 0.0
