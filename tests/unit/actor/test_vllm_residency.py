"""Which part of the card vLLM gives back, against the sizes of R1-Distill-Qwen-1.5B."""

from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from actor.engines.vllm_options import (
    MARGIN_BYTES,
    VLLM_CONTEXT_BYTES,
    EngineMemory,
    GiveBack,
    learner_bytes,
    plan_give_back,
    vllm_options,
)
from actor.wiring import given_back, served_bytes
from launch.presets.load import load_config
from shared.base.cache import cached_base
from shared.errors import ModelError
from shared.model.adapter_file import read_layout

MIB = 2**20
QWEN = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
NF4 = EngineMemory(weights=1_594 * MIB, kv=252 * MIB)
PLAIN = EngineMemory(weights=3_389 * MIB, kv=252 * MIB)


@pytest.mark.parametrize(
    ("card_mib", "learner_mib", "memory", "expected"),
    [
        (7_700, 2_600, NF4, "nothing"),
        (7_700, 2_600, PLAIN, "nothing"),
        (7_000, 2_600, PLAIN, "kv"),
        (7_700, 4_500, PLAIN, "weights"),
        (7_700, 7_000, NF4, "stop"),
        (5_396, 2_600, NF4, "nothing"),
        (5_395, 2_600, NF4, "kv"),
        (5_144, 2_600, NF4, "kv"),
        (5_143, 2_600, NF4, "weights"),
        (3_550, 2_600, NF4, "weights"),
        (3_549, 2_600, NF4, "stop"),
        (3_000, 2_600, NF4, "stop"),
    ],
)
def test_the_least_that_makes_room(card_mib: int, learner_mib: int, memory: EngineMemory, expected: GiveBack) -> None:
    assert plan_give_back(card_mib * MIB, learner_mib * MIB, memory, actors=1) == expected


@pytest.mark.parametrize(
    ("actors", "expected"), [(1, "nothing"), (2, "nothing"), (3, "kv"), (4, "weights"), (12, "weights"), (13, "stop")]
)
def test_every_actor_of_the_card_keeps_its_part(actors: int, expected: GiveBack) -> None:
    room = 3 * (VLLM_CONTEXT_BYTES + NF4.weights) + 2 * NF4.kv
    assert room // VLLM_CONTEXT_BYTES == 12
    assert plan_give_back(room + 2_600 * MIB + MARGIN_BYTES, 2_600 * MIB, NF4, actors) == expected


def found_on(card: int, *, beside: bool | None, **compute: Any) -> GiveBack:
    """For a vLLM of the embedded model on a card of so many bytes. beside: the learner."""
    config = load_config("embedded", ["actor.engine=vllm"])
    config = replace(config, compute=replace(config.compute, **compute))
    base = cached_base(config.model)
    options = vllm_options(config, base.folder, "cuda", "bfloat16")
    layout = read_layout(base.folder, config.lora)
    return given_back(config, base, layout, options, lambda: card, beside_learner=beside)


def test_a_learner_that_is_not_on_this_card_needs_no_room_there() -> None:
    tight = 1_200 * MIB
    assert found_on(tight, beside=True) == found_on(tight, beside=None) != "nothing"
    assert found_on(tight, beside=False) == "nothing"
    assert found_on(tight, beside=True, learner_card=1) == found_on(tight, beside=None, learner_card=1) == "nothing"


def test_actors_on_a_card_without_the_learner_make_room_for_each_other() -> None:
    assert found_on(8_000 * MIB, beside=True, learner_card=1, actors=2) == "nothing"
    assert found_on(8_000 * MIB, beside=True, learner_card=1, actors=32) == "stop"
    assert found_on(8_000 * MIB, beside=None, learner_card=1, actors=32) == "nothing", "they are elsewhere"
    assert found_on(500 * MIB, beside=True, learner_card=1) == "nothing", "vLLM says itself that it does not fit"


def test_a_base_counts_in_the_number_type_that_vllm_serves_it_in(tmp_path: Path) -> None:
    config = load_config("embedded", ["actor.engine=vllm"])
    save_file({"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    served = replace_fields(vllm_options(config, cached_base(config.model).folder, "cuda", "float32"), folder=tmp_path)
    assert served_bytes(served) == 60
    assert served_bytes(replace_fields(served, dtype="bfloat16")) == 30
    codes = replace_fields(served, nf4=True, dtype="bfloat16")
    assert served_bytes(codes) == (tmp_path / "model.safetensors").stat().st_size


def test_a_learner_larger_than_the_card_is_refused_only_where_it_must_be_on_it() -> None:
    assert found_on(500 * MIB, beside=None) == "nothing"
    with pytest.raises(ModelError, match="The learner needs about"):
        found_on(500 * MIB, beside=True)


def test_actors_that_are_started_beside_the_learner_share_its_card() -> None:
    assert found_on(8_000 * MIB, beside=True) == "nothing" != found_on(8_000 * MIB, beside=True, actors=16)


def test_a_learner_that_fits_no_card_is_refused_with_the_figures() -> None:
    with pytest.raises(ModelError, match=r"needs about 9\.8 GiB and this card has 7\.8, of which 0\.4 are kept free"):
        plan_give_back(8_000 * MIB, 10_000 * MIB, NF4, actors=1)


def test_the_learners_estimate_for_1_5b() -> None:
    """Base 1535 MiB, LoRA r=16 on all linears 18.46 M parameters (282 MiB), 0.219 MiB a token, its context."""
    found = learner_bytes(QWEN, 1_535 * MIB, 18_464_768, 640) / MIB
    assert found == pytest.approx(400 + 1_535 + 282 + 140, abs=2)
