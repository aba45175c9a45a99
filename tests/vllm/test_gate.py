"""Faults that only completions show, planted in front of real vLLM: each is refused before a token is learned from."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as change
from safetensors.torch import load_file, save_file

from actor.engines.engine import Completion
from actor.engines.vllm_engine import VLLMEngine
from learner.objective.batch import Sample
from learner.orders.dispatch import Dispatcher
from learner.update.mismatch import Mismatch
from protocol.messages import GroupOrder, Order, Policy, Refused, Sampling, Welcome
from shared.base.cache import dense_base
from shared.config.model import ModelConfig
from shared.config.tree import Config
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from tests.support.dispatch_bench import inbox
from tests.support.fakes import CHECK, hello_of, toy_orders, toy_policy
from tests.support.live_run import OnceRecorder
from tests.support.memory_transport import MemoryHub
from tests.support.steps import step_batch, update_of
from tests.vllm.bench import Bench
from tests.vllm.test_sampling import silent

EMBEDDED = Path(__file__).parents[2] / "shared/embedded/model"
ORDERED = 0.7


def learned_from(bench: Bench, completions: list[list[Completion]], groups: tuple[GroupOrder, ...]) -> None:
    """One gated update of the learner's policy on these completions."""
    config: Config = change(bench.config, rollout=change(bench.config.rollout, temperature=ORDERED))
    for parameter in bench.policy.adapter.parameters().values():
        parameter.requires_grad_(True)
    samples = [
        Sample(
            name=f"{group.group_id}[{index}]",
            prompt_ids=group.prompt_ids,
            completion_ids=completion.ids,
            trained=completion.ids >= 0,
            actor_logprobs=completion.logprobs,
            entropies=completion.entropies,
            advantage=1.0 - 2 * (index % 2),
        )
        for group, some in zip(groups, completions, strict=True)
        for index, completion in enumerate(some)
    ]
    update_of(bench.policy, config).apply(0, step_batch(samples, 0, config, on_policy=True))


def sampled(bench: Bench, temperature: float) -> tuple[list[list[Completion]], tuple[GroupOrder, ...]]:
    groups = bench.groups(3, 4)
    return bench.engine.generate(groups, Sampling(temperature=temperature, max_new_tokens=24), silent), groups


def test_what_was_sampled_as_ordered_is_learned_from(bench: Bench) -> None:
    bench.engine.install(1, before := bench.adapter(1))
    learned_from(bench, *sampled(bench, ORDERED))
    assert adapter_bytes(bench.policy.adapter) != before


def test_a_temperature_that_vllm_did_not_apply(bench: Bench) -> None:
    bench.engine.install(1, before := bench.adapter(1))
    with pytest.raises(Mismatch, match=r"samples at temperature 1 where 0\.7 was ordered"):
        learned_from(bench, *sampled(bench, 1.0))
    assert adapter_bytes(bench.policy.adapter) == before


def test_keys_and_values_of_another_version(bench: Bench) -> None:
    """The prompt's prefix is version 1's: its name was given to version 2, and nothing was emptied."""
    engine, vllm = bench.engine, bench.engine.vllm
    engine.install(1, bench.adapter(1))
    place = vllm.new_place(1)
    vllm.used -= {place.name, place.number, place.path}
    groups = bench.groups(3, 4)

    def drawn(adapter: bytes) -> list[list[Completion]]:
        from shared.model.adapter_file import read_adapter

        vllm.used -= {place.name, place.number, place.path}
        vllm.take_bytes(place, read_adapter(adapter, engine.layout.shapes), engine.layout.rank, engine.layout.scale)
        vllm.forget_prefixes = lambda: None
        try:
            return engine.generate(groups, Sampling(temperature=ORDERED, max_new_tokens=24), silent)
        finally:
            del vllm.forget_prefixes

    drawn(bench.adapter(1))
    stale = drawn(before := bench.adapter(2))
    with pytest.raises(Mismatch, match="stale adapter"):
        learned_from(bench, stale, groups)
    assert adapter_bytes(bench.policy.adapter) == before


def test_a_base_of_other_codes_has_another_digest_and_another_folder(bench: Bench) -> None:
    from shared.base.cache import CachedBase, cached_base

    base = cached_base(bench.config.model)
    assert bench.engine.identity.base_digest == base.digest == bench.policy.base_digest
    assert bench.engine.options.folder == dense_base(base, torch.float32).folder
    assert (
        dense_base(CachedBase(folder=base.folder, digest="b" * 64), torch.float32).folder != bench.engine.options.folder
    )
    assert replace(base, digest="b" * 64).digest != bench.engine.identity.base_digest


def test_an_actor_on_another_base_is_refused_in_words_and_given_nothing(bench: Bench, tmp_path: Path) -> None:
    from shared.base.cache import cached_base

    shutil.copytree(EMBEDDED, model := tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    other = cached_base(ModelConfig(path=str(model), cache_dir=str(tmp_path / "cache")))
    engine = bench.engine
    foreign = VLLMEngine(engine.vllm, engine.options, bench.prompter, engine.lora, engine.layout, other.digest)
    hub, orders = MemoryHub(), toy_orders(count=1)
    welcome = Welcome(run_id="run-1", heartbeat_s=60.0, silence_s=60.0, mark=0)
    dispatcher = Dispatcher(hub.learner_port(), OnceRecorder(), hello_of(bench.hf().identity), welcome, CHECK)
    dispatcher.publish(toy_policy(0), oldest_needed=0)
    dispatcher.submit(orders)
    for name, identity in (("foreign", foreign.identity), ("ours", engine.identity)):
        port = hub.actor_port(name)
        port.send(hello_of(identity, name))
        dispatcher.pump()
        if name == "foreign":
            (refusal,) = inbox(port)
            assert isinstance(refusal, Refused) and "Actor foreign has another base model" in refusal.reason
            assert other.digest[:12] in refusal.reason and engine.identity.base_digest[:12] in refusal.reason
        else:
            assert [type(message) for message in inbox(port)] == [Welcome, Policy, Order]


def test_a_dense_base_with_one_other_bit_is_not_served(bench: Bench) -> None:
    from shared.base.cache import cached_base
    from shared.model.layers.nf4 import WEIGHTS

    file = bench.engine.options.folder / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    try:
        with pytest.raises(DamageError, match="is not what was written there"):
            dense_base(cached_base(bench.config.model), torch.float32)
    finally:
        data[-9] ^= 1
        file.write_bytes(data)
