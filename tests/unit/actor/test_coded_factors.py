"""Factors of an adapter as codes: the numbers, when they are used, and that a new version replaces them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.coded import CodedFactor, reads_codes
from actor.engines.token_step.layers import Layers
from actor.engines.token_step.packed import AddedProduct, FasterKinds, Packing, RowProduct
from actor.engines.token_step.stacks import Stack, outputs
from protocol.messages import Sampling
from shared.config.processes import CODED_ADAPTER_ROWS, PACKED_TOKENS
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.lora import DenseMatmul, FrozenLinear, LoraLinear
from tests.support.fakes import shake, tiny_prompter
from tests.unit.actor.test_coded import Sampled
from tests.unit.actor.test_layers import ADAPTED, groups
from tests.unit.actor.test_packed import needs_bf16

pytestmark = pytest.mark.usefixtures("one_thread")
needs_codes = pytest.mark.skipif(not reads_codes(), reason="factors are read as codes where the base is")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def encoded(weight: torch.Tensor, scale: float = 1.0) -> CodedFactor:
    factor = CodedFactor(weight, scale)
    factor.encode()
    return factor


def largest_error(weight: torch.Tensor, scale: float, x: torch.Tensor) -> torch.Tensor:
    """[n, out] Half a step between codes for each term, and bf16 for the result."""
    wide = scale * weight.double()
    step = wide.abs().amax(dim=1) / 127 * (1 + 2**-8)
    # A scale that was rounded down has no code for the largest values.
    terms = x.double().abs() @ torch.maximum(step[:, None] / 2, wide.abs() * 2**-8).t()
    return terms + 2**-8 * (x.double() @ wide.t()).abs() + 1e-6


@pytest.mark.parametrize("rows", [1, 8, CODED_ADAPTER_ROWS])
@pytest.mark.parametrize(("out", "size"), [(4, 64), (16, 4864), (96, 896), (1152, 48), (200, 8), (33, 12)])
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.3, -1.5])
def test_a_product_is_that_of_the_values(rows: int, out: int, size: int, scale: float) -> None:
    weight, x = drawn(out, size), drawn(rows, size, seed=1)
    found = encoded(weight, scale).product(x).double()
    exact = x.double() @ (scale * weight.double()).t()
    assert ((found - exact).abs() <= largest_error(weight, scale, x)).all()
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()


def test_a_weight_may_lie_column_by_column_and_rows_apart() -> None:
    weight, x = drawn(48, 32), drawn(16, 32, seed=1)
    expected = encoded(weight).product(x)
    assert torch.equal(encoded(weight.t().contiguous().t()).product(x), expected)
    assert torch.equal(encoded(weight).product(x[::2]), expected[::2])


@pytest.mark.parametrize("size", [1, 4, 8, 15, 17, 24, 100])
def test_nothing_beyond_a_narrow_factor_is_read(size: int) -> None:
    """PyTorch's product would read what follows in memory."""
    weight, memory = drawn(200, size), torch.full((8 * size + 4096,), 1e30).bfloat16()
    x = memory[: 8 * size].view(8, size).copy_(drawn(8, size, seed=1))
    exact = x.double() @ weight.double().t()
    assert ((encoded(weight).product(x).double() - exact).abs() <= largest_error(weight, 1.0, x)).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e6])
def test_zeros_stay_zero_and_no_value_leaves_its_range(scale: float) -> None:
    weight = drawn(64, 32)
    weight[3] = 0.0
    factor = encoded(weight, scale)
    assert not factor.codes[3].any() and (scale / factor.row_scales.float()).isfinite().all()
    found = factor.product(drawn(8, 32, seed=1))
    assert found.isfinite().all() and not found[:, 3].any()
    assert int(factor.codes.abs().max()) == 127


def test_no_code_overflows_however_a_scale_is_rounded() -> None:
    sizes = torch.linspace(1.0, 2.0, 2**8 + 1).bfloat16()
    weight = torch.stack([sizes, -sizes], dim=1).repeat(1, 8)
    for scale in torch.linspace(1.0, 2.0, 97).tolist():
        codes = encoded(weight, scale).codes
        assert torch.equal(codes.sign(), weight.sign().to(torch.int8)) and (codes.int().abs() == 127).all()


def test_a_bias_is_added() -> None:
    weight, x, bias = drawn(24, 32), drawn(8, 32, seed=1), drawn(24, seed=2)
    factor = encoded(weight)
    assert torch.equal(factor.product(x, bias), factor.product(x) + bias)


def test_a_sum_takes_the_scale_into_the_codes() -> None:
    b, x, y = drawn(32, 320), drawn(8, 32, seed=1), drawn(8, 320, seed=2)
    added = AddedProduct(b, 1.5, encoded(b.t(), 1.5))
    plain = AddedProduct(b, 1.5)(y.clone(), x).float()
    found = added(y.clone(), x).float()
    assert 0 < (found - plain).norm() < 0.02 * plain.norm()
    many = drawn(CODED_ADAPTER_ROWS + 1, 32)
    wide = drawn(CODED_ADAPTER_ROWS + 1, 320)
    assert torch.equal(added(wide.clone(), many), AddedProduct(b, 1.5)(wide.clone(), many)), "more rows, in bf16"


def stacks_of(engine: HFEngine) -> list[Stack]:
    assert isinstance(engine.layers, Layers)
    return list(engine.layers.stacks())


def adapters_of(stack: Stack) -> list[LoraLinear]:
    return [linear for linear in stack.linears if isinstance(linear, LoraLinear)]


def added_by_adapter(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """[n, in] -> [n, sum of outputs], without the base."""
    assert stack.by_a is not None
    low = stack.by_a(x).contiguous()
    found = [torch.zeros(len(x), sum(product.sizes)).bfloat16() for product in stack.products]
    for y, product in zip(found, stack.products, strict=True):
        if product.by_b is not None:
            product.by_b(y, low[:, product.columns])
    return torch.cat(found, dim=1).float()


def of_linears(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """The same from the parameters, in float64."""
    parts = [
        linear.scale * (x.double() @ linear.lora_A.double().t()) @ linear.lora_B.double().t()
        if isinstance(linear, LoraLinear)
        else x.new_zeros(len(x), outputs(linear), dtype=torch.float64)
        for linear in stack.linears
    ]
    return torch.cat(parts, dim=1).float()


@needs_codes
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_a_new_version_replaces_the_codes_of_every_factor(tmp_path: Path, name: str) -> None:
    sampled = Sampled(tmp_path, name)
    for version in (1, 2):
        shake(sampled.policy, 10 + version)
        sampled.engine.install(version, adapter_bytes(sampled.policy.adapter))
        for stack in stacks_of(sampled.engine):
            x = drawn(CODED_ADAPTER_ROWS + 1, adapters_of(stack)[0].lora_A.shape[1], seed=version)
            expected, found = of_linears(stack, x[:8]), added_by_adapter(stack, x[:8])
            assert (found - expected).norm() < 0.02 * expected.norm()
            assert not torch.equal(found, added_by_adapter(stack, x)[:8]), "in bf16 with more rows"
    sampled.engine.check()


@needs_codes
def test_they_are_used_only_beside_codes_of_the_base(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    dense = HFEngine(sampled.policy, tiny_prompter(*range(6)))
    for engine, few, many in ((sampled.engine, True, False), (dense, False, False)):
        thin = engine.thin_products()
        assert len(thin) == 2 * len(stacks_of(engine)), "A and B"
        assert {product.reads_codes(CODED_ADAPTER_ROWS) for product in thin} == {few}
        assert {product.reads_codes(CODED_ADAPTER_ROWS + 1) for product in thin} == {many}


@needs_codes
def test_an_adapter_of_some_linears_is_read_as_codes_too(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path, targets=ADAPTED[0])
    stacks = [stack for stack in stacks_of(sampled.engine) if stack.by_a is not None]
    assert stacks and all(stack.by_a is not None and stack.by_a.reads_codes(8) for stack in stacks)
    for stack in stacks:
        x = drawn(8, adapters_of(stack)[0].lora_A.shape[1])
        expected, found = of_linears(stack, x), added_by_adapter(stack, x)
        assert (found - expected).norm() < 0.02 * expected.norm()
    sampled.engine.check()


@needs_codes
def test_an_order_whose_rows_become_few_gives_the_same_bits_again(tmp_path: Path) -> None:
    """Its last rows are multiplied by codes of the adapter, the others in bf16."""
    sampled = Sampled(tmp_path)
    sampled.engine.end_ids = torch.arange(6, 11)
    group = structs.replace(groups()[0], seeds=tuple(range(20)))
    counts: list[int] = []
    twice = [
        sampled.engine.generate(
            (group,), Sampling(temperature=1.0, max_new_tokens=12), lambda ended: counts.append(len(ended))
        )
        for _ in range(2)
    ]
    lengths = [len(one.ids) for one in twice[0][0]]
    assert sum(length > 6 for length in lengths) <= CODED_ADAPTER_ROWS, "rows end early"
    assert any(length > 6 for length in lengths) and sum(counts) == 40
    for one, other in zip(*(found[0] for found in twice), strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.logprobs, other.logprobs)


@needs_bf16
def test_they_are_not_packed_for_few_rows() -> None:
    b = drawn(32, 320)
    thin, weight, packing = AddedProduct(b, 2.0, encoded(b.t(), 2.0)), RowProduct(drawn(128, 128)), Packing(1.0)
    packing.kinds = FasterKinds(packed=True, right=False)
    packing.prepare([weight], [thin], PACKED_TOKENS, CODED_ADAPTER_ROWS)
    assert weight.packed is not None and thin.packed is None
    packing.prepare([weight], [thin], PACKED_TOKENS, CODED_ADAPTER_ROWS + 1)
    assert thin.packed is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_different_ranks_keep_their_own_scales(dtype: torch.dtype) -> None:
    """With lora.ranks, linears that read the same input differ in s = alpha / R."""
    whole = drawn(96, 64).to(dtype)
    linears = [
        LoraLinear(FrozenLinear(DenseMatmul(part), None), (48, 64), rank, 32 / rank)
        for part, rank in zip(whole.split(48), (8, 4), strict=True)
    ]
    for linear in linears:
        linear.lora_A.data.copy_(drawn(*linear.lora_A.shape, seed=3))
        linear.lora_B.data.copy_(drawn(*linear.lora_B.shape, seed=4))
    stack, x = Stack(linears, lambda _: None), drawn(8, 64, seed=1).to(dtype)
    stack.prepare(dtype)
    for linear, found in zip(linears, stack(x), strict=True):
        expected = linear(x).float()
        assert (found.float() - expected).norm() < 0.01 * expected.norm()
