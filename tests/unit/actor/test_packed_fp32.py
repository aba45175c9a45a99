"""Large weights in fp32 on processors without AVX-512: oneDNN multiplies by them, packed or not, with the same bits."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from actor.engines.token_step.packed import (
    ROWS,
    FasterKinds,
    Packing,
    RowProduct,
    faster_kinds,
    packed_has_same_bits,
)
from shared.config.processes import ONEDNN_VALUES, PACKED_TOKENS
from shared.model.layers.products import is_for_onednn, product_of_largest
from shared.process.determinism import cpu_environment

pytestmark = pytest.mark.usefixtures("one_thread")

OUT, IN = 2048, 768
HERE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"
avx2_only = pytest.mark.skipif(not HERE, reason="this processor has AVX-512, or no AVX2")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packing(share: float = 1.0) -> Packing:
    found = Packing(share)
    found.kinds = FasterKinds(packed=True, right=False)
    return found


@pytest.mark.skipif(HERE, reason="the tests below run here as they are")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="portable needs AVX2")
def test_all_of_this_file_with_portable_kernels() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | cpu_environment(1, "portable")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


@avx2_only
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 40, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_has_the_bits_of_the_plain_one(rows: int, has_bias: bool) -> None:
    weight, x, bias = drawn(OUT, IN), drawn(rows, IN, seed=1), drawn(OUT, seed=2) if has_bias else None
    product = RowProduct(weight)
    plain = product(x, bias)
    packing().prepare([product], [], PACKED_TOKENS, ROWS)
    assert product.packed is not None
    assert torch.equal(product(x, bias), plain)
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    assert (plain - exact).abs().max() < 3e-6 * exact.abs().max()
    product.unpack()
    assert torch.equal(product(x, bias), plain)


@avx2_only
def test_one_row_is_multiplied_by_the_weight_as_it_is() -> None:
    product, x = RowProduct(drawn(OUT, IN)), drawn(1, IN, seed=1)
    product.pack()
    assert torch.equal(product(x), F.linear(x, product.dense))


@avx2_only
def test_only_large_weights_in_fp32_are_for_onednn() -> None:
    large = torch.empty(1, 1).expand(1, ONEDNN_VALUES)
    assert is_for_onednn(large) and not is_for_onednn(large[:, 1:])
    assert not is_for_onednn(large.bfloat16()) and not is_for_onednn(torch.empty(1, ONEDNN_VALUES, device="meta"))


@avx2_only
def test_as_much_is_packed_as_is_allowed_and_nothing_small() -> None:
    small, large = RowProduct(drawn(64, 64)), [RowProduct(drawn(OUT, IN)) for _ in range(4)]
    packing(0.5).prepare([small, *large], [small], PACKED_TOKENS, ROWS)
    assert small.packed is None and [one.packed is not None for one in large] == [True, True, False, False]
    short = [RowProduct(drawn(OUT, IN))]
    packing().prepare(short, [], PACKED_TOKENS - 1, ROWS)
    assert short[0].packed is None


@avx2_only
def test_bits_are_compared_in_fp32() -> None:
    product = RowProduct(drawn(OUT, IN))
    one = product.stand_in()
    assert one.dense.dtype == torch.float32 and one.uses_onednn and packed_has_same_bits(product)


@avx2_only
def test_measuring_takes_no_random_number_and_no_weight() -> None:
    weights = [drawn(OUT, IN), drawn(OUT, IN, seed=1)]
    before, state = [weight.clone() for weight in weights], torch.get_rng_state()
    assert not faster_kinds(weights).right
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, weights, before))


@avx2_only
def test_logits_in_fp32_come_from_the_head_of_the_token_step() -> None:
    hidden, weight = drawn(8, IN), drawn(OUT, IN, seed=1)
    asked: list[torch.Tensor] = []
    head = RowProduct(weight)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return head(x)

    assert torch.equal(product_of_largest(hidden, weight, rounded), head(hidden)) and len(asked) == 1
