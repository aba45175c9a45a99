"""Streams: pinned for ever, independent of each other and of the order of work."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.seeding import derive, permutation, sample_seeds, uniforms


def test_seeds_are_pinned() -> None:
    """A change here changes every recorded run."""
    assert derive(0, "adapter") == 2149337636398145895
    assert sample_seeds(0, "train", 3, 1, 2) == (107192331208968611, 6418215541370078227)
    assert uniforms(5, 2).tolist() == [0.7337459554446363, 0.5905206445727093]
    assert permutation(0, 0, 6).tolist() == [3, 0, 4, 1, 5, 2]


@given(seed=st.integers(0, 2**31), step=st.integers(0, 10**6))
def test_seeds_fit_the_wire_and_differ(seed: int, step: int) -> None:
    names = [("train", step, 0), ("train", step, 1), ("train", step + 1, 0), ("eval", step, 0)]
    found = [s for name in names for s in sample_seeds(seed, *name, 4)] + [derive(seed, "adapter"), derive(seed + 1)]
    assert len(set(found)) == 18
    assert all(0 <= s < 2**63 for s in found)


def test_a_larger_group_keeps_the_seeds_of_a_smaller_one() -> None:
    assert sample_seeds(9, "train", 0, 0, 8)[:3] == sample_seeds(9, "train", 0, 0, 3)


def test_names_do_not_run_together() -> None:
    assert len({derive(1, "a", "b"), derive(1, "ab"), derive(1, "a", 1), derive(1, "a", "1"), derive(1, "a1")}) == 5


def test_a_longer_stream_continues_a_shorter_one() -> None:
    long = uniforms(2**63 - 1, 50)
    np.testing.assert_array_equal(uniforms(2**63 - 1, 20), long[:20])
    assert ((long >= 0) & (long < 1)).all() and not np.array_equal(long, uniforms(1, 50))


def test_every_task_once_an_epoch_in_another_order_each_time() -> None:
    first, second = permutation(4, 0, 100), permutation(4, 1, 100)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert first.tolist() != second.tolist()
