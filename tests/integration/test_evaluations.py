"""Evaluations on the way, with real processes: the adapter is that of a run without any, also after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    SMALL,
    kill,
    launch,
    num_rows,
    processes_of,
    rows,
    sets,
    start,
    summary,
    train,
    wait_until,
)

EVALUATED = {"eval.problems": 8, "eval.every": 2, "eval.samples": 2, "pipeline.max_lag": 1}


def report(out: Path, label: str) -> dict[str, Any]:
    return json.loads((out / "eval" / f"{label}.json").read_text())


@pytest.mark.long
def test_evaluations_leave_the_adapter_alone_also_after_a_kill(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "run"
    expected = train(plain, pipeline__max_lag=1)["adapter_sha256"]
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | EVALUATED))
    wait_until(lambda: num_rows(out) >= 3, "the third step")
    kill(processes_of(out, "learner"))
    launcher.communicate(timeout=60)
    assert launch("resume", out).returncode == 0
    assert summary(out)["adapter_sha256"] == expected
    assert summary(out)["eval"]["final"]["greedy"]["n"] == 8
    assert sorted(path.stem for path in (out / "eval").glob("*.json")) == [
        "base",
        "final",
        "step-000002",
        "step-000004",
    ]
    assert report(out, "step-000004")["version"] == 4 and report(out, "final")["adapter_sha256"] == expected
    scores = {label: report(out, label) for label in ("step-000002", "step-000004", "final")}
    best = max((found["greedy"]["accuracy"], found["version"]) for found in scores.values())
    noted = json.loads((out / "checkpoints" / "best.json").read_text())
    assert (noted["accuracy"], noted["step"]) == best
    assert (out / "checkpoints" / f"step-{noted['step']:06d}" / "MANIFEST.json").is_file()
    # The command line finds what the learner found.
    before = report(out, "step-000004")
    assert launch("eval", out, "--checkpoint", "4").returncode == 0
    again = report(out, "step-000004")
    assert again["task_results"] == before["task_results"] and again["sampled"] == before["sampled"]
    assert set(again["sampled"]["maj_at"]) == {"1", "2"} and before["wall_s"] > 0
    # The row after an evaluation shows it, also after the kill.
    shown = {row["step"]: row["eval/step"] for row in rows(out) if "eval/step" in row}
    assert shown == {1: 0, 3: 2, 5: 4}
    assert rows(out)[4]["eval/maj_at_2"] == before["sampled"]["maj_at"]["2"]["accuracy"]
    assert "| greedy |" in (out / "eval" / "step-000004.md").read_text()


@pytest.mark.long
def test_the_test_set_is_read_by_eval_when_it_is_asked_for_and_never_by_a_run(tmp_path: Path) -> None:
    data, out = tmp_path / "sums", tmp_path / "run"
    data.mkdir()
    lines = [json.dumps({"question": f"What is {n} + 1?", "answer": n + 1}) for n in range(40)]
    (data / "train.jsonl").write_text("\n".join(lines))
    (data / "test.jsonl").write_text("not JSON")
    train(out, tasks__source=str(data), run__steps=1, eval__problems=3)
    assert report(out, "final")["n"] == 3 and report(out, "final")["source"] == str(data)
    (data / "test.jsonl").write_text("\n".join(lines[:7]))
    assert launch("eval", out, "--test", "--problems", "5").returncode == 0
    found = report(out, "step-000001-test")
    assert (found["n"], found["source"]) == (5, f"{data} test")
    assert found["tasks_sha256"] != report(out, "final")["tasks_sha256"]
    base = report(out, "base")
    assert launch("eval", out, "--base", "--problems", "2").returncode == 0
    assert report(out, "base") == base
    assert report(out, f"base-n2x{base['sampled']['draws']}")["n"] == 2
    assert launch("eval", out, "--samples", "2").returncode == 0
    assert report(out, "step-000001-n3x2")["version"] == 1
    assert not (out / "eval" / "step-000001.json").exists(), "the name of the run's own"
    (data / "test.jsonl").unlink()
    refused = launch("eval", out, "--test")
    assert refused.returncode == 2 and "has no test set; name one with tasks.test" in refused.stderr
