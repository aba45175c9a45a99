"""The product with a weight: the same sums whichever factor is on the left, and gradients."""

import pytest
import torch
import torch.nn.functional as F

from shared.model.layers.products import (
    BETWEEN,
    SHORT,
    gradient_product,
    largest_columns,
    product_of_largest,
    weight_product,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def factors(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 48), (200, 48), (200,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, SHORT, SHORT + 1, BETWEEN.start, 1144, BETWEEN.stop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_linear_of_torch(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    x, weight, bias = factors(rows, dtype)
    added = bias if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    # A rounding of the result, and the order of the sum.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(weight_product(x, weight, added).double(), exact, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("rows", [8, SHORT + 1, 1144])
def test_its_gradient_is_that_of_the_linear(rows: int) -> None:
    x, weight, bias = factors(rows, torch.bfloat16)
    arriving = torch.randn(rows, 200).bfloat16()
    (found,) = torch.autograd.grad(weight_product(x.requires_grad_(), weight, bias), x, arriving)
    torch.testing.assert_close(found.double(), arriving.double() @ weight.double(), rtol=2.0**-8, atol=2.0**-7)


@pytest.mark.parametrize("rows", [8, 1144, 1600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_input_may_be_added_to_another(dtype: torch.dtype, rows: int) -> None:
    x, weight, _ = factors(rows, dtype)
    arriving = torch.randn(rows, 200).to(dtype)
    exact = arriving.double() @ weight.double()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(gradient_product(arriving, weight).double(), exact, rtol=rounding, atol=rounding)
    total = x.clone()
    assert gradient_product(arriving, weight, total) is total
    torch.testing.assert_close(total.double(), x.double() + exact, rtol=rounding, atol=2 * rounding)


def test_of_few_rows_the_result_is_written_by_columns() -> None:
    """Where the weight is the right factor, it would be copied in each call."""
    x, weight, _ = factors(8, torch.bfloat16)
    assert weight_product(x, weight).stride() == (1, 8)


def test_the_largest_logits_have_fp32_and_the_rows_are_whole() -> None:
    x, weight, _ = factors(8, torch.bfloat16)
    found, exact = product_of_largest(x, weight), x.double() @ weight.double().t()
    assert found.is_contiguous() and found.dtype == torch.float32
    # Rounding decides which is the last of them.
    largest = exact.topk(48).indices
    torch.testing.assert_close(found.double().gather(1, largest), exact.gather(1, largest), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [97, 8192, 20_011])
def test_the_largest_columns_are_found_among_the_maxima_of_blocks(size: int) -> None:
    values = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    # All of the largest in one block, one in each block, and in the columns after the last whole block.
    values[0, 200:264] += 20.0
    values[1, ::129] += 20.0
    values[2, -3:] += 20.0
    found = values.gather(1, largest_columns(values, 64))
    assert torch.equal(found.sort(dim=1).values, values.topk(64, dim=1).values.sort(dim=1).values)
