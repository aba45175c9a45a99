"""Order and arithmetic of benchmarks/tracker_cost.py, on planted times."""

from typing import Any, cast

import pytest

from benchmarks.student import mean_interval
from benchmarks.tracker_cost import KINDS, NONE, WARM, Block, Interleaved, cost_of, costs, interleaved


def test_every_block_of_a_tracker_has_one_without_on_both_sides() -> None:
    order = interleaved(4)
    assert order[::2] == [NONE] * 13
    assert sorted(order[1::2]) == sorted(KINDS * 4)
    assert {order[1 + 6 * number] for number in range(3)} == set(KINDS), "each comes first in some round"


def test_the_cost_is_by_the_neighbours() -> None:
    blocks = [(NONE, 1.0), ("wandb", 1.65), (NONE, 2.0), ("trackio", 2.0), (NONE, 2.0)]
    assert list(costs(blocks, "wandb")) == pytest.approx([0.1])
    assert list(costs(blocks, "trackio")) == pytest.approx([0.0])
    assert list(costs(blocks, "tensorboard")) == []


def test_the_interval_is_student_s_of_the_blocks_and_the_blocks_are_kept() -> None:
    blocks: list[Block] = [(NONE, 1.0)]
    for seconds in (1.01, 0.9, 1.2, 1.0, 1.1, 0.95):
        blocks += [("wandb", seconds), (NONE, 1.0)]
    found = cost_of(blocks, "wandb")
    assert found["blocks"] == [0.01, -0.1, 0.2, 0.0, 0.1, -0.05]
    assert found == {**mean_interval(found["blocks"], digits=4), "blocks": found["blocks"]}
    # t(0.975, 5) = 2.571; s = 0.108.
    assert found["high"] - found["mean"] == pytest.approx(2.571 * 0.108 / 6**0.5, abs=2e-4)


class StandIn:
    """An arm without a run directory, which notes what it was told."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.told: list[Any] = []
        self.steps = 0

    def write(self, step: int, *figures: Any) -> None:
        self.told.append(step)

    def stop(self) -> None:
        self.told.append("stop")

    def go_on(self) -> None:
        self.told.append("go on")

    def cpu_s(self) -> float:
        return 0.5

    def settle(self) -> None:
        """Nothing to do."""


def test_a_tracker_runs_in_its_blocks_only_and_gets_their_steps() -> None:
    none, wandb = StandIn(NONE), StandIn("wandb")
    files = Interleaved(cast(Any, [none, wandb]), [NONE, "wandb", NONE], 2)
    nothing = cast(Any, None)
    for step in range(WARM + 6):
        files.step(step, nothing, nothing, nothing, nothing)
    warm = list(range(WARM))
    assert wandb.told == [*warm, "stop", "go on", WARM + 2, WARM + 3, "stop"]
    assert none.told == [*warm, "stop", "go on", WARM, WARM + 1, "stop", "go on", WARM + 4, WARM + 5, "stop"]
    assert [kind for kind, _ in files.blocks] == [NONE, "wandb", NONE]
    assert files.started == {NONE: 0.5, "wandb": 0.5}
