"""A run with several actors ends with the adapter of a run with one, also if one of them is killed in between."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actor.passed_on import KEPT
from protocol.access.key_list import create_invitation
from protocol.access.keys import load_actor_key, read_allowed
from shared.config.load import config_from_json
from shared.process.invitation import write_invitation
from shared.run.run_dir import RunDir
from tests.support.runs import (
    ROOT,
    SMALL,
    free_port,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    sets,
    start,
    summary,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)
ORDERS = SMALL | {
    "run.steps": 4,
    "rollout.groups_per_order": 1,
    "eval.problems": 4,
    "compute.dtype": "fp32",
    "actor.token_step": "torch",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the adapter of a run with one actor."""
    out = tmp_path_factory.mktemp("runs") / "one"
    done = launch("run", "embedded", "--out", out, *sets(ORDERS))
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(out)["adapter_sha256"]


@pytest.mark.long
def test_two_actors_a_trace_and_a_resume_with_three(tmp_path: Path, alone: str) -> None:
    out = tmp_path / "run"
    first = launch("run", "embedded", "--actors", "2", "--trace", "--out", out, *sets(ORDERS | {"run.steps": 2}))
    assert first.returncode == 0, first.stdout + first.stderr
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    decoding = {event["pid"] for event in events if event["name"] == "decode"}
    assert len(decoding) == 2, "both had orders"
    resumed = launch("resume", out, "--steps", "4", "--actors", "3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (out / "logs" / "actor2.log").is_file()
    assert summary(out)["adapter_sha256"] == alone
    assert replayed(out)["match"] is True


def test_two_actors_on_a_network_pass_adapters_on(tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, shared = tmp_path / "run", tmp_path / "runtime"
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    network = ORDERS | {"link.endpoint": f"tcp://127.0.0.1:{free_port()}"}
    done = launch("run", "embedded", "--actors", "2", "--out", out, *sets(network))
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(out)["adapter_sha256"] == alone
    logs = "".join((out / "logs" / f"actor{number}.log").read_text() for number in range(2))
    assert "from another actor" in logs and "passes policy" not in logs
    (folder,) = shared.glob("tandem-*/adapters-*")
    assert 1 <= len(list(folder.glob("*.safetensors"))) <= KEPT


@pytest.mark.long
def test_one_of_three_actors_killed_in_mid_run_changes_nothing(tmp_path: Path, alone: str) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--actors", "3", "--out", out, *sets(ORDERS))
    wait_until(lambda: num_rows(out) >= 1 and len(processes_of(out, "actor")) == 3, "a step of three actors")
    kill(processes_of(out, "actor")[1:2])
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, output
    assert summary(out)["adapter_sha256"] == alone and num_rows(out) == 4
    assert replayed(out)["match"] is True


@pytest.mark.long
def test_an_invited_actor_is_all_that_a_learner_needs(tmp_path: Path, alone: str) -> None:
    out = tmp_path / "run"
    # `invite` refuses a loopback address, which a second machine could not use; here it is this one.
    elsewhere = ORDERS | {"link.endpoint": f"tcp://127.0.0.1:{free_port()}"}
    assert launch("run", "embedded", "--prepare", "--out", out, *sets(elsewhere)).returncode == 0
    run = RunDir.open(out)
    config = config_from_json(run.config.read_bytes())
    expires_at = time.time() + 600
    key = create_invitation(run.keys, "guest0", expires_at)
    text = write_invitation(config.link.endpoint, key, expires_at, config)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    learner = subprocess.Popen([sys.executable, "-m", "learner", "--run", str(out)], cwd=ROOT)
    actor = subprocess.Popen(
        [sys.executable, "-m", "actor", "--invitation", "-"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = actor.communicate(text, timeout=180)
        assert (actor.returncode, learner.wait(60)) == (0, 0), said
    finally:
        actor.kill()
        learner.kill()
    assert summary(out)["adapter_sha256"] == alone
    assert key.secret not in said
    (joined,) = (tmp_path / "cache").rglob("guest0.json")
    own = load_actor_key(joined)
    assert own.public.decode() != key.public and own.secret.decode() not in said
    assert read_allowed(run.keys / "allowed").actor_ids[own.public.decode()] == "guest0"
