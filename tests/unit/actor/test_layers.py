"""A step through the layers without their modules gives the numbers of the modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers, layers_of
from actor.engines.token_step.stacks import frozen
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.model.policy import Policy
from shared.tensor_file import neighbours
from tests.support.architectures import VOCAB, architecture_model
from tests.support.fakes import shake, tiny_prompter, unheard

pytestmark = pytest.mark.usefixtures("one_thread")

OURS = ["Llama", "Qwen2", "Qwen2 windowed", "Qwen3"]
ADAPTED = [
    ("q_proj", "v_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
]


def policy_of(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    targets: tuple[str, ...],
    dequantize: Any = "auto",
    alpha: float = 6.0,
    **shape: Any,
) -> Policy:
    checkpoint = architecture_model(folder, name, **shape)
    model = ModelConfig(path=str(checkpoint), cache_dir=str(folder / "cache"), dequantize=dequantize)
    # By default a scale that rounding sees.
    lora = LoraConfig(rank=4, alpha=alpha, targets=targets)
    policy = load_policy(cached_base(model), model, lora, torch.device("cpu"), dtype)
    shake(policy, 3)
    return policy


def groups() -> tuple[GroupOrder, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        GroupOrder(
            group_id=str(n), prompt_ids=rng.integers(6, VOCAB, n).astype(np.int32), columns={}, seeds=(n, n + 1, 9)
        )
        for n in (3, 9, 14)
    )


def decoded(engine: HFEngine) -> list[Completion]:
    found = engine.generate(groups(), Sampling(temperature=0.9, max_new_tokens=12), unheard)
    return [completion for group in found for completion in group]


def both(policy: Policy, config: ActorConfig) -> tuple[list[Completion], list[Completion]]:
    """By our layers, and by those of transformers."""
    engine = HFEngine(policy, tiny_prompter(*range(6)), config)
    assert isinstance(engine.layers, Layers)
    ours, engine.layers = decoded(engine), None
    return ours, decoded(engine)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("targets", ADAPTED, ids=["some linears", "all linears"])
@pytest.mark.parametrize("fold", ["always", "never"])
@pytest.mark.parametrize("name", OURS)
def test_in_fp32_numbers_agree_to_rounding(tmp_path: Path, name: str, fold: Any, targets: tuple[str, ...]) -> None:
    policy = policy_of(tmp_path, name, torch.float32, targets)
    for mine, theirs in zip(*both(policy, ActorConfig(fold=fold, max_sequences=4)), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", OURS)
def test_in_bf16_every_operation_is_rounded_as_in_the_modules(tmp_path: Path, name: str) -> None:
    policy = policy_of(tmp_path, name, torch.bfloat16, ADAPTED[1])
    for mine, theirs in zip(*both(policy, ActorConfig(max_sequences=4)), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_weights_with_the_same_input_are_multiplied_at_once_where_they_are_mapped(tmp_path: Path) -> None:
    engine = HFEngine(policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[0]), tiny_prompter(0))
    assert isinstance(engine.layers, Layers)
    for layer in engine.layers.layers:
        for stack, count in ((layer.qkv, 3), (layer.out, 1), (layer.gate_up, 2), (layer.down, 1)):
            weights = [weight for linear in stack.linears if (weight := frozen(linear).matmul.dense) is not None]
            (product,) = stack.products
            whole = product.matmul.dense
            assert whole is not None and len(weights) == len(product.sizes) == count
            assert whole.data_ptr() == weights[0].data_ptr(), "no copy"
            assert torch.equal(whole, torch.cat(weights))


def test_only_neighbours_are_joined() -> None:
    whole = torch.rand(6, 4)
    first, second, third = whole.split([3, 2, 1])
    joined = neighbours([first, second, third])
    assert joined is not None and torch.equal(joined, whole)
    assert neighbours([second, first]) is None, "the other way round"
    assert neighbours([first, third]) is None, "something lies between"
    assert neighbours([first, torch.rand(2, 4)]) is None, "other memory"
    assert neighbours([first, None]) is None, "only codes are in memory"


def test_folded_weights_are_in_memory_once(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Qwen2", torch.float32, ADAPTED[1])
    HFEngine(policy, tiny_prompter(0))
    storages = {
        name: layer.folded.untyped_storage()
        for name, layer in policy.adapter.layers.items()
        if layer.folded is not None
    }
    assert len(storages) == len(policy.adapter.layers)
    together = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
    assert len(together) == 4 * 4, "q, k and v are parts of one tensor, and gate and up of another"
    size = sum(4 * layer.lora_B.shape[0] * layer.lora_A.shape[1] for layer in policy.adapter.layers.values())
    assert sum(together.values()) == size


def test_an_install_computes_sums_into_the_memory_of_the_last_ones(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Qwen2", torch.float32, ADAPTED[1])
    engine = HFEngine(policy, tiny_prompter(0))
    sums = {name: layer.folded for name, layer in policy.adapter.layers.items() if layer.folded is not None}
    before = {name: weight.clone() for name, weight in sums.items()}
    shake(policy, 4)
    engine.prepare()
    assert len(sums) == len(policy.adapter.layers)
    for name, layer in policy.adapter.layers.items():
        dense = layer.base.matmul.dense
        assert layer.folded is not None and dense is not None
        assert layer.folded.data_ptr() == sums[name].data_ptr()
        fresh = torch.addmm(dense, layer.lora_B, layer.lora_A, alpha=layer.scale)
        assert torch.equal(layer.folded, fresh), "the same bits as in new memory"
        assert not torch.equal(fresh, before[name])
    assert isinstance(engine.layers, Layers)
    for layer in engine.layers.layers:
        for stack in (layer.qkv, layer.out, layer.gate_up, layer.down):
            assert stack.folded is not None
            assert torch.equal(stack.folded, torch.cat([linear.folded for linear in stack.linears]))  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ADAPTED, ids=["some linears", "all linears"])
@pytest.mark.parametrize("dequantize", ["once", "each_call"])
def test_another_version_is_copied_to_the_memory_of_the_last_one(
    tmp_path: Path, dequantize: Any, targets: tuple[str, ...], dtype: torch.dtype
) -> None:
    policy = policy_of(tmp_path, "Qwen2", dtype, targets, dequantize)
    engine = HFEngine(policy, tiny_prompter(0), ActorConfig(fold="never"))
    assert isinstance(engine.layers, Layers)
    before = [tensor.data_ptr() for tensor in versioned(engine.layers)]
    shake(policy, 4)
    engine.prepare()
    assert [tensor.data_ptr() for tensor in versioned(engine.layers)] == before
    fresh = layers_of(policy)
    assert fresh is not None
    fresh.prepare()
    pairs = list(zip(versioned(engine.layers), versioned(fresh), strict=True))
    assert pairs and all(torch.equal(mine, theirs) for mine, theirs in pairs)
    expected = decoded(HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(fold="never")))
    found = HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(fold="never"))
    found.layers = engine.layers
    for mine, theirs in zip(decoded(found), expected, strict=True):
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def versioned(layers: Layers) -> list[torch.Tensor]:
    """What is made of an adapter, and the biases beside it."""
    stacks = [stack for layer in layers.layers for stack in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    found = [stack.by_a and stack.by_a.dense for stack in stacks]
    for product in (product for stack in stacks for product in stack.products):
        found += [product.by_b and product.by_b.dense, product.bias]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("name", ["Mistral", "Gemma"])
def test_other_models_go_through_their_own_layers(tmp_path: Path, name: str) -> None:
    assert layers_of(policy_of(tmp_path, name, torch.float32, ("o_proj",))) is None
