"""C code that reads NF4 codes as they are stored gives the bits that it gives with dense values."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from actor.engines.forms import codes_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.step import CompiledLayers
from actor.engines.token_step.compiled.stored_codes import StoredCodes
from protocol.messages import Sampling
from shared.base.cache import CachedBase, cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.config.tree import Config
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.nf4 import STATE_KEY, WEIGHTS, block_scales, from_tensors
from shared.tensor_file import map_file
from tests.reference import nf4_code
from tests.support.architectures import architecture_model
from tests.support.fakes import shake, tiny_prompter, unheard
from tests.support.processor_kinds import KINDS, Kind, needs_compiler
from tests.unit.actor.test_coded import resident_kb
from tests.unit.actor.test_compiled_step import library_of, logprobs_of
from tests.unit.actor.test_layers import ADAPTED, OURS, decoded, groups, policy_of

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
IN_BF16 = [kind for kind in KINDS if kind.dtype == torch.bfloat16]
kinds = pytest.mark.parametrize("kind", IN_BF16, ids=lambda kind: kind.name)
LINEAR = "model.layers.1.mlp.up_proj"


def base_of(folder: Path, name: str = "Qwen2", **shape: Any) -> CachedBase:
    model = architecture_model(folder, name, **shape)
    return cached_base(ModelConfig(path=str(model), cache_dir=str(folder / "cache")))


def codes_of(folder: Path, name: str = "Qwen2", **shape: Any) -> StoredCodes:
    return StoredCodes(map_file(base_of(folder, name, **shape).folder / WEIGHTS))


def engine_of(folder: Path, kind: Kind, codes: StoredCodes | None, name: str = "Qwen2", **config: Any) -> HFEngine:
    policy = policy_of(folder, name, torch.bfloat16, ADAPTED[1])
    actor = ActorConfig(**config)
    return HFEngine(policy, tiny_prompter(*range(6)), actor, codes=codes, compiled=library_of(kind, folder))


@kinds
@pytest.mark.parametrize("name", OURS)
def test_every_completion_has_the_bits_of_the_dense_base(tmp_path: Path, name: str, kind: Kind) -> None:
    codes = codes_of(tmp_path, name)
    coded, dense = engine_of(tmp_path, kind, codes, name), engine_of(tmp_path, kind, None, name)
    assert isinstance(coded.layers, CompiledLayers)
    used = [getattr(fields, linear).codes for fields in coded.layers.layers for linear in ("q", "o", "gate", "down")]
    assert all(used), "all are read as codes"
    assert logprobs_of(decoded(coded)) == logprobs_of(decoded(dense))
    coded.check()


@kinds
@pytest.mark.parametrize("rows", [20, 40, 70])
def test_so_have_many_rows(tmp_path: Path, rows: int, kind: Kind) -> None:
    (group,) = groups()[:1]
    wide = structs.replace(group, seeds=tuple(range(rows)))
    found = []
    for codes in (codes_of(tmp_path), None):
        engine = engine_of(tmp_path, kind, codes, max_sequences=rows)
        (completions,) = engine.generate((wide,), Sampling(temperature=1.0, max_new_tokens=4), unheard)
        found.append(logprobs_of(completions))
    assert found[0] == found[1]


@kinds
@pytest.mark.parametrize("rows", [3, 40])
def test_so_have_odd_numbers_of_tiles(tmp_path: Path, rows: int, kind: Kind) -> None:
    """Queries are 9 times 16 outputs, and keys 3 times."""
    shape, found = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 48}, []
    policy = policy_of(tmp_path, "Qwen3", torch.bfloat16, ADAPTED[1], **shape)
    (group,) = groups()[:1]
    wide = structs.replace(group, seeds=tuple(range(rows)))
    for codes in (codes_of(tmp_path, "Qwen3", **shape), None):
        config = ActorConfig(max_sequences=rows)
        library = library_of(kind, tmp_path)
        engine = HFEngine(policy, tiny_prompter(*range(6)), config, codes=codes, compiled=library)
        assert isinstance(engine.layers, CompiledLayers)
        assert bool(engine.layers.layers[0].q.codes and engine.layers.layers[0].k.codes) == (codes is not None)
        (completions,) = engine.generate((wide,), Sampling(temperature=1.0, max_new_tokens=4), unheard)
        found.append(logprobs_of(completions))
    assert found[0] == found[1]


@kinds
def test_so_have_rows_that_are_not_made_at_once(tmp_path: Path, kind: Kind) -> None:
    """Of 320 and 576 values; without AMX, 256 are made at once."""
    folder = architecture_model(tmp_path, "Llama", hidden_size=320, intermediate_size=576)
    model = ModelConfig(path=str(folder), cache_dir=str(tmp_path / "cache"))
    base, found = cached_base(model), []
    for codes in (StoredCodes(map_file(base.folder / WEIGHTS)), None):
        policy = load_policy(base, model, LoraConfig(rank=4, targets=ADAPTED[1]), torch.device("cpu"), torch.bfloat16)
        shake(policy, 3)
        engine = HFEngine(policy, tiny_prompter(*range(6)), codes=codes, compiled=library_of(kind, tmp_path))
        found.append(logprobs_of(decoded(engine)))
    assert found[0] == found[1]


@kinds
def test_other_codes_give_other_completions(tmp_path: Path, kind: Kind) -> None:
    codes = codes_of(tmp_path)
    tensors, linear = codes.file.tensors, LINEAR.replace("1", "0")
    tensors[f"{linear}.weight"].copy_(tensors[f"{LINEAR}.weight"].clone())
    coded, dense = engine_of(tmp_path, kind, codes), engine_of(tmp_path, kind, None)
    assert logprobs_of(decoded(coded)) != logprobs_of(decoded(dense))


def test_what_is_stored_is_what_the_paper_says(tmp_path: Path) -> None:
    codes = codes_of(tmp_path)
    found = codes.of(LINEAR)
    assert found is not None
    assert torch.allclose(found.levels.double(), torch.from_numpy(nf4_code()), atol=1e-7)
    weight = f"{LINEAR}.weight"
    names = [name for name in codes.file.tensors if name.startswith(weight)]
    stored = from_tensors(weight, {name: codes.file.tensors[name] for name in names}, torch.device("cpu"))
    both = torch.stack([found.codes.flatten() >> 4, found.codes.flatten() & 15], dim=1).flatten()
    values = found.levels[both.int()].view(-1, 64) * found.scales[:, None]
    assert torch.equal(values.flatten(), stored.dequantize(torch.float32).flatten())
    assert torch.equal(found.scales, block_scales(stored))
    assert found.codes.data_ptr() == codes.file.tensors[weight].data_ptr(), "no copy"
    assert codes.of(LINEAR) is found, "made once"


@pytest.mark.parametrize("facts", [{"dtype": "float16"}, {"shape": [64, 96]}])
def test_what_dense_values_serve_has_no_codes(tmp_path: Path, facts: dict[str, Any]) -> None:
    codes = codes_of(tmp_path)
    tensors, key = codes.file.tensors, f"{LINEAR}.weight.{STATE_KEY}"
    known = json.loads(bytes(tensors[key].numpy())) | facts
    tensors[key] = torch.frombuffer(bytearray(json.dumps(known).encode()), dtype=torch.uint8)
    assert codes.of(LINEAR) is None
    assert codes.of("model.embed_tokens") is None
    assert codes.of(LINEAR.replace("up", "gate")) is not None


def test_linears_without_codes_are_read_from_the_dense_base(tmp_path: Path) -> None:
    codes = codes_of(tmp_path)
    del codes.file.tensors[f"{LINEAR}.weight.{STATE_KEY}"]
    mixed, dense = engine_of(tmp_path, IN_BF16[0], codes), engine_of(tmp_path, IN_BF16[0], None)
    assert isinstance(mixed.layers, CompiledLayers)
    assert not mixed.layers.layers[1].up.codes and mixed.layers.layers[0].up.codes
    assert logprobs_of(decoded(mixed)) == logprobs_of(decoded(dense))


def test_a_changed_code_stops_the_next_install(tmp_path: Path) -> None:
    codes = codes_of(tmp_path)
    engine = engine_of(tmp_path, IN_BF16[0], codes)
    adapter = adapter_bytes(engine.policy.adapter)
    engine.install(1, adapter)
    codes.file.tensors[f"{LINEAR}.weight"].view(-1)[7] ^= 1
    with pytest.raises(DamageError, match=r"up_proj.stored codes"):
        engine.install(2, adapter)
    codes.file.tensors[f"{LINEAR}.weight"].view(-1)[7] ^= 1
    engine.install(3, adapter)
    stored = codes.of(LINEAR)
    assert stored is not None
    stored.scales.view(torch.int32)[3] ^= 1
    with pytest.raises(DamageError, match=r"up_proj.scales"):
        engine.install(4, adapter)
    stored.scales.view(torch.int32)[3] ^= 1
    stored.levels.view(torch.int32)[0] ^= 1
    with pytest.raises(DamageError, match=r"up_proj.levels"):
        engine.install(5, adapter)


def test_after_an_order_the_file_takes_no_memory_and_is_read_again(tmp_path: Path) -> None:
    file = base_of(tmp_path).folder / WEIGHTS
    engine = engine_of(tmp_path, IN_BF16[0], StoredCodes(map_file(file)))
    found = []
    for _ in range(2):
        found.append(logprobs_of(decoded(engine)))
        assert resident_kb(file) > 0
        engine.sleep()
        assert resident_kb(file) == 0
    assert found[0] == found[1]


def test_they_are_read_where_the_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, library = base_of(tmp_path), library_of(IN_BF16[0], tmp_path)
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])

    def read(weights: Any, dtype: torch.dtype = torch.bfloat16) -> bool:
        one = policy if dtype == torch.bfloat16 else policy_of(tmp_path, "Qwen2", dtype, ADAPTED[1])
        return isinstance(codes_for(in_c(weights), base, one, library), StoredCodes)

    assert read("nf4") and not read("dense") and not read("auto")
    with caplog.at_level(logging.WARNING):
        assert not read("nf4", torch.float32)
    assert "it reads dense weights" in caplog.text


def in_c(weights: Any) -> Config:
    return Config(actor=ActorConfig(weights=weights, token_step="compiled"))


def test_without_c_code_such_a_run_reads_dense_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their numbers are the same in C, and those of PyTorch's codes are not."""
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    with caplog.at_level(logging.WARNING):
        assert codes_for(in_c("nf4"), base_of(tmp_path), policy, None) is None
    assert "it reads dense weights" in caplog.text


def test_a_base_whose_values_are_rounded_twice_has_none(tmp_path: Path) -> None:
    codes = codes_of(tmp_path)
    assert codes.has_any()
    for name, tensor in [*codes.file.tensors.items()]:
        if name.endswith(STATE_KEY):
            facts = json.loads(bytes(tensor.numpy())) | {"dtype": "float16"}
            codes.file.tensors[name] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    assert not codes.has_any()
