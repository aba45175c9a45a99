"""The race against TRL: one optimizer on both sides, and the figures of a side are those of its best rate."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.time_to_reward import SEEDS, SIDES, summary, trl_argv
from launch.presets.load import load_config

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "trl_grpo.py"


def test_trl_is_given_the_numbers_of_our_optimizer(tmp_path: Path) -> None:
    args = argparse.Namespace(trl_python="python", target=0.9, max_steps=60, threads=2)
    argv = trl_argv("2e-3", 1, args, tmp_path, tmp_path / "out")
    given = dict(zip(argv[3::2], argv[4::2], strict=True))
    ours = load_config("embedded").optimizer
    assert (given["--beta1"], given["--beta2"]) == (str(ours.beta1), str(ours.beta2)) == ("0.9", "0.95")
    assert (given["--weight-decay"], given["--max-grad-norm"]) == (str(ours.weight_decay), str(ours.max_grad_norm))
    assert (given["--lr"], given["--seed"]) == ("2e-3", "1")
    text = SCRIPT.read_text()
    assert "adam_beta2=float(args.beta2)" in text and text.count("0.99") == 0


def run(side: str, lr: str, seed: int, seconds: float | None) -> dict[str, Any]:
    return {
        "side": side,
        "lr": lr,
        "seed": seed,
        "seconds_to_target": seconds,
        "steps_to_target": 10,
        "median_step_s": (seconds or 1.0) / 10,
        "peak_memory_mb": 500,
        "peak_resident_mb": 600,
    }


def test_a_rate_must_reach_the_target_with_all_seeds_and_ratios_have_intervals() -> None:
    runs = [run(side, "2e-3", seed, 10.0 + seed) for side in SIDES[:2] for seed in SEEDS]
    runs += [run("trl", "2e-3", seed, 30.0 + 3 * seed) for seed in SEEDS]
    # Faster, but not always.
    runs += [run("tandem", "4e-3", seed, 5.0 if seed else None) for seed in SEEDS]
    found = summary(runs, len(SEEDS))
    assert found["best"]["tandem"]["lr"] == "2e-3" and found["best"]["tandem"]["seconds_to_target"]["n"] == 3
    assert found["tandem"]["times_faster"] == {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 3}
    assert found["tandem"]["memory_ratio"]["mean"] == 1.0


def test_a_side_that_never_arrives_is_told_and_the_runs_are_not_lost() -> None:
    runs = [run(side, "2e-3", seed, None if side == "trl" else 9.0) for side in SIDES for seed in SEEDS]
    found = summary(runs, len(SEEDS))
    assert found["best"]["trl"] is None and "tandem" not in found and found["best"]["tandem"]["lr"] == "2e-3"
