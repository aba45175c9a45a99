"""Device and number type, and a policy that computes in bf16 on a CPU."""

from pathlib import Path

import pytest
import torch

from actor.engines.hf_engine import HFEngine
from shared.base.cache import cached_base
from shared.base.checksum import frozen_tensors
from shared.base.load import load_policy, pick_device, pick_dtype
from shared.config.model import LoraConfig, ModelConfig
from shared.errors import ModelError
from shared.model.canary import sequence_logprobs
from shared.model.policy import Policy
from tests.support.fakes import CPU, shake, tiny_prompter

IDS = torch.arange(40).numpy() % 29


def policy_in(dtype: torch.dtype, checkpoint: Path) -> Policy:
    model = ModelConfig(path=str(checkpoint), cache_dir=str(checkpoint.parent / "cache"))
    policy = load_policy(cached_base(model), model, LoraConfig(rank=4, alpha=8.0), CPU, dtype)
    shake(policy, 3)
    return policy


def test_the_device_is_the_one_that_is_there() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="PyTorch sees no card"):
            pick_device("cuda")


def test_the_type_follows_the_device_unless_it_is_named() -> None:
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("bf16", CPU) == torch.bfloat16
    assert pick_dtype("fp32", torch.device("cuda")) == torch.float32


def test_bf16_rounds_the_base_and_leaves_the_adapter_alone(checkpoint: Path) -> None:
    policy = policy_in(torch.bfloat16, checkpoint)
    assert {tensor.dtype for name, tensor in frozen_tensors(policy) if "rotary" not in name} == {torch.bfloat16}
    assert {value.dtype for value in policy.adapter.parameters().values()} == {torch.float32}


def test_bf16_is_near_fp32_and_repeats_to_the_bit(checkpoint: Path) -> None:
    exact, rounded = policy_in(torch.float32, checkpoint), policy_in(torch.bfloat16, checkpoint)
    found = sequence_logprobs(rounded, IDS)
    assert 1e-4 < abs(found - sequence_logprobs(exact, IDS)).max() < 0.5
    assert (found == sequence_logprobs(policy_in(torch.bfloat16, checkpoint), IDS)).all()


def test_the_decode_loop_in_bf16_passes_the_check_of_its_model(checkpoint: Path) -> None:
    engine = HFEngine(policy_in(torch.bfloat16, checkpoint), tiny_prompter(1))
    engine.check()
