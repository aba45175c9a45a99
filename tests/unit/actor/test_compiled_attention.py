"""Attention of the token step in C, for heads of the sizes of real models; with AMX it is computed by tiles."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.step import CompiledLayers
from protocol.messages import GroupOrder, Sampling
from shared.config.processes import ActorConfig
from shared.errors import ModelError
from shared.model.policy import Policy
from tests.support.architectures import VOCAB
from tests.support.fakes import tiny_prompter, unheard
from tests.support.processor_kinds import BF16, FP32, KINDS, SOFTWARE_TILES, Kind, needs_compiler
from tests.unit.actor.test_compiled_step import common, library_of, logprobs_of
from tests.unit.actor.test_layers import ADAPTED, policy_of

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def heads(queries: int, keys: int, size: int) -> dict[str, int]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


SHAPES = {
    "heads of keys together": heads(6, 2, 64),
    "five together and three": heads(24, 8, 64),
    "sixteen queries": heads(16, 1, 64),
    "heads of 128": heads(9, 3, 128),
    "the largest head": heads(4, 2, 256),
    "a query for each key": heads(10, 10, 64),
    "too many queries for tiles": heads(17, 1, 64),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
PROMPTS, TOKENS = (3, 17, 66), 60
"""So that columns fill less than a tile, some tiles, and more than the four that are multiplied at once."""
ENDS = (91,)
"""A token that ends completions early and late, so that rows begin at many columns."""
FP32_MOST, BF16_MEAN, BF16_MOST = 2e-5, 0.004, 0.05


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


def completions(engine: HFEngine, some: tuple[GroupOrder, ...], tokens: int = TOKENS) -> list[Completion]:
    found = engine.generate(some, Sampling(temperature=1.0, max_new_tokens=tokens), unheard)
    return [one for group in found for one in group]


def engine_of(policy: Policy, kind: Kind, folder: Path, rows: int, threads: int = 1) -> HFEngine:
    config = ActorConfig(fold="never", max_sequences=rows)
    engine = HFEngine(policy, tiny_prompter(*ENDS), config, compiled=library_of(kind, folder))
    assert isinstance(engine.layers, CompiledLayers)
    engine.layers.step.threads = threads
    return engine


def adds_by_tiles(kind: Kind) -> bool:
    """Whether the kind's sums have the same order for any number of rows."""
    has_amx: bool = torch.cpu._init_amx()
    return kind.options == SOFTWARE_TILES or (kind.name == "bf16" and has_amx)


def assert_near(some: Sequence[Completion], others: Sequence[Completion], kind: Kind) -> None:
    """Until the first token that rounding turned. In bf16 on average, since now and then it turns the last bit of a
    value that many others depend on."""
    distances: list[np.ndarray] = []
    for one, other in zip(some, others, strict=True):
        same = common(one.ids, other.ids)
        assert same == len(other.ids) or kind.dtype == BF16
        distances.append(np.abs(one.logprobs[:same] - other.logprobs[:same]))
    found = np.concatenate(distances)
    assert len(found) > 50
    most = FP32_MOST if kind.dtype == FP32 else BF16_MOST
    mean = FP32_MOST / 2 if kind.dtype == FP32 else BF16_MEAN
    assert found.mean() < mean and found.max() < most, f"{found.mean()}, {found.max()}"


@pytest.mark.one_in(4)
@kinds
@shapes
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2 windowed"])
def test_numbers_are_those_of_the_modules(tmp_path: Path, name: str, shape: dict[str, int], kind: Kind) -> None:
    policy, some = policy_of(tmp_path, name, kind.dtype, ADAPTED[1], **shape), orders(PROMPTS, (1, 2, 3))
    by_modules = HFEngine(policy, tiny_prompter(*ENDS), ActorConfig(fold="never", max_sequences=4))
    by_modules.layers = None
    assert_near(completions(engine_of(policy, kind, tmp_path, 4), some), completions(by_modules, some), kind)


@pytest.mark.one_in(3)
@kinds
@shapes
def test_a_row_is_the_same_whenever_it_begins(tmp_path: Path, shape: dict[str, int], kind: Kind) -> None:
    """Where tiles add up its columns, to the bit; also where its columns go round the end of the ring."""
    policy, some = policy_of(tmp_path, "Qwen3", kind.dtype, ADAPTED[1], **shape), orders(PROMPTS[1:2], range(8))
    found = {
        (rows, threads): completions(engine_of(policy, kind, tmp_path, rows, threads), some)
        for rows, threads in ((8, 1), (8, 3), (3, 1), (2, 2))
    }
    assert sum(len(one.ids) for one in found[8, 1]) > 3 * (TOKENS + 1), "three rows go round the end of the ring"
    assert logprobs_of(found[8, 1]) == logprobs_of(found[8, 3])
    if adds_by_tiles(kind) and shape["num_attention_heads"] < 17:
        assert logprobs_of(found[8, 1]) == logprobs_of(found[3, 1]) == logprobs_of(found[2, 2])
    for few in (found[3, 1], found[2, 2]):
        assert_near(few, found[8, 1], kind)


@pytest.mark.one_in(2)
@kinds
@pytest.mark.parametrize("rows", [17, 65, 130])
def test_each_row_of_many_is_what_it_is_alone(tmp_path: Path, rows: int, kind: Kind) -> None:
    """In two blocks of rows, and in more than go through the layers together."""
    policy = policy_of(tmp_path, "Qwen3", kind.dtype, ADAPTED[1], **SHAPES["heads of keys together"])
    some, few = orders((66,), range(rows)), (0, rows // 2, rows - 1)
    together = completions(engine_of(policy, kind, tmp_path, rows, 3), some, tokens=8)
    alone = completions(engine_of(policy, kind, tmp_path, 1), orders((66,), few), tokens=8)
    of_few = [together[row] for row in few]
    if adds_by_tiles(kind):
        assert logprobs_of(of_few) == logprobs_of(alone)
    else:
        for one, other in zip(of_few, alone, strict=True):
            same = common(one.ids, other.ids)
            most = FP32_MOST if kind.dtype == FP32 else BF16_MOST
            np.testing.assert_allclose(one.logprobs[:same], other.logprobs[:same], rtol=0, atol=most)


@pytest.mark.one_in(2)
@kinds
def test_many_rows_have_prompts_of_two_lengths(tmp_path: Path, kind: Kind) -> None:
    """A shorter prompt is padded; what stands there counts for nothing."""
    policy = policy_of(tmp_path, "Qwen3", kind.dtype, ADAPTED[1], **SHAPES["five together and three"])
    some = orders((17, 66), range(20))
    both = completions(engine_of(policy, kind, tmp_path, 40, 2), some, tokens=8)
    alone = [one for order in some for one in completions(engine_of(policy, kind, tmp_path, 20), (order,), tokens=8)]
    if adds_by_tiles(kind):
        assert logprobs_of(both) == logprobs_of(alone)
    assert_near(both, alone, kind)


def test_other_sizes_of_layers_are_refused(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Llama", FP32, ADAPTED[1], **heads(4, 2, 24))
    with pytest.raises(ModelError, match=r"does not cover layers of these sizes; set actor\.token_step to 'torch'"):
        CompiledLayers(policy, library_of(KINDS[0], tmp_path))
