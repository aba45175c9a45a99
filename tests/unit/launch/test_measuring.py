"""launch/plan/machine.py measures in seconds, also what takes this processor seconds."""

import time
from dataclasses import dataclass, field

import pytest

from launch.plan.machine import ENOUGH_S, FEW_ROWS, SLOW_S, best_time, gradient_time


def test_slow_calls_are_made_twice_and_quick_ones_until_the_time_is_up() -> None:
    made: list[str] = []

    def call(name: str, seconds: float) -> None:
        made.append(name)
        time.sleep(seconds)

    assert best_time(lambda: call("a", ENOUGH_S), lambda: call("b", ENOUGH_S)) >= ENOUGH_S
    assert made == ["a", "a"]
    made.clear()
    assert best_time(lambda: call("a", 0.001), lambda: call("b", 0.001)) < ENOUGH_S
    assert made[:4] == ["a", "b", "a", "b"] and len(made) > 4


@dataclass
class Rows:
    """A gradient whose product takes a time for each row."""

    row_s: float
    count: int = 512
    multiplied: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.row_s, rows.stop, self.multiplied)

    def matmul(self, weight: str) -> None:
        self.multiplied.append(self.count)
        time.sleep(self.count * self.row_s)


def test_a_gradient_that_is_slow_for_a_few_rows_is_not_measured_with_all() -> None:
    slow, quick = Rows(2 * SLOW_S / FEW_ROWS), Rows(1e-5)
    assert gradient_time(slow, ["w"]) == pytest.approx(512 * slow.row_s, rel=0.5)
    assert {*slow.multiplied} == {FEW_ROWS}
    assert gradient_time(quick, ["w", "w"]) >= 512 * quick.row_s
    assert {*quick.multiplied} == {FEW_ROWS, 512}
