"""Prompts and completions in one run through the layers: values, roundings and gradients are those of the modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.model import LoraConfig
from shared.model.policy import Policy
from shared.model.products import product_in_two
from shared.model.sequences import Sequences, kept_places
from tests.support.fakes import tiny_model, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("qwen2", "qwen3", "llama")
LENGTHS, OWNER, COMPLETION = (7, 3, 5), (1, 0, 0, 2, 1), 6
COUNTS = (6, 4, 0, 1, 6)
"""Tokens of each completion that count."""


def sequences() -> Sequences:
    kept = kept_places(LENGTHS, max(LENGTHS), COUNTS, COMPLETION)
    generator = torch.Generator().manual_seed(2)
    return Sequences(
        prompts=torch.randint(0, 90, (len(LENGTHS), max(LENGTHS)), generator=generator),
        lengths=torch.tensor(LENGTHS),
        completions=torch.randint(0, 90, (len(OWNER), COMPLETION), generator=generator),
        owner=torch.tensor(OWNER),
        kept=torch.tensor(kept),
    )


def used(policy: Policy) -> torch.Tensor:
    """Hidden rows but for those of padding."""
    hidden = policy.hidden(sequences())
    filled = [
        torch.arange(width) < torch.tensor(counts)[:, None] for counts, width in ((LENGTHS, 7), (COUNTS, COMPLETION))
    ]
    return hidden[torch.cat([columns.flatten() for columns in filled])]


def test_where_nothing_is_padding_every_place_counts() -> None:
    assert kept_places([3, 3], 3, [2], 2) is None
    found = kept_places([3, 1], 3, [0, 2], 2)
    assert found is not None and found.tolist() == [0, 1, 2, 3, 8, 9]


def gradients(policy: Policy) -> list[torch.Tensor]:
    hidden = used(policy)
    arriving = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(hidden.dtype)
    return list(torch.autograd.grad(hidden, list(policy.adapter.parameters().values()), arriving))


def policy_of(folder: Path, family: Any, dtype: torch.dtype, **options: Any) -> Policy:
    policy = tiny_policy(tiny_model(folder, family), dtype=dtype, **options)
    assert policy.layers is not None
    return policy


@pytest.mark.parametrize("options", [{}, {"lora": LoraConfig(rank=3, targets=("k_proj", "up_proj"))}])
@pytest.mark.parametrize("dequantize", ["once", "each_call"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_modules(
    tmp_path: Path, family: str, dequantize: str, options: dict[str, Any]
) -> None:
    policy = policy_of(tmp_path, family, torch.float32, dequantize=dequantize, **options)
    modules = replace(policy, layers=None)
    torch.testing.assert_close(used(policy), used(modules), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(policy), gradients(modules), strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_rounds_as_in_the_modules(tmp_path: Path, family: str) -> None:
    """The products have other shapes; on one thread the sums in them have the same order."""
    policy = policy_of(tmp_path, family, torch.bfloat16)
    torch.testing.assert_close(used(policy), used(replace(policy, layers=None)), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_gradients_are_as_close_to_exact_ones_as_those_of_the_modules(tmp_path: Path, family: str) -> None:
    exact = gradients(policy_of(tmp_path, family, torch.float32))
    policy = policy_of(tmp_path, family, torch.bfloat16)

    def error(of: Policy) -> float:
        found = [(mine - true).norm() / true.norm() for mine, true in zip(gradients(of), exact, strict=True)]
        return float(torch.stack(found).mean())

    assert error(policy) <= 1.1 * error(replace(policy, layers=None))


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
