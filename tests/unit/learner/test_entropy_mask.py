"""The top rho of a step's tokens, and that nothing but the entropies decides which."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.entropy_mask import select_tokens, share_count
from tests import reference

FRACTIONS = st.sampled_from([0.01, 0.1, 0.2, 1 / 3, 0.5, 0.8, 0.99, 1.0])
LEVELS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6)
DISTINCT = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40, unique=True)


@given(rows=LEVELS, fraction=FRACTIONS)
def test_equals_the_definition_with_ties(rows: list[list[int]], fraction: float) -> None:
    got = select_tokens([np.array(row, dtype=np.float32) for row in rows], fraction)
    assert [row.tolist() for row in got] == reference.top_tokens(rows, fraction)


@given(rows=LEVELS, fraction=FRACTIONS)
def test_equal_entropies_are_taken_or_left_together(rows: list[list[int]], fraction: float) -> None:
    """At least the fraction, and no more than the last class of equals adds."""
    flat = np.concatenate(rows)
    chosen = np.concatenate(select_tokens([np.array(row, dtype=np.float32) for row in rows], fraction))
    count = exact_share(fraction, len(flat))
    assert chosen.sum() >= count > chosen.sum() - (flat == flat[chosen].min()).sum()
    assert chosen.all() or flat[chosen].min() > flat[~chosen].max()


def test_completions_that_share_a_prefix_keep_or_lose_it_together() -> None:
    """A cut through it would leave one completion's advantage where the other's cancels it."""
    prefix = [0.5, 0.5]
    rows = select_tokens([np.array([*prefix, 0.9]), np.array([*prefix, 0.1])], 0.5)
    assert [row.tolist() for row in rows] == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize(("fraction", "count", "wanted"), [(0.55, 100, 55), (0.07, 100, 7), (0.56, 25, 14)])
def test_a_share_is_that_of_the_decimal_number_that_was_written(fraction: float, count: int, wanted: int) -> None:
    """In floats 0.55 * 100 is a little more than 55, and its ceiling 56."""
    assert share_count(fraction, count) == wanted < math.ceil(fraction * count)
    (row,) = select_tokens([np.arange(count, dtype=np.float32)], fraction)
    assert row.sum() == wanted


@given(fraction=FRACTIONS, count=st.integers(1, 10_000))
def test_a_share_is_the_smallest_number_that_is_enough(fraction: float, count: int) -> None:
    assert share_count(fraction, count) == exact_share(fraction, count)


def exact_share(fraction: float, count: int) -> int:
    """Counted up from nothing in decimal arithmetic."""
    whole = int(Decimal(repr(fraction)) * count)
    return whole if Decimal(whole) == Decimal(repr(fraction)) * count else whole + 1


@given(values=DISTINCT, fraction=FRACTIONS, data=st.data())
def test_neither_the_cut_into_rows_nor_their_order_matters(
    values: list[float], fraction: float, data: st.DataObject
) -> None:
    flat = np.array(values, dtype=np.float32)
    whole = set(flat[select_tokens([flat], fraction)[0]].tolist())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(flat)), max_size=5)) - {len(flat)})
    rows = data.draw(st.permutations(np.split(flat, cuts)))
    chosen = np.concatenate(select_tokens(rows, fraction))
    assert set(np.concatenate(rows)[chosen].tolist()) == whole


def test_a_fraction_of_one_selects_everything() -> None:
    rows = select_tokens([np.array([0.0, 3.0]), np.array([0.0])], 1.0)
    assert [row.tolist() for row in rows] == [[True, True], [True]]


@pytest.mark.parametrize("fraction", [1e-9, 0.2])
def test_at_least_one_token_is_selected(fraction: float) -> None:
    rows = select_tokens([np.array([0.1]), np.array([0.3, 0.2])], fraction)
    assert [row.tolist() for row in rows] == [[False], [True, False]]


@pytest.mark.parametrize("values", [[math.nan] * 4, [0.1, math.nan, 0.3, 0.2]])
def test_entropies_that_are_no_numbers_are_not_masked_away(values: list[float]) -> None:
    """The update refuses what is not finite, and it can refuse only what it sees."""
    (row,) = select_tokens([np.array(values)], 0.5)
    assert row[np.isnan(values)].all()
