"""What a turn leaves on the card: the model, and nothing of the order or the step."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from protocol.messages import GroupOrder, Sampling
from shared.process.card import card_facts, driver_of
from shared.process.lease import Lease
from tests.support.card_sides import Sides, make_sides, release
from tests.support.fakes import unheard

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 2**20
SLACK = 24 * MIB
"""PyTorch takes memory in pieces of 2 and 20 MiB, and returns whole ones."""


def order() -> tuple[GroupOrder, ...]:
    ids = np.random.default_rng(0).integers(3, 512, (8, 100)).astype(np.int32)
    return tuple(
        GroupOrder(group_id=f"g{number}", prompt_ids=prompt, columns={}, seeds=tuple(range(16)))
        for number, prompt in enumerate(ids)
    )


def decode(side: Sides) -> list[list[Completion]]:
    return side.engine.generate(order(), Sampling(temperature=1.0, max_new_tokens=256), unheard)


def test_the_driver_says_which_card_it_is(card: torch.device) -> None:
    facts = card_facts(card)
    assert facts.name == torch.cuda.get_device_name(card) and facts.uuid.startswith("GPU-")
    assert facts.total_bytes >= torch.cuda.mem_get_info(card)[1] > 0
    assert facts.driver, "the kernel's part of the driver says its version"


def test_released_memory_is_free_on_the_card(clean: torch.device) -> None:
    driver = driver_of(clean)
    assert driver is not None
    driver.release()
    before = driver.free_bytes()
    held = torch.zeros(512 * MIB, dtype=torch.uint8, device=clean)
    assert driver.free_bytes() <= before - 512 * MIB + SLACK
    peak = driver.peak()
    assert peak.allocated >= 512 * MIB and peak.reserved >= peak.allocated and peak.driver >= peak.reserved
    del held
    assert driver.free_bytes() <= before - 512 * MIB + SLACK, "the allocator keeps it"
    driver.release()
    assert driver.free_bytes() >= before - SLACK
    assert driver.peak().allocated < 512 * MIB


@pytest.mark.parametrize("graphs", ["never", "auto"])
def test_a_turn_of_the_actor_leaves_its_model_alone(clean: torch.device, graphs: str) -> None:
    """Also of what graphs held."""
    side = make_sides(clean, actor__graphs=graphs)
    driver = driver_of(clean)
    assert driver is not None
    decode(side)
    side.engine.sleep()
    driver.release()
    loaded = torch.cuda.memory_allocated(), driver.free_bytes()
    side.engine.wake()
    decode(side)
    assert driver.peak().allocated > loaded[0] + 64 * MIB
    side.engine.sleep()
    driver.release()
    assert torch.cuda.memory_allocated() <= loaded[0] + MIB
    assert driver.free_bytes() >= loaded[1] - SLACK


def test_a_lease_gives_back_what_a_turn_has_cached(clean: torch.device, tmp_path: Path) -> None:
    release()
    driver = driver_of(clean)
    assert driver is not None
    before = driver.free_bytes()
    lease = Lease(tmp_path / "lease", driver=driver)
    with lease.hold("actor") as turn:
        torch.zeros(512 * MIB, dtype=torch.uint8, device=clean)
    assert turn.peak.allocated >= 512 * MIB
    assert driver.free_bytes() >= before - SLACK
