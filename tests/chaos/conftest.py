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
def rare_points(points: list[str], troubled: Result) -> list[str]:
    """Those of clearing up."""
    assert not troubled.error and not troubled.missed, troubled
    return [point for point in kinds(troubled.passed) if point not in points]
