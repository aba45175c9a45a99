"""Attention as plain products: the formula and its gradients, and which sequences are short enough for it."""

from types import SimpleNamespace

import pytest
import torch

from shared.model.layers.attention import SHORT, attention, short_attention

HEADS, KV_HEADS, SIZE, SCALING = 6, 2, 8, 0.4


def inputs(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS, queries, SIZE, generator=generator)
    key, value = torch.randn(2, 3, KV_HEADS, keys, SIZE, generator=generator)
    mask = (torch.rand(3, 1, queries, keys, generator=generator) > 0.5) | (torch.arange(keys) == 0)
    return query, key, value, mask


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Row by row and head by head."""
    out = torch.zeros(query.shape[0], query.shape[2], HEADS, SIZE, dtype=query.dtype)
    for row in range(query.shape[0]):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = query[row, head] @ key[row, shared].t() * SCALING
            weights = torch.softmax(scores.masked_fill(~mask[row, 0], float("-inf")), dim=-1)
            out[row, :, head] = weights @ value[row, shared]
    return out


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (4, 9)])
def test_values_and_gradients_are_those_of_the_formula(queries: int, keys: int) -> None:
    query, key, value, mask = inputs(queries, keys)
    ours = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    plain = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    arriving = torch.randn(3, queries, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    got = short_attention(ours[0], ours[1], ours[2], mask, SCALING)
    expected = exact(plain[0], plain[1], plain[2], mask)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    got.backward(arriving)
    expected.backward(arriving.double())
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_scores_of_bf16_are_weighed_in_fp32() -> None:
    query, key, value, mask = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs(4, 40))
    got = short_attention(query, key, value, mask, SCALING)
    assert got.dtype == torch.bfloat16
    expected = exact(query.double(), key.double(), value.double(), mask)
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)


def test_scores_are_scaled_in_fp32_and_not_the_bf16_query() -> None:
    """Scores of some tens of nats: a query that is rounded once more would move them by a tenth."""
    query, key, value, mask = inputs(4, 40)
    query, key, value = (30 * query).bfloat16(), key.bfloat16(), value.bfloat16()
    got = short_attention(query, key, value, mask, SCALING)
    expected = exact(query.double(), key.double(), value.double(), mask)
    torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9), (1, 9)])
@pytest.mark.parametrize("window", [None, 4])
def test_a_soft_cap_and_a_window_are_those_of_the_formula(queries: int, keys: int, window: int | None) -> None:
    """The first two columns are padding, so the window's columns are counted from the query back."""
    query, key, value, _ = inputs(queries, keys)
    places, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    full = (columns <= places) & ((columns >= 2) | (columns == places))
    seen = full if window is None else full & (columns > places - window)
    got, _ = attention(
        object(), query, key, value, full.expand(3, 1, -1, -1), scaling=SCALING, softcap=1.5, sliding_window=window
    )
    repeated = [t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value)]
    scores = 1.5 * torch.tanh(query.double() @ repeated[0].transpose(2, 3) * SCALING / 1.5)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    torch.testing.assert_close(got.double(), (weights @ repeated[1]).transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_long_sequences_with_a_soft_cap_keep_it() -> None:
    query, key, value, _ = inputs(SHORT // 128 + 1, SHORT // 128 + 1)
    got, _ = attention(object(), query, key, value, None, scaling=SCALING, softcap=1.5)
    mask = torch.ones(3, 1, *[SHORT // 128 + 1] * 2, dtype=torch.bool).tril()
    assert torch.equal(got, short_attention(query, key, value, mask, SCALING, 1.5))


@pytest.mark.parametrize("queries", [SHORT // 128, SHORT // 128 + 1])
def test_long_sequences_go_to_the_fused_kernel_and_give_the_same(queries: int) -> None:
    query, key, value, mask = inputs(queries, 128)
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS)
    got, _ = attention(module, query, key, value, mask, scaling=SCALING)
    plain = short_attention(query, key, value, mask, SCALING)
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(got, plain) == (queries * 128 <= SHORT)
