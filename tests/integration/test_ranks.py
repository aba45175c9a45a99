"""Several ranks as real processes over gloo: one gradient, one adapter on all, kills, other numbers, replay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from learner.update.placement.divided import frozen_linears
from learner.update.placement.placement import ALONE
from shared.run.failpoints import KILL, PLAN, VARIABLE
from tests.support.fakes import tiny_policy
from tests.support.rank_processes import gradients_of
from tests.support.runs import ROOT, SMALL, launch, num_rows, replayed, rows, sets, start, summary, wait_until

pytestmark = pytest.mark.timeout(900)
NUMBERS = (2, 4)


@pytest.fixture(scope="module")
def steps(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank of two and of four had after one step."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_policy(checkpoint)  # Its quantised base is made once.
    argv = [sys.executable, "-m", "tests.support.rank_processes", str(checkpoint), str(folder), *map(str, NUMBERS)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", NUMBERS)
def test_the_gradient_is_that_of_one_process_and_the_adapter_the_same_on_all(
    steps: Path, checkpoint: Path, ranks: int
) -> None:
    found = [load_file(steps / f"{ranks}-{rank}.safetensors") for rank in range(ranks)]
    expected, stats = gradients_of(tiny_policy(checkpoint), ALONE)
    for name, gradient in expected.items():
        assert (found[0][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    in_turns = load_file(steps / f"{ranks}-in-turns.safetensors")
    for one in found:
        assert one.keys() == in_turns.keys()
        assert all(torch.equal(one[name], value) for name, value in in_turns.items()), "to the bit"
        assert float(one["norm"]) == pytest.approx(stats.grad_norm, rel=1e-5)


@pytest.mark.parametrize(("ranks", "kind"), [(2, ""), (4, ""), (2, "-modules"), (2, "-bf16")])
def test_a_divided_base_gives_the_bits_of_a_whole_one(steps: Path, ranks: int, kind: str) -> None:
    for rank in range(ranks):
        whole, divided = (load_file(steps / f"{ranks}-{rank}{kind}{how}.safetensors") for how in ("", "-divided"))
        assert divided.keys() == whole.keys() and any(value.any() for value in whole.values())
        assert all(torch.equal(divided[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("ranks", "kind"), [(2, ""), (4, ""), (2, "-modules"), (2, "-bf16")])
def test_divided_moments_give_the_bits_of_whole_ones_and_each_sum_to_its_owner(
    steps: Path, ranks: int, kind: str
) -> None:
    whole = load_file(steps / f"{ranks}-0{kind}.safetensors")
    found = [load_file(steps / f"{ranks}-{rank}{kind}-owned.safetensors") for rank in range(ranks)]
    sums = {name for name in whole if f"adapter {name}" in whole}
    assert sorted(name for one in found for name in one if name in sums) == sorted(sums), "each on one rank"
    for one in found:
        assert whole.keys() - one.keys() < sums and one.keys() & sums
        assert all(torch.equal(value, whole[name]) for name, value in one.items())


@pytest.mark.parametrize("ranks", NUMBERS)
def test_clipped_steps_and_a_checkpoint_have_the_same_bits_with_divided_moments(steps: Path, ranks: int) -> None:
    whole = load_file(steps / f"{ranks}-0-ddp-clipped.safetensors")
    assert all(norm > 0.01 for norm in whole["norms"].tolist()), "clipped"
    for rank in range(ranks):
        found = load_file(steps / f"{ranks}-{rank}-zero2-clipped.safetensors")
        assert found.keys() == whole.keys() and all(torch.equal(found[name], value) for name, value in whole.items())
    moments = (steps / f"{ranks}-0-ddp-clipped.moments").read_bytes()
    assert (steps / f"{ranks}-0-zero2-clipped.moments").read_bytes() == moments
    own = [load((steps / f"{ranks}-{rank}-zero2-clipped.own").read_bytes()) for rank in range(ranks)]
    assert sorted(key for one in own for key in one) == sorted(load(moments))


@pytest.mark.parametrize("ranks", NUMBERS)
def test_ranks_have_parts_that_make_up_the_base_and_none_has_a_whole_weight(
    steps: Path, checkpoint: Path, ranks: int
) -> None:
    found = [json.loads((steps / f"{ranks}-{rank}-kept.json").read_text()) for rank in range(ranks)]
    weights = [linear.matmul.dense for linear in frozen_linears(tiny_policy(checkpoint))]
    assert sum(one["bytes"] for one in found) == sum(weight.nbytes for weight in weights if weight is not None) > 0
    assert max(one["bytes"] for one in found) <= sum(one["bytes"] for one in found) / ranks * 1.1
    assert [one["whole"] for one in found] == [0] * ranks


@pytest.mark.parametrize("ranks", NUMBERS)
def test_ranks_that_gather_a_weight_end_when_one_of_them_is_killed(steps: Path, ranks: int) -> None:
    for rank in range(ranks - 1):
        assert "Another rank of the learner is gone" in (steps / f"{ranks}-{rank}-lost").read_text()


@pytest.mark.long
def test_two_ranks_then_four_then_one_and_a_replay(tmp_path: Path) -> None:
    ends: list[str] = []
    for parallel in ("ddp", "fsdp2", "zero2"):
        out, keys = tmp_path / parallel, {"run.steps": 2, "compute.parallel": parallel, "actor.audit_invited": 0}
        first = launch("run", "embedded", "--ranks", "2", "--out", out, *sets(SMALL | keys))
        assert first.returncode == 0, first.stdout + first.stderr
        assert "computes with" in (out / "logs" / "learner1.log").read_text()
        for ranks, steps in ((4, 4), (1, 5)):
            done = launch("resume", out, "--ranks", str(ranks), "--steps", str(steps))
            assert done.returncode == 0, done.stdout + done.stderr
        assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5]
        assert replayed(out)["match"] is True
        ends.append(summary(out)["adapter_sha256"])
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    ("parallel", "point"),
    [
        pytest.param("ddp", "after ranks add gradients 1", marks=pytest.mark.long),
        pytest.param("zero2", "after ranks share parameters 1", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_ends_the_run_with_its_name_and_resume_goes_on(tmp_path: Path, parallel: str, point: str) -> None:
    out, plan = tmp_path / "run", tmp_path / "plan"
    plan.mkdir()
    fault = {"point": point, "hit": 3, "act": KILL}
    (plan / PLAN).write_text(json.dumps({"faults": [fault]}))
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--ranks", "2", "--out", str(out)]
    argv += sets(SMALL | {"run.steps": 4, "compute.parallel": parallel})
    environment = os.environ | {VARIABLE: str(plan)}
    killed = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert killed.returncode == 1 and num_rows(out) < 4, killed.stdout + killed.stderr
    assert "learner1 was ended by SIGKILL" in killed.stderr + killed.stdout
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(out)["status"] == "done" and replayed(out)["match"] is True


@pytest.mark.long
def test_ranks_with_a_part_of_the_moments_stop_together_and_lose_nothing(tmp_path: Path) -> None:
    out, keys = tmp_path / "run", {"run.steps": 16, "checkpoint.every": 16, "compute.parallel": "zero2"}
    launcher = start("run", "embedded", "--ranks", "2", "--out", out, *sets(SMALL | keys))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    stopped = summary(out)
    assert stopped["status"] == "stopped" and 0 < stopped["steps"] == num_rows(out) < 16
    assert (out / "checkpoints" / f"step-{stopped['steps']:06d}" / "optimizer.safetensors").is_file()
    # Now nobody fills their orders.
    argv = [sys.executable, "-m", "learner", "--run", str(out), "--meeting", "here"]
    with (tmp_path / "log").open("wb") as log:
        ranks = [subprocess.Popen([*argv, "--rank", str(rank)], cwd=ROOT, stderr=log) for rank in range(2)]
    wait_until(lambda: "begins at step" in (tmp_path / "log").read_text(), "the first order")
    ranks[0].send_signal(signal.SIGTERM)
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    assert summary(out)["status"] == "stopped" and summary(out)["steps"] == stopped["steps"]
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(out)["status"] == "done" and replayed(out)["match"] is True
