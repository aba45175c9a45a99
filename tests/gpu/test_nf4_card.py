"""NF4 on a card: bitsandbytes' kernels give the formula's values, for each matrix of the models that presets name."""

import numpy as np
import pytest
import torch

from benchmarks.gpu.products import linear_shapes
from benchmarks.gpu.random_base import SHAPES, random_codes
from shared.model.layers.lora import DequantizingMatmul
from shared.model.layers.nf4 import NF4Weight, from_tensors, kernel_state, kernel_values, quantize
from shared.model.layers.products import product_fp32

pytestmark = pytest.mark.gpu
LINEARS = sorted({shape for model in SHAPES for shape in linear_shapes(model)})
ROWS = (1, 2, 8, 33, 64, 512, 4096)
ROUNDED = 2**-8
"""Of a vector whose entries are rounded to bf16 once, twice as much as on average."""
BY_CODES, DENSE_ROWS = 1.5 * ROUNDED, 1536
"""Of bitsandbytes' product by the codes, which rounds scales as well: 0.0042 was measured. With more rows than these it
makes dense values."""


@pytest.fixture(scope="module")
def template() -> NF4Weight:
    generator = torch.Generator().manual_seed(0)
    return quantize((0.02 * torch.randn(512, 512, generator=generator)).bfloat16())


def weight(shape: tuple[int, int], template: NF4Weight, device: torch.device) -> NF4Weight:
    drawn = random_codes(torch.Size(shape), template, np.random.default_rng(shape[0]))
    return from_tensors("w", drawn.tensors("w"), device)


def normal(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device).bfloat16()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", LINEARS, ids=str)
def test_values_are_those_of_the_formula(card: torch.device, template: NF4Weight, shape: tuple[int, int]) -> None:
    codes = weight(shape, template, card)
    by_kernel = kernel_values(codes.packed, kernel_state(codes), torch.bfloat16).view(shape)
    by_formula = weight(shape, template, torch.device("cpu")).dequantize(torch.bfloat16)
    assert torch.equal(by_kernel.cpu(), by_formula)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", LINEARS, ids=str)
def test_products_are_those_with_the_values(
    card: torch.device, template: NF4Weight, shape: tuple[int, int], biased: bool
) -> None:
    """With and without gradients, because other kernels compute these."""
    codes = weight(shape, template, card)
    layer, values = DequantizingMatmul(codes), codes.dequantize(torch.bfloat16).double()
    bias = normal(shape[0], device=card, seed=1) if biased else None
    for rows in ROWS:
        x = normal(rows, shape[1], device=card, seed=rows)
        expected = x.double() @ values.t() + (0.0 if bias is None else bias.double())
        with torch.no_grad():
            bound = ROUNDED if rows > DENSE_ROWS else BY_CODES
            assert relative(layer(x, bias), expected) < bound, f"{rows} rows"
        trained = x.clone().requires_grad_()
        y = layer(trained, bias)
        arriving = normal(rows, shape[0], device=card, seed=rows + 1)
        y.backward(arriving)
        assert trained.grad is not None
        assert relative(y.detach(), expected) < ROUNDED, f"{rows} rows"
        assert relative(trained.grad, arriving.double() @ values) < ROUNDED, f"{rows} rows"


def test_quantising_on_a_card_gives_the_codes_of_the_formula(card: torch.device) -> None:
    exact = normal(256, 192, device=card) * 0.02
    here, there = quantize(exact), quantize(exact.cpu())
    same = (here.packed.cpu() == there.packed).double().mean()
    assert float(same) > 0.999, "a value half-way between two codes may go to either"
    torch.testing.assert_close(here.dequantize(torch.float32).cpu(), there.dequantize(torch.float32), rtol=0, atol=4e-3)


CASES = {
    "scores": ((6, 40, 64), (6, 64, 137)),
    "one query": ((16, 1, 128), (16, 128, 640)),
    "head": ((8, 1536), (1536, 4096)),
    "long sum": ((64, 8960), (8960, 16)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_of_bf16_factors_are_summed_and_kept_in_fp32(card: torch.device, case: str, transposed: bool) -> None:
    first, second = CASES[case]
    a, b = normal(*first, device=card), normal(*second, device=card, seed=1)
    if transposed:
        b = b.transpose(-1, -2).contiguous().transpose(-1, -2)
    found = product_fp32(a, b)
    assert found.dtype == torch.float32
    assert relative(found, a.double() @ b.double()) < 1e-5
