"""NF4 by the book, as bitsandbytes has it bit for bit, and in folders that Hugging Face's own loader reads."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shared.base.cache import CachedBase, cached_base, is_decoder_linear
from shared.base.meta import META, meta_nf4
from shared.config.model import ModelConfig
from shared.errors import ModelError
from shared.model.layers.lora import DequantizingMatmul
from shared.model.layers.nf4 import WEIGHTS, bitsandbytes, from_tensors, fused_product, quantize
from tests import reference
from tests.support.fakes import CPU, dense_twin, hidden_of, tiny_model, tiny_policy
from tests.support.meta_card import Launches

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", "quant_state.bitsandbytes__nf4")


def weight(rows: int = 48, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return 0.3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def nibbles(packed: torch.Tensor) -> np.ndarray:
    """[n] codes, high half of each byte first."""
    flat = packed.flatten().numpy()
    return np.stack([flat >> 4, flat & 15], axis=1).reshape(-1)


def cached(checkpoint: Path) -> CachedBase:
    return cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(checkpoint.parent / "cache")))


def test_the_code_books_are_the_papers() -> None:
    quantised = quantize(weight())
    np.testing.assert_allclose(quantised.quant_map.numpy(), reference.nf4_code(), atol=1e-6)
    np.testing.assert_allclose(quantised.nested_quant_map.numpy(), reference.dynamic_code(), atol=1e-6)


# 256 x 96 has more than one block of doubly quantised scales.
@pytest.mark.parametrize("shape", [(48, 64), (64, 96), (256, 96)])
def test_codes_and_values_are_those_of_the_paper(shape: tuple[int, int]) -> None:
    exact = weight(*shape)
    quantised = quantize(exact)
    codes, absmax = reference.nf4(exact.numpy())
    np.testing.assert_array_equal(nibbles(quantised.packed), codes)
    values = quantised.dequantize(torch.float32).numpy().reshape(-1, 64)
    # Every block holds a code of -1 or 1, so its largest value is its scale.
    scales = np.abs(values).max(axis=1)
    np.testing.assert_allclose(values, reference.nf4_code()[codes].reshape(-1, 64) * scales[:, None], atol=2e-6)
    # A scale half-way between two 8-bit values may go to either.
    error, best = np.abs(scales - absmax), np.abs(reference.double_quantised(absmax) - absmax)
    assert (error <= best + 1e-5).all() and best.max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# The last has three slices, one of them short.
@pytest.mark.parametrize("shape", [(48, 64), (192, 128), (1040, 512)])
def test_a_round_trip_through_a_file_keeps_every_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    exact = weight(*shape).to(dtype)
    packed, state = quantize_4bit(exact, blocksize=64, quant_type="nf4", compress_statistics=True)
    entries = quantize(exact).tensors("x.weight")
    assert set(entries) == {"x.weight", *(f"x.weight.{part}" for part in PARTS)}
    loaded = from_tensors("x.weight", entries | {"x.weight_of_another": exact}, CPU)
    assert torch.equal(loaded.packed, packed)
    assert torch.equal(loaded.dequantize(torch.float32), dequantize_4bit(packed, state).float())
    assert torch.equal(loaded.dequantize(torch.bfloat16), dequantize_4bit(packed, state).bfloat16())


# A row of 96 is one and a half blocks.
@pytest.mark.parametrize("columns", [64, 96, 128])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_the_layer_is_a_plain_one_on_dequantised_values(leading: tuple[int, ...], columns: int) -> None:
    quantised = quantize(weight(columns=columns))
    dense = quantised.dequantize(torch.float32)
    x = torch.randn(*leading, columns, generator=torch.Generator().manual_seed(1))
    arriving = torch.randn(*leading, 48, generator=torch.Generator().manual_seed(2))
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = DequantizingMatmul(quantised)(ours, None), F.linear(plain, dense)
    y.backward(arriving)
    expected.backward(arriving)
    assert torch.equal(y, expected)
    assert ours.grad is not None and plain.grad is not None
    assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 64)])
@pytest.mark.parametrize("shape", [(64, 64), (64, 192)])
def test_the_fused_product_is_that_of_the_values(
    shape: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Its arguments, that is: on a CPU bitsandbytes dequantises. tests/gpu compares the kernel."""
    quantised = quantize(weight(*shape).to(dtype))
    matmul, x = DequantizingMatmul(quantised), torch.randn(5, shape[1], dtype=dtype)
    bias = None if bias is None else bias.to(dtype)
    found = fused_product(x, matmul.packed, matmul.shape, matmul.state, bias)
    assert matmul.fuses and torch.equal(found, F.linear(x, quantised.dequantize(dtype), bias))


@pytest.mark.parametrize(
    ("columns", "needs_gradient", "expected"), [(64, False, 1), (64, True, 0), (96, False, 0)], ids=str
)
def test_on_a_card_codes_are_multiplied_unless_a_gradient_is_needed(
    columns: int, needs_gradient: bool, expected: int
) -> None:
    """And unless a row is not a whole number of blocks."""
    with META:
        matmul = DequantizingMatmul(meta_nf4(torch.Size((32, columns)), torch.bfloat16))
        x, bias = torch.ones(4, columns, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
    launches = Launches()
    with launches:
        found = matmul(x.requires_grad_(needs_gradient), bias)
    assert found.shape == (4, 32) and launches.counts["bitsandbytes::gemm_4bit"] == expected
    assert launches.counts.total() == 1 or not expected, "the bias is part of it"


def test_the_level_of_a_logger_is_set_once() -> None:
    """To set it takes longer than a launch, and there are two hundred products in a token."""
    bitsandbytes()
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    bitsandbytes()
    assert (level, logger.level) == (logging.ERROR, logging.DEBUG)
    logger.setLevel(level)


def test_a_layer_keeps_no_dense_weight_between_forward_and_backward() -> None:
    quantised = quantize(weight())
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        DequantizingMatmul(quantised)(torch.ones(3, 64, requires_grad=True), None).sum().backward()
    assert not [tensor for tensor in saved if tensor.numel() >= 48 * 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_and_recomputed_weights_give_the_same_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = tiny_model(tmp_path, dtype=dtype)
    ids = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(0))
    found = []
    for dequantize in ("once", "each_call"):
        policy = tiny_policy(checkpoint, dequantize=dequantize)
        hidden = hidden_of(policy, ids)
        hidden.square().sum().backward()
        gradients = [p.grad for p in policy.adapter.parameters().values() if p.grad is not None]
        found.append((hidden.detach(), gradients))
    (dense, dense_gradients), (recomputed, recomputed_gradients) = found
    assert torch.equal(dense, recomputed)
    assert len(dense_gradients) == 28
    assert all(torch.equal(a, b) for a, b in zip(dense_gradients, recomputed_gradients, strict=True))


def test_the_cached_folder_names_its_tensors_as_hugging_face_does(checkpoint: Path) -> None:
    source = load_file(checkpoint / WEIGHTS)
    entries = load_file(cached(checkpoint).folder / WEIGHTS)
    linears = {name for name in source if name.endswith("_proj.weight")}
    assert len(linears) == 14
    assert set(entries) == set(source) | {f"{name}.{part}" for name in linears for part in PARTS}
    assert all(torch.equal(entries[name], source[name]) for name in set(source) - linears)
    config = json.loads((cached(checkpoint).folder / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_use_double_quant"] is True


def test_every_load_has_the_same_digest_and_the_cache_is_written_once(checkpoint: Path) -> None:
    first, second = tiny_policy(checkpoint), tiny_policy(checkpoint)
    assert first.base_digest == second.base_digest == cached(checkpoint).digest
    written = (cached(checkpoint).folder / WEIGHTS).stat().st_mtime_ns
    assert (cached(checkpoint).folder / WEIGHTS).stat().st_mtime_ns == written
    assert not list((checkpoint.parent / "cache").glob(".writing-*"))


def test_an_unquantised_base_keeps_the_weights_and_another_digest(checkpoint: Path) -> None:
    ids = torch.arange(9)[None]
    plain = tiny_policy(checkpoint, quantization="none", shaken=False)
    assert plain.base_digest != tiny_policy(checkpoint).base_digest
    expected = dense_twin(checkpoint, nf4=False)(input_ids=ids).logits
    torch.testing.assert_close(hidden_of(plain, ids) @ plain.head.t(), expected, rtol=1e-5, atol=1e-5)


def test_transformers_reads_the_cached_folder_as_its_own(checkpoint: Path) -> None:
    """Its weights are our bits. Its CPU kernel may multiply in bf16, so logits agree to that alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(cached(checkpoint).folder, dtype=torch.float32).eval()
    linears = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert len(linears) == 14
    entries = load_file(cached(checkpoint).folder / WEIGHTS)
    for name, module in linears.items():
        theirs = dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(from_tensors(f"{name}.weight", entries, CPU).dequantize(torch.float32), theirs)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    policy = tiny_policy(checkpoint, shaken=False)
    with torch.no_grad():
        ours, theirs = hidden_of(policy, ids) @ policy.head.t(), model(input_ids=ids).logits
    assert (ours - theirs).norm() < 0.05 * ours.norm()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a model"):
        cached_base(ModelConfig(path=str(tmp_path), cache_dir=str(tmp_path / "cache")))


def test_a_matrix_that_blocks_do_not_divide_is_refused_in_words() -> None:
    with pytest.raises(ModelError, match=r"66 values.*whole blocks of 64.*model\.quantization=none"):
        is_decoder_linear("model.layers.0.self_attn.q_proj.weight", torch.zeros(6, 11))
