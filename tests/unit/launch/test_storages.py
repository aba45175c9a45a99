"""What is counted while code runs over tensors without values, and what PyTorch's allocator makes of it."""

from typing import Any

import pytest
import torch
from torch import nn

from launch.card.allocator import MIB, Allocator, rounded
from launch.card.items import Peak
from launch.card.storages import Storages
from shared.base.meta import META, install_attention_of_a_card


def mib(count: float) -> torch.Tensor:
    return torch.empty(int(count * MIB), dtype=torch.uint8, device=META)


def peaks(storages: Storages) -> dict[str, Peak]:
    return {peak.name: peak for peak in storages.peaks()}


# --- storages


def test_the_peak_of_a_phase_has_names_activations_and_temporaries() -> None:
    storages = Storages()
    weights = mib(8)
    with storages:
        with storages.phase("load"):
            storages.name("weights", [weights])
        with storages.phase("forward"):
            kept = mib(2)
            mib(16)
            small = mib(1)
            del small
        with storages.phase("backward", temporaries="tiles"):
            more = mib(4)
            del kept, more
            mib(3)
    found = peaks(storages)
    assert found["load"].items == {"weights": 8 * MIB}
    assert found["forward"].items == {"weights": 8 * MIB, "activations": 2 * MIB, "temporaries": 16 * MIB}
    # What was kept for this phase, and ends in it, is computed with like the rest.
    assert found["backward"].items == {"weights": 8 * MIB, "tiles": 6 * MIB}


def test_a_phase_begins_with_what_is_alive_and_a_view_is_no_storage() -> None:
    storages = Storages()
    with storages:
        whole = mib(4)
        with storages.phase("idle"):
            parts = whole.view(4, -1).unbind()
            again = whole[: MIB // 2].view(torch.int16)
    assert peaks(storages)["idle"].items == {"activations": 4 * MIB}
    assert len(parts) == 4 and len(again) == MIB // 4


def test_a_name_that_was_given_stays() -> None:
    storages = Storages()
    with storages, storages.phase("load"):
        tied = mib(1)
        storages.name("embedding", [tied])
        storages.name("head", [tied[:10]])
    assert peaks(storages)["load"].items == {"embedding": MIB}


def test_small_storages_are_rounded_and_empty_ones_take_nothing() -> None:
    storages = Storages()
    with storages, storages.phase("load"):
        kept = [torch.empty(size, dtype=torch.uint8, device=META) for size in (0, 1, 512, 513)]
    assert peaks(storages)["load"].items == {"activations": 4 * 512}
    assert [rounded(len(one)) for one in kept] == [0, 512, 512, 1024]


def test_what_an_operation_takes_inside_is_added_while_its_result_is_alive() -> None:
    storages = Storages(lambda func, args: 5 * MIB if func._opname == "mm" else 0)
    with storages:
        a = torch.empty((MIB // 4, 1), device=META)
        with storages.phase("product"):
            product = a.t() @ a
        assert product.shape == (1, 1)
    assert peaks(storages)["product"].items == {"activations": MIB + 512, "temporaries": 5 * MIB}


def test_gradients_and_recomputed_activations_are_seen() -> None:
    """The graph of a backward pass runs in C++, and its storages are noted as well."""
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="meta") for _ in range(3)))
    storages = Storages()
    x = torch.empty((1024, 256), device=META)
    with storages:
        storages.name("held", [x, *layers.parameters()])
        with storages.phase("forward"):
            loss = layers(x).sum()
        with storages.phase("backward"):
            loss.backward()
            storages.name("gradients", [p.grad for p in layers.parameters() if p.grad is not None])
    found = peaks(storages)
    # The outputs of the first two layers are kept, the third one's is not; the loss is a number.
    assert found["forward"].items["activations"] == 2 * MIB + 512
    assert found["backward"].items["gradients"] >= 2 * 256 * 1024


def test_operations_in_place_are_not_run_and_make_nothing() -> None:
    storages = Storages()
    a, b = (torch.empty(MIB, device=META) for _ in range(2))
    steps = torch.zeros(())
    with storages, storages.phase("work"):
        assert a.add_(b).mul_(2.0).clamp_(min=0.0) is a
        torch._foreach_add_([a, b], 1.0)  # pyright: ignore[reportPrivateImportUsage]
        # Those of the CPU are run: an optimizer counts its steps there.
        steps.add_(1.0)
    assert float(steps) == 1.0
    assert peaks(storages)["work"].items == {}


def test_an_operation_that_is_known_gives_the_same_shapes_in_new_storages() -> None:
    storages = Storages()
    x = torch.empty((3, 4, 5), device=META).transpose(0, 1)
    with storages, storages.phase("work"):
        sums = [x + 1 for _ in range(3)]
        wider = x + torch.empty((2, 4, 3, 5), device=META)
        halves = [x.to(torch.float16) for _ in range(2)]
        largest = [x.max(dim=2) for _ in range(2)]
        lists = [torch._foreach_mul([x, x], 2.0) for _ in range(2)]  # pyright: ignore[reportPrivateImportUsage]
        views = [x.reshape(4, 3, 5)[0] for _ in range(2)]
    assert len({one.untyped_storage()._cdata for one in sums}) == 3
    assert all(one.shape == x.shape and one.stride() == sums[0].stride() for one in sums)
    assert wider.shape == (2, 4, 3, 5)
    assert [one.dtype for one in halves] == [torch.float16] * 2
    assert [(one.values.dtype, one.indices.dtype) for one in largest] == [(torch.float32, torch.int64)] * 2
    assert [len(one) for one in lists] == [2, 2]
    assert len({view.untyped_storage()._cdata for view in views}) == 1
    # Sums, the wider one and what was added, halves, largest, lists, and x itself, first seen through its views.
    assert sum(event.change > 0 for event in storages.events) == 3 + 2 + 2 + 4 + 4 + 1


def test_attention_takes_what_its_kernel_takes_and_not_all_scores() -> None:
    install_attention_of_a_card()
    rows, heads, length, size = 2, 4, 512, 64
    query, key, value = (torch.empty((rows, heads, length, size), dtype=torch.bfloat16, device=META) for _ in range(3))
    mask = torch.empty((rows, 1, length, length), dtype=torch.bool, device=META)
    out, scores = 2 * query.numel(), 4 * rows * heads * length**2

    def taken(**options: Any) -> int:
        storages = Storages()
        with storages, storages.phase("attention"):
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        assert mixed.shape == query.shape
        return sum(peaks(storages)["attention"].items.values())

    assert out <= taken(is_causal=True) < 1.1 * out
    bias = 2 * mask.numel()
    assert out + bias <= taken(attn_mask=mask) < 1.1 * (out + bias) < scores


# --- the allocator


def test_segments_are_those_of_pytorch() -> None:
    for size, reserved in ((1, 2), (1.0, 2), (1.1, 20), (9.9, 20), (10, 10), (10.5, 12), (31, 32)):
        allocator = Allocator()
        allocator.take(0, int(size * MIB))
        assert allocator.reserved == reserved * MIB, size


def test_small_tensors_share_a_segment_and_large_ones_another() -> None:
    allocator = Allocator()
    for key in range(4096):
        allocator.take(key, 512)
    assert allocator.reserved == 2 * MIB
    allocator.take(4096, 1)
    assert allocator.reserved == 4 * MIB
    # 20 MiB take six of 3 MiB; 2 MiB are left, in which 1 MiB and a half has room.
    for key in range(6):
        allocator.take(10_000 + key, 3 * MIB)
    assert allocator.reserved == 24 * MIB
    allocator.take(20_000, 3 * MIB // 2)
    assert allocator.reserved == 24 * MIB


def test_the_rest_of_a_large_block_stays_with_the_tensor_if_it_is_a_mebibyte_or_less() -> None:
    allocator = Allocator()
    allocator.take(0, 19 * MIB // 2)
    allocator.give_back(0)
    # 10.5 MiB are left of 20 after 9.5, so a second one fits; then 1 MiB is left and is not split off.
    allocator.take(1, 19 * MIB // 2)
    allocator.take(2, 19 * MIB // 2)
    assert allocator.reserved == 20 * MIB
    allocator.take(3, 513 * 1024 * 2)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = Allocator()
    for key, size in enumerate((32, 12, 24)):
        allocator.take(key, size * MIB)
    for key in range(3):
        allocator.give_back(key)
    allocator.take(3, 11 * MIB)
    allocator.take(4, 24 * MIB)
    allocator.take(5, 32 * MIB)
    assert allocator.reserved == 68 * MIB


def test_neighbours_become_one_and_only_whole_segments_are_released() -> None:
    allocator = Allocator()
    for key in range(5):
        allocator.take(key, 4 * MIB)
    assert allocator.reserved == 20 * MIB
    for key in (1, 3, 2):
        allocator.give_back(key)
    # 12 MiB in one piece, though no tensor there had more than 4.
    allocator.take(5, 12 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.release()
    assert allocator.reserved == 20 * MIB
    for key in (0, 4, 5):
        allocator.give_back(key)
    allocator.release()
    assert allocator.reserved == 0


@pytest.mark.parametrize("seed", range(5))
def test_tensors_never_overlap_and_all_memory_comes_back(seed: int) -> None:
    """In any order: blocks always add up to their segments, and those in use are as large as was asked for."""
    generator = torch.Generator().manual_seed(seed)
    allocator, alive = Allocator(), dict[int, int]()
    for key in range(600):
        if alive and float(torch.rand((), generator=generator)) < 0.45:
            gone = list(alive)[int(torch.randint(len(alive), (), generator=generator))]
            allocator.give_back(gone)
            del alive[gone]
        else:
            alive[key] = int(2 ** (9 + 16 * float(torch.rand((), generator=generator))))
            allocator.take(key, alive[key])
        free = sum(size for blocks in allocator.free.values() for size, _, _ in blocks)
        taken = sum(block.size for block in allocator.taken.values())
        assert free + taken == allocator.reserved
        assert all(block.size >= rounded(alive[key]) for key, block in allocator.taken.items())
    for key in alive:
        allocator.give_back(key)
    allocator.release()
    assert allocator.reserved == 0 and not any(allocator.free.values())
