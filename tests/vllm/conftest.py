"""The vLLM tier: real vLLM on the embedded model, in the environment that `tests/run.sh vllm` makes.

One engine serves all tests: a process can hold one, and it takes seconds to start. Tests must not depend on what was
installed before them.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `tests/run.sh vllm` makes an environment that has it")

from tests.vllm.bench import Bench, make_bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM warns of its own deprecations."""
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Made once."""
    return make_bench()
