"""Random weights with a true shape: a base that loads like any other, without being quantised."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.gpu.random_base import SHAPES, SPREAD, STD, parameters_of, random_codes, random_model, write_source
from launch.plan.shape import shape_of
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.model.layers.lora import DequantizingMatmul, LoraLinear
from shared.model.layers.nf4 import WEIGHTS, from_tensors, quantize
from shared.model.prompt import load_prompter
from tests.support.fakes import CPU, hidden_of

pytestmark = pytest.mark.usefixtures("one_thread")
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "r1-distill-1.5b": 1_777_088_000,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return random_model("tiny", tmp_path_factory.mktemp("random"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(shape: str, tmp_path: Path) -> None:
    write_source(SHAPES[shape], tmp_path)
    assert sum(value.numel() for value in parameters_of(tmp_path).values()) == PUBLISHED[shape]
    sizes = shape_of(tmp_path, LoraConfig().targets)
    assert sizes.linear + sizes.rest == PUBLISHED[shape]
    assert sizes.file_bytes == pytest.approx(2 * PUBLISHED[shape], rel=0.001)
    weights = (tmp_path / WEIGHTS).stat()
    assert weights.st_size == sizes.file_bytes and weights.st_blocks * 512 < 2**20


def test_it_is_cached_already_and_made_once(model: ModelConfig) -> None:
    folder = Path(model.cache_dir)
    before = sorted(folder.iterdir())
    base = cached_base(model)
    assert base.folder in before
    written = (base.folder / WEIGHTS).stat().st_mtime_ns
    again = random_model("tiny", folder.parent)
    assert again == model and cached_base(again) == base
    assert (base.folder / WEIGHTS).stat().st_mtime_ns == written


def test_codes_and_scales_are_those_of_normal_weights() -> None:
    std, shape = 0.02, torch.Size((768, 640))
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(0)
    template = quantize((std * torch.randn(512, 512, generator=generator)).bfloat16())
    drawn = random_codes(shape, template, rng)
    assert drawn.absmax.shape == (768 * 640 // 64,) and drawn.nested_absmax.shape == (30,)
    values = drawn.dequantize(torch.float32)
    assert values.shape == shape
    assert values.std().item() == pytest.approx(std, rel=0.15)
    by_kernel: Any = DequantizingMatmul(drawn)(torch.eye(640), None)
    assert torch.equal(by_kernel.t(), values)


def test_a_policy_loads_it_and_draws_different_tokens(model: ModelConfig) -> None:
    keys = ModelConfig(path=model.path, cache_dir=model.cache_dir, dequantize="each_call")
    policy = load_policy(cached_base(keys), keys, LoraConfig(), CPU, torch.float32)
    linears = [module for module in policy.backbone.modules() if isinstance(module, LoraLinear)]
    assert len(linears) == 14
    assert all(isinstance(linear.base.matmul, DequantizingMatmul) for linear in linears)
    ids = torch.randint(0, 512, (4, 16), generator=torch.Generator().manual_seed(0))
    logits = policy.logits(hidden_of(policy, ids).flatten(0, 1), 1.0)
    assert logits.std().item() == pytest.approx(SPREAD, rel=0.3)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    assert 0.5 < entropies.mean().item() < 4.0


def test_its_weights_are_as_large_as_drawn(model: ModelConfig) -> None:
    entries = load_file(cached_base(model).folder / WEIGHTS)
    values = from_tensors("model.layers.1.mlp.up_proj.weight", entries, CPU).dequantize(torch.float32)
    assert values.shape == (128, 64)
    assert values.std().item() == pytest.approx(STD / 8, rel=0.15)
    assert torch.equal(entries["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))


def test_other_programs_read_it_too(model: ModelConfig) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(cached_base(model).folder, dtype=torch.float32)
    assert len([m for m in loaded.modules() if type(m).__name__ == "Linear4bit"]) == 14


def test_its_tokenizer_has_a_text_for_every_token(model: ModelConfig) -> None:
    prompter = load_prompter(cached_base(model).folder)
    assert len(prompter.tokenizer) == SHAPES["tiny"]["vocab_size"]
    assert prompter.end_ids == (2,)
    assert prompter.prompt_ids("1")[-3:] == prompter.prompt_ids("2")[-3:]
