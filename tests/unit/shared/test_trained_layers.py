"""Prompts and completions in one run through the layers: values, roundings and gradients are those of the modules."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.model import LoraConfig
from shared.model.layers.products import product_in_two
from shared.model.layers.sequences import Places, Sequences, bucket_starts, kept_places
from shared.model.policy import Policy
from tests.support.fakes import tiny_model, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("qwen2", "qwen3", "llama")
LENGTHS, OWNER = (7, 3, 5), (1, 0, 0, 2, 1)
COUNTS = (6, 4, 0, 1, 6)
"""Tokens of each completion that count."""
UNEVEN = (60, 30, 8, 1, 0)
"""The same in three buckets."""
MIXED, ALMOST_EMPTY = (150, 150, 30, 8, 0), (64, 0, 0, 0, 0)
"""Buckets with fused kernels and with plain products, and one without a token."""


def sequences(counts: Sequence[int]) -> Sequences:
    generator = torch.Generator().manual_seed(2)
    return Sequences(
        prompts=torch.randint(0, 90, (len(LENGTHS), max(LENGTHS)), generator=generator),
        lengths=torch.tensor(LENGTHS),
        completions=torch.randint(0, 90, (len(OWNER), max(counts)), generator=generator),
        owner=torch.tensor(OWNER),
        places=Places.of(LENGTHS, counts, OWNER),
    )


def used(policy: Policy, counts: Sequence[int] = COUNTS) -> torch.Tensor:
    """Hidden rows but for those of padding."""
    hidden = policy.hidden(sequences(counts))
    filled = [torch.arange(max(sizes)) < torch.tensor(sizes)[:, None] for sizes in (LENGTHS, counts)]
    return hidden[torch.cat([columns.flatten() for columns in filled])]


def test_where_nothing_is_padding_every_place_counts() -> None:
    assert kept_places([3, 3], [2]) is None
    found = kept_places([3, 1], [0, 2])
    assert found is not None and found.tolist() == [0, 1, 2, 3, 8, 9]


def test_a_bucket_begins_where_enough_padding_is_left_out() -> None:
    assert list(bucket_starts(UNEVEN)) == [0, 1, 2]
    assert list(bucket_starts([64, 64, 48, 48, 48, 48])) == [0, 2], "three quarters of the first one"
    assert list(bucket_starts([64, 64, 49, 49, 49, 49])) == [0]
    assert list(bucket_starts([64, 33, 33])) == [0] and list(bucket_starts([64, 32, 32])) == [0, 1]
    assert list(bucket_starts([0, 0])) == [0]
    places = Places.of(LENGTHS, UNEVEN, OWNER)
    assert [bucket.shape for bucket in places.completions] == [(1, 60), (1, 30), (3, 8)]
    assert [owner.tolist() for owner in places.owners] == [[1], [0], [0, 2, 1]]


def gradients(policy: Policy, counts: Sequence[int] = COUNTS) -> list[torch.Tensor]:
    hidden = used(policy, counts)
    arriving = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(hidden.dtype)
    return list(torch.autograd.grad(hidden, list(policy.adapter.parameters().values()), arriving))


def policy_of(folder: Path, family: Any, dtype: torch.dtype, **options: Any) -> Policy:
    policy = tiny_policy(tiny_model(folder, family), dtype=dtype, **options)
    assert policy.layers is not None
    return policy


@pytest.mark.one_in(2)
@pytest.mark.parametrize("counts", [COUNTS, UNEVEN, MIXED, ALMOST_EMPTY])
@pytest.mark.parametrize("options", [{}, {"lora": LoraConfig(rank=3, targets=("k_proj", "up_proj"))}])
@pytest.mark.parametrize("dequantize", ["once", "each_call"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_modules(
    tmp_path: Path, family: str, dequantize: str, options: dict[str, Any], counts: Sequence[int]
) -> None:
    policy = policy_of(tmp_path, family, torch.float32, dequantize=dequantize, **options)
    modules = replace(policy, layers=None)
    torch.testing.assert_close(used(policy, counts), used(modules, counts), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(policy, counts), gradients(modules, counts), strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without bf16 units the order of a sum depends on the number of rows",
)
@pytest.mark.parametrize("counts", [COUNTS, UNEVEN])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_rounds_as_in_the_modules(tmp_path: Path, family: str, counts: Sequence[int]) -> None:
    """The products have other shapes; on one thread the sums in them have the same order."""
    policy = policy_of(tmp_path, family, torch.bfloat16)
    modules = replace(policy, layers=None)
    torch.testing.assert_close(used(policy, counts), used(modules, counts), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_gradients_are_as_close_to_exact_ones_as_those_of_the_modules(tmp_path: Path, family: str) -> None:
    exact = gradients(policy_of(tmp_path, family, torch.float32))
    policy = policy_of(tmp_path, family, torch.bfloat16)

    def error(of: Policy) -> float:
        found = [(mine - true).norm() / true.norm() for mine, true in zip(gradients(of), exact, strict=True)]
        return float(torch.stack(found).mean())

    assert error(policy) <= 1.1 * error(replace(policy, layers=None))


@pytest.mark.parametrize("counts", [COUNTS, UNEVEN, MIXED, ALMOST_EMPTY])
def test_recomputed_gradients_have_the_same_bits(tmp_path: Path, counts: Sequence[int]) -> None:
    policy = policy_of(tmp_path, "qwen2", torch.float32)
    kept = gradients(policy, counts)
    assert policy.layers is not None
    policy.layers.recomputes = True
    for one, other in zip(gradients(policy, counts), kept, strict=True):
        assert torch.equal(one, other)


def test_the_same_bits_twice_and_without_a_gradient(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "qwen2", torch.bfloat16)
    for one, other in zip(gradients(policy), gradients(policy), strict=True):
        assert torch.equal(one, other)
    kept = used(policy)
    with torch.no_grad():
        assert torch.equal(used(policy), kept)


def test_an_adapter_that_is_off_adds_nothing(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "qwen2", torch.float32)
    bare = policy_of(tmp_path, "qwen2", torch.float32, shaken=False)
    with torch.no_grad(), policy.adapter.switched_off():
        torch.testing.assert_close(used(policy), used(bare), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 3, 17, 564])
def test_a_product_in_two_keeps_what_bf16_would_lose(rows: int) -> None:
    a, b = torch.randn(rows, 16).bfloat16().t(), torch.randn(rows, 300).bfloat16()
    exact = a.double() @ b.double()
    assert (product_in_two(a, b) - exact).abs().max() <= 1e-5 * exact.abs().max()
