"""A machine is measured in seconds, also where calls take seconds, and what was measured is kept."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest
import torch
from msgspec import structs

from launch.commands.run import speeds_of
from launch.plan.cost import make_plan, plan_as_json, table
from launch.plan.machine import (
    MAX_BUSY_AGE_S,
    ROWS,
    NotMeasured,
    OtherTimes,
    Speed,
    machine_speed,
    measure_elsewhere,
)
from launch.plan.measuring import ENOUGH_S, SLOW_S, TRIED_ROWS, gradient_time, layer_times, usual_time
from launch.plan.timed_layers import DEEP, SHALLOW, TURNS, USUAL, solved
from launch.plan.work import Dtype
from shared.config.processes import ComputeConfig
from shared.process.processor import BF16_FLAGS, CPUINFO, read_flags
from tests.support.machines import HALF, SPEED
from tests.unit.launch.test_plan import dry_run, work


def test_slow_calls_are_made_twice_and_quick_ones_until_the_time_is_up() -> None:
    made: list[str] = []

    def call(name: str, seconds: float) -> None:
        made.append(name)
        time.sleep(seconds)

    assert usual_time(lambda: call("a", ENOUGH_S), lambda: call("b", ENOUGH_S)) >= ENOUGH_S
    assert made == ["a", "a"]
    made.clear()
    assert usual_time(lambda: call("a", 0.001), lambda: call("b", 0.001)) < ENOUGH_S
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
    slow, quick = Rows(2 * SLOW_S / TRIED_ROWS), Rows(1e-5)
    assert gradient_time(slow, ["w"]) == pytest.approx(512 * slow.row_s, rel=0.5)
    assert {*slow.multiplied} == {TRIED_ROWS}
    assert gradient_time(quick, ["w", "w"]) >= 512 * quick.row_s
    assert {*quick.multiplied} == {TRIED_ROWS, 512}


def test_a_call_that_waits_for_other_programs_hardly_counts() -> None:
    made: list[int] = []

    def call() -> None:
        made.append(1)
        time.sleep(ENOUGH_S / 2 if len(made) == 5 else ENOUGH_S / 40)

    assert usual_time(call) < ENOUGH_S / 10 and len(made) > 10


def quiet() -> bool:
    return False


class Measuring:
    """Counts how often it is asked."""

    def __init__(self, speed: Speed = SPEED) -> None:
        self.speed = speed
        self.asked: list[int] = []

    def __call__(self, threads: int, blas: str, dtype: str) -> Speed:
        self.asked.append(threads)
        return self.speed


def test_a_measurement_is_kept_for_its_number_of_threads(tmp_path: Path) -> None:
    measuring = Measuring()
    for threads in (2, 2, 1, 2, 1):
        assert machine_speed(tmp_path / "cache", threads, "fast", "fp32", measure=measuring, is_busy=quiet) == SPEED
    assert measuring.asked == [2, 1]
    machine_speed(tmp_path / "cache", 2, "portable", "fp32", measure=measuring, is_busy=quiet)
    assert measuring.asked == [2, 1, 2]
    machine_speed(tmp_path / "cache", 2, "fast", "bf16", measure=measuring, is_busy=quiet)
    assert measuring.asked == [2, 1, 2, 2], "another number type"


@pytest.mark.parametrize("looks", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("age", [MAX_BUSY_AGE_S - 10, MAX_BUSY_AGE_S + 10])
@pytest.mark.parametrize("busy", [False, True])
def test_what_is_measured_beside_others_is_kept_while_others_compute(
    looks: tuple[bool, bool], age: float, busy: bool, tmp_path: Path
) -> None:
    measuring, seen = Measuring(), iter(looks)
    machine_speed(tmp_path, 2, "fast", "fp32", measure=measuring, is_busy=lambda: next(seen))
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps(content | {"seconds_since_1970": content["seconds_since_1970"] - age}))
    again = any(looks) and (age > MAX_BUSY_AGE_S or not busy)
    found = machine_speed(tmp_path, 2, "fast", "fp32", measure=measuring, is_busy=lambda: busy)
    assert found == structs.replace(SPEED, busy=any(looks) and busy)
    assert measuring.asked == ([2, 2] if again else [2])


@pytest.mark.parametrize("damage", ["torn", "zeros", "no json", "other facts", "old", "from the future", "negative"])
def test_a_file_that_cannot_be_used_is_measured_again(damage: str, tmp_path: Path) -> None:
    measuring = Measuring()
    machine_speed(tmp_path, 2, "fast", "fp32", measure=measuring, is_busy=quiet)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    content = json.loads(whole)
    changed = {
        "other facts": {"facts": content["facts"] | {"torch": "1.0"}},
        "old": {"seconds_since_1970": content["seconds_since_1970"] - 40 * 86_400},
        "from the future": {"seconds_since_1970": content["seconds_since_1970"] + 86_400},
        "negative": {"speed": content["speed"] | {"byte": -1.0}},
    }
    bytes_of = {"torn": whole[: len(whole) // 2], "zeros": bytes(len(whole)), "no json": b"\xff{"}
    file.write_bytes(bytes_of.get(damage) or json.dumps(content | changed[damage]).encode())
    assert machine_speed(tmp_path, 2, "fast", "fp32", measure=measuring, is_busy=quiet) == SPEED
    assert measuring.asked == [2, 2]
    assert machine_speed(tmp_path, 2, "fast", "fp32", measure=measuring, is_busy=quiet) == SPEED
    assert measuring.asked == [2, 2], "the file is whole again"


def test_a_cache_that_cannot_be_written_costs_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert machine_speed(tmp_path / "file" / "cache", 2, "fast", "fp32", measure=Measuring(), is_busy=quiet) == SPEED


@pytest.mark.parametrize(("threads", "asked"), [((2, 2), [2]), ((1, 2), [1, 2])])
def test_processes_with_the_same_threads_are_measured_once_even_without_a_cache(
    tmp_path: Path, threads: tuple[int, int], asked: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    measuring = Measuring()
    compute = ComputeConfig(actor_threads=threads[0], learner_threads=threads[1])
    found = speeds_of(compute, tmp_path / "file" / "cache", measure=measuring)
    assert [structs.replace(speed, busy=False) for speed in found] == [SPEED, SPEED]
    assert measuring.asked == asked


def test_a_machine_that_starts_no_process_has_a_plan_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # No process starts with a variable of this length.
    monkeypatch.setenv("TOO_LONG", "x" * 2**20)
    with pytest.raises(NotMeasured, match="cannot be started"):
        measure_elsewhere(1, "fast", "fp32")
    text = dry_run(capsys, "--set", f"model.cache_dir={tmp_path}")
    assert "predicted memory: " in text and "predicted time: unknown, the measurement cannot be started" in text


def test_a_machine_that_cannot_be_measured_has_no_time() -> None:
    def fail() -> tuple[Speed, Speed]:
        raise NotMeasured("it has no torch")

    found = make_plan(HALF, work(), None, steps=10, speeds=fail)
    assert found.time is None and found.fits
    assert "predicted time: unknown, it has no torch" in table(found)


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_this_machine_is_measured_within_seconds(dtype: Dtype) -> None:
    if dtype == "bf16" and not {*BF16_FLAGS} & read_flags(CPUINFO):
        pytest.skip("this processor emulates bf16, which takes most of a minute")
    rates = measure_elsewhere(1, "fast", dtype).rates
    assert rates.product[-1] > rates.product[0] > 0, "512 rows take longer than one"


TINY_VALUES, NARROW_VALUES = 4 * 64 + 2 * 128, 4 * 128 + 2 * 384
"""Of one row."""


class Written:
    """Times of calls, in their order; each call is made once."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, work: Callable[[], object]) -> float:
        work()
        return self.seconds.pop(0)


def turns(layer_s: float, first_s: float = 1e-3) -> list[float]:
    """Of models with SHALLOW and with DEEP layers that take so long each, and of what is not in layers."""
    return TURNS * [first_s + SHALLOW * layer_s, first_s + DEEP * layer_s]


def test_calls_and_values_are_solved_from_the_measured_times() -> None:
    step = [*turns(1e-3), *turns(10e-3), DEEP * 2e-3]
    update = [*turns(5e-3), *turns(30e-3), DEEP * 6e-3, DEEP * 8e-3]
    folded = [*turns(0.8e-3), *turns(5e-3), DEEP * 2e-3]
    timed = Written(*step, *update, *folded)
    found = layer_times(torch.float32, timed)
    per_value = 7e-3 / (128 * NARROW_VALUES - 8 * TINY_VALUES)
    assert structs.astuple(found.token_step) == pytest.approx((1e-3 - 8 * TINY_VALUES * per_value, per_value))
    per_value = (30e-3 - 14e-3 - 5e-3) / (2 * 9 * USUAL * NARROW_VALUES - 160 * TINY_VALUES)
    assert structs.astuple(found.update) == pytest.approx((5e-3 - 160 * TINY_VALUES * per_value, per_value))
    assert found.folded_token_step.per_value == pytest.approx(2.2e-3 / (128 * NARROW_VALUES - 8 * TINY_VALUES))
    assert not timed.seconds


def test_a_slow_processor_measures_less() -> None:
    """One turn of calls that take long, and one prompt in the update of a narrow layer."""
    tiny, narrow = (0.1, 0.9), (0.2, 1.4)
    timed = Written(*tiny, *narrow, 0.08, *tiny, *narrow, 0.08, 0.08, *tiny, *narrow, 0.08)
    found = layer_times(torch.float32, timed)
    layer, whole = 0.8 / (DEEP - SHALLOW), 1.2 / (DEEP - SHALLOW)
    values = 9 * USUAL * NARROW_VALUES - 160 * TINY_VALUES
    assert found.update.per_value == pytest.approx((whole - 0.16 / DEEP - layer) / values)
    assert not timed.seconds


def test_a_difference_of_times_counts_as_a_tenth_at_least() -> None:
    assert solved(1.0, 2.0, 1.5, 0, 10) == OtherTimes(calls=1.0, per_value=0.02)
    assert solved(1.0, 9.0, 1.0, 10, 11).calls == 0.1


def test_products_between_two_measurements_are_on_a_line() -> None:
    assert ROWS == (1, 8, 32, 128, 512)
    for rows, expected in ((1, 1e-9), (20, 1e-9), (80, 1.5e-9), (128, 2e-9), (320, 5e-9), (512, 8e-9), (1024, 16e-9)):
        assert SPEED.product_s(rows) == pytest.approx(expected)
    assert SPEED.product_s(0.5) == pytest.approx(1e-9)


@pytest.mark.parametrize("busy", [False, True])
def test_the_plan_says_that_other_processes_computed_while_the_machine_was_measured(busy: bool) -> None:
    quiet_one, other = SPEED, structs.replace(SPEED, busy=busy)
    for speeds in ((quiet_one, other), (other, quiet_one)):
        found = make_plan(HALF, work(), None, steps=10, speeds=lambda speeds=speeds: speeds)
        assert ("less if nothing else computes" in table(found)[-1]) is busy
        assert plan_as_json(found)["measured_while_busy"] is busy
