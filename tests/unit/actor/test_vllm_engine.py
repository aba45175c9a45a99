"""From our orders to requests of vLLM and back, with a vLLM of our own; tests/vllm has the real one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import EndedCompletion
from actor.engines.vllm_engine import VLLMEngine
from actor.engines.vllm_internals import (
    DrawOptions,
    FinishedRequest,
    Installed,
    compare,
    engine_arguments,
    loaded_adapter,
    sent_adapter,
)
from actor.engines.vllm_options import VLLMOptions
from protocol.messages import Finish, GroupOrder, Sampling
from shared.config.model import LoraConfig
from shared.errors import DamageError, ModelError
from shared.model.adapter_file import LoraLayout, adapter_bytes
from tests.support.fakes import RANK, tiny_policy, tiny_prompter, unheard

OPTIONS = VLLMOptions(
    folder=Path("/nonexistent"),
    nf4=False,
    device="cpu",
    dtype="float32",
    rank=8,
    max_tokens=40,
    max_sequences=4,
    batched_tokens=2048,
    block=32,
    kv_bytes=2**20,
    sleeps=False,
    seed=0,
)
END = 5


class PlayedVLLM:
    """Returns the seed and the cap as tokens, the last request first; notes what it was asked."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.queue: list[tuple[str, list[int], DrawOptions]] = []
        self.sums = {"norm": 7}
        self.places = 0

    def new_place(self, version: int, folder: str = "") -> Installed:
        self.places += 1
        return Installed(name=f"v{version}-{self.places}", number=self.places, path=folder or "/nonexistent/x")

    def weight_sums(self) -> dict[str, int]:
        return dict(self.sums)

    def take_bytes(self, adapter: Installed, tensors: dict[str, torch.Tensor], rank: int, scale: float) -> None:
        self.said.append(("bytes", adapter.name, sorted(tensors), rank, scale))

    def take_files(self, adapter: Installed) -> None:
        files = {path.name: path.read_bytes() for path in Path(adapter.path).iterdir()}
        self.said.append(("files", adapter.name, files, Path(adapter.path)))

    def forget_prefixes(self) -> None:
        self.said.append("forget")

    def submit(self, request: str, prompt_ids: list[int], draw: DrawOptions) -> None:
        self.said.append(request)
        self.queue.append((request, prompt_ids, draw))

    def give_back(self, part: str) -> None:
        self.said.append(("give back", part))

    def take_again(self, part: str) -> None:
        self.said.append(("take again", part))

    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[FinishedRequest]:
        name, prompt, draw = self.queue.pop()
        ids = [*prompt, draw.seed, draw.end_ids[0] if draw.seed % 2 else 9]
        numbers = [-0.5] * len(ids)
        return [FinishedRequest(request=name, ids=ids, logprobs=numbers, prompt_logprobs=[], cached_tokens=0)]

    def logprobs(self, ids: list[int]) -> list[float]:
        return [-float(token) for token in ids[1:]]


@pytest.fixture
def vllm() -> PlayedVLLM:
    return PlayedVLLM()


def engine_of(vllm: PlayedVLLM, checkpoint: Path, how: str = "memory") -> VLLMEngine:
    shapes = {name: layer.base.matmul.dense for name, layer in tiny_policy(checkpoint).adapter.layers.items()}
    layers = {name: (dense.shape[0], dense.shape[1]) for name, dense in shapes.items() if dense is not None}
    layout = LoraLayout(layers=layers, lora=LoraConfig(rank=RANK, alpha=2.0 * RANK))
    played: Any = vllm
    way = "files" if how == "files" else "memory"
    return VLLMEngine(played, OPTIONS, tiny_prompter(END, 6), LoraConfig(rank=RANK), layout, "a" * 64, way)


@pytest.mark.parametrize("part", ["kv", "weights", "stop"])
def test_what_was_given_back_is_taken_again_and_must_be_proved(vllm: PlayedVLLM, checkpoint: Path, part: Any) -> None:
    engine, adapter = engine_of(vllm, checkpoint), adapter_bytes(tiny_policy(checkpoint).adapter)
    engine.part = part
    engine.install(4, adapter)
    vllm.said.clear()
    assert engine.wake() is False
    engine.sleep()
    assert engine.wake() is True and engine.wake() is False
    assert vllm.said[:2] == [("give back", part), ("take again", part)]
    # An engine that was built again has no adapter.
    assert [said[:2] for said in vllm.said[2:]] == ([("bytes", "v4-2")] if part == "stop" else [])


def test_a_base_that_came_back_other_than_it_went_is_noticed(vllm: PlayedVLLM, checkpoint: Path) -> None:
    engine = engine_of(vllm, checkpoint)
    engine.part = "weights"
    engine.sleep()
    vllm.sums["norm"] += 1
    with pytest.raises(DamageError, match="'norm'"):
        engine.wake()


def order(index: int, *seeds: int) -> GroupOrder:
    prompt = np.arange(10 + index, 13 + index, dtype=np.int32)
    return GroupOrder(group_id=f"g{index}", prompt_ids=prompt, columns={}, seeds=seeds)


def test_samples_come_back_in_the_order_of_the_order(vllm: PlayedVLLM, checkpoint: Path) -> None:
    engine = engine_of(vllm, checkpoint)
    ticks: list[Sequence[EndedCompletion]] = []
    sampling = Sampling(temperature=0.7, max_new_tokens=9)
    first, second = engine.generate((order(0, 3, 4), order(1, 8)), sampling, ticks.append)
    assert [completion.ids.tolist() for completion in first] == [[10, 11, 12, 3, END], [10, 11, 12, 4, 9]]
    assert [completion.ids.tolist() for completion in second] == [[11, 12, 13, 8, 9]]
    assert [completion.finish for completion in first] == [Finish.STOP, Finish.LENGTH]
    assert first[0].entropies is None and first[0].logprobs.dtype == np.float32
    # Group by group, from an empty prefix cache.
    assert vllm.said == ["forget", "0/0", "0/1", "1/0"] and len(ticks) == 3
    # Each is told of when it ends: while others are still being decoded.
    told = {(ended.group, ended.index): ended.completion for (ended,) in ticks}
    assert told.keys() == {(0, 0), (0, 1), (1, 0)}
    assert all(told[0, index] is first[index] for index in (0, 1)) and told[1, 0] is second[0]


def test_a_request_says_all_that_the_order_says(vllm: PlayedVLLM, checkpoint: Path) -> None:
    draw = engine_of(vllm, checkpoint).draw(11, Sampling(temperature=0.7, max_new_tokens=9))
    assert draw == DrawOptions(seed=11, temperature=0.7, max_new_tokens=9, end_ids=(END, 6))


def test_an_order_that_does_not_fit_is_refused_whole(vllm: PlayedVLLM, checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="A prompt of 3 tokens and a completion of up to 38 do not fit the 40"):
        engine_of(vllm, checkpoint).generate((order(0, 1),), Sampling(temperature=1.0, max_new_tokens=38), unheard)
    assert vllm.said == []


def test_an_adapter_goes_in_from_memory_under_a_new_name_each_time(vllm: PlayedVLLM, checkpoint: Path) -> None:
    engine, adapter = engine_of(vllm, checkpoint), tiny_policy(checkpoint).adapter
    for _ in range(2):
        engine.install(4, adapter_bytes(adapter))
    names = sorted(adapter.parameters())
    assert vllm.said == [("bytes", "v4-1", names, RANK, 2.0), ("bytes", "v4-2", names, RANK, 2.0)]


def test_an_adapter_goes_in_through_files_that_are_gone_afterwards(vllm: PlayedVLLM, checkpoint: Path) -> None:
    data = adapter_bytes(tiny_policy(checkpoint).adapter)
    engine_of(vllm, checkpoint, "files").install(4, data)
    ((how, _, files, folder),) = vllm.said
    assert how == "files" and files["adapter_model.safetensors"] == data
    assert b'"peft_type": "LORA"' in files["adapter_config.json"]
    assert folder.parent == Path("/dev/shm") and not folder.exists()


def test_an_adapter_of_another_shape_never_reaches_vllm(vllm: PlayedVLLM, checkpoint: Path) -> None:
    other = tiny_policy(checkpoint, lora=LoraConfig(rank=RANK, targets=("q_proj",))).adapter
    with pytest.raises(DamageError, match="does not fit the model"):
        engine_of(vllm, checkpoint).install(1, adapter_bytes(other))
    assert vllm.said == []


def test_a_base_that_changed_takes_no_adapter(vllm: PlayedVLLM, checkpoint: Path) -> None:
    engine = engine_of(vllm, checkpoint)
    vllm.sums["norm"] += 1
    with pytest.raises(DamageError, match="changed in memory: 'norm'"):
        engine.install(1, adapter_bytes(tiny_policy(checkpoint).adapter))


def test_what_it_says_of_itself(vllm: PlayedVLLM, checkpoint: Path) -> None:
    engine = engine_of(vllm, checkpoint)
    assert (engine.identity.engine, engine.identity.base_digest) == ("vllm", "a" * 64)
    assert engine.logprobs(np.array([1, 2, 3], np.int32)).tolist() == [-2.0, -3.0]
    assert engine.wake() is False


def test_nothing_is_left_to_vllms_or_the_models_defaults() -> None:
    arguments = engine_arguments(OPTIONS)
    assert arguments["generation_config"] == "vllm" and arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["kv_cache_memory_bytes"] == 2**20 and arguments["skip_tokenizer_init"]
    assert "quantization" not in arguments


class Layer:
    """What vLLM keeps of a linear: stacks of A and B, one a packed part."""

    def __init__(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.lora_a_stacked = tuple(a[None, None] for a, _ in parts)
        self.lora_b_stacked = tuple(b[None, None] for _, b in parts)


class Manager:
    """What of vLLM's adapter manager is read."""

    def __init__(self, packed: dict[str, list[str]], **modules: Layer) -> None:
        self.modules = modules
        self.packed_modules = packed


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A [8, 3] and B [4, 8] as vLLM pads them for rank 2."""
    a, b = torch.zeros(8, 3), torch.zeros(4, 8)
    a[:2], b[:, :2] = value, value + 1
    return a, b


def test_packed_layers_are_read_back_by_our_names_and_zeros_are_left_out() -> None:
    manager = Manager({"qkv": ["q", "k"]}, qkv=Layer(pair(1.0), pair(2.0)), o=Layer(pair(3.0)), head=Layer(zeros()))
    loaded = loaded_adapter(manager, rank=2)
    assert sorted(loaded) == ["k.lora_A", "k.lora_B", "o.lora_A", "o.lora_B", "q.lora_A", "q.lora_B"]
    assert loaded["k.lora_A"].tolist() == [[2.0] * 3] * 2 and loaded["k.lora_B"].tolist() == [[3.0] * 2] * 4


def zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, 3), torch.zeros(4, 8)


def test_b_is_scaled_once_after_the_cast() -> None:
    sent = sent_adapter(
        {"o.lora_A": torch.full((2, 3), 1 / 3), "o.lora_B": torch.full((4, 2), 1 / 3)}, 2.0, torch.bfloat16
    )
    assert sent["o.lora_A"].dtype == torch.bfloat16
    assert torch.equal(sent["o.lora_B"], sent["o.lora_A"][0, 0] * 2 * torch.ones(4, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loaded: loaded.pop("o.lora_B"), "did not take the adapter's entry 'o.lora_B'"),
        (lambda loaded: loaded.update({"x.lora_A": torch.ones(1)}), "in 'x.lora_A', which this adapter does not have"),
        (lambda loaded: loaded["o.lora_B"].mul_(2), "other values than were sent in the adapter's entry 'o.lora_B'"),
    ],
)
def test_what_vllm_holds_must_be_what_was_sent(change: Any, words: str) -> None:
    sent = {"o.lora_A": torch.ones(2, 3), "o.lora_B": torch.ones(4, 2)}
    loaded = {name: tensor.clone() for name, tensor in sent.items()}
    compare(loaded, sent)
    change(loaded)
    with pytest.raises(DamageError, match=words):
        compare(loaded, sent)


def test_a_zero_b_may_be_missing_from_what_is_loaded() -> None:
    compare({}, {"o.lora_B": torch.zeros(4, 2)})
