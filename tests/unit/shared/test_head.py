"""Log-probs and entropies in chunks: equal to full float64 logits, and never more rows than asked for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.config.tree import BatchConfig, Config, LossConfig
from shared.model.head import CARD_COLUMNS, CPU_COLUMNS, LogitForm, columns_at_once, head_logits, token_stats
from shared.model.layers.products import IN_FP32, product_fp32, product_tiles
from tests import reference
from tests.support.cramped_card import Allocations
from tests.support.fakes import VOCAB, tiny_group, tiny_policy
from tests.support.steps import step_batch, teaching_samples, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 23, 16
WIDE = 2 * CPU_COLUMNS + 400


OPS = torch.ops.aten
VIEWS = (OPS.t.default, OPS.transpose.int, OPS.slice.Tensor, OPS.alias.default)


class HeadRows(TorchDispatchMode):
    """Notes the rows of every tensor with a vocabulary-wide last dimension that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.multiplied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() and result.shape[-1] == VOCAB:
            # Views of the [V, H] weight are no logits.
            if func not in VIEWS:
                self.largest = max(self.largest, result.numel() // VOCAB)
            if func is torch.ops.aten.mm.default:
                self.multiplied.append(result.shape[0])
        return result


def inputs(seed: int = 0, vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, targets, and a gradient that arrives from the loss."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(vocab, WIDTH, generator=generator)
    return hidden, weight, torch.randint(vocab, (ROWS,), generator=generator), torch.randn(ROWS, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("rows", [1, 7, ROWS, 1000])
def test_statistics_and_gradient_equal_full_logits_in_float64(temperature: float, rows: int) -> None:
    hidden, weight, targets, arriving = inputs()
    exact = hidden.double().requires_grad_()
    logprobs, entropies = reference.softmax_stats(exact @ weight.double().t(), targets, temperature)
    (logprobs * arriving.double()).sum().backward()

    leaf = hidden.clone().requires_grad_()
    stats = token_stats(leaf, weight, targets, temperature=temperature, rows=rows)
    (stats.logprobs * arriving).sum().backward()
    torch.testing.assert_close(stats.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stats.entropies.double(), entropies, rtol=1e-5, atol=1e-6)
    assert leaf.grad is not None and exact.grad is not None
    assert (leaf.grad.double() - exact.grad).norm() <= 1e-6 * exact.grad.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bias_scale_and_soft_cap_of_the_logits_are_part_of_both(temperature: float) -> None:
    hidden, weight, targets, arriving = inputs()
    form = LogitForm(bias=torch.linspace(-1, 1, VOCAB), scale=0.5, cap=2.0)
    exact = hidden.double().requires_grad_()
    product = 0.5 * (exact @ weight.double().t() + torch.linspace(-1, 1, VOCAB).double())
    logprobs, entropies = reference.softmax_stats(2 * torch.tanh(product / 2), targets, temperature)
    (logprobs * arriving.double()).sum().backward()
    leaf = hidden.clone().requires_grad_()
    stats = token_stats(leaf, weight, targets, temperature=temperature, rows=7, form=form)
    (stats.logprobs * arriving).sum().backward()
    torch.testing.assert_close(stats.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stats.entropies.double(), entropies, rtol=1e-5, atol=1e-6)
    assert leaf.grad is not None and exact.grad is not None
    assert (leaf.grad.double() - exact.grad).norm() <= 1e-6 * exact.grad.norm()


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(bias=torch.linspace(-1, 1, WIDE), scale=2.0, cap=3.0)])
@pytest.mark.parametrize("entropies", [True, False])
def test_a_vocabulary_of_several_tiles_is_one_distribution(form: LogitForm, entropies: bool) -> None:
    hidden, weight, targets, arriving = inputs(vocab=WIDE)
    logprobs, expected, gradient = exact_stats(hidden, weight, targets, arriving, form)
    leaf = hidden.clone().requires_grad_()
    stats = token_stats(leaf, weight, targets, temperature=0.7, rows=7, form=form, entropies=entropies)
    (stats.logprobs * arriving).sum().backward()
    torch.testing.assert_close(stats.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)
    if entropies:
        torch.testing.assert_close(stats.entropies.double(), expected, rtol=1e-5, atol=1e-6)
    else:
        assert stats.entropies.shape == (0,)
    assert leaf.grad is not None
    assert (leaf.grad.double() - gradient).norm() <= 1e-6 * gradient.norm()


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_in_bf16_logits_are_rounded_by_their_distance_from_the_target_and_the_gradient_in_its_factors(
    sharpness: float,
) -> None:
    """A logit is wrong by 2^-8 of its distance from the target's. p and the result have 8 bits, so the rounding of a
    row is at most 2^-8 of its own length."""
    hidden, weight, targets, arriving = inputs(vocab=WIDE)
    hidden, weight = (sharpness * hidden).bfloat16(), weight.bfloat16()
    # Some rows are sure of their target, and the gradient is a small difference.
    targets[::2] = (hidden.double() @ weight.double().t()).argmax(dim=1)[::2]
    logprobs, entropies, gradient = exact_stats(hidden, weight, targets, arriving, LogitForm())
    leaf = hidden.clone().requires_grad_()
    stats = token_stats(leaf, weight, targets, temperature=0.7, rows=64)
    (stats.logprobs * arriving).sum().backward()

    logits = hidden.double() @ weight.double().t() / 0.7
    shares = logits.softmax(dim=1)
    # A twentieth more for what is of second order.
    wrong = 1.05 * 2**-8 * (logits - logits.gather(1, targets[:, None])).abs()
    mean = (shares * wrong).sum(dim=1)
    assert ((stats.logprobs - logprobs).abs() <= mean + 2e-5).all()
    of_entropy = (shares * (shares.log() + entropies[:, None]).abs() * wrong).sum(dim=1)
    assert ((stats.entropies - entropies).abs() <= of_entropy + 2e-5).all()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
    of_gradient = (shares * (wrong + mean[:, None]) * weight.double().norm(dim=1)).sum(dim=1) * arriving.abs() / 0.7
    assert ((leaf.grad.double() - gradient).norm(dim=1) <= 2**-8 * gradient.norm(dim=1) + of_gradient).all()


def exact_stats(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, arriving: torch.Tensor, form: LogitForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and gradient at temperature 0.7 from full logits in float64."""
    exact = hidden.double().requires_grad_()
    logits = (exact @ weight.double().t() + (0 if form.bias is None else form.bias.double())) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    logprobs, entropies = reference.softmax_stats(logits, targets, 0.7)
    (logprobs * arriving.double()).sum().backward()
    assert exact.grad is not None
    return logprobs, entropies, exact.grad


def test_entropies_carry_no_gradient() -> None:
    hidden, weight, targets, _ = inputs()
    stats = token_stats(hidden.requires_grad_(), weight, targets, temperature=1.0, rows=5)
    assert stats.logprobs.requires_grad and not stats.entropies.requires_grad


def test_the_chunk_size_changes_rounding_alone() -> None:
    hidden, weight, targets, arriving = inputs()
    results = []
    for rows in (1, 4, 8, ROWS):
        leaf = hidden.clone().requires_grad_()
        stats = token_stats(leaf, weight, targets, temperature=0.9, rows=rows)
        (stats.logprobs * arriving).sum().backward()
        results.append((stats.logprobs.detach(), stats.entropies, leaf.grad))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 8, 64])
def test_no_more_than_the_given_rows_are_ever_vocabulary_wide(rows: int) -> None:
    hidden, weight, targets, arriving = inputs()
    with HeadRows() as seen:
        stats = token_stats(hidden.requires_grad_(), weight, targets, temperature=0.7, rows=rows)
        stats.logprobs.backward(arriving)
    assert seen.largest == min(rows, ROWS)
    # The backward pass computes no logits.
    assert sum(seen.multiplied) == ROWS


@pytest.mark.parametrize(("entropies", "most"), [(False, 1.6), (True, 2.6)])
@pytest.mark.parametrize("directions", [False, True])
def test_on_a_card_the_head_takes_little_more_than_a_tile(entropies: bool, most: float, directions: bool) -> None:
    """Of 1.5 billion parameters' vocabulary and rows, over tensors without values; the hidden rows count apart."""
    rows, width, vocab = 512, 1536, 151_936
    hidden, weight = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, vocab))
    targets = torch.empty(rows, dtype=torch.int64, device="meta")
    hidden.requires_grad_(directions)
    with Allocations(device="meta") as card:
        stats = token_stats(hidden, weight, targets, temperature=0.7, rows=rows, entropies=entropies)
    tile, hidden_rows = rows * CARD_COLUMNS * 4, rows * width * 4
    assert tile < card.peak <= most * tile + 3 * hidden_rows * directions
    assert stats.entropies.numel() == rows * entropies


def test_a_tile_is_wide_where_launches_take_the_time() -> None:
    found = [columns_at_once(torch.device(kind)) for kind in ("cpu", "cuda", "meta")]
    assert found == [CPU_COLUMNS, CARD_COLUMNS, CARD_COLUMNS]


def test_no_rows_are_fine() -> None:
    hidden, weight, _, _ = inputs()
    leaf = hidden[:0].requires_grad_()
    stats = token_stats(leaf, weight, torch.zeros(0, dtype=torch.int64), temperature=1.0, rows=4)
    stats.logprobs.sum().backward()
    assert stats.logprobs.shape == (0,) and leaf.grad is not None


def test_in_bf16_the_largest_logits_are_exact_and_the_others_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (3, 4000))
    found = head_logits(hidden, weight, 2.0)
    exact = hidden.double() @ weight.double().t() / 2
    assert found.dtype == torch.float32
    # The 64th to the 70th may be in another order once they are rounded.
    largest = exact.topk(IN_FP32 // 2).indices
    error = (found.double() - exact).abs() / exact.abs()
    assert (error.gather(1, largest) < 1e-5).all()
    assert 1e-3 < error.max() <= 2**-8
    assert (found.argmax(dim=1) == exact.argmax(dim=1)).all()
    expected = exact.log_softmax(dim=-1)
    ours, rounded = (
        ((logits.double().log_softmax(dim=-1) - expected).abs() * expected.exp()).sum(dim=1)
        for logits in (found, (hidden @ weight.t()).float() / 2)
    )
    assert (ours < rounded / 4).all()


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_masked_tokens_never_meet_the_head(checkpoint: Path, fraction: float) -> None:
    config = Config(loss=LossConfig(entropy_fraction=fraction), batch=BatchConfig(token_budget=30, head_rows=6))
    policy = tiny_policy(checkpoint)
    groups = [tiny_group([1.0, 0.0], [5, 11], group_id=f"g{i}", seed=i) for i in range(3)]
    batch = step_batch(teaching_samples(groups, config), 0, config)
    update = update_of(policy, config)
    with HeadRows() as seen:
        update.apply(0, batch)
    assert sum(seen.multiplied) == math.ceil(fraction * 48)
    assert seen.largest <= 6


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("vocab", [100, WIDE])
def test_a_bf16_product_is_summed_and_kept_in_fp32(rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, 200, generator=generator).bfloat16() for n in (rows, vocab))
    before = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    found = product_fp32(a, b.t())
    exact = a.double() @ b.double().t()
    assert found.dtype == torch.float32
    bound = 200 * 2**-24 * (a.double().abs() @ b.double().abs().t())
    assert ((found.double() - exact).abs() <= bound).all()
    # Other products of fp32 factors are not rounded.
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("vocab", [100, WIDE])
def test_tiles_of_a_bf16_product_are_exact_around_a_column_of_each_row(rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(n, 200, generator=generator).bfloat16() for n in (rows, vocab))
    centers = torch.randint(vocab, (rows,), generator=generator)
    tiles = product_tiles(a, b.t(), 64, centers)
    found = torch.cat([tile.float() + added for _, tile, added in tiles if added is not None], dim=1)
    exact = a.double() @ b.double().t()
    center = exact.gather(1, centers[:, None])
    assert found.dtype == torch.float32
    # The center itself has 8 bits when it is subtracted.
    distance = (exact - center).abs() + 2**-8 * center.abs()
    sums = 400 * 2**-24 * (a.double().abs() @ b.double().abs().t())
    assert ((found - exact).abs() <= 2**-8 * distance + sums).all()
