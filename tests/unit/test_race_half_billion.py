"""The race with a real model: both sides get the same numbers, steps without work are refused, ratios are to the better
side of TRL."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.process_tree import Watched
from benchmarks.race_half_billion import TRL_SIDES, configured, figures_of, overrides, summary, tandem_argv, trl_argv

WATCHED = Watched(code=0, wall_s=60.0, pss_mb=2000.4, rss_mb=3000.4)


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"trl_python": "python", "steps": 3, "tokens": 64, "threads": 2, "dtype": "bf16", "set": []} | given
    )


def test_both_sides_get_the_same_sizes_lora_and_optimizer(tmp_path: Path) -> None:
    args = arguments(set=["optimizer.lr=3e-4", "lora.rank=8"])
    ours = configured(4, args, tmp_path)
    assert ours.compute.dtype == "bf16" and configured(4, arguments(dtype="fp32"), tmp_path).compute.dtype == "fp32"
    assert ours.optimizer.warmup_steps == 0 and ours.optimizer.schedule == "constant"
    assert (ours.rollout.prompts, ours.rollout.group, ours.rollout.max_new_tokens) == (4, 8, 64)
    for side in ("trl_fp32", "trl_bf16"):
        argv = trl_argv(side, 4, args, tmp_path, tmp_path / "out")
        given = dict(zip(argv[3::2], argv[4::2], strict=True))
        assert given["--dtype"] == side.removeprefix("trl_")
        assert (given["--prompts"], given["--group"], given["--tokens"]) == ("4", "8", "64")
        assert given["--micro-batch"] == "8"
        assert (given["--rank"], float(given["--alpha"])) == ("8", ours.lora.alpha)
        assert (float(given["--lr"]), float(given["--beta2"])) == (3e-4, ours.optimizer.beta2)
        assert (given["--model"], given["--tasks"]) == (ours.model.path, ours.tasks.source)
        assert (given["--reward"], given["--max-steps"], given["--threads"]) == ("parity", "3", "2")
    words = tandem_argv(4, args, tmp_path, tmp_path / "out")
    assert [word for word in words if "=" in word] == overrides(4, args, tmp_path)


def rows(**last: float) -> list[dict[str, float]]:
    found = [{"time_s": time, "length": 64.0, "grad_norm": 0.1} for time in (9.0, 11.0, 15.0, 18.0)]
    return [*found[:-1], found[-1] | last]


def test_the_first_step_does_not_count() -> None:
    found = figures_of(rows(), WATCHED, 4, 64)
    assert found["step_s"] == [2.0, 4.0, 3.0] and found["median_step_s"] == 3.0
    assert (found["peak_memory_mb"], found["peak_resident_mb"]) == (2000, 3000)


@pytest.mark.parametrize("last", [{"length": 60.0}, {"grad_norm": 0.0}, {"grad_norm": float("nan")}])
def test_a_step_that_did_less_work_is_refused(last: dict[str, float]) -> None:
    with pytest.raises(SystemExit, match="not 4 steps of 64 tokens with a gradient"):
        figures_of(rows(**last), WATCHED, 4, 64)
    with pytest.raises(SystemExit, match="not 5 steps"):
        figures_of(rows(), WATCHED, 5, 64)


def test_ratios_are_to_the_better_side_of_trl_in_each_figure() -> None:
    seconds, memory = {"tandem": 2.0, "trl_fp32": 16.0, "trl_bf16": 8.0}, {"tandem": 2, "trl_fp32": 3, "trl_bf16": 5}
    runs = [
        {"side": side, "median_step_s": seconds[side] * slow, "peak_memory_mb": 1000 * memory[side]}
        for slow in (1.0, 1.5, 2.0)
        for side in ("tandem", *TRL_SIDES)
    ]
    found = summary(runs, list(TRL_SIDES), base_mb=900)
    assert found["better_of_trl"] == {"median_step_s": "trl_bf16", "peak_memory_mb": "trl_fp32"}
    assert found["step_of_trl"] == {"mean": 0.25, "low": 0.25, "high": 0.25, "n": 3}
    assert found["memory_of_trl"]["mean"] == 0.667 and found["beyond_the_base_mb"] == 1100
    assert found["trl_fp32"]["median_step_s"]["mean"] == 24.0
    assert summary(runs, ["trl_bf16"], base_mb=900)["better_of_trl"]["peak_memory_mb"] == "trl_bf16"
