"""A process that does not fit on its card while it loads ends with one sentence, whatever found no memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from actor.wiring import serve_orders
from launch.presets.load import load_config
from learner.wiring import load_model
from shared.base.loading import fitting, lighter
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ComputeConfig
from shared.errors import ModelError
from shared.process.card import MIB
from tests.support.cramped_card import Refusing
from tests.support.fake_card import GIB, FakeCard, FakeDriver

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = ["compute.device=cpu", "compute.learner_threads=1", "compute.actor_threads=1"]
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


def sentence(error: Exception, **known: Any) -> str:
    """What is said when loading ends with this."""
    with pytest.raises(ModelError) as caught, fitting("actor", remedy="take a smaller model", **known):
        raise error
    return str(caught.value)


def test_it_names_what_was_planned_what_was_free_and_what_helps() -> None:
    card = FakeCard(8 * GIB)
    card.used = 7 * GIB
    said = sentence(torch.OutOfMemoryError(f"{SAID}\nDetails"), planned=1900 * MIB, driver=FakeDriver(card))
    assert said == (
        "The actor does not fit into the free memory of the card while it loads (OutOfMemoryError: CUDA out of memory."
        " Tried to allocate 2.00 GiB): 1900 MiB were planned for it at its peak, 1024 MiB of 8192 MiB were free when it"
        " began; end other programs on the card, or take a smaller model."
    )
    assert "): nothing was planned for it; end other" in sentence(torch.OutOfMemoryError(SAID), planned=0)


def test_a_card_without_room_for_a_context_says_so_in_another_way() -> None:
    def refused(code: int) -> RuntimeError:
        error = RuntimeError("CUDA error: out of memory")
        error.__dict__["error_code"] = code
        return error

    assert "(RuntimeError: CUDA error: out of memory)" in sentence(refused(2), planned=0)
    with pytest.raises(RuntimeError, match="CUDA error"), fitting("actor", 0, ""):
        raise refused(700)


class DeadDriver(FakeDriver):
    """A card on which not even a question finds memory."""

    def free_bytes(self) -> int:
        raise torch.OutOfMemoryError(SAID)


def test_a_driver_that_finds_no_memory_is_no_crash() -> None:
    assert "nothing was planned for it; end" in sentence(RuntimeError("never reached"), planned=0, driver=DeadDriver())


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="ours"), fitting("learner", 0, ""):
        raise RuntimeError("an error of ours")


def test_the_cheapest_change_comes_first() -> None:
    def first(model: ModelConfig, rank: int = 16, **compute: Any) -> str:
        return lighter(ComputeConfig(**compute), model, LoraConfig(rank=rank))

    nf4 = ModelConfig(dequantize="each_call")
    assert first(nf4) == first(nf4, residency="release") == "run with --set compute.residency=swap"
    assert first(nf4, residency="swap").startswith("run with --set lora.rank=8, or ")
    assert first(nf4, actor_card=1).startswith("run with --set lora.rank=8"), "nobody is in the way"
    assert first(ModelConfig(quantization="none"), actor_card=1) == "run with --set model.quantization=nf4"
    assert first(ModelConfig(dequantize="once"), actor_card=1) == "run with --set model.dequantize=each_call"
    assert first(nf4, rank=1, residency="swap") == "take a smaller model"


# --- both processes


class Port:
    """Of an actor that never joins."""

    def close(self) -> None:
        raise AssertionError("it was not opened by whom it is closed")


def actor_loads(folder: Path) -> None:
    config = load_config("embedded", KEYS)
    serve_orders(config, cast(Any, Port()), "ipc://nowhere", "actor0", folder / "lease", planned=GIB)


def learner_loads(folder: Path) -> None:
    config = load_config("embedded", KEYS)
    compute = structs.replace(config.compute, residency="swap")
    with fitting("learner", GIB, lighter(compute, config.model, config.lora)):
        load_model(config)


@pytest.mark.parametrize("at", [1, 20, 100])
@pytest.mark.parametrize("loads", [actor_loads, learner_loads])
def test_whatever_finds_no_memory_is_one_sentence(tmp_path: Path, loads: Callable[[Path], None], at: int) -> None:
    """The first operation on tensors, and later ones: parameters, buffers, the check of the decode loop."""
    refusing = Refusing(lambda func, args: True, at=at)
    with pytest.raises(ModelError) as caught, refusing:
        loads(tmp_path)
    assert refusing.left == 0
    said, who = str(caught.value), loads.__name__.partition("_")[0]
    assert said.startswith(
        f"The {who} does not fit into the free memory of the card while it loads (OutOfMemoryError: "
    )
    assert "1024 MiB were planned for it at its peak; end other programs" in said and said.count("\n") == 0
