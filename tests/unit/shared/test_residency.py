"""A base that waits in host memory: what it frees, and that nothing else notices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shared.base.block import aligned
from shared.base.cache import cached_base
from shared.base.checksum import BaseChecksum, frozen_sums, frozen_tensors
from shared.base.load import load_policy
from shared.base.residency import Resident, Swapped, WakingLease, residency_of
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ComputeConfig
from shared.errors import DamageError
from shared.model.canary import sequence_logprobs
from shared.model.policy import Policy
from shared.process.lease import Turn, nothing


@pytest.fixture(params=["each_call", "once"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """With memory of its own for every tensor, as on a card; on a CPU it would be a mapped file."""
    model = ModelConfig(dequantize=request.param)
    policy = load_policy(cached_base(model), model, LoraConfig(), torch.device("cpu"), torch.float32)
    policy.adapter.initialise(3)
    for layer in policy.adapter.layers.values():
        layer.lora_B.data.normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    of_storage: dict[int, torch.Tensor] = {}
    # A tied head and its embedding stay one.
    for tensor in every_frozen(policy):
        tensor.data = of_storage.setdefault(tensor.data_ptr(), tensor.data.clone())
    return policy


def every_frozen(policy: Policy) -> list[torch.Tensor]:
    """Aliases too."""
    pointers = {tensor.data_ptr() for _, tensor in frozen_tensors(policy)}
    found: list[Any] = [*policy.backbone.parameters(), *policy.backbone.buffers(), policy.head]
    for module in policy.backbone.modules():
        found += getattr(module, "tensors", dict)().values()
    return [tensor for tensor in {id(tensor): tensor for tensor in found}.values() if tensor.data_ptr() in pointers]


def logprobs(policy: Policy) -> bytes:
    return sequence_logprobs(policy, torch.arange(5, 40).numpy()).tobytes()


def held(policy: Policy) -> int:
    """Bytes of the frozen tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in every_frozen(policy)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_it_leaves_and_comes_back_with_the_same_bits(policy: Policy) -> None:
    expected, sums, before = logprobs(policy), frozen_sums(policy), held(policy)
    swapped = Swapped(policy)
    assert swapped.table and not swapped.wake(), "it is on the card at first"
    swapped.sleep()
    waiting = sum(entry.waiting.nbytes for entry in swapped.table.values())
    assert held(policy) == before - waiting < 0.5 * before
    assert swapped.sums() == sums, "between turns the block is the base"
    assert swapped.wake() and not swapped.wake()
    assert held(policy) == before
    assert logprobs(policy) == expected and swapped.sums() == sums


def test_a_base_that_changes_while_it_waits_is_found(policy: Policy) -> None:
    swapped = Swapped(policy)
    check = BaseChecksum(swapped.sums)
    swapped.sleep()
    check.check()
    name, entry = next(iter(swapped.table.items()))
    entry.waiting.view(torch.uint8).flatten()[5] ^= 4
    with pytest.raises(DamageError, match=name):
        check.check()
    swapped.wake()
    with pytest.raises(DamageError, match=name):
        check.check()


def test_a_tensor_that_shares_its_memory_stays(policy: Policy) -> None:
    """Freeing it would free what it shares."""
    both = torch.zeros(2, *policy.head.shape)
    (parameter,) = (one for one in policy.backbone.parameters() if one.data_ptr() == policy.head.data_ptr())
    both[0] = parameter.data
    parameter.data = both[0]
    swapped = Swapped(policy)
    assert all(entry.tensor is not parameter for entry in swapped.table.values())
    swapped.sleep()
    assert torch.equal(parameter.data, both[0])


def refused(num_bytes: int) -> torch.Tensor:
    """A system on which nothing may be pinned."""
    raise RuntimeError("CUDA error: out of memory\nmore lines")


def test_a_block_is_pinned_by_the_first_way_that_works(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    made = list[torch.Tensor]()

    def pinned(num_bytes: int) -> torch.Tensor:
        made.append(torch.empty(num_bytes, dtype=torch.uint8))
        return made[-1]

    swapped = Swapped(policy, (refused, pinned, refused))
    assert swapped.block is made[0] and made[0].nbytes == sum(
        aligned(one.waiting.nbytes) for one in swapped.table.values()
    )
    assert "pinned" not in caplog.text


def test_where_nothing_may_be_pinned_the_base_waits_all_the_same(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logprobs(policy)
    swapped = Swapped(policy, (refused, refused))
    swapped.sleep()
    assert swapped.wake() and logprobs(policy) == expected
    (line,) = [record.message for record in caplog.records if "pinned" in record.message]
    assert "(RuntimeError: CUDA error: out of memory; RuntimeError" in line and "more slowly" in line


class Recorded:
    """A lease that notes what happens in its turns."""

    def __init__(self, residency: Swapped) -> None:
        self.residency, self.seen = residency, list[tuple[str, bool]]()

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[Turn]:
        self.seen.append(("taken", self.residency.is_awake))
        yield Turn(waited_s=0.0)
        self.seen.append(("given back", self.residency.is_awake))


def test_the_base_is_on_the_card_in_turns_alone(policy: Policy) -> None:
    residency = Swapped(policy)
    residency.sleep()
    inner = Recorded(residency)
    lease = WakingLease(inner, residency)
    with lease.hold("learner") as turn:
        assert residency.is_awake and turn.swap_s > 0
        awake_s = turn.swap_s
    assert turn.swap_s > awake_s, "both ways"
    with pytest.raises(ValueError, match="a fault"), lease.hold("learner"):
        raise ValueError("a fault")
    assert not residency.is_awake, "also after a fault"
    assert inner.seen[:2] == [("taken", False), ("given back", False)]


def test_on_a_cpu_the_base_stays(policy: Policy) -> None:
    """Both processes map one copy there."""
    assert isinstance(residency_of(ComputeConfig(residency="swap"), policy, "actor"), Resident)
