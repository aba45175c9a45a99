"""What benchmarks/window.py makes of the turns of a watched run."""

from typing import Any

import pytest

from benchmarks.student import mean_interval

bench: Any = pytest.importorskip("benchmarks.window", reason="benchmarks/window.py needs playwright")


def test_the_cost_is_student_s_interval_of_the_pairs_which_are_kept() -> None:
    turns = [bench.Turn(who="asked", steps=[], processor=0.9)]  # No step ended in it.
    for on, off in ((1.02, 1.0), (1.8, 2.0), (1.2, 1.0), (1.0, 1.0), (0.95, 1.0)):
        turns += [bench.Turn(who="asked", steps=[on - 0.1, on + 0.1], processor=0.01)]
        turns += [bench.Turn(who="nobody", steps=[off], processor=0.0)]
        turns += [bench.Turn(who="shown", steps=[9.0], processor=0.5)]
        turns += [bench.Turn(who="nobody", steps=[off], processor=0.0)]
    found = bench.cost_of("asked", turns)
    assert found["cost"] == mean_interval([0.02, -0.1, 0.2, 0.0, -0.05], digits=4)
    assert found["pairs_step_s"] == [
        pytest.approx(pair) for pair in ((1.02, 1.0), (1.8, 2.0), (1.2, 1.0), (1.0, 1.0), (0.95, 1.0))
    ]
    assert (found["step_s"], found["processor"]) == (pytest.approx(1.2), pytest.approx(0.01))
