"""What vLLM is started with: room for what can be asked for and no more, in numbers that a person can check."""

import json
from pathlib import Path
from typing import Any

import pytest

from actor.engines.vllm_options import RANKS, VLLMOptions, vllm_options
from shared.config.data import TasksConfig
from shared.config.model import LoraConfig
from shared.config.processes import EvalConfig
from shared.config.tree import ActorConfig, Config, GuardConfig, RolloutConfig
from shared.errors import ModelError

QWEN = {
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_size": 1536,
    "max_position_embeddings": 131_072,
}


def options(
    tmp_path: Path,
    *,
    actor: ActorConfig | None = None,
    rollout: RolloutConfig | None = None,
    prompt: int = 128,
    rank: int = 16,
    canary: int = 16,
    device: str = "cuda",
    evaluation: EvalConfig | None = None,
    **model: Any,
) -> VLLMOptions:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | model))
    config = Config(
        actor=actor or ActorConfig(),
        rollout=rollout or RolloutConfig(prompts=1, group=8, max_new_tokens=512),
        tasks=TasksConfig(max_prompt_tokens=prompt),
        lora=LoraConfig(rank=rank),
        guard=GuardConfig(canary_tokens=canary),
        eval=evaluation or EvalConfig(),
    )
    return vllm_options(config, tmp_path, *(("cuda", "bfloat16") if device == "cuda" else ("cpu", "float32")))


def test_keys_and_values_of_one_group_of_r1_distill_1_5b(tmp_path: Path) -> None:
    """28 KiB a token in bf16 (2 x 28 layers x 2 heads x 128 x 2 bytes); 8 x 640 tokens are 140 MiB."""
    made = options(tmp_path)
    block = 16 * 28 * 1024
    assert made.kv_bytes == 140 * 2**20 + block
    assert (made.max_tokens, made.max_sequences, made.dtype, made.block) == (640, 8, "bfloat16", 16)


def test_on_a_cpu_values_are_fp32_and_blocks_are_larger(tmp_path: Path) -> None:
    made = options(tmp_path, device="cpu")
    assert (made.dtype, made.block) == ("float32", 32)
    assert made.kv_bytes == 280 * 2**20 + 32 * 56 * 1024


def test_nf4_codes_are_computed_in_bf16_on_a_cpu_too(tmp_path: Path) -> None:
    made = options(tmp_path, device="cpu", actor=ActorConfig(weights="nf4"))
    assert (made.nf4, made.dtype) == (True, "bfloat16")


def test_a_length_that_is_no_whole_number_of_blocks_takes_one_more(tmp_path: Path) -> None:
    made = options(tmp_path, prompt=129)
    assert made.max_tokens == 641
    assert made.kv_bytes == (8 * 656 + 16) * 28 * 1024


def test_many_long_sequences_get_a_gibibyte_and_one_gets_what_it_needs(tmp_path: Path) -> None:
    many = RolloutConfig(prompts=16, group=8, max_new_tokens=4096)
    assert options(tmp_path, rollout=many).kv_bytes == 2**30
    one = options(tmp_path, rollout=RolloutConfig(prompts=1, group=2, max_new_tokens=65_536 - 128))
    assert one.kv_bytes == (65_536 + 16) * 28 * 1024 > 2**30


def test_a_configured_amount_is_taken_unless_not_one_sequence_fits(tmp_path: Path) -> None:
    assert options(tmp_path, actor=ActorConfig(kv_mb=500)).kv_bytes == 500 * 2**20
    assert options(tmp_path, actor=ActorConfig(kv_mb=1)).kv_bytes == (640 + 16) * 28 * 1024


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (16, 16), (33, 64), (200, 256), (512, 512)])
def test_a_rank_is_served_under_the_next_one_that_vllm_knows(tmp_path: Path, rank: int, room: int) -> None:
    assert options(tmp_path, rank=rank).rank == room and room in RANKS


def test_the_caps_of_an_evaluation_fit_unless_there_is_none(tmp_path: Path) -> None:
    assert options(tmp_path, evaluation=EvalConfig(max_new_tokens=700)).max_tokens == 128 + 700
    assert options(tmp_path, evaluation=EvalConfig(long_cap=900)).max_tokens == 128 + 900
    assert options(tmp_path, evaluation=EvalConfig(problems=0, long_cap=900)).max_tokens == 640


def test_the_canary_fits_too(tmp_path: Path) -> None:
    assert options(tmp_path, canary=2000).max_tokens == 2002


def test_sequences_at_once(tmp_path: Path) -> None:
    assert options(tmp_path, rollout=RolloutConfig(prompts=64, group=16)).max_sequences == 256
    assert options(tmp_path, actor=ActorConfig(max_sequences=3)).max_sequences == 3


def test_one_pass_takes_one_whole_sequence_at_least(tmp_path: Path) -> None:
    assert options(tmp_path).batched_tokens == 2048
    assert options(tmp_path, prompt=4000).batched_tokens == 4512


def test_heads_that_config_json_does_not_spell_out(tmp_path: Path) -> None:
    plain = options(tmp_path, num_key_value_heads=0).kv_bytes
    assert plain == 6 * options(tmp_path).kv_bytes
    assert options(tmp_path, head_dim=64).kv_bytes == options(tmp_path).kv_bytes / 2


def test_more_than_the_model_has_positions_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"may reach 640 tokens together and this model has 512 positions; lower"):
        options(tmp_path, max_position_embeddings=512)


def test_longrope_is_refused_beyond_its_original_positions(tmp_path: Path) -> None:
    """As the files of Phi-3 and of Phi-4-mini have it."""
    for kind in ("su", "longrope"):
        facts = {"original_max_position_embeddings": 512, "rope_scaling": {"type": kind}}
        with pytest.raises(ModelError, match=r"this model has 512 positions, beyond which longrope would change"):
            options(tmp_path, **facts)
        assert options(tmp_path, prompt=0, **facts).max_tokens == 512
        with pytest.raises(ModelError, match=r"this model has 512 positions, beyond which longrope would change"):
            options(tmp_path, max_position_embeddings=None, **facts)
