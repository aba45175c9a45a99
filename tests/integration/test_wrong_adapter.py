"""An actor that holds other weights than it says is caught: by the canary before it samples, or by its samples."""

import math

import pytest

from actor.installer import CanaryMismatch
from benchmarks.local_run import Planted, run_here
from launch.presets.load import load_config
from learner.update.mismatch import Mismatch
from shared.run.metrics import StepMetrics

ONE_THREAD = ("compute.actor_threads=1", "compute.learner_threads=1")
FAULTY = 3
"""The version from which on something is wrong. That of step 0 has B = 0, where no fault of an adapter shows."""


def run(fault: str, *more: str) -> list[StepMetrics]:
    """Four steps with an engine that has a fault; no fault if it has no name."""
    sets = ("run.steps=4", "rollout.prompts=4", "optimizer.lr=0.003", "eval.problems=0", *ONE_THREAD)
    # Without lag: only samples of the current version must agree with it.
    config = load_config("embedded", (*sets, "pipeline.max_lag=0", *more))
    version = 0 if fault == "hot" else FAULTY
    return run_here(config, Planted(name=fault, version=version) if fault else None).rows


in_both_types = pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-4), pytest.param("bf16", 0.1, marks=pytest.mark.long)])
def test_the_right_adapter_agrees_to_rounding(dtype: str, most: float) -> None:
    found = [row.mismatch_p99 for row in run("", f"compute.dtype={dtype}")]
    # A step in which no group teaches has none.
    judged = [p99 for p99 in found if not math.isnan(p99)]
    assert len(judged) >= 3 and max(judged) <= most


@in_both_types
@pytest.mark.parametrize(
    ("fault", "step", "cause"),
    [
        ("stale", 4, "a stale adapter, half of one, or a wrong scale"),
        ("off", 4, "a stale adapter: the actor's log-probs are those of the base without one"),
        ("half", 4, "a stale adapter, half of one, or a wrong scale"),
        ("doubled", 4, "a wrong scale: the actor applies its adapter 2 times"),
        ("hot", 1, "the actor samples at temperature 1.2 where 1 was ordered"),
    ],
)
def test_the_gate_stops_the_run_and_names_the_fault(dtype: str, fault: str, step: int, cause: str) -> None:
    with pytest.raises(Mismatch, match=rf"Step {step}: .*Likely cause: {cause}"):
        run(fault, "guard.canary_tokens=0", f"compute.dtype={dtype}")


@in_both_types
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("stale", r"They are those of policy 2: the adapter was not installed\."),
        ("off", r"They are those of policy 0, the base without an adapter: the adapter was not installed\."),
        ("half", r"They show about \d+% of the adapter's effect: half an adapter, an old one, or a wrong scale\."),
        ("doubled", r"They show about 1\d\d% of the adapter's effect: half an adapter, an old one, or a wrong scale\."),
    ],
)
def test_the_canary_stops_it_before_anything_is_sampled(dtype: str, fault: str, cause: str) -> None:
    with pytest.raises(CanaryMismatch, match=rf"Policy 3 was installed, but this actor .*{cause}"):
        run(fault, f"compute.dtype={dtype}")
