"""A head in 8 bits: the file, the numbers, which orders read it, and what it costs in agreement with the learner."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.coded import reads_codes
from actor.engines.token_step.eight_bit import (
    CODES,
    SCALES,
    SUMS,
    EightBitHead,
    eight_bit_head,
    in_eight_bits,
    multiplies_eight_bits,
)
from actor.wiring import codes_for, head_codes_for
from protocol.messages import Sampling
from shared.base.cache import cached_base
from shared.base.mapped import map_file
from shared.config.model import ModelConfig
from shared.config.processes import EIGHT_BIT_TOKENS, ActorConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from shared.model.nf4 import WEIGHTS
from tests.support.architectures import architecture_model
from tests.support.fakes import tiny_prompter, unheard
from tests.unit.actor.test_coded import mismatch, resident_kb
from tests.unit.actor.test_layers import ADAPTED, groups, policy_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_vnni = pytest.mark.skipif(
    not multiplies_eight_bits(), reason="this processor has no VNNI, so nothing multiplies by 8-bit codes"
)
needs_codes = pytest.mark.skipif(
    not (reads_codes() and multiplies_eight_bits()), reason="this processor has no AVX512-BF16 or no VNNI"
)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


def head(weight: torch.Tensor) -> EightBitHead:
    scales, sums, codes = in_eight_bits(weight)
    found = EightBitHead(codes, scales, sums)
    found.pack()
    return found


def rounded_weight(weight: torch.Tensor) -> np.ndarray:
    """The nearest of 255 multiples of a step for each row, in float64."""
    values = weight.double().numpy()
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    return np.rint(np.divide(values, step, out=np.zeros_like(values), where=step > 0)) * step


def rounded_rows(x: torch.Tensor) -> np.ndarray:
    """The nearest of 256 values from the smallest to the largest of each row, in float64."""
    values = x.double().numpy()
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    step = (high - low) / 255
    return np.rint((values - low) / step) * step + low


def test_codes_are_the_nearest_multiples_and_a_row_of_zeros_stays_zero() -> None:
    weight = drawn(40, 64)
    weight[7] = 0
    scales, sums, codes = in_eight_bits(weight)
    found = codes.double().numpy() * scales.double().numpy()[:, None]
    # A value in the middle between two codes may go to either.
    step = scales.double().numpy()[:, None]
    assert (np.abs(found - rounded_weight(weight)) <= 1.0001 * step).all()
    assert (np.abs(found - weight.double().numpy()) <= 0.5001 * step).all()
    assert codes.abs().amax(dim=1).tolist() == [0 if row == 7 else 127 for row in range(40)]
    np.testing.assert_allclose(sums, found.sum(axis=1), rtol=1e-5, atol=1e-5)


@needs_vnni
@pytest.mark.parametrize("rows", [1, 8, 32, 33])
def test_a_product_is_that_of_the_rounded_factors(rows: int) -> None:
    """Within the error of fp32: sums of codes are exact."""
    weight, x = drawn(96, 256), drawn(rows, 256) + 3
    found = head(weight).product(x).double().numpy()
    expected = rounded_rows(x) @ rounded_weight(weight).T
    exact = x.double().numpy() @ weight.double().numpy().T
    # Ties of the codes that float64 rounds the other way are worth a step of one factor.
    assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(exact)
    assert np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact)


@needs_vnni
def test_the_largest_factors_do_not_overflow() -> None:
    """Without VNNI, two products of 255 x 127 are added in 16 bits."""
    weight, x = torch.ones(64, 256).bfloat16(), torch.ones(2, 256).bfloat16()
    weight[:, 0], x[:, 0] = -1, 0
    assert torch.allclose(head(weight).product(x), torch.full((2, 64), 255.0), rtol=1e-5)


@needs_vnni
def test_a_row_does_not_depend_on_the_others() -> None:
    product, x = head(drawn(64, 128)).product, drawn(32, 128)
    whole = product(x)
    for rows in (1, 5, 8, 17):
        assert torch.equal(product(x[:rows]), whole[:rows])
    assert torch.equal(product(torch.zeros(2, 128).bfloat16()), torch.zeros(2, 64)), "rows without a range"


class Sampled:
    """A small model whose engine reads codes and the head in 8 bits."""

    def __init__(self, folder: Path, name: str = "Qwen2", cap: int = EIGHT_BIT_TOKENS) -> None:
        self.policy = policy_of(folder, name, torch.bfloat16, ADAPTED[1])
        self.policy.config.max_position_embeddings = 2 * EIGHT_BIT_TOKENS
        model = ModelConfig(path=str(architecture_model(folder, name)), cache_dir=str(folder / "cache"))
        self.base = cached_base(model)
        actor = structs.replace(ActorConfig(), weights="nf4")
        config = Config(model=model, actor=actor, rollout=RolloutConfig(max_new_tokens=cap))
        codes = codes_for(config, self.base, self.policy)
        self.eight_bit = head_codes_for(config, self.base, self.policy, codes)
        self.engine = HFEngine(self.policy, tiny_prompter(*range(6)), codes=codes, eight_bit=self.eight_bit)

    def sample(self, cap: int) -> list[bytes]:
        found = self.engine.generate(groups(), Sampling(temperature=1.0, max_new_tokens=cap), unheard)
        return [one.logprobs.tobytes() for group in found for one in group]


@needs_codes
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_long_completions_are_drawn_from_it_and_short_ones_are_not(tmp_path: Path, name: str) -> None:
    sampled = Sampled(tmp_path, name)
    assert sampled.eight_bit is not None
    plain = HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes)
    asked = Sampling(temperature=1.0, max_new_tokens=EIGHT_BIT_TOKENS)
    sampled.sample(EIGHT_BIT_TOKENS - 1)
    assert sampled.eight_bit.packed is None
    long = sampled.sample(EIGHT_BIT_TOKENS)
    assert sampled.eight_bit.packed is not None
    other = plain.generate(groups(), asked, unheard)
    assert long != [one.logprobs.tobytes() for group in other for one in group]
    assert long == sampled.sample(EIGHT_BIT_TOKENS), "the same order gives the same bits"
    sampled.engine.sleep()
    assert sampled.eight_bit.packed is None
    assert long == sampled.sample(EIGHT_BIT_TOKENS)


@needs_codes
def test_a_shorter_order_frees_it_and_one_that_did_not_fit_packs_it_again(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    assert sampled.eight_bit is not None
    long = sampled.sample(EIGHT_BIT_TOKENS)
    sampled.sample(EIGHT_BIT_TOKENS - 1)
    assert sampled.eight_bit.packed is None
    sampled.engine.head.choose(EIGHT_BIT_TOKENS)
    sampled.engine.head.prepare()
    assert sampled.engine.head.plain.packed is None, "one copy at a time"
    sampled.engine.free_memory()
    assert sampled.eight_bit.packed is None
    sampled.engine.head.prepare()
    assert sampled.eight_bit.packed is not None and sampled.sample(EIGHT_BIT_TOKENS) == long


@needs_codes
def test_later_turns_of_a_conversation_use_what_the_first_one_did(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    first, later = (Sampling(temperature=1.0, max_new_tokens=cap) for cap in (EIGHT_BIT_TOKENS, 8))
    sampled.engine.take_turn(groups(), first, unheard)
    others = tuple(structs.replace(group, group_id=f"{group.group_id}, another") for group in groups())
    sampled.engine.take_turn(others, later, unheard)
    assert sampled.engine.head.reads_codes
    sampled.engine.generate(groups(), later, unheard)
    assert not sampled.engine.head.reads_codes


@needs_codes
def test_a_changed_scale_stops_the_next_install_and_another_head_the_start(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    assert sampled.eight_bit is not None and sampled.eight_bit.matches(sampled.policy.head)
    assert not sampled.eight_bit.matches(sampled.policy.head.flip(0))
    assert not sampled.eight_bit.matches(sampled.policy.head[:-1])
    adapter = adapter_bytes(sampled.policy.adapter)
    sampled.engine.install(1, adapter)
    sampled.eight_bit.scales.view(torch.int32)[0] ^= 1
    with pytest.raises(DamageError, match=SCALES):
        sampled.engine.install(2, adapter)


@needs_codes
def test_log_probs_stay_close_to_the_learner_s(tmp_path: Path) -> None:
    """And a head whose rows are in another order does not."""
    sampled = Sampled(tmp_path)
    plain = mismatch(HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes), EIGHT_BIT_TOKENS)
    assert sampled.eight_bit is not None
    assert mismatch(sampled.engine, EIGHT_BIT_TOKENS) < 3 * plain
    sampled.engine.sleep()
    for facts in (sampled.eight_bit.scales, sampled.eight_bit.sums, sampled.eight_bit.codes):
        facts.copy_(facts.flip(0))
    assert mismatch(sampled.engine, EIGHT_BIT_TOKENS) > 10 * plain


@needs_codes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_between_orders_the_file_takes_no_memory(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    file = eight_bit_head(sampled.base).folder / WEIGHTS
    sampled.sample(EIGHT_BIT_TOKENS)
    assert resident_kb(file) == 0


@needs_codes
def test_a_run_of_short_completions_has_none_nor_one_that_keeps_no_copies(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path, cap=EIGHT_BIT_TOKENS - 1)
    assert sampled.eight_bit is None
    little = Config(
        actor=structs.replace(ActorConfig(), packed=0.0), rollout=RolloutConfig(max_new_tokens=EIGHT_BIT_TOKENS)
    )
    assert head_codes_for(little, sampled.base, sampled.policy, sampled.engine.codes) is None


def test_the_file_belongs_to_its_base_and_damage_is_found(tmp_path: Path) -> None:
    base = cached_base(ModelConfig(path=str(architecture_model(tmp_path, "Qwen2")), cache_dir=str(tmp_path / "cache")))
    made = eight_bit_head(base)
    assert made == eight_bit_head(base) and base.digest[:16] in made.folder.name
    tensors = map_file(made.folder / WEIGHTS).tensors
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    scales, sums, codes = in_eight_bits(policy.head)
    assert torch.equal(tensors[SCALES], scales) and torch.equal(tensors[SUMS], sums)
    assert torch.equal(tensors[CODES], codes)
    (made.folder / WEIGHTS).write_bytes((made.folder / WEIGHTS).read_bytes()[:-1] + b"\x01")
    with pytest.raises(DamageError, match="is damaged"):
        eight_bit_head(base)
