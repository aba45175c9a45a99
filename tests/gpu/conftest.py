"""What the tests of a card share: the card, or the reason why there is none.

    tests/run.sh gpu
    TANDEM_PYTHON=python3 tests/run.sh gpu          without network, with the packages of this Python

Nothing here asks for a card while tests are collected.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from shared.process.determinism import pin_torch
from tests.support.card_sides import release

# Deterministic algorithms need it, and CUDA reads it when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def card() -> Iterator[torch.device]:
    """Set up as learner and actor are. Skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA card here")
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    pin_torch(2)
    yield torch.device("cuda")
    release()
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def clean(card: torch.device) -> Iterator[torch.device]:
    """Nothing of an earlier test is in memory."""
    release()
    yield card
    release()
