"""Every write of a run refused in every way: it stops with one sentence, and ends the same once the disk works."""

import re

import pytest

from tests.chaos.plans import TROUBLE, split, write_faults
from tests.chaos.pool import Pool
from tests.chaos.rounds import run_trials
from tests.chaos.trial import Result, check

BATCHES = 8
SENTENCE = re.compile(r"error: /\S+ cannot be used \(.+\); .+\.")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long
def test_if_any_write_is_refused_the_run_says_so_and_ends_the_same(
    hosts: Pool, prepared: str, undisturbed: Result, points: list[str], rare_points: list[str]
) -> None:
    rare = write_faults(rare_points)
    acts = sorted({fault.act for fault in rare})
    batches = list(split(write_faults(points), BATCHES))
    batches += [(*TROUBLE, *(fault for fault in rare if fault.act == act)) for act in acts]
    happened: set[tuple[str, str]] = set()
    for trial, result in run_trials(hosts, "writes", prepared, batches):
        check(result, undisturbed)
        happened |= {(fault.point, fault.act) for fault in trial.happened(result)}
        kills = sum(fault.act in ("kill", "tear") for fault in trial.faults)
        assert sum(code == 1 for code, _ in result.starts) <= kills, result.starts
        for code, sentence in result.starts:
            assert code != 2 or SENTENCE.fullmatch(sentence), sentence
    assert {(fault.point, fault.act) for fault in write_faults([*points, *rare_points])} <= happened
