"""The policy is transformers' own model on dequantised weights, in every family we name, tied or not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config

from shared.config.model import ModelConfig
from shared.errors import ModelError
from shared.model.policy import Policy
from tests import reference
from tests.support.fakes import FAMILIES, Family, dense_twin, hidden_of, tiny_model, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def some_ids() -> torch.Tensor:
    return torch.randint(0, 97, (3, 13), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    return hidden_of(policy, ids) @ policy.head.t()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: Family, tied: bool) -> None:
    path = tiny_model(tmp_path, family, tied=tied)
    policy = tiny_policy(path, shaken=False)
    expected = dense_twin(path)(input_ids=some_ids()).logits
    torch.testing.assert_close(logits(policy, some_ids()), expected, rtol=1e-5, atol=1e-5)
    assert policy.head.shape == (97, 64) and not policy.head.requires_grad
    assert len(policy.adapter.layers) == 14


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_full_float64_logits(tmp_path: Path, family: Family) -> None:
    path = tiny_model(tmp_path, family)
    policy, ids = tiny_policy(path, shaken=False), some_ids()
    full = dense_twin(path).double()(input_ids=ids).logits[:, :-1].flatten(0, 1)
    logprobs, entropies = reference.softmax_stats(full, ids[:, 1:].flatten(), 0.7)
    with torch.no_grad():
        hidden = hidden_of(policy, ids)[:, :-1].flatten(0, 1)
        stats = policy.stats(hidden, ids[:, 1:].flatten(), temperature=0.7, rows=7)
    torch.testing.assert_close(stats.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropies.double(), entropies, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_at_the_right_is_harmless(tmp_path: Path, family: Family) -> None:
    policy = tiny_policy(tiny_model(tmp_path, family))
    ids = some_ids()
    padded = torch.cat([ids, torch.zeros(3, 6, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(logits(policy, padded)[:, :13], logits(policy, ids), rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trainable(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    trainable = {id(p) for p in policy.backbone.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in policy.adapter.parameters().values()}


def test_a_model_that_lacks_a_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_text((checkpoint / "config.json").read_text())
    assert ModelConfig(path=str(broken)).quantization == "nf4"
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        tiny_policy(broken)


def test_longrope_is_refused_beyond_its_original_positions(tmp_path: Path) -> None:
    """There, the longest sequence of a batch decides about the frequencies of all."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        pad_token_id=0,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **factors},
    )
    policy = replace(tiny_policy(tiny_model(tmp_path)), config=config)
    policy.refuse_if_too_long(60, 4)
    with pytest.raises(ModelError, match="fit into the 64 positions of this model, beyond which longrope would change"):
        policy.refuse_if_too_long(60, 5)
