"""Whose figures are in the result file of benchmarks/hostile_actors.py."""

from benchmarks.hostile_actors import measured_before, of_this_call
from benchmarks.machine import machine


def test_a_kind_has_the_machine_and_date_of_the_call_that_measured_it() -> None:
    assert of_this_call(80, {"passed": True}) == {"machine": machine(), "steps": 80, "passed": True}


def test_the_kinds_of_earlier_calls_have_theirs() -> None:
    before = measured_before()
    assert before and all(found["machine"].keys() == machine().keys() for found in before.values())
