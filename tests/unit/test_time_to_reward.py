"""The race with the embedded model: what a run's times are, and which environment each side has."""

from itertools import accumulate

import pytest

from benchmarks.time_to_reward import environment_of, times_of


def rows(*steps: tuple[float, float]) -> list[dict[str, float]]:
    """steps: reward and seconds of each."""
    times = accumulate(seconds for _, seconds in steps)
    return [{"reward": reward, "time_s": time} for (reward, _), time in zip(steps, times, strict=True)]


CLIMB = [(0.5, 9.0), (0.8, 2.0), (0.9, 2.2), (0.9, 2.0), (1.0, 2.2), (1.0, 2.4)]
"""The first step warms up; the mean of five is 0.92 at the sixth."""


def test_steps_past_the_target_are_not_in_the_median() -> None:
    stopped, went_on = rows(*CLIMB), rows(*CLIMB, *[(1.0, 0.5)] * 30)
    found = times_of(went_on, target=0.90)
    assert found == {"steps_to_target": 6, "seconds_to_target": 19.8, "median_step_s": 2.2}
    assert times_of(stopped, target=0.90) == found


def test_the_first_step_is_not_in_the_median() -> None:
    slow = rows((1.0, 50.0), *[(1.0, seconds) for seconds in (1.0, 2.0, 3.0, 4.0)])
    assert times_of(slow, target=0.90)["median_step_s"] == 2.5


def test_a_run_that_never_gets_there_has_the_median_of_all_its_steps() -> None:
    found = times_of(rows(*[(0.5, seconds) for seconds in (9.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0)]), target=0.90)
    assert (found["steps_to_target"], found["seconds_to_target"], found["median_step_s"]) == (None, None, 3.0)


@pytest.mark.parametrize("side", ["trl", "trl_fp32", "trl_bf16"])
def test_trl_gets_the_number_of_threads_and_nothing_else_of_ours(side: str) -> None:
    assert environment_of(side, 2) == {"OMP_NUM_THREADS": "2"}
    ours = environment_of("tandem", 2)
    assert ours["OMP_NUM_THREADS"] == "2" and "MKL_CBWR" in ours
    assert environment_of("tandem_ahead", 2) == ours
