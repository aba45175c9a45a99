"""The adapter's kernel, in Triton's interpreter or on a card, and an engine that decodes with all three kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers
from protocol.messages import GroupOrder, Sampling
from shared.model.layers import lora
from shared.model.policy import Kernels, Policy
from tests.support.fakes import shake, tiny_policy, tiny_prompter

pytest.importorskip("triton", reason="the extra `kernels` is not installed here")

from shared.model.kernels.head import FoldedSums
from shared.model.kernels.lora import INPUTS, OUTPUTS, RANKS, ROWS, add_low_rank
from shared.model.kernels.sampler import draw

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 1.75


def inputs(rows: int, sizes: tuple[int, int], rank: int) -> tuple[torch.Tensor, ...]:
    """y, x, A, B"""
    inside, outside = sizes
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, outside), (rows, inside), (rank, inside), (outside, rank))
    y, x, a, b = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return y, x, a / inside**0.5, b / rank**0.5


def exact(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y + s B (A x) in float64."""
    return y.double() + SCALE * (x.double() @ a.double().t()) @ b.double().t()


@pytest.mark.parametrize("rows", [1, 8, 33, ROWS])
@pytest.mark.parametrize(
    ("sizes", "rank"),
    [((INPUTS, OUTPUTS), 16), ((40, 24), 4), ((3 * INPUTS + 8, 2 * OUTPUTS + 1), 33), ((96, 64), RANKS)],
)
def test_it_adds_the_product_in_place(rows: int, sizes: tuple[int, int], rank: int) -> None:
    y, x, a, b = inputs(rows, sizes, rank)
    expected = exact(y, x, a, b)
    found = add_low_rank(y, x, a, b, SCALE)
    assert found is y
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "rank"), [(ROWS + 1, 4), (2, RANKS + 1)])
def test_beyond_its_sizes_the_torch_version_computes(rows: int, rank: int) -> None:
    y, x, a, b = inputs(rows, (40, 24), rank)
    expected = lora.add_low_rank(y.clone(), x, a, b, SCALE)
    assert torch.equal(add_low_rank(y, x, a, b, SCALE), expected)


def test_parts_of_wider_matrices_will_do() -> None:
    """A is part of what a stack of linears has, B is kept transposed, y is a part of a joint product."""
    y, x, a, b = inputs(5, (40, 24), 8)
    room, around = torch.zeros(5, 60, device=DEVICE), torch.zeros(20, 40, device=DEVICE)
    room[:, 30:54], around[4:12] = y, a
    found = add_low_rank(room[:, 30:54], x, around[4:12], b.t().contiguous().t(), SCALE)
    torch.testing.assert_close(found.double(), exact(y, x, a, b), rtol=0, atol=1e-5)
    assert not room[:, :30].any() and not room[:, 54:].any()


def rounded(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> fp32 with the bits of bf16. The interpreter cuts the others off."""
    if values.is_cuda:
        return values.bfloat16().float()
    return (values.view(torch.int32) & -(2**16)).view(torch.float32)


def test_in_bf16_it_rounds_what_the_torch_version_rounds() -> None:
    """The factors, A x, and the sum; nothing else."""
    y, x, a, b = inputs(8, (96, 64), 16)
    y, x = y.bfloat16(), x.bfloat16()
    low = rounded(x.float() @ rounded(a).t())
    expected = rounded(y.float() + SCALE * low @ rounded(b).t())
    torch_version = lora.add_low_rank(y.clone(), x, a.bfloat16(), b.bfloat16(), SCALE)
    found = add_low_rank(y, x, a, b, SCALE)
    assert found.dtype == torch.bfloat16
    # Another order of a sum turns a rounding here and there.
    assert (found.float() != expected).float().mean() < 0.02
    assert (found.float() - torch_version.float()).norm() <= 2**-6 * torch_version.float().norm()


class Counted:
    """A kernel that counts its calls."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.kernel(*args, **options)


def orders() -> tuple[GroupOrder, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        GroupOrder(
            group_id=f"g{index}",
            prompt_ids=rng.integers(6, 97, 4 + index).astype(np.int32),
            columns={},
            seeds=(index, index + 10),
        )
        for index in range(2)
    )


def completions(policy: Policy, *, fixed: bool) -> list[Completion]:
    """fixed: in fixed shapes, as on a card."""
    engine = HFEngine(policy, tiny_prompter(0))
    if fixed and isinstance(engine.layers, Layers):
        engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, Grain())
    groups = engine.generate(orders(), Sampling(temperature=1.0, max_new_tokens=4), lambda ended: None)
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize("fixed", [True, False])
def test_an_engine_decodes_the_same_with_all_kernels(checkpoint: Path, fixed: bool) -> None:
    policy = tiny_policy(checkpoint, dequantize="each_call")
    shake(policy, 3)
    plain = completions(policy, fixed=fixed)
    low_rank, drawing = Counted(add_low_rank), Counted(draw)
    fast = policy.with_kernels(Kernels(sums=FoldedSums, add_low_rank=low_rank, draw=drawing))
    for one, other in zip(completions(fast, fixed=fixed), plain, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    assert drawing.calls == 4
    # The prompts, then three steps (in fixed shapes a fourth, which nobody reads), through seven linears of two layers.
    assert low_rank.calls == (5 if fixed else 4) * 7 * 2


def test_a_policy_scores_the_same_with_the_kernels(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    hidden = torch.randn(5, policy.head.shape[1], generator=torch.Generator().manual_seed(0))
    targets = torch.arange(5)
    expected = policy.stats(hidden, targets, temperature=0.7, rows=3)
    sums = Counted(FoldedSums)
    found = policy.with_kernels(Kernels(sums=sums)).stats(hidden, targets, temperature=0.7, rows=3)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies, expected.entropies, rtol=0, atol=1e-5)
    assert sums.calls == 2
