"""The top rho of a step's tokens, and that nothing but the entropies decides which."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.entropy_mask import select_tokens
from tests import reference

FRACTIONS = st.sampled_from([0.01, 0.1, 0.2, 1 / 3, 0.5, 0.8, 0.99, 1.0])
LEVELS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6)
DISTINCT = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40, unique=True)


@given(rows=LEVELS, fraction=FRACTIONS)
def test_equals_the_definition_with_ties(rows: list[list[int]], fraction: float) -> None:
    got = select_tokens([np.array(row, dtype=np.float32) for row in rows], fraction)
    assert [row.tolist() for row in got] == reference.top_tokens(rows, fraction)


@given(rows=LEVELS, fraction=FRACTIONS)
def test_the_count_is_exact_and_no_masked_token_is_above_a_selected_one(rows: list[list[int]], fraction: float) -> None:
    flat = np.concatenate(rows)
    chosen = np.concatenate(select_tokens([np.array(row, dtype=np.float32) for row in rows], fraction))
    assert chosen.sum() == math.ceil(fraction * len(flat))
    assert chosen.all() or flat[chosen].min() >= flat[~chosen].max()


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
