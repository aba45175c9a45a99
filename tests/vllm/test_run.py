"""Two real processes with vLLM in one of them: repeatable, replayable, and nothing left over when it is killed."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.runs import (
    SMALL,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    rows,
    sets,
    start,
    summary,
    wait_until,
)

# With a mask, so that the learner has to find the entropies that vLLM cannot tell.
ENGINE = {"actor.engine": "vllm", "run.steps": 4, "loss.entropy_fraction": 0.5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = launch("run", "embedded", "--out", out, *sets(SMALL | ENGINE))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, summary(out)


def test_the_learner_agrees_with_every_token(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    found = [row["mismatch/p99"] for row in rows(undisturbed[0]) if row["mismatch/p99"] is not None]
    assert found and max(found) <= 1e-4


def test_a_replay_gives_the_same_adapter(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    assert replayed(undisturbed[0])["match"] is True


@pytest.mark.long
def test_an_actor_killed_with_vllm_inside_is_replaced_and_changes_nothing(
    tmp_path: Path, undisturbed: tuple[Path, dict[str, Any]]
) -> None:
    """Everything that vLLM has started ends with it: the engine core is a part of the actor, and no child is left."""
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | ENGINE))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    (actor,) = processes_of(out, "actor")
    below = psutil.Process(actor).children(recursive=True)
    # The fork server of the scoring workers and its worker. vLLM's processes would carry its name in their title.
    titles = [" ".join(child.cmdline()) for child in below]
    assert titles and not [title for title in titles if "VLLM::" in title or "multiprocessing" in title], titles
    kill([actor])
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not processes_of(out, "actor") and not processes_of(out, "learner")
    assert [row["step"] for row in rows(out)] == list(range(1, ENGINE["run.steps"] + 1))
    assert summary(out)["adapter_sha256"] == undisturbed[1]["adapter_sha256"]
    assert replayed(out)["match"] is True


@pytest.mark.long
def test_generate_and_eval_use_the_engine_of_the_run(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    done = launch("generate", undisturbed[0], "--prompt", "Tom has 6 coins. He finds 4. How many coins now?")
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout
