"""The head's kernel, in Triton's interpreter or on a card: equal to full logits in float64, with their gradient."""

from typing import Any

import pytest
import torch

from shared.model.head import CPU_COLUMNS, Head, LogitForm, Sums, SumsOf, token_stats
from tests import reference

pytest.importorskip("triton", reason="the extra `kernels` is not installed here")

from shared.model.kernels.head import FoldedSums

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH = 11, 16
WIDE = 2 * CPU_COLUMNS + 400
PLAIN = LogitForm()
WHOLE = {
    "plain": PLAIN,
    "scale": LogitForm(scale=0.25),
    "bias": LogitForm(bias=torch.linspace(-1, 1, WIDE)),
    "cap": LogitForm(scale=2.0, cap=3.0),
    "all": LogitForm(bias=torch.linspace(-1, 1, WIDE), scale=0.5, cap=2.0),
}


def inputs(vocab: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """hidden, weight, targets in the first, a middle and the last tile, and a gradient that arrives from the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weight = torch.randn(vocab, WIDTH, generator=generator)
    targets = torch.linspace(0, vocab - 1, rows).long()
    arriving = torch.randn(rows, generator=generator)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), targets.to(DEVICE), arriving.to(DEVICE)


def on_device(form: LogitForm) -> LogitForm:
    return LogitForm(bias=None if form.bias is None else form.bias.to(DEVICE), scale=form.scale, cap=form.cap)


def exact(tensors: tuple[torch.Tensor, ...], form: LogitForm, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and gradient from all logits at once, in float64."""
    hidden, weight, targets, arriving = (one.cpu() for one in tensors)
    leaf = hidden.double().requires_grad_()
    logits = (leaf @ weight.double().t() + (0 if form.bias is None else form.bias.double())) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    logprobs, entropies = reference.softmax_stats(logits, targets, temperature)
    (logprobs * arriving.double()).sum().backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropies.detach(), leaf.grad


def found(
    tensors: tuple[torch.Tensor, ...], form: LogitForm, temperature: float, sums: SumsOf = FoldedSums, rows: int = 4
) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, arriving = tensors
    leaf = hidden.clone().requires_grad_()
    stats = token_stats(leaf, weight, targets, temperature=temperature, rows=rows, form=on_device(form), sums=sums)
    (stats.logprobs * arriving).sum().backward()
    assert leaf.grad is not None and not stats.entropies.requires_grad
    return tuple(one.double().cpu() for one in (stats.logprobs.detach(), stats.entropies, leaf.grad))


def assert_equal(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-5)
    assert (ours[2] - expected[2]).norm() <= 1e-5 * expected[2].norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", WHOLE)
def test_statistics_and_gradient_equal_full_logits_in_float64(name: str, temperature: float) -> None:
    tensors, form = inputs(WIDE), WHOLE[name]
    assert_equal(found(tensors, form, temperature), exact(tensors, form, temperature))


def test_a_vocabulary_of_150_000() -> None:
    tensors = inputs(151_936, rows=2)
    assert_equal(found(tensors, PLAIN, 0.9), exact(tensors, PLAIN, 0.9))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_the_torch_version_gives_the_same(name: str) -> None:
    tensors = inputs(WIDE)
    assert_equal(found(tensors, WHOLE[name], 0.7), found(tensors, WHOLE[name], 0.7, sums=Sums))


def test_rows_at_once_change_rounding_alone() -> None:
    tensors = inputs(WIDE)
    for rows in (1, ROWS):
        assert_equal(found(tensors, PLAIN, 0.9, rows=rows), found(tensors, PLAIN, 0.9))


def test_in_bf16_only_the_factors_of_the_gradient_are_rounded() -> None:
    """On a card. On a CPU logits are rounded before they reach the kernel, so it is compared with the torch version,
    whose bounds are in test_head.py."""
    hidden, weight, targets, arriving = inputs(WIDE, dtype=torch.bfloat16)
    # Some rows are sure of their target, and the gradient is a small difference.
    targets[::2] = (hidden.double() @ weight.double().t()).argmax(dim=1)[::2]
    tensors = hidden, weight, targets, arriving
    ours = found(tensors, PLAIN, 0.7)
    expected = exact(tensors, PLAIN, 0.7) if DEVICE.type == "cuda" else found(tensors, PLAIN, 0.7, sums=Sums)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-5, atol=2e-5)
    # The interpreter cuts the last bits of bf16 off instead of rounding.
    assert ((ours[2] - expected[2]).norm(dim=1) <= 2**-7 * expected[2].norm(dim=1)).all()


@pytest.mark.parametrize("entropies", [True, False])
def test_what_is_not_asked_for_is_not_computed(entropies: bool) -> None:
    hidden, weight, targets, _ = inputs(WIDE)
    stats = token_stats(hidden, weight, targets, temperature=0.7, rows=4, entropies=entropies, sums=FoldedSums)
    expected = token_stats(hidden, weight, targets, temperature=0.7, rows=4, entropies=entropies)
    torch.testing.assert_close(stats.logprobs, expected.logprobs)
    torch.testing.assert_close(stats.entropies, expected.entropies)
    assert not stats.logprobs.requires_grad
    head = Head(weight=weight, form=PLAIN, temperature=1.0)
    sums: Any = FoldedSums(head, hidden, targets, entropies=entropies, directions=False)
    assert sums.weighted is None


def test_no_rows_are_fine() -> None:
    hidden, weight, _, _ = inputs(100)
    leaf = hidden[:0].requires_grad_()
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    stats = token_stats(leaf, weight, none, temperature=1.0, rows=4, sums=FoldedSums)
    stats.logprobs.sum().backward()
    assert stats.logprobs.shape == (0,) and leaf.grad is not None
