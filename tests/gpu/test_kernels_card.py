"""Our Triton kernels, compiled for this card, against PyTorch's own operations and a float64 formula."""

import argparse
import math

import pytest
import torch

from benchmarks.kernels import random_policy
from shared.model.head import Sums, token_stats
from shared.model.kernels.toolchain import look_at_toolchain, missing
from shared.model.kernels.trial import TRIALS, difference

pytestmark = pytest.mark.gpu
SHAPES = {
    "1.5B": {"vocabulary": 151_936, "hidden": 1536, "inner": 8960, "rank": 16},
    "7B": {"vocabulary": 152_064, "hidden": 3584, "inner": 18_944, "rank": 32},
    "odd": {"vocabulary": 1003, "hidden": 72, "inner": 136, "rank": 3},
}


@pytest.fixture(scope="module")
def toolchain(card: torch.device) -> torch.device:
    if lacks := missing(look_at_toolchain()):
        pytest.skip("; ".join(f"{lack.found}: {lack.remedy}" for lack in lacks))
    return card


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRIALS)
def test_a_kernel_agrees_with_pytorch(toolchain: torch.device, name: str, shape: str, dtype: str) -> None:
    policy = random_policy(argparse.Namespace(**SHAPES[shape], dtype=dtype), toolchain)
    trial = TRIALS[name](policy)
    assert difference(trial) <= trial.tolerance


def test_a_kernel_can_be_captured(toolchain: torch.device) -> None:
    """The token step is a graph, so a kernel must neither wait nor allocate in a way that a graph forbids."""
    trial = TRIALS["draw"](random_policy(argparse.Namespace(**SHAPES["1.5B"], dtype="bf16"), toolchain))
    example = trial.example()
    expected = [part.clone() for part in trial.by_triton(*example)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = trial.by_triton(*example)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_the_heads_sums_are_the_formulas(toolchain: torch.device, by: str) -> None:
    """log p, entropy and the gradient against float64, with a vocabulary of 151,936."""
    from shared.model.kernels.head import FoldedSums

    generator = torch.Generator(toolchain).manual_seed(0)
    weight = torch.randn(151_936, 128, device=toolchain, generator=generator) / math.sqrt(128)
    hidden = 3 * torch.randn(48, 128, device=toolchain, generator=generator)
    targets = torch.randint(0, 151_936, (48,), device=toolchain, generator=generator)
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    sums = {"torch": Sums, "triton": FoldedSums}[by]
    found = token_stats(ours, weight, targets, temperature=0.9, rows=32, sums=sums)
    found.logprobs.sum().backward()
    logprobs = torch.log_softmax(exact @ weight.double().t() / 0.9, dim=1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    chosen.sum().backward()
    entropies = -(logprobs.exp() * logprobs).sum(dim=1)
    torch.testing.assert_close(found.logprobs.double(), chosen, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropies.double(), entropies, rtol=0, atol=2e-5)
    assert ours.grad is not None and exact.grad is not None
    assert (ours.grad.double() - exact.grad).norm() < 1e-5 * exact.grad.norm()
