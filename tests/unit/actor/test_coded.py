"""Codes that are multiplied directly: the layout, the numbers, which rows read them, and what protects them."""

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.engines.forms import codes_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.coded import CodedWeight, Codes, reads_codes
from actor.engines.token_step.packed import RowProduct
from protocol.messages import Sampling
from shared.base.cache import CachedBase, cached_base
from shared.base.interleaved import CODES, SCALES, interleaved, interleaved_base, scales_of
from shared.base.load import class_logprobs
from shared.config.model import ModelConfig
from shared.config.processes import CODED_ROWS, ActorConfig
from shared.config.tree import Config
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.nf4 import WEIGHTS, NF4Weight, quantize
from shared.model.policy import Policy
from shared.tensor_file import map_file
from tests.reference import nf4_code, nf4_values
from tests.support.architectures import architecture_model
from tests.support.fakes import tiny_prompter, unheard
from tests.unit.actor.test_layers import ADAPTED, groups, policy_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernel = pytest.mark.skipif(
    not reads_codes(), reason="this processor has no AVX512-BF16, so nothing multiplies by codes"
)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def coded(weight: NF4Weight) -> CodedWeight:
    return CodedWeight(codes=interleaved(weight), scales=scales_of(weight).contiguous())


def codes_one_by_one(packed: torch.Tensor) -> Iterator[int]:
    """Of a matrix row by row, as bitsandbytes stores them."""
    for byte in packed.flatten().tolist():
        yield byte >> 4
        yield byte & 15


def test_each_code_is_where_the_layout_says() -> None:
    outputs, inputs = 64, 128
    weight = quantize(drawn(outputs, inputs))
    stored, plain = interleaved(weight).flatten().tolist(), list(codes_one_by_one(weight.packed))
    for row in range(outputs):
        for column in range(inputs):
            block = (row // 32) * (inputs // 2) + column // 2
            code = (row % 32) * 2 + column % 2
            byte = stored[32 * block + code % 32]
            assert (byte >> 4 if code >= 32 else byte & 15) == plain[row * inputs + column]


def test_a_scale_belongs_to_a_block_of_a_row() -> None:
    weight = quantize(drawn(32, 192))
    scales = scales_of(weight)
    assert scales.shape == (3, 32) and scales.dtype == torch.bfloat16
    dense = weight.dequantize(torch.float32)
    largest = dense.view(32, 3, 64).abs().amax(dim=2).t()
    assert torch.allclose(scales.float(), largest, rtol=2**-8)


@needs_kernel
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_reference(rows: int, has_bias: bool) -> None:
    """Codes from the paper's table, in float64; the library rounds each scale and the result to 8 bits."""
    matrix, x = drawn(96, 256), drawn(rows, 256).bfloat16()
    bias = drawn(96).bfloat16() if has_bias else None
    found = coded(quantize(matrix)).product(x, bias).double()
    values = torch.from_numpy(nf4_values(matrix.numpy().astype(np.float64)))
    assert len(nf4_code()) == 16
    exact = x.double() @ values.t() + (0 if bias is None else bias.double())
    assert (found - exact).norm() / exact.norm() < 2**-8
    terms = x.double().abs() @ values.abs().t()
    assert ((found - exact).abs() <= 2**-8 * (terms + exact.abs()) + 1e-3).all()


@needs_kernel
def test_a_row_does_not_depend_on_the_others() -> None:
    weight, x = coded(quantize(drawn(64, 128))), drawn(32, 128).bfloat16()
    whole = weight.product(x, None)
    for rows in (1, 5, 8, 17):
        assert torch.equal(weight.product(x[:rows], None), whole[:rows])
    assert torch.equal(weight.product(x[::2], None), whole[::2]), "rows that are not side by side"


@needs_kernel
def test_up_to_so_many_rows_read_codes() -> None:
    dense, other = drawn(64, 128).bfloat16(), coded(quantize(torch.zeros(64, 128)))
    product = RowProduct(dense, other)
    assert not product(drawn(CODED_ROWS, 128).bfloat16()).any()
    assert product(drawn(CODED_ROWS + 1, 128).bfloat16()).any()
    product.pack()
    assert not product(drawn(CODED_ROWS, 128).bfloat16()).any(), "packed or not"


class Sampled:
    """A small model whose engine reads codes, and its file."""

    def __init__(self, folder: Path, name: str = "Qwen2", targets: tuple[str, ...] = ADAPTED[1]) -> None:
        self.policy = policy_of(folder, name, torch.bfloat16, targets)
        model = ModelConfig(path=str(architecture_model(folder, name)), cache_dir=str(folder / "cache"))
        self.base = cached_base(model)
        self.codes = Codes(map_file(interleaved_base(self.base).folder / WEIGHTS))
        self.engine = HFEngine(self.policy, tiny_prompter(*range(6)), codes=self.codes)


@needs_kernel
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_a_token_step_reads_the_codes_of_every_linear(tmp_path: Path, name: str) -> None:
    sampled = Sampled(tmp_path, name)
    assert sampled.engine.layers is not None
    products = sampled.engine.layers.row_products()
    assert products and all(product.coded is not None for product in products)
    for product in products:
        x = drawn(8, product.dense.shape[1]).bfloat16()
        plain = RowProduct(product.dense)(x).float()
        assert (product(x).float() - plain).norm() < 0.01 * plain.norm(), "neighbours in the same order"
    sampled.engine.check()


def mismatch(engine: HFEngine, cap: int = 12) -> float:
    """Mean difference between the log-probs of sampled tokens and those of the model's class over the dense base."""
    found = engine.generate(groups(), Sampling(temperature=1.0, max_new_tokens=cap), unheard)
    differences: list[np.ndarray] = []
    for group, completions in zip(groups(), found, strict=True):
        for one in completions:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, one.ids])).long()[None]
            with torch.no_grad():
                known = class_logprobs(engine.policy, ids)[0, len(group.prompt_ids) - 1 :]
            differences.append(np.abs(one.logprobs - known.numpy()))
    return float(np.concatenate(differences).mean())


@needs_kernel
@pytest.mark.parametrize("kind", ["down_proj", "gate_proj", "q_proj"])
def test_log_probs_are_as_close_to_the_dense_base_as_without_codes(tmp_path: Path, kind: str) -> None:
    """And codes of another layer are not."""
    sampled = Sampled(tmp_path)
    dense = mismatch(HFEngine(sampled.policy, tiny_prompter(*range(6))))
    assert mismatch(sampled.engine) < 3 * dense
    tensors, part = sampled.codes.file.tensors, "mlp" if kind != "q_proj" else "self_attn"
    first, second = (f"model.layers.{layer}.{part}.{kind}.{CODES}" for layer in (0, 1))
    kept = tensors[first].clone()
    tensors[first].copy_(tensors[second])
    tensors[second].copy_(kept)
    assert mismatch(sampled.engine) > 3 * dense


@needs_kernel
def test_a_changed_code_stops_the_next_install(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    adapter = adapter_bytes(sampled.policy.adapter)
    sampled.engine.install(1, adapter)
    name = f"model.layers.1.mlp.up_proj.{CODES}"
    sampled.codes.file.tensors[name].view(-1)[7] ^= 1
    with pytest.raises(DamageError, match=r"gate_proj.codes"):
        sampled.engine.install(2, adapter)
    sampled.codes.file.tensors[name].view(-1)[7] ^= 1
    sampled.engine.install(3, adapter)
    used = sampled.codes.used["model.layers.0.self_attn.q_proj"]
    used.scales.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(DamageError, match=r"q_proj.scales"):
        sampled.engine.install(4, adapter)


@needs_kernel
def test_an_engine_that_nobody_uses_is_gone_at_once(tmp_path: Path) -> None:
    """Without a garbage collection: it has packed weights and a file."""
    sampled = Sampled(tmp_path)
    sampled.engine.install(1, adapter_bytes(sampled.policy.adapter))
    sampled.engine.generate(groups(), Sampling(temperature=1.0, max_new_tokens=4), unheard)
    gc.collect()
    gc.disable()
    try:
        engine = weakref.ref(sampled.engine)
        del sampled.engine
        assert engine() is None
    finally:
        gc.enable()


def resident_kb(file: Path) -> int:
    """Of a mapped file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_after_an_order_the_file_takes_no_memory_and_is_read_again(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    file = interleaved_base(sampled.base).folder / WEIGHTS
    found = []
    for _ in range(2):
        completions = sampled.engine.generate(groups(), Sampling(temperature=1.0, max_new_tokens=8), unheard)
        found.append([one.logprobs.tobytes() for group in completions for one in group])
        assert resident_kb(file) > 0
        sampled.engine.sleep()
        assert resident_kb(file) == 0
    assert found[0] == found[1]


def test_the_file_belongs_to_its_base_and_damage_is_found(tmp_path: Path) -> None:
    model = ModelConfig(path=str(architecture_model(tmp_path, "Qwen2")), cache_dir=str(tmp_path / "cache"))
    base = cached_base(model)
    made = interleaved_base(base)
    assert made == interleaved_base(base) and base.digest[:16] in made.folder.name
    tensors = map_file(made.folder / WEIGHTS).tensors
    assert tensors[f"model.layers.0.self_attn.q_proj.{CODES}"].dtype == torch.uint8
    assert tensors[f"model.layers.0.self_attn.q_proj.{SCALES}"].dtype == torch.bfloat16
    (made.folder / WEIGHTS).write_bytes((made.folder / WEIGHTS).read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(DamageError, match="is damaged"):
        interleaved_base(base)


def config(weights: str) -> Config:
    return Config(actor=structs.replace(ActorConfig(), weights=weights))


def read(weights: str, base: CachedBase, policy: Policy) -> bool:
    return codes_for(config(weights), base, policy, None) is not None


def test_codes_are_read_where_the_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    base = cached_base(ModelConfig(path=str(architecture_model(tmp_path, "Qwen2")), cache_dir=str(tmp_path / "cache")))
    assert not read("dense", base, policy) and not read("auto", base, policy)
    assert read("nf4", base, policy) == reads_codes()
    other = policy_of(tmp_path, "Mistral", torch.bfloat16, ADAPTED[1])
    assert not read("nf4", base, other), "its layers are not ours"
    wide = policy_of(tmp_path, "Qwen2", torch.float32, ADAPTED[1])
    with caplog.at_level(logging.WARNING):
        assert not read("nf4", base, wide)
    assert "it reads dense weights" in caplog.text
