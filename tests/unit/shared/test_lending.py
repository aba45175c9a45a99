"""One copy of the base for two processes: what is agreed, what is computed with it, what its owner's death means."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from actor.wiring import build_engine
from launch.presets.load import load_config
from learner.wiring import load_trained_policy
from protocol.errors import PeerGone, PeerTimeout
from protocol.messages import GroupOrder, Sampling
from shared.base.block import ALIGNMENT, CudaBlocks, CudaHandle, Table, table_of, views
from shared.base.cache import cached_base
from shared.base.checksum import BaseChecksum
from shared.base.lending import AGREED, Agreed, Borrower, Lender, read, write
from shared.base.load import load_policy
from shared.base.residency import Borrowed, Resident, borrow, is_shared, lend, residency_of
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ComputeConfig
from shared.errors import DamageError
from shared.model.canary import sequence_logprobs
from shared.model.layers.nf4 import WEIGHTS
from shared.model.policy import Policy
from shared.tensor_file import map_file
from tests.support.fakes import unheard
from tests.support.host_blocks import CARD, Closed, Elsewhere, HostBlocks, Unexported

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
KEYS = ["compute.device=cpu", "compute.learner_threads=1", "compute.actor_threads=1", "model.dequantize=each_call"]


@dataclass(frozen=True, kw_only=True)
class Both:
    """Both ends, and what each of them has been told."""

    lender: Lender
    borrower: Borrower
    told: tuple[str, str]
    """Reasons against it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lease").mkdir()
    return tmp_path / "lease"


def meet(folder: Path, lends: HostBlocks, borrows: HostBlocks, card: str = CARD, known: str = "") -> Both:
    """Until both know what is agreed; what can be lent then is. card, known: of the borrower, to the lender."""
    lender, borrower = Lender(folder, lends, CARD), Borrower(folder, borrows, card)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(borrower.ask, 60.0)
        reason = lender.offer(known, 60.0)
        if not reason:
            lender.place(tensors_of(ModelConfig()), torch.float32)
        return Both(lender=lender, borrower=borrower, told=(reason, asked.result()))


def tensors_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    return map_file(cached_base(model).folder / WEIGHTS).tensors


def logprobs(policy: Policy) -> bytes:
    return sequence_logprobs(policy, np.arange(5, 40)).tobytes()


def policy_with(place: Any, dtype: torch.dtype) -> Policy:
    model = ModelConfig(dequantize="each_call")
    policy = load_policy(cached_base(model), model, LoraConfig(), CPU, dtype, place)
    policy.adapter.initialise(3)
    for layer in policy.adapter.layers.values():
        layer.lora_B.data.normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    return policy


# --- the block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_has_every_tensor_in_the_type_that_is_computed_with(dtype: torch.dtype) -> None:
    tensors = tensors_of(ModelConfig())
    table = table_of(tensors, dtype)
    parts = views(torch.zeros(table.size, dtype=torch.uint8), table)
    on_host = {name for name in tensors if "quant_state" in name}
    assert on_host and parts.keys() == tensors.keys() - on_host
    kinds = {name: part.dtype for name, part in parts.items()}
    (codes,) = {kinds[name] for name in parts if f"{name}.absmax" in parts}
    scales = {kinds[name] for name in parts if name.endswith((".absmax", "quant_map"))}
    rest = {kinds[name] for name in parts if name.endswith(("norm.weight", "embed_tokens.weight"))}
    assert (codes, scales, rest) == (torch.uint8, {torch.uint8, torch.float32}, {dtype})
    assert all(entry.start % ALIGNMENT == 0 for entry in table.entries)
    ends = [(entry.start, entry.start + parts[entry.name].nbytes) for entry in table.entries]
    assert all(end <= start for (_, end), (start, _) in zip(ends, [*ends[1:], (table.size, 0)], strict=True))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=Table) == table


class Exported:
    """What PyTorch says of a storage that is shared."""

    def untyped_storage(self) -> "Exported":
        return self

    def _share_cuda_(self) -> tuple[object, ...]:
        return 0, b"memory", 4096, 512, b"users", 3, b"event", True


def test_a_handle_of_a_card_is_a_message_with_all_that_pytorch_asks_for() -> None:
    packed = CudaBlocks(torch.device("cuda", 0)).handle(cast(Any, Exported()))
    expected = {"memory": b"memory", "size": 4096, "offset": 512, "users": b"users", "users_offset": 3}
    assert msgspec.msgpack.decode(packed) == expected | {"event": b"event", "waits": True}
    named = list(signature(rebuild_cuda_tensor).parameters)
    order = [name for name in named[named.index("storage_device") :] if name != "requires_grad"]
    assert order == [
        "storage_device",
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    ]
    assert len(CudaHandle.__struct_fields__) == len(order) - 1


# --- agreeing


def test_what_is_lent_is_the_base_once(folder: Path) -> None:
    both = meet(folder, HostBlocks(folder), HostBlocks(folder))
    assert both.told == ("", "")
    mine = policy_with(both.lender.place, torch.float32)
    theirs = policy_with(fresh(both).place, torch.float32)
    assert logprobs(mine) == logprobs(theirs) == logprobs(policy_with(None, torch.float32))
    check = BaseChecksum(Resident(theirs).sums)
    flip(both.lender, "model.embed_tokens.weight")
    with pytest.raises(DamageError, match="changed in memory"):
        check.check()


def flip(lender: Lender, name: str) -> None:
    """One bit of a tensor in the block."""
    agreed = read(lender.folder, AGREED, Agreed)
    assert lender.block is not None and agreed and agreed.table
    (start,) = (entry.start for entry in agreed.table.entries if entry.name == name)
    lender.block[start] ^= 4


def fresh(both: Both) -> Borrower:
    """One that comes when all is agreed, such as an actor that was started again."""
    borrower = Borrower(both.borrower.folder, both.borrower.blocks, CARD)
    assert borrower.ask(0.0) == ""
    return borrower


@pytest.mark.parametrize(
    ("lends", "borrows", "card", "known", "reason"),
    [
        (HostBlocks, Closed, CARD, "", "the actor cannot map the learner's memory (RuntimeError: CUDA error: invalid"),
        (HostBlocks, Elsewhere, CARD, "", "the actor does not see what the learner has written"),
        (HostBlocks, HostBlocks, "GPU-other", "", "the actor computes on another card (GPU-other) than the learner"),
        (Unexported, HostBlocks, CARD, "", "its memory cannot be shared (RuntimeError: expandable_segments"),
        (HostBlocks, HostBlocks, CARD, "there is no actor", "there is no actor"),
    ],
)
def test_both_are_told_why_there_is_no_common_copy(
    folder: Path, lends: type[HostBlocks], borrows: type[HostBlocks], card: str, known: str, reason: str
) -> None:
    told = meet(folder, lends(folder), borrows(folder), card, known).told
    assert told[0] == told[1] and told[0].startswith(reason) and "\n" not in told[0]


def test_a_lender_to_whom_nobody_answers_goes_on_alone(folder: Path) -> None:
    lender = Lender(folder, HostBlocks(folder), CARD)
    assert lender.offer(wait_s=0.0) == "no actor has answered within 0 s"
    late = Borrower(folder, HostBlocks(folder), CARD)
    assert late.ask(0.0) == "no actor has answered within 0 s"


# --- the end of a lender


def test_what_a_dead_lender_has_left_does_not_count(folder: Path) -> None:
    both = meet(folder, HostBlocks(folder), HostBlocks(folder))
    os.close(both.lender.lock)
    assert read(folder, AGREED, Agreed) is not None
    with pytest.raises(PeerTimeout, match="its copy of the base"):
        Borrower(folder, HostBlocks(folder), CARD).ask(0.0)


def test_a_borrower_ends_before_and_after_a_turn_whose_lender_has_died(folder: Path) -> None:
    both = meet(folder, HostBlocks(folder), HostBlocks(folder))
    borrowed = Borrowed(policy_with(None, torch.float32), both.borrower)
    assert borrowed.wake() is False
    borrowed.sleep()
    os.close(both.lender.lock)
    for turn in (borrowed.wake, borrowed.sleep, lambda: both.borrower.place({}, torch.float32)):
        with pytest.raises(PeerGone, match="whose copy of the base this actor computes with, has ended"):
            turn()
    again = Lender(folder, HostBlocks(folder), CARD)
    write(folder, AGREED, Agreed(offer=again.name, reason=""))
    with pytest.raises(PeerGone):
        borrowed.wake()


def test_a_copy_that_reads_otherwise_is_refused(folder: Path) -> None:
    both = meet(folder, HostBlocks(folder), HostBlocks(folder))
    tensors = tensors_of(ModelConfig())
    with pytest.raises(DamageError, match="has another layout"):
        both.borrower.place(tensors, torch.bfloat16)
    flip(both.lender, "model.norm.weight")
    with pytest.raises(DamageError, match=r"reads differently here: 'model\.norm\.weight' .*compute\.residency=swap"):
        both.borrower.place(tensors, torch.float32)


# --- both processes, as they are built


def test_an_actor_samples_from_the_learners_base_as_from_its_own(folder: Path) -> None:
    config = load_config("embedded", KEYS)
    both = meet(folder, HostBlocks(folder), HostBlocks(folder))
    load_trained_policy(config, "cpu", place=both.lender.place)
    borrower = fresh(both)
    order = GroupOrder(group_id="g", prompt_ids=np.arange(6, 15, dtype=np.int32), columns={}, seeds=(1, 2, 3))
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    found = []
    for one in (None, borrower):
        engine, _ = build_engine(config, one)
        (completions,) = engine.generate((order,), sampling, unheard)
        engine.sleep()
        found.append([completion.ids.tobytes() + completion.logprobs.tobytes() for completion in completions])
    assert found[0] == found[1]


def test_which_residency_follows() -> None:
    policy, shared = policy_with(None, torch.float32), ComputeConfig(residency="shared")
    card, cpu = torch.device("cuda", 0), CPU
    assert is_shared(shared, card) and not is_shared(shared, cpu)
    assert not is_shared(ComputeConfig(residency="shared", actor_card=1), card), "each card has its own"
    assert lend(shared, cpu, Path("nowhere"), "") is None and borrow(shared, cpu, Path("nowhere"), 0.0) is None
    assert isinstance(residency_of(shared, policy, "learner"), Resident), "on a CPU both map one file"
    there = replace(policy, device=card)
    assert isinstance(residency_of(shared, there, "learner", cast(Lender, object())), Resident)
