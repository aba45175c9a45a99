"""Runs that start from an adapter, as a user starts them: moved folders, resume, replay, eval, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_bad_input import refused
from tests.support.runs import ROOT, SMALL, launch, replayed, rows, sets, summary, train

QUICK = SMALL | {"optimizer.lr": 2e-3, "run.steps": 4}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "first"
    train(out, **{"run.steps": 2, "optimizer.lr": 2e-3})
    return out


def second(out: Path, start_from: Path, **given: Any) -> Path:
    done = launch("run", "embedded", "--out", out, *sets(QUICK | {"lora.start_from": str(start_from)} | given))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.long
def test_a_run_goes_on_from_another_after_that_is_gone(first: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "second"
    shutil.copytree(first, source)
    second(out, source, **{"run.steps": 2, "curriculum.kl_to": "start", "loss.kl_beta": 0.1})
    newest = max((first / "checkpoints").glob("step-*")) / "adapter_model.safetensors"
    assert (out / "start" / "adapter_model.safetensors").read_bytes() == newest.read_bytes()
    shutil.rmtree(source)
    moved = out.rename(tmp_path / "moved")
    done = launch("resume", moved, "--steps", "4")
    assert done.returncode == 0 and summary(moved)["steps"] == 4, done.stdout + done.stderr
    assert replayed(moved)["match"]
    # The KL is to the adapter that was started from: none before the first step, some after it.
    kl = [row["kl"] for row in rows(moved)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and max(kl) > 0.0, kl
    assert json.loads((moved / "config.json").read_text())["lora"]["start_from"] == str(source)


@pytest.mark.long
def test_an_export_is_started_from_and_eval_and_generate_work(first: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert launch("export", first, "--out", exported).returncode == 0
    out = second(tmp_path / "second", exported, **{"eval.problems": 8, "optimizer.lr": 1e-9, "run.steps": 1})
    base = json.loads((out / "eval" / "base.json").read_text())
    # What the run began with is the other run's policy, not the base.
    assert base["adapter_sha256"] == summary(first)["adapter_sha256"]
    assert launch("eval", out, "--base", "--problems", "8").returncode == 0
    again = json.loads((out / "eval" / "base.json").read_text())
    assert (again["adapter_sha256"], again["greedy"]) == (base["adapter_sha256"], base["greedy"])
    prompt = ("--prompt", "Tom has 6 coins. He finds 4. How many coins now?")
    said = launch("generate", out, *prompt)
    assert said.returncode == 0 and said.stdout == launch("generate", first, *prompt).stdout
    assert launch("export", out, "--out", tmp_path / "again").returncode == 0
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (exported, tmp_path / "again"))
    assert one.keys() == two.keys() and all((one[n] - two[n]).abs().max() < 1e-6 for n in one)


def test_an_adapter_of_the_hub_is_taken_from_its_cache(first: Path, tmp_path: Path) -> None:
    """As the hub's own library left it there; this machine may be without a network."""
    newest, cached = max((first / "checkpoints").glob("step-*")), tmp_path / "hub" / "models--org--adapter"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (cached / "snapshots" / "c0ffee").mkdir(parents=True, exist_ok=True)
        shutil.copy(newest / name, cached / "snapshots" / "c0ffee" / name)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    keys = sets(QUICK | {"lora.start_from": "org/adapter"})
    done = subprocess.run(
        [sys.executable, "-m", "launch", "run", "embedded", "--prepare", "--out", str(tmp_path / "run"), *keys],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = tmp_path / "run" / "start" / "adapter_model.safetensors"
    assert kept.read_bytes() == (newest / "adapter_model.safetensors").read_bytes()


@pytest.mark.long
def test_what_cannot_be_started_from(first: Path, tmp_path: Path) -> None:
    def tried(start_from: Path | str, **given: Any) -> str:
        keys = QUICK | {"lora.start_from": str(start_from)} | given
        said = refused(launch("run", "embedded", "--out", tmp_path / "run", *sets(keys)), "lora.")
        assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "config.json").exists()
        return said

    assert "lora.rank = 16" in tried(first, **{"lora.rank": 8})
    assert "is on" in tried(first, **{"lora.targets": ["q_proj"]})
    assert "adapter_config.json" in tried(tmp_path)
    assert "neither a folder nor" in tried(tmp_path / "missing")
    assert "ratio would be noise" in tried(first, **{"lora.dropout": 0.1})
    launch("run", "embedded", "--out", tmp_path / "new", "--prepare", *sets(QUICK))
    assert "no checkpoint yet" in tried(tmp_path / "new")
    out = second(tmp_path / "second", first)
    shutil.rmtree(out / "start")
    refused(launch("resume", out, "--steps", "9"), "start/adapter_model.safetensors", "restore it")
