"""A run whose actors are killed and cut off in network namespaces ends as one that nobody disturbed."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.network_faults import SETTINGS, Trouble, measured, why_unusable
from tests.support.runs import SMALL

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SHORT = SETTINGS | SMALL | {"run.steps": 30}


@pytest.fixture(autouse=True)
def needs_namespaces() -> None:
    if reason := why_unusable():
        pytest.skip(reason)


def test_no_group_is_lost_or_repeated_when_actors_die_and_are_cut_off(tmp_path: Path) -> None:
    trouble = Trouble(gap_s=(0.5, 1.5), cut_s=(1.0, 6.0), down_s=(0.1, 0.5))
    found = measured(tmp_path, SHORT, count=3, trouble=trouble, seed=1)
    kept = ("ended", "no group lost", "no group twice", "same adapter as undisturbed")
    log = (tmp_path / "learner.txt").read_text()
    assert [name for name in kept if not found["passed"][name]] == [], f"{found} {log}"
    assert sum(found["events"].get(name, 0) for name in ("actors killed", "hosts cut off")) >= 2, found["events"]
    assert found["packets"]["lost"] > 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "tandem-" not in left
