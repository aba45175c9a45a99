"""What every test gets: fixed threads, no network, a run directory of its own."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: sums depend on the thread count in the last bit, and tests compare bits. Workers
# that share the cores have one each: threads that wait for one another there would keep the others from theirs.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
if not Path("/dev/nvidiactl").exists():
    # Without a card the kernels run in Triton's interpreter. It must know before it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with `one_in(n)`, one case in n stays in tests/run.sh; the others are long. Every n-th case might have
    the same value of a second parameter, so the place moves on by one after n cases."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test, every = item.nodeid.partition("[")[0], mark.args[0]
            if seen[test] % every != seen[test] // every % every:
                item.add_marker(pytest.mark.long)
            seen[test] += 1


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Quantised bases of a test run go to a folder of its own; child processes inherit it. With tests/run.sh all its
    stages and workers share one: otherwise each would quantise the same bases anew. The speed of the machine that runs
    find there is made up."""
    from tests.support.machines import assume_speed

    cache = os.environ.get("TANDEM_TESTS_CACHE") or str(tmp_path_factory.mktemp("cache"))
    os.environ["XDG_CACHE_HOME"] = cache
    assume_speed(Path(cache, "tandem"))


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Where a run may be made; does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2; its quantised base is cached beside it on first use."""
    from tests.support.fakes import tiny_model

    return tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """No barriers between threads: at toy sizes they cost more than the sums, and on a busy machine far more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path) -> None:
    """What `datasets` converts goes into the test's folder, not the user's."""
    import datasets
    import datasets.config

    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    datasets.disable_progress_bars()
