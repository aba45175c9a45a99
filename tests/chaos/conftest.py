"""What the chaos tests share: hosts on all cores, a prepared run, and its result when nothing goes wrong."""

from collections.abc import Iterator

import pytest

from tests.chaos.plans import TROUBLE, kinds
from tests.chaos.pool import Pool, pool
from tests.chaos.prepared import prepare
from tests.chaos.trial import Result, Trial


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("trials")) as made:
        yield made


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(prepare(tmp_path_factory.mktemp("chaos") / "prepared"))


@pytest.fixture(scope="session")
def undisturbed(hosts: Pool, prepared: str) -> Result:
    return hosts.run_one(Trial(name="undisturbed", run=prepared, trace=True))


@pytest.fixture(scope="session")
def troubled(hosts: Pool, prepared: str) -> Result:
    """A run that has to clear up after trouble."""
    return hosts.run_one(Trial(name="troubled", run=prepared, trace=True, faults=TROUBLE))


@pytest.fixture(scope="session")
def points(undisturbed: Result) -> list[str]:
    """Those that every run passes."""
    assert not undisturbed.error, undisturbed.error
    return kinds(undisturbed.passed)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run with a learner of two ranks."""
    return str(prepare(tmp_path_factory.mktemp("chaos") / "ranks", {"compute.ranks": 2}))


@pytest.fixture(scope="session")
def calm_ranks(hosts: Pool, two_ranks: str) -> Result:
    return hosts.run_one(Trial(name="calm-ranks", run=two_ranks, trace=True))


@pytest.fixture(scope="session")
def rank_points(calm_ranks: Result, points: list[str]) -> list[str]:
    """Those that several ranks pass besides, each with the number of its rank."""
    return about_ranks(calm_ranks, points)


def about_ranks(calm: Result, points: list[str]) -> list[str]:
    assert not calm.error, calm.error
    others = [point for point in kinds(calm.passed) if point not in points]
    return [point for point in others if "rank" in point and "{run}" not in point]


@pytest.fixture(scope="session")
def divided(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run with a base that two ranks divide."""
    keys = {"compute.ranks": 2, "compute.parallel": "fsdp2", "actor.audit_invited": 0}
    return str(prepare(tmp_path_factory.mktemp("chaos") / "divided", keys))


@pytest.fixture(scope="session")
def calm_divided(hosts: Pool, divided: str) -> Result:
    return hosts.run_one(Trial(name="calm-divided", run=divided, trace=True))


@pytest.fixture(scope="session")
def divided_points(calm_divided: Result, points: list[str]) -> list[str]:
    return about_ranks(calm_divided, points)


@pytest.fixture(scope="session")
def owned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run with AdamW's moments divided among two ranks."""
    keys = {"compute.ranks": 2, "compute.parallel": "zero2"}
    return str(prepare(tmp_path_factory.mktemp("chaos") / "owned", keys))


@pytest.fixture(scope="session")
def calm_owned(hosts: Pool, owned: str) -> Result:
    return hosts.run_one(Trial(name="calm-owned", run=owned, trace=True))


@pytest.fixture(scope="session")
def owned_points(calm_owned: Result, points: list[str]) -> list[str]:
    return about_ranks(calm_owned, points)


@pytest.fixture(scope="session")
def rare_points(points: list[str], troubled: Result) -> list[str]:
    """Those of clearing up."""
    assert not troubled.error and not troubled.missed, troubled
    return [point for point in kinds(troubled.passed) if point not in points]
