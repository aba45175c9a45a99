"""Student's interval of a handful of runs, against a textbook example and by how often it covers."""

import numpy as np
import pytest

from benchmarks.mean_interval import T_975, mean_interval


def test_a_textbook_example() -> None:
    """n = 5, mean 10, s = sqrt 2.5: 10 -+ 2.776 * 1.5811 / 2.2361."""
    assert mean_interval([8, 9, 10, 11, 12]) == pytest.approx([10.0, 8.0371, 11.9629], abs=1e-4)


def test_one_run_has_no_interval() -> None:
    assert mean_interval([3.0]) is None and mean_interval([]) is None


@pytest.mark.parametrize("count", sorted(freedom + 1 for freedom in T_975))
def test_it_covers_the_truth_in_95_of_100_cases(count: int) -> None:
    rng = np.random.default_rng(count)
    covered = 0
    for values in rng.normal(7.0, 3.0, (4000, count)):
        found = mean_interval(values.tolist())
        assert found is not None
        covered += found[1] <= 7.0 <= found[2]
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)
