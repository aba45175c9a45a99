"""A token step of fixed shapes is few launches, waits for nothing, and reads and writes where it did before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actor.engines.fixed_cache import FixedShape
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.fixed_rows import FixedBuffers, TokenStep
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers, layers_of
from launch.card.published import QWEN_15B
from protocol.messages import GroupOrder, Sampling
from shared.base.architecture import architecture_of
from shared.base.meta import META, meta_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.model.adapter_file import adapter_bytes
from tests.support.architectures import architecture_model
from tests.support.fakes import shake, tiny_policy, tiny_prompter, unheard
from tests.support.meta_card import SORTS, WAITS, CardKernels, Launches

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_LAUNCHES = 1400


def launches(shape: FixedShape, temperature: float = 1.0) -> Launches:
    """Of one step of a model of 1.5 billion parameters with NF4 linears and adapters on all of them."""
    policy = meta_policy(architecture_of(QWEN_15B), ModelConfig(), LoraConfig(), torch.bfloat16)
    layers = layers_of(policy)
    assert layers is not None
    layers.prepare()
    end_ids = torch.zeros(2, dtype=torch.int64, device=META)
    with torch.no_grad():
        step = TokenStep(policy, layers, FixedBuffers.of(policy, layers, shape), end_ids, temperature)
        found = Launches()
        with found, CardKernels(found):
            step()
    return found


@pytest.mark.parametrize(
    "shape",
    [FixedShape(slots=8, places=8, width=256, room=320), FixedShape(slots=64, places=1, width=256, room=320)],
    ids=["8 groups of 8", "64 rows"],
)
def test_a_step_has_few_launches(shape: FixedShape) -> None:
    found = launches(shape)
    assert found.counts["bitsandbytes::gemm_4bit"] == 7 * 28, "the codes are multiplied by one kernel each"
    assert found.counts.total() <= MOST_LAUNCHES, found.counts.most_common(12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_in_a_step_waits_for_the_card_or_sorts(temperature: float) -> None:
    """Tensors without values raise by themselves where a value is asked for."""
    found = launches(FixedShape(slots=2, places=4, width=64, room=64), temperature)
    assert not (WAITS | SORTS) & set(found.counts)
    assert found.devices == {"meta"}, "a tensor of the host would be copied to the card"


class Outside(TorchDispatchMode):
    """Notes which memory a step uses that it has not made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = set[int]()
        self.made: dict[int, torch.Tensor] = {}
        self.modes = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself; what it makes is kept, so that no address is used twice."""
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self.places |= {storage(one) for one in given} - set(self.made)
        self.modes.add(torch.get_deterministic_debug_mode())
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and storage(one) not in self.places:
                self.made[storage(one)] = one
        return found


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def group() -> GroupOrder:
    return GroupOrder(group_id="g", prompt_ids=np.arange(6, 15, dtype=np.int32), columns={}, seeds=(1, 2, 3))


@contextmanager
def deterministic() -> Iterator[None]:
    """As every process of a run computes."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(2)
    yield
    torch.set_deterministic_debug_mode(before)


def outside(engine: HFEngine) -> Outside:
    """Of one step."""
    assert engine.fixed is not None and engine.fixed.buffers is not None
    step = TokenStep(engine.policy, engine.fixed.layers, engine.fixed.buffers, engine.end_ids, 1.0)
    found = Outside()
    with deterministic(), torch.inference_mode(), found:
        step()
        assert torch.get_deterministic_debug_mode() == 2
    return found


@pytest.mark.parametrize("dequantize", ["once", "each_call"])
@pytest.mark.parametrize("name", ["Qwen2 windowed", "Qwen3"])
@pytest.mark.parametrize("fold", ["always", "never"])
def test_every_step_uses_the_same_memory_also_with_another_adapter(
    tmp_path: Path, name: str, fold: Any, dequantize: Any
) -> None:
    """What a CUDA graph relies on: it repeats addresses."""
    policy = tiny_policy(architecture_model(tmp_path, name), dequantize=dequantize)
    engine = HFEngine(policy, tiny_prompter(0, 1), ActorConfig(fold=fold))
    assert isinstance(engine.layers, Layers)
    engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, Grain())
    engine.generate((group(),), Sampling(temperature=1.0, max_new_tokens=12), unheard)
    first = outside(engine)
    assert first.modes == {0}, "a card would sort the places that it scatters to"
    assert first.places == outside(engine).places
    shake(policy, 5)
    engine.install(2, adapter_bytes(policy.adapter))
    assert first.places == outside(engine).places
