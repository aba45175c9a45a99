"""Attention of the token step in C, for heads of the sizes of real models; with AMX it is computed by tiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.step import CompiledLayers
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.model.policy import Policy
from tests.support.architectures import VOCAB, architecture_model
from tests.support.fakes import shake, tiny_prompter, unheard
from tests.support.processor_kinds import BF16, FLAGS, FP32, KINDS, Kind, needs_compiler
from tests.unit.actor.test_compiled_step import common, library_of, logprobs_of
from tests.unit.actor.test_layers import ADAPTED

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
SHAPES = {
    "all heads in one vector": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    "two vectors": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 128},
    "the largest head": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256},
    "more heads of keys than at once": {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64},
    "more queries than a vector": {"num_attention_heads": 17, "num_key_value_heads": 1, "head_dim": 64},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
PROMPTS, TOKENS = (3, 17, 40), 40
"""So that columns fill less than a tile, some tiles, and some of PAIRED columns."""
ENDS = (6, 7)
"""So that rows begin at many columns."""
BF16_MEAN, BF16_MOST = 0.004, 0.05


def policy_of(folder: Path, dtype: torch.dtype, name: str, **shape: Any) -> Policy:
    model = ModelConfig(path=str(architecture_model(folder, name, **shape)), cache_dir=str(folder / "cache"))
    lora = LoraConfig(rank=4, alpha=6.0, targets=ADAPTED[1])
    policy = load_policy(cached_base(model), model, lora, torch.device("cpu"), dtype)
    shake(policy, 3)
    return policy


def orders(prompts: Sequence[int], seeds: Sequence[int]) -> tuple[GroupOrder, ...]:
    rng = np.random.default_rng(5)
    return tuple(
        GroupOrder(
            group_id=str(length),
            prompt_ids=rng.integers(6, VOCAB, length).astype(np.int32),
            columns={},
            seeds=tuple(seeds),
        )
        for length in prompts
    )


def completions(engine: HFEngine, some: tuple[GroupOrder, ...]) -> list[Completion]:
    found = engine.generate(some, Sampling(temperature=1.0, max_new_tokens=TOKENS), unheard)
    return [one for group in found for one in group]


def engine_of(policy: Policy, kind: Kind, folder: Path, rows: int, threads: int = 1) -> HFEngine:
    config = ActorConfig(fold="never", max_sequences=rows)
    engine = HFEngine(policy, tiny_prompter(*ENDS), config, compiled=library_of(kind, folder))
    assert isinstance(engine.layers, CompiledLayers)
    engine.layers.step.threads = threads
    return engine


@pytest.mark.one_in(2)
@kinds
@shapes
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2 windowed"])
def test_numbers_are_those_of_the_modules(tmp_path: Path, name: str, shape: dict[str, int], kind: Kind) -> None:
    """In bf16 on average: now and then rounding turns the last bit of a value that many others depend on."""
    policy, some = policy_of(tmp_path, kind.dtype, name, **shape), orders(PROMPTS, (1, 2, 3))
    by_modules = HFEngine(policy, tiny_prompter(*ENDS), ActorConfig(fold="never", max_sequences=4))
    by_modules.layers = None
    mine, theirs = completions(engine_of(policy, kind, tmp_path, 4), some), completions(by_modules, some)
    distances: list[np.ndarray] = []
    for one, other in zip(mine, theirs, strict=True):
        same = common(one.ids, other.ids)
        assert same == len(other.ids) or kind.dtype == BF16
        distances.append(np.abs(one.logprobs[:same] - other.logprobs[:same]))
    found = np.concatenate(distances)
    assert len(found) > 50
    limits = (1e-5, 2e-5) if kind.dtype == FP32 else (BF16_MEAN, BF16_MOST)
    assert found.mean() < limits[0] and found.max() < limits[1], f"{found.mean()}, {found.max()}"


@pytest.mark.one_in(2)
@kinds
@shapes
def test_a_row_is_the_same_whenever_it_begins(tmp_path: Path, shape: dict[str, int], kind: Kind) -> None:
    """Where tiles add up its columns, to the bit; also where its columns go round the end of the ring."""
    policy, some = policy_of(tmp_path, kind.dtype, "Qwen3", **shape), orders(PROMPTS[1:2], range(7))
    found = {
        (rows, threads): completions(engine_of(policy, kind, tmp_path, rows, threads), some)
        for rows, threads in ((7, 1), (7, 3), (3, 1), (2, 2))
    }
    assert logprobs_of(found[7, 1]) == logprobs_of(found[7, 3])
    if kind.name == "bf16" and "amx_bf16" in FLAGS and shape["num_attention_heads"] < 17:
        assert logprobs_of(found[7, 1]) == logprobs_of(found[3, 1]) == logprobs_of(found[2, 2])
    for few in (found[3, 1], found[2, 2]):
        for one, other in zip(few, found[7, 1], strict=True):
            same = common(one.ids, other.ids)
            assert same == len(other.ids) or kind.dtype == BF16
            np.testing.assert_allclose(one.logprobs[:same], other.logprobs[:same], rtol=0, atol=BF16_MOST)
