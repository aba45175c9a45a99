"""A head in 8 bits: the file, the numbers, where it is read, and what it costs in agreement with the learner."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.engines.forms import codes_for, eight_bit_head_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.eight_bit import (
    CODES,
    ISA_VARIABLE,
    SCALES,
    SUMS,
    EightBitHead,
    bytes_of,
    codes_over,
    eight_bit_head,
    in_eight_bits,
    layout_name,
    multiplies_eight_bits,
)
from protocol.messages import Sampling
from shared.base.cache import cached_base
from shared.config.model import ModelConfig
from shared.config.processes import CODED_ROWS, ActorConfig
from shared.config.tree import Config
from shared.errors import DamageError, ModelError
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.nf4 import WEIGHTS
from shared.tensor_file import map_file
from tests.support.architectures import architecture_model
from tests.support.fakes import tiny_prompter, unheard
from tests.unit.actor.test_coded import mismatch, resident_kb
from tests.unit.actor.test_layers import ADAPTED, groups, policy_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_vnni = pytest.mark.skipif(
    not multiplies_eight_bits(), reason="this processor has no VNNI, so nothing multiplies by 8-bit codes"
)

ASKED = Sampling(temperature=1.0, max_new_tokens=8)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


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
    found = EightBitHead.of(weight)(x).double().numpy()
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
    assert torch.allclose(EightBitHead.of(weight)(x), torch.full((2, 64), 255.0), rtol=1e-5)


@needs_vnni
def test_a_row_does_not_depend_on_the_others() -> None:
    product, x = EightBitHead.of(drawn(64, 128)), drawn(32, 128)
    whole = product(x)
    for rows in (1, 5, 8, 17):
        assert torch.equal(product(x[:rows]), whole[:rows])
    assert torch.equal(product(torch.zeros(2, 128).bfloat16()), torch.zeros(2, 64)), "rows without a range"


class Sampled:
    """A small model whose engine reads codes (where the processor can), or dense weights, and the head in 8 bits."""

    def __init__(self, folder: Path, name: str = "Qwen2", weights: Literal["nf4", "dense"] = "nf4") -> None:
        self.policy = policy_of(folder, name, torch.bfloat16, ADAPTED[1])
        self.policy.config.max_position_embeddings = 128
        model = ModelConfig(path=str(architecture_model(folder, name)), cache_dir=str(folder / "cache"))
        self.base = cached_base(model)
        self.config = Config(model=model, actor=ActorConfig(weights=weights, head="int8"))
        codes = codes_for(self.config, self.base, self.policy, None)
        self.eight_bit = eight_bit_head_for(self.config, self.base, self.policy, None)
        self.engine = HFEngine(self.policy, tiny_prompter(*range(6)), codes=codes, eight_bit=self.eight_bit)

    def sample(self) -> list[bytes]:
        found = self.engine.generate(groups(), ASKED, unheard)
        return [one.logprobs.tobytes() for group in found for one in group]


@needs_vnni
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_completions_are_drawn_from_it(tmp_path: Path, name: str) -> None:
    sampled = Sampled(tmp_path, name)
    assert sampled.eight_bit is not None
    plain = HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes)
    found = sampled.sample()
    other = plain.generate(groups(), ASKED, unheard)
    assert found != [one.logprobs.tobytes() for group in other for one in group]
    assert found == sampled.sample(), "the same order gives the same bits"
    sampled.engine.sleep()
    assert found == sampled.sample()


@needs_vnni
def test_a_flipped_bit_stops_the_next_install_and_another_head_the_start(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    assert sampled.eight_bit is not None and sampled.eight_bit.matches(sampled.policy.head)
    assert not sampled.eight_bit.matches(sampled.policy.head.flip(0))
    assert not sampled.eight_bit.matches(sampled.policy.head[:-1])
    adapter = adapter_bytes(sampled.policy.adapter)
    sampled.engine.install(1, adapter)
    sampled.eight_bit.scales.view(torch.int32)[0] ^= 1
    with pytest.raises(DamageError, match=SCALES):
        sampled.engine.install(2, adapter)
    sampled.eight_bit.scales.view(torch.int32)[0] ^= 1
    bytes_of(sampled.eight_bit.codes)[5] ^= 1
    with pytest.raises(DamageError, match=CODES):
        sampled.engine.install(2, adapter)


@needs_vnni
def test_log_probs_stay_close_to_the_learner_s(tmp_path: Path) -> None:
    """And a head whose rows are in another order does not."""
    sampled = Sampled(tmp_path)
    plain = mismatch(
        HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes), ASKED.max_new_tokens
    )
    assert mismatch(sampled.engine, ASKED.max_new_tokens) < 3 * plain
    wrong = EightBitHead.of(sampled.policy.head.flip(0))
    other = HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes, eight_bit=wrong)
    assert mismatch(other, ASKED.max_new_tokens) > 10 * plain


@needs_vnni
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_between_orders_it_takes_no_memory(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    file = eight_bit_head(sampled.base).folder / WEIGHTS
    sampled.sample()
    assert resident_kb(file) > 0
    sampled.engine.sleep()
    assert resident_kb(file) == 0


@needs_vnni
def test_turns_and_wide_steps_read_it_and_it_is_no_packed_copy(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    plain = HFEngine(sampled.policy, tiny_prompter(*range(6)), codes=sampled.engine.codes)
    unpacked = HFEngine(
        sampled.policy,
        tiny_prompter(*range(6)),
        structs.replace(ActorConfig(), packed=0.0),
        codes=sampled.engine.codes,
        eight_bit=sampled.eight_bit,
    )
    assert unpacked.generate(groups(), ASKED, unheard)[0][0].logprobs.tobytes() == sampled.sample()[0]
    wide = tuple(structs.replace(group, seeds=tuple(range(CODED_ROWS + 1))) for group in groups()[:1])
    for order, ask in ((groups(), HFEngine.take_turn), (wide, HFEngine.generate)):
        found, other = (ask(engine, order, ASKED, unheard) for engine in (sampled.engine, plain))
        assert found[0][0].logprobs.tobytes() != other[0][0].logprobs.tobytes()


@needs_vnni
def test_it_is_read_beside_dense_layers_too_and_only_where_the_configuration_says_so(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path, weights="dense")
    assert sampled.engine.codes is None and isinstance(sampled.engine.head, EightBitHead)
    plain = HFEngine(sampled.policy, tiny_prompter(*range(6)))
    other = plain.generate(groups(), ASKED, unheard)
    assert sampled.sample() != [one.logprobs.tobytes() for group in other for one in group]
    assert sampled.engine.loop != plain.loop, "each has a check of its own"
    for head in ("dense", "auto"):
        actor = structs.replace(sampled.config.actor, head=head)
        assert (
            eight_bit_head_for(structs.replace(sampled.config, actor=actor), sampled.base, sampled.policy, None) is None
        )


@needs_vnni
def test_a_policy_in_fp32_takes_its_values_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampled = Sampled(tmp_path, weights="dense")
    policy = policy_of(tmp_path, "Qwen2", torch.float32, ADAPTED[1])
    assert eight_bit_head_for(sampled.config, sampled.base, policy, None) is None
    assert "actor.head is 'int8', which takes bf16" in caplog.text


@needs_vnni
def test_a_mapped_head_multiplies_as_one_in_memory(tmp_path: Path) -> None:
    base = cached_base(ModelConfig(path=str(architecture_model(tmp_path, "Qwen2")), cache_dir=str(tmp_path / "cache")))
    weight = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1]).head
    file = map_file(eight_bit_head(base).folder / WEIGHTS)
    mapped, x = EightBitHead.mapped(file), drawn(3, weight.shape[1])
    assert file.tensors[CODES].data_ptr() % 64 == 0
    assert bytes_of(mapped.codes).data_ptr() == file.tensors[CODES].data_ptr(), "no copy"
    expected = EightBitHead.of(weight)(x)
    assert torch.equal(mapped(x), expected)
    mapped.release()
    assert torch.equal(mapped(x), expected)


@needs_vnni
def test_bytes_that_do_not_fit_their_layout_are_refused() -> None:
    """oneDNN would read beyond them."""
    codes = EightBitHead.of(drawn(96, 128)).codes
    memory, layout = bytes_of(codes), torch.ops.mkldnn._get_mkldnn_serialized_md(codes)
    again = codes_over(memory, layout)
    assert torch.equal(bytes_of(again), memory) and again.shape == codes.shape
    for bad in ((memory[:-64], layout), (memory, torch.zeros_like(layout))):
        with pytest.raises(ModelError, match="does not accept the layout"):
            codes_over(*bad)


@needs_vnni
def test_a_model_without_a_step_of_our_own_takes_its_values(tmp_path: Path) -> None:
    """In others the head may have another name in the file."""
    sampled = Sampled(tmp_path, weights="dense")
    policy = policy_of(tmp_path, "Gemma2", torch.bfloat16, ADAPTED[1])
    assert eight_bit_head_for(sampled.config, sampled.base, policy, None) is None


def test_another_setting_of_onednn_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = layout_name()
    assert usual == layout_name()
    monkeypatch.setenv(ISA_VARIABLE, "AVX2")
    assert layout_name() != usual


@needs_vnni
def test_where_onednn_may_not_use_vnni_nothing_is_multiplied_by_codes() -> None:
    """Its products would overflow."""
    script = "from actor.engines.token_step.eight_bit import multiplies_eight_bits as f; print(f())"
    environment = os.environ | {ISA_VARIABLE: "AVX2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@needs_vnni
def test_the_file_belongs_to_its_base_and_damage_is_found(tmp_path: Path) -> None:
    base = cached_base(ModelConfig(path=str(architecture_model(tmp_path, "Qwen2")), cache_dir=str(tmp_path / "cache")))
    made = eight_bit_head(base)
    assert made == eight_bit_head(base) and base.digest[:16] in made.folder.name
    tensors = map_file(made.folder / WEIGHTS).tensors
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    scales, sums, _ = in_eight_bits(policy.head)
    assert torch.equal(tensors[SCALES], scales) and torch.equal(tensors[SUMS], sums)
    content = bytearray((made.folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (made.folder / WEIGHTS).write_bytes(content)
    with pytest.raises(DamageError, match="is damaged"):
        eight_bit_head(base)
