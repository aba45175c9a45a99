"""Evaluation by a process of its own: the results of the run's own evaluations, and not a bit of the training changed,
also if it is killed."""

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.durable.journal import Journal
from learner.durable.recorder import orders_in, read
from tests.support.runs import SMALL, kill, launch, processes_of, rows, sets, start, summary, wait_until
from tests.support.wire_examples import plain, timings

EVALUATED = SMALL | {"eval.problems": 8, "eval.every": 2, "eval.samples": 2, "checkpoint.keep": 1}
LABELS = ["base", "final", "step-000002", "step-000004"]


def stored(out: Path) -> dict[str, dict[str, Any]]:
    """Label -> evaluation, without its time."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((out / "eval").glob("*.json"))}
    return {label: {key: value for key, value in one.items() if key != "wall_s"} for label, one in found.items()}


def recorded(out: Path) -> list[object]:
    """All groups that were trained on, without the times of the actor."""
    packed = (one for payload in Journal.read(out / "journal").records() for one in orders_in(payload).values())
    return [plain(msgspec.structs.replace(read(one), timings=timings())) for one in packed]


@pytest.mark.long
def test_a_run_that_is_evaluated_beside_is_the_same_run(tmp_path: Path) -> None:
    own, out = tmp_path / "own", tmp_path / "beside"
    assert launch("run", "embedded", "--out", own, *sets(EVALUATED)).returncode == 0
    launcher = start("run", "embedded", "--out", out, *sets(EVALUATED | {"eval.beside": True}))
    wait_until(lambda: (out / "eval" / "base.json").exists(), "the evaluation of the base")
    kill(processes_of(out, "launch.evaluator"))
    shown, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, shown
    assert "starting it again" in shown, shown
    assert summary(out)["adapter_sha256"] == summary(own)["adapter_sha256"]
    assert recorded(out) == recorded(own)
    assert list(stored(out)) == LABELS and stored(out) == stored(own)
    assert summary(out)["eval"]["final"]["greedy"] == stored(own)["final"]["greedy"]
    best = [json.loads((run / "checkpoints" / "best.json").read_text()) for run in (own, out)]
    assert best[0] == best[1]
    assert launch("eval", out, "--checkpoint", "best").returncode == 0
    assert {row["eval/step"] for row in rows(out) if "eval/step" in row} <= {0, 2, 4}
    assert not processes_of(out, "launch.evaluator")


@pytest.mark.long
def test_a_run_is_followed_by_hand_until_it_ends(tmp_path: Path) -> None:
    out = tmp_path / "run"
    longer = SMALL | {"run.steps": 30, "checkpoint.keep": 30, "eval.problems": 4}
    launcher = start("run", "embedded", "--out", out, *sets(longer))
    wait_until(lambda: (out / "config.json").exists(), "the run")
    follow = ("eval", out, "--follow")
    first = start(*follow)
    # The base and the last step are evaluated by the run itself as well.
    wait_until(lambda: "step-000002" in stored(out), "the first result")
    # It would otherwise have made all of them before the second looks, on a busy machine.
    first.send_signal(signal.SIGSTOP)
    refused = launch(*follow)
    assert refused.returncode == 2 and "is being evaluated by process" in refused.stderr
    first.kill()
    first.communicate(timeout=60)
    made = list(stored(out))
    second = launch(*follow)
    assert second.returncode == 0, second.stderr
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and summary(out)["status"] == "done"
    labels = ["base", "final", *(f"step-{step:06d}" for step in range(2, 30, 2))]
    assert sorted(stored(out)) == sorted(labels)
    told = [line.partition(":")[0] for line in second.stdout.splitlines() if ": greedy" in line]
    assert set(told) - {"final"} == set(labels) - set(made) - {"final"} and len(told) == len(set(told)), "each once"
    assert launch(*follow).stdout == "", "nothing is missing"
