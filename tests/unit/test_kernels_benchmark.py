"""benchmarks/kernels: says where it cannot run, and compares what a policy of the asked shapes would run."""

import argparse

import pytest
import torch

from benchmarks import kernels
from shared.model.kernels.trial import TRIALS, difference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_so() -> None:
    with pytest.raises(SystemExit, match="are measured on a card, and PyTorch sees none here"):
        kernels.refuse_without_card()


@pytest.mark.parametrize("name", ["add_low_rank", "draw"])
def test_its_random_policy_has_the_shapes_that_were_asked_for(name: str) -> None:
    pytest.importorskip("triton", reason="the extra `kernels` is not installed here")
    sizes = argparse.Namespace(vocabulary=1200, hidden=32, inner=48, rank=4, dtype="fp32")
    policy = kernels.random_policy(sizes, torch.device("cpu"))
    trial = TRIALS[name](policy)
    assert policy.head.shape == (1200, 32) and difference(trial) <= trial.tolerance
    rows = 16
    moved = {"draw": rows * 1200, "add_low_rank": rows * (2 * 48 + 32) + 4 * (48 + 32)}
    assert trial.bytes_moved == 4 * moved[name]
