"""Adapters in and out of vLLM: version 1, 2, 1 again, B = 0, and every way to install it wrongly."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load, save

from actor.engines.vllm_engine import VLLMEngine
from actor.engines.vllm_internals import Installed
from actor.installer import CanaryMismatch, Installer
from learner.update.publisher import Publisher, policy_message
from protocol.messages import Policy as PolicyMessage
from protocol.messages import Sampling
from shared.errors import DamageError
from shared.model.adapter_file import read_adapter
from shared.model.canary import canary_ids, canary_of
from tests.vllm.bench import Bench
from tests.vllm.test_sampling import T1, bits, silent

LAYER = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def ids(bench: Bench) -> np.ndarray:
    return canary_ids(0, len(bench.policy.head), 40)


@pytest.mark.parametrize("how", ["memory", "files"])
def test_version_1_2_1_gives_version_1_to_the_bit(bench: Bench, ids: np.ndarray, how: str) -> None:
    engine = by(bench, how)
    one, two = bench.adapter(1), bench.adapter(2)
    found: list[bytes] = []
    for version, adapter in ((1, one), (2, two), (1, one)):
        engine.install(version, adapter)
        drawn = bits(engine.generate(bench.groups(2, 4), T1, silent))
        found.append(engine.logprobs(ids).tobytes() + b"".join(logprobs for _, logprobs, _ in drawn))
    assert found[0] == found[2] != found[1]


def by(bench: Bench, how: str) -> VLLMEngine:
    """The same vLLM, adapters going in another way."""
    ours, way = bench.engine, "files" if how == "files" else "memory"
    return VLLMEngine(ours.vllm, ours.options, bench.prompter, bench.config.lora, ours.layout, "0" * 64, way)


def test_memory_and_files_put_in_the_same_bits(bench: Bench, ids: np.ndarray) -> None:
    adapter = bench.adapter(3)
    scores = []
    for how in ("memory", "files"):
        engine = by(bench, how)
        engine.install(3, adapter)
        scores.append(engine.logprobs(ids).tobytes())
    assert scores[0] == scores[1]
    assert not list(Path("/dev/shm").glob("tandem-policy-*"))


def test_a_zero_adapter_is_the_base_to_the_bit(bench: Bench, ids: np.ndarray) -> None:
    bench.engine.vllm.adapter = None
    base, drawn = bench.engine.logprobs(ids), bits(bench.engine.generate(bench.groups(2, 4), T1, silent))
    bench.engine.install(0, bench.zero_adapter())
    assert bench.engine.logprobs(ids).tobytes() == base.tobytes()
    assert bits(bench.engine.generate(bench.groups(2, 4), T1, silent)) == drawn


def test_installing_leaves_what_was_sent_as_it_was(bench: Bench) -> None:
    """vLLM scales B in place."""
    engine = bench.engine
    tensors = read_adapter(bench.adapter(1), engine.layout.shapes)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.vllm.take_bytes(engine.vllm.new_place(1), tensors, engine.layout.rank, engine.layout.scale)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


def test_a_name_is_never_used_twice(bench: Bench) -> None:
    engine = bench.engine
    tensors = read_adapter(bench.adapter(1), engine.layout.shapes)
    used = engine.vllm.new_place(1)
    engine.vllm.take_bytes(used, tensors, engine.layout.rank, engine.layout.scale)
    with pytest.raises(DamageError, match="which another one had before"):
        engine.vllm.take_bytes(used, tensors, engine.layout.rank, engine.layout.scale)
    assert engine.vllm.adapter is None


def test_a_reused_name_would_have_found_the_old_versions_keys_and_values(bench: Bench) -> None:
    """Why it is refused: with the guard taken away, vLLM goes on from a prefix that another adapter computed."""
    engine, vllm = bench.engine, bench.engine.vllm
    order, greedy = bench.group(2, 1), Sampling(temperature=1.0, max_new_tokens=1)
    one = read_adapter(bench.adapter(1), engine.layout.shapes)
    two = read_adapter(bench.adapter(2), engine.layout.shapes)

    def first_token(adapter: dict[str, torch.Tensor], where: Installed) -> list[float]:
        vllm.used -= {where.name, where.number, where.path}
        vllm.take_bytes(where, adapter, engine.layout.rank, engine.layout.scale)
        vllm.submit("0/0", order.prompt_ids.tolist(), engine.draw(order.seeds[0], greedy))
        return [output.logprobs[0] for output in vllm.run()]

    vllm.forget_prefixes()
    same = engine.vllm.new_place(1)
    first_token(one, same)
    stale = first_token(two, same)
    honest = first_token(two, engine.vllm.new_place(1))
    assert stale != honest


def typo(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(LAYER, LAYER.replace("k_proj", "k_porj")): tensor for name, tensor in tensors.items()}


def missing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if LAYER not in name}


@pytest.mark.parametrize("spoil", [typo, missing])
def test_names_that_do_not_fit_are_refused_before_vllm_sees_them(
    bench: Bench, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(DamageError, match=r"does not fit the model: .*k_p"):
        bench.engine.install(1, save(spoil(load(bench.adapter(1)))))


def test_a_layer_that_vllm_drops_in_silence_is_noticed(bench: Bench) -> None:
    """A name that our checks let through and vLLM does not know: it would drop it at debug level."""
    engine = bench.engine
    tensors = typo(read_adapter(bench.adapter(1), engine.layout.shapes))
    with pytest.raises(DamageError, match=r"vLLM did not take the adapter's entry 'model.layers.1.self_attn.k_porj"):
        engine.vllm.take_bytes(engine.vllm.new_place(1), tensors, engine.layout.rank, engine.layout.scale)
    assert engine.vllm.adapter is None


def published(bench: Bench, seed: int) -> PolicyMessage:
    """What the learner sends of this adapter."""
    bench.adapter(seed)
    ids = canary_ids(0, len(bench.policy.head), 16)
    return Publisher(bench.policy.adapter, lambda: canary_of(bench.policy, ids)).snapshot(1)


def test_an_adapter_scaled_twice_fails_the_canary(bench: Bench) -> None:
    engine, policy = by(bench, "memory"), published(bench, 1)
    Installer(engine).install(policy, woken=False)
    twice = msgspec.structs.replace(engine.layout.lora, alpha=2 * engine.layout.lora.alpha)
    engine.layout = replace(engine.layout, lora=twice)
    with pytest.raises(CanaryMismatch, match="Nothing was sampled from it"):
        Installer(engine).install(policy, woken=False)


def test_a_stale_adapter_fails_the_canary(bench: Bench) -> None:
    engine, policy = by(bench, "memory"), published(bench, 1)
    stale = bench.adapter(2)
    engine.install = lambda version, adapter: VLLMEngine.install(engine, version, stale)  # type: ignore[method-assign]
    with pytest.raises(CanaryMismatch):
        Installer(engine).install(policy, woken=False)


def test_values_left_over_in_a_layer_are_noticed(bench: Bench) -> None:
    """An adapter for fewer layers, over one for all, where the old values were not cleared."""
    engine = bench.engine
    worker = engine.vllm.engine.model_executor.driver_worker.worker
    manager = worker.model_runner.lora_manager._adapter_manager
    tensors = read_adapter(bench.adapter(1), engine.layout.shapes)
    engine.vllm.take_bytes(engine.vllm.new_place(1), tensors, engine.layout.rank, engine.layout.scale)
    module = manager.modules["model.layers.1.self_attn.o_proj"]
    module.reset_lora = lambda index: None
    try:
        fewer = {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.o_proj" not in name}
        with pytest.raises(DamageError, match="which this adapter does not have"):
            engine.vllm.take_bytes(engine.vllm.new_place(1), fewer, engine.layout.rank, engine.layout.scale)
    finally:
        del module.reset_lora


def test_a_bit_that_flips_in_vllms_weights_is_found_by_the_next_install(bench: Bench) -> None:
    engine = bench.engine
    model = engine.vllm.engine.model_executor.driver_worker.worker.model_runner.get_model()
    weight = next(p for name, p in model.named_parameters() if name.endswith("norm.weight"))
    weight.data.view(torch.int32)[3] ^= 1 << 20
    with pytest.raises(DamageError, match=r"changed in memory: '.*norm.weight'"):
        engine.install(1, bench.adapter(1))
    weight.data.view(torch.int32)[3] ^= 1 << 20
    engine.install(1, bench.adapter(1))


def test_the_engine_core_is_no_process_of_its_own(bench: Bench) -> None:
    bench.engine.install(1, bench.adapter(1))
    bench.engine.generate(bench.groups(1, 2), T1, silent)
    assert psutil.Process().children(recursive=True) == []


def test_what_is_broken_is_not_installed(bench: Bench) -> None:
    data = bytearray(bench.adapter(1))
    data[-4:] = np.float32(np.nan).tobytes()
    with pytest.raises(DamageError, match="not finite"):
        bench.engine.install(1, bytes(data))
    assert policy_message(1, bytes(data)).version == 1
